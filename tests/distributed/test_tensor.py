"""Tensor parallelism: the losses, gradients and weights of one process, and only the collectives that the file states.

Most runs are in fp64, where equality means equality: splitting the sums of a matrix product moves fp32 gradients that
nearly cancel by about as much as they are off in one process.
"""

from functools import partial
from unittest import mock

import pytest
import torch
import torch._dynamo.utils
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from minitrain import save_pretrained
from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.parallel.fsdp import set_gradient_sync, shard
from minitrain.parallel.parts import split_parameters, use_local_tensors
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.training import loss as losses
from minitrain.training.loop import Trainer
from minitrain.training.loss import IGNORE, linear_cross_entropy
from tests.helpers import oracle
from tests.helpers.families import families, is_dense, is_rotary
from tests.helpers.oracle import (
    Count,
    Results,
    built,
    check_close,
    collective,
    plain_step,
    ragged_batch,
    relative_error,
    snapshot,
    train,
)
from tests.helpers.resharding import train as train_from
from tests.helpers.training import filled_waits, materialised, one_graph

MODEL = {"name": "llama3-8b-tiny", "vocab_size": 124, "num_layers": 2, "initializer_range": 0.05}
TREE = {
    "model": MODEL,
    "batch": {"global": 4, "micro": 2, "seq_len": 16},
    "optim": {"name": "sgd", "lr": 0.1},
    "parallel": {"tp": 2},
}
DENSE = families(is_dense)
FAMILIES = families(is_rotary)
GPT_OSS = {"name": "gpt-oss-20b-tiny"}
DEEPSEEK = {"name": "deepseek-v3-tiny", "router_aux_loss_coef": 0.1, "seq_aux": True}
HYBRID = {"name": "nemotron3-super-120b-a12b-tiny", "num_layers": 4}
BALANCED = [DEEPSEEK, {"name": "mixtral-8x7b-tiny", "router_aux_loss_coef": 0.1}]
EXPERTS = [
    {"name": name, "num_layers": 4 if model_config(name).layer_pattern else 2}
    for name in families(lambda config: not is_dense(config))
    if name not in [model["name"] for model in BALANCED]
]
EXPERTS += [*BALANCED, HYBRID]
LAYOUTS = [(4, {"tp": 4}), (4, {"tp": 2, "dp_shard": 2}), (4, {"tp": 2, "dp_replicate": 2})]
check_against_one_process = partial(oracle.check_against_one_process, double=True)


def with_model(tree=TREE, **fields):
    return tree | {"model": MODEL | fields}


@pytest.mark.parametrize(("name", "tied"), [*((name, None) for name in DENSE), (DENSE[0], True)])
def test_families(pool, name, tied):
    given = {} if tied is None else {"tie_word_embeddings": tied}
    check_against_one_process(pool, 2, with_model(name=name, **given))


@pytest.mark.parametrize("model", EXPERTS, ids=lambda model: model["name"])
def test_experts_and_hybrids(pool, model):
    """In fp32, since grouped products know no fp64: rounding alone is above 1e-6 where sums are split otherwise."""
    tree = with_model(**model) | {"batch": TREE["batch"] | {"micro": 4}}
    oracle.check_against_one_process(pool, 2, tree, batch=padded_batch, tolerance=1e-5)


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (DEEPSEEK, {"tp": 2, "dp_shard": 2}),
        (GPT_OSS, {"tp": 2, "pp": 2}),
        (GPT_OSS, {"tp": 2, "cp": 2}),
        (HYBRID, {"tp": 2, "dp_shard": 2}),
        (HYBRID, {"tp": 2, "pp": 2}),
    ],
    ids=str,
)
def test_layouts_of_experts_and_hybrids(pool, model, parallel):
    tree = with_model(**model) | {"parallel": parallel, "recompute": "full"}
    oracle.check_against_one_process(pool, 4, tree, batch=padded_batch, tolerance=1e-5)


@pytest.mark.parametrize(("world_size", "parallel"), LAYOUTS, ids=str)
def test_layouts(pool, world_size, parallel):
    tree = with_model(name="qwen3-32b-tiny", num_key_value_heads=4)
    check_against_one_process(
        pool, world_size, tree | {"parallel": parallel, "batch": TREE["batch"] | {"micro": 1}}
    )


@pytest.mark.parametrize(
    ("kv_heads", "model", "extra"),
    [
        (1, {"name": "qwen2.5-7b-tiny"}, {}),
        (2, {"name": "qwen3-32b-tiny"}, {"recompute": "full"}),
        (2, {"name": "olmo3-7b-tiny"}, {}),
        (1, {"name": "gpt-oss-20b-tiny"}, {"parallel": {"tp": 2, "dp_shard": 2}}),
        (
            2,
            {"name": "llama3-8b-tiny"},
            {"lora": {"rank": 4, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}},
        ),
    ],
    ids=str,
)
def test_more_ranks_than_key_value_heads(pool, kv_heads, model, extra):
    """Biases, norms, sinks, and adapters."""
    tree = with_model(**model, num_key_value_heads=kv_heads) | {"parallel": {"tp": 4}} | extra
    experts = "gpt-oss" in model["name"]
    check = (
        partial(oracle.check_against_one_process, tolerance=1e-5)
        if experts
        else check_against_one_process
    )
    check(pool, 4, tree, batch=padded_batch)


@pytest.mark.parametrize(
    "parallel", [{"tp": 2, "dp_shard": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2}], ids=str
)
def test_layouts_with_more_ranks_than_key_value_heads(pool, parallel):
    tree = with_model(name="qwen2.5-7b-tiny", num_key_value_heads=1) | {"parallel": parallel}
    check_against_one_process(pool, 4, tree)


def test_parts_that_fsdp_splits_unevenly(pool):
    check_against_one_process(
        pool, 4, with_model(vocab_size=126, intermediate_size=50, tie_word_embeddings=True)
    )


@pytest.mark.parametrize("micro", [1, 4])
def test_accumulation(pool, micro):
    check_against_one_process(pool, 2, TREE | {"batch": TREE["batch"] | {"micro": micro}})


def padded_batch(config, step):
    """Rows of documents of 5 and 6 tokens and of 5 that are padding, each with its own positions."""
    batch = ragged_batch(config, step)
    document_ids = torch.tensor([0] * 5 + [1] * 6 + [-1] * 5).expand(len(batch["tokens"]), -1)
    positions = torch.tensor([*range(5), *range(6), *range(5)]).expand(len(batch["tokens"]), -1)
    return batch | {"document_ids": document_ids, "positions": positions}


@pytest.mark.parametrize("world_size", [2, 4])
def test_packed_documents(pool, world_size):
    check_against_one_process(pool, world_size, TREE, batch=padded_batch)


@pytest.mark.parametrize(("recompute", "compiled"), [("full", True), ("selective", False)])
def test_recompute(pool, recompute, compiled):
    tree = with_model(name="qwen3-32b-tiny") | {"recompute": recompute, "compile": compiled}
    check_against_one_process(pool, 2, tree, run=train_compiled if compiled else train)


@pytest.mark.parametrize(
    ("world_size", "name"), [(2, name) for name in FAMILIES[1:]] + [(4, FAMILIES[0])]
)
def test_compiled_blocks(pool, world_size, name):
    check_against_one_process(
        pool, world_size, with_model(name=name) | {"compile": True}, run=train_compiled
    )


def train_compiled(*args):
    """`train` with one graph for all blocks, handed to autograd instead of to a C++ compiler."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    aot_eager = mock.patch("torch.compile", partial(torch.compile, backend="aot_eager"))
    with aot_eager, filled_waits():
        trace = train(*args)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    return trace


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rounding_is_no_worse_than_in_one_process(pool, precision):
    tree = TREE | {"precision": precision}

    def error(world_size, parallel):
        trace = pool.run(world_size, train, tree | {"parallel": parallel}, 1)[0]
        with oracle.double_precision():
            config = configs.from_dict(tree)
            weights = {name: tensor.double() for name, tensor in trace.weights[0].items()}
            _, exact = plain_step(config, weights, ragged_batch(config, 0))
        return max(relative_error(trace.gradients[0][name], exact[name]) for name in exact)

    alone = error(1, {})
    assert 0 < alone < {"fp32": 1e-5, "bf16": 0.1}[precision]
    for world_size in (2, 4):
        assert error(world_size, {"tp": 2}) < 1.5 * alone


# ---------------------------------------------------------------------------------------------------- head and loss


def split_head(tp, chunk, scale, traced=False):
    """This rank's loss and gradients of a head split over `tp` ranks, next to those of whole logits.

    traced: as one graph, what CUDA compiles.
    """
    torch.manual_seed(0)
    hidden = (torch.randn(2, 9, 16) * scale).requires_grad_()
    weight = torch.randn(24, 16, requires_grad=True)
    labels = torch.randint(24, (2, 9))
    labels[0, ::3] = IGNORE
    expected = materialised(hidden, weight, labels)
    expected = [expected.detach(), *torch.autograd.grad(expected / 7, [hidden, weight])]
    mesh = init_device_mesh("cpu", (tp,))
    parts = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
    fused = one_graph if traced else losses.fused
    with mock.patch.object(losses, "CHUNK", chunk), mock.patch.object(losses, "fused", fused):
        value = linear_cross_entropy(hidden, parts, labels)
        with torch.no_grad():
            assert torch.equal(linear_cross_entropy(hidden, parts, labels), value)
    grads = torch.autograd.grad(value / 7, [hidden, parts])
    torch.distributed.all_reduce(grads[0])
    return [value.detach(), grads[0], grads[1].full_tensor()], expected


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("chunk", [1, 8, 1000])
@pytest.mark.parametrize("scale", [1, 1e4])
def test_split_head_equals_whole_logits(pool, tp, chunk, scale):
    for actual, expected in pool.run(tp, split_head, tp, chunk, scale):
        torch.testing.assert_close(actual, expected)


def test_split_head_as_one_graph(pool):
    for actual, expected in pool.run(2, split_head, 2, 8, 1, True):
        torch.testing.assert_close(actual, expected)


def run_trainer(tree, watch):
    """One step and one evaluation on mock data under the context `watch`, which is returned."""
    config = configs.from_dict(tree | {"device": "cpu"})
    trainer = Trainer(config, start(config))
    data, _ = open_dataset(config)
    with mock.patch.object(losses, "CHUNK", 10), watch:
        trainer.step(data, 0)
        trainer.evaluate(data)
    return watch


def sizes_in_a_step(tree):
    """Of all dimensions of all plain tensors that operators return."""
    sizes = set()
    run_trainer(tree, Results(lambda tensor: sizes.update(tensor.shape)))
    return sizes


def test_no_rank_sees_all_logits_of_a_token(pool):
    vocab = MODEL["vocab_size"]
    for name in FAMILIES:
        sizes = pool.run(2, sizes_in_a_step, with_model(name=name))
        assert all(vocab not in seen and vocab // 2 in seen for seen in sizes)
    assert vocab in pool.run(1, sizes_in_a_step, TREE | {"parallel": {}})[0]


# ------------------------------------------------------------------------------------------------------- collectives


def collectives_of_a_step(tree):
    return run_trainer(tree, Count(collective)).counts


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_collectives(pool, layers, recompute):
    """A training step of two micro-batches and an evaluation, on 2 ranks that FSDP does not split further."""
    tree = with_model(num_layers=layers) | {"recompute": recompute, "validation": {"batches": 1}}
    once, again = 2 * layers + 1, layers * (recompute == "full")
    for counts in pool.run(2, collectives_of_a_step, tree):
        assert counts["all_gather_into_tensor"] == 2 * (once + 2 * again + once) + 2 * once
        assert counts["reduce_scatter_tensor"] == 2 * (once + again + once) + 2 * once
        # once per micro-batch, as FSDP frees what it gathered; and the gradients' norm
        assert counts["all_reduce"] == 2 * (2 * layers + 1) + 1


class Scale(torch.nn.Module):
    """The gradient of the weight is x, if the output is added up."""

    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * self.weight


def gradient_of_partial_sums(frees):
    """Of a weight that all ranks have whole: number r of it is 1 from rank r and 3 / 1024 from each other one."""
    mesh = init_device_mesh("cpu", (1, 1, 4), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    model = torch.nn.Sequential(Scale(4))
    split_parameters(model[0], mesh["tp"], Replicate())
    model[0].register_forward_pre_hook(use_local_tensors)
    shard(
        model,
        [model[0]],
        mesh["dp_replicate", "dp_shard"],
        torch.bfloat16,
        reshard_after_forward=frees,
    )
    x = torch.full((4,), 3 / 1024, dtype=torch.bfloat16)
    x[mesh["tp"].get_local_rank()] = 1
    for last in (False, True):
        set_gradient_sync(model, last)
        model(x).sum().backward()
    return next(model.parameters()).grad.full_tensor()


@pytest.mark.parametrize("frees", [False, True])
def test_partial_sums_are_not_added_up_in_bf16(pool, frees):
    """There 1 + 3 / 1024 is 1, however often, whereas their sum is far more than that, once rounded or not."""
    for gradient in pool.run(4, gradient_of_partial_sums, frees):
        torch.testing.assert_close(
            gradient, torch.full((4,), 2 * (1 + 9 / 1024)), rtol=2**-9, atol=0
        )


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("other", [(2, {}), (4, {"tp": 2})], ids=str)
def test_a_checkpoint_resumes_in_another_layout(pool, tmp_path, other):
    tree = with_model(name="qwen3-32b-tiny") | {
        "optim": {"name": "adamw", "lr": 0.01},
        "device": "cpu",
    }
    tree["batch"] = TREE["batch"] | {"micro": 1}
    unbroken, _ = pool.run(2, train_from, tree, tmp_path / "unbroken", 3)[0]
    for folder, (before, after) in {
        "there": ((2, {"tp": 2}), other),
        "back": (other, (2, {"tp": 2})),
    }.items():
        for (world_size, parallel), steps in ((before, [0, 1]), (after, [2])):
            run = pool.run(
                world_size,
                train_from,
                tree | {"parallel": parallel},
                tmp_path / folder,
                steps[-1] + 1,
            )
            assert run[0][0] == {step: pytest.approx(unbroken[step], rel=1e-6) for step in steps}


@pytest.mark.parametrize(
    "name", [*FAMILIES, "gpt-oss-20b-tiny", "deepseek-v3-tiny", "nemotron3-nano-30b-a3b-tiny"]
)
def test_pretrained_weights_are_cut_right(pool, tmp_path, name):
    torch.manual_seed(0)
    layers = 4 if "nemotron3" in name else 2
    model = Decoder(
        configs.from_dict(with_model(name=name, vocab_size=126, num_layers=layers)).model.config
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    save_pretrained(model, tmp_path)
    tree = TREE | {"model": {"path": str(tmp_path)}}
    check_close(pool.run(4, built, tree), snapshot(model.named_parameters()), 0, "loaded weights")


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallel": {"tp": 8}}, "parallel.tp=8 does not divide vocab_size=124 (use 1, 2 or 4)"),
        (
            {"parallel": {"tp": 6}},
            "parallel.tp=6 does not divide num_key_value_heads=4 (use 1, 2 or 4)",
        ),
        (
            {"parallel": {"tp": 3}},
            "parallel.tp=3 does not divide num_key_value_heads=4 (use 1, 2 or 4)",
        ),
        (
            {"parallel": {"tp": 4}, "model": MODEL | {"vocab_size": 126}},
            "tp=4 does not divide vocab_size=126 (use 1 or 2)",
        ),
        (
            {"model": MODEL | {"intermediate_size": 51}},
            "parallel.tp=2 does not divide intermediate_size=51 (use 1)",
        ),
        (
            {"batch": TREE["batch"] | {"seq_len": 18}, "parallel": {"tp": 4}},
            "tp=4 does not divide batch.seq_len=18 ",
        ),
        (
            {"model": "mixtral-8x7b-tiny", "parallel": {"tp": 4}},
            "does not divide moe_intermediate_size / 8=6 (use 1 or",
        ),
        (
            {"model": "nemotron3-nano-30b-a3b-tiny", "parallel": {"tp": 8}},
            "tp=8 does not divide mamba_n_groups=4",
        ),
        (
            {"model": {"name": "nemotron3-nano-30b-a3b-tiny", "mamba_n_groups": 1}},
            "tp=2 does not divide mamba_n_groups=1",
        ),
        (
            {
                "model": {
                    "name": "nemotron3-nano-30b-a3b-tiny",
                    "shared_expert_intermediate_size": 51,
                }
            },
            "divide shared_expert",
        ),
    ],
)
def test_refusals(change, message):
    with pytest.raises(InputError) as refused:
        configs.from_dict(TREE | change)
    assert message in str(refused.value)


def test_experts_that_are_not_cut_need_not_divide():
    configs.from_dict(TREE | {"model": "mixtral-8x7b-tiny", "parallel": {"tp": 4, "ep": 4}})
