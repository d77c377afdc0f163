"""Expert parallelism: the gradients of one process, whoever has the experts; tokens sent once per rank; no waits."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from minitrain.bench.shrink import shrink, shrink_parallel
from minitrain.data.text.text_rows import Mock
from minitrain.errors import InputError
from minitrain.formats.hf import save_pretrained
from minitrain.models.decoder import Decoder
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.moe import Experts, MoE
from minitrain.models.moe import dispatch as dispatch_alone
from minitrain.models.router import Router, balanced_routing
from minitrain.models.zoo import model_config
from minitrain.parallel.collectives import start_all_to_all
from minitrain.parallel.compiling import compile_blocks
from minitrain.parallel.expert import dispatch_to_ranks, make_size_exchange
from minitrain.parallel.fsdp import widest_dimension
from minitrain.parallel.shards import full_tensor
from minitrain.run.config import load as configs
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.launch.start import start
from minitrain.run.tasks.initial_weights import fill_weights
from minitrain.simulator.fake_world import fake_world
from minitrain.training.build import build_model, initialize
from minitrain.training.loop import Trainer
from tests.helpers.experts import all_to_the_first, bias_after_a_step
from tests.helpers.oracle import check_against_one_process, packed_batch
from tests.helpers.oracle import train as train_to_trace
from tests.helpers.resharding import TREE as TRAINED
from tests.helpers.resharding import assert_equal, load, train
from tests.helpers.training import in_flight

TREE = {
    "batch": {"global": 8, "micro": 2, "seq_len": 16},
    "optim": {"name": "sgd", "lr": 0.1, "clip": 1.0},
}


@pytest.mark.parametrize(
    ("ranks", "model", "parallel", "recompute"),
    [
        (2, "mixtral-8x7b-tiny", {"ep": 2}, "none"),
        (4, "qwen3-30b-a3b-tiny", {"ep": 4}, "none"),
        (4, "deepseek-v3-tiny", {"ep": 2}, "full"),  # two ranks share the same experts
        (4, "gpt-oss-20b-tiny", {"ep": 4, "cp": 2}, "none"),  # biases
        (4, "mixtral-8x7b-tiny", {"ep": 2, "dp_replicate": 2}, "selective"),
        (4, "nemotron3-super-120b-a12b-tiny", {"ep": 2, "pp": 2}, "full"),  # in latents
    ],
    ids=str,
)
def test_gradients(pool, ranks, model, parallel, recompute):
    layers = {} if model.startswith("nemotron") else {"num_layers": 2}
    tree = TREE | {
        "model": {"name": model, **layers},
        "parallel": parallel,
        "recompute": recompute,
    }
    check_against_one_process(pool, ranks, tree, batch=packed_batch)


def test_one_expert_on_each_rank(pool):
    """Which is not copied any rows: all that come are for it."""
    model = {"name": "mixtral-8x7b-tiny", "num_layers": 2, "num_experts": 4}
    check_against_one_process(
        pool, 4, TREE | {"model": model, "parallel": {"ep": 4}}, batch=packed_batch
    )


@pytest.mark.parametrize(
    ("tp", "ep", "recompute"),
    [
        (2, 2, "none"),
        (2, 4, "selective"),
        (4, 2, "none"),  # alone with all other parameters, but not with its experts
    ],
)
def test_gradients_with_tensor_parallel(pool, tp, ep, recompute):
    """Every rank sends its part of a sequence. Tensor parallelism splits sums: rounding alone is above 1e-6 in fp32."""
    model = {"name": "deepseek-v3-tiny", "num_layers": 2}
    tree = TREE | {"model": model, "parallel": {"ep": ep, "tp": tp}, "recompute": recompute}
    check_against_one_process(pool, 4, tree, batch=packed_batch, tolerance=1e-5)


def train_with_idle_ranks(*args):
    with all_to_the_first():
        return train_to_trace(*args)


def test_ranks_without_tokens(pool):
    tree = TREE | {"model": {"name": "mixtral-8x7b-tiny", "num_layers": 2}, "parallel": {"ep": 4}}
    with all_to_the_first():
        check_against_one_process(pool, 4, tree, run=train_with_idle_ranks)


# ------------------------------------------------------------------------------------------------------------- dispatch

EXPERTS, TOP_K, WIDTH, TOKENS = 8, 3, 16, 10


def routing(load, rank):
    """The experts, [TOKENS, TOP_K], and weights that a rank chooses for its tokens."""
    generator = torch.Generator().manual_seed(rank)
    # or the last ranks get no tokens at all
    experts = {"even": EXPERTS, "half": EXPERTS // 2, "one": TOP_K}[load]
    indices = torch.rand(TOKENS, experts, generator=generator).argsort(1)[:, :TOP_K]
    return indices, torch.rand(TOKENS, TOP_K, generator=generator)


def make_experts(bias=True):
    experts = Experts(EXPERTS, WIDTH, 24, "swiglu", bias)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5, generator=generator)
    return experts


def make_router(experts=EXPERTS, top_k=TOP_K, fake=False):
    return Router(
        DecoderConfig(
            hidden_size=WIDTH,
            num_experts=experts,
            num_experts_per_tok=top_k,
            moe_intermediate_size=24,
            fake_balanced_gate=fake,
        )
    )


def local_experts(rank, ranks):
    experts = make_experts()
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, torch.nn.Parameter(parameter.detach().chunk(ranks)[rank].clone()))
    return experts


def tokens_of(rank):
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 + rank))


def output_and_gradients(run, x, weights, experts, cotangent):
    x, weights = x.requires_grad_(), weights.requires_grad_()
    output = run(x, weights, experts)
    gradients = torch.autograd.grad(output, [x, weights, *experts.parameters()], cotangent)
    return [output.detach(), *gradients]


def dispatch_here(load):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,))
    indices, weights = routing(load, rank)
    get_sizes = make_size_exchange(make_router(), mesh)
    return output_and_gradients(
        lambda x, weights, experts: dispatch_to_ranks(
            mesh, get_sizes, x, indices, weights, experts
        )(),
        tokens_of(rank),
        weights,
        local_experts(rank, ranks),
        tokens_of(rank) + 1,
    )


@pytest.mark.parametrize(("ranks", "load"), [(2, "even"), (4, "even"), (4, "half"), (4, "one")])
def test_dispatch(pool, ranks, load):
    """Outputs and all gradients are those of one process with all tokens and experts, to the last bits of fp32."""
    indices, weights = (
        torch.cat(parts)
        for parts in zip(*(routing(load, rank) for rank in range(ranks)), strict=True)
    )
    x = torch.cat([tokens_of(rank) for rank in range(ranks)])
    expected = output_and_gradients(
        lambda x, weights, experts: dispatch_alone(x, indices, weights, experts)(),
        x,
        weights,
        make_experts(),
        x + 1,
    )
    results = pool.run(ranks, dispatch_here, load)
    for i, whole_tensor in enumerate(expected):
        found = torch.cat([result[i] for result in results])
        assert (found - whole_tensor).norm() <= 1e-6 * whole_tensor.norm()


class Sent(TorchDispatchMode):
    """Adds up the elements that all-to-alls send to other ranks, by type."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.elements = rank, {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if "all_to_all" in op._opname:
            x, _, sends = args[:3]
            if sum(sends):
                away = x.numel() // sum(sends) * (sum(sends) - sends[self.rank])
                self.elements[x.dtype] = self.elements.get(x.dtype, 0) + away
        return op(*args, **kwargs or {})


def elements_sent(load, fake):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    indices, weights = routing(load, dist.get_rank())
    if fake:
        indices, weights = balanced_routing(TOKENS, TOP_K, EXPERTS, "cpu")
    get_sizes = make_size_exchange(make_router(fake=fake), mesh)
    experts = local_experts(dist.get_rank(), dist.get_world_size())
    x = tokens_of(dist.get_rank()).requires_grad_()
    with Sent(dist.get_rank()) as sent:
        dispatch_to_ranks(
            mesh, get_sizes, x, indices, weights.requires_grad_(), experts
        )().sum().backward()
    return sent.elements, indices


@pytest.mark.parametrize("fake", [False, True])
def test_a_token_is_sent_once_to_a_rank(pool, fake):
    """As many rows leave a rank, and return, as its tokens have other ranks with any of their experts."""
    ranks = 4
    results = pool.run(ranks, elements_sent, "even", fake)
    ranks_of = [
        [{e * ranks // EXPERTS for e in chosen} for chosen in indices.tolist()]
        for _, indices in results
    ]
    for rank, (elements, _) in enumerate(results):
        out = sum(len(there - {rank}) for there in ranks_of[rank])
        back = sum(
            rank in there for other in range(ranks) if other != rank for there in ranks_of[other]
        )
        assert out < TOKENS * TOP_K * (ranks - 1) / ranks  # fewer than one row per chosen expert
        per_row = WIDTH + EXPERTS // ranks
        forward = out * per_row + back * WIDTH
        # the gradients of what came, to where it came from
        backward = back * per_row + out * WIDTH
        assert elements[torch.float32] == forward + backward
        assert elements.get(torch.int64, 0) == (0 if fake else 2 * (ranks - 1))


def sizes_known_and_exchanged(experts, top_k, tokens):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    indices, _ = balanced_routing(tokens, top_k, experts, "cpu")
    chosen = (
        torch.zeros(tokens, experts, dtype=torch.bool)
        .scatter(1, indices, True)
        .unflatten(1, (mesh.size(), -1))
    )
    return [
        make_size_exchange(make_router(experts, top_k, fake), mesh)(chosen)
        for fake in (True, False)
    ]


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"), [(8, 3, 7), (12, 8, 5), (4, 4, 1), (16, 1, 3)]
)
def test_sizes_with_the_fake_gate(pool, experts, top_k, tokens):
    for known, exchanged in pool.run(4, sizes_known_and_exchanged, experts, top_k, tokens):
        assert known == exchanged


WAITS = (
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.__bool__,
    torch.Tensor.nonzero,
    torch.Tensor.cpu,
)


class Waits(TorchFunctionMode):
    """Counts calls that wait for a device."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in WAITS
        return function(*args, **kwargs or {})


def count_waits(load):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    indices, weights = routing(load, dist.get_rank())
    get_sizes = make_size_exchange(make_router(), mesh)
    with Waits() as waits:
        x = tokens_of(dist.get_rank()).requires_grad_()
        dispatch_to_ranks(
            mesh, get_sizes, x, indices, weights, local_experts(0, 2)
        )().sum().backward()
    return waits.count


def test_one_wait(pool):
    assert pool.run(2, count_waits, "even") == [1, 1]


def test_nothing_waits_with_the_fake_gate():
    """Fake tensors have no values: whatever asked the device for one would raise."""
    with fake_world(4, rank=1):
        mesh = init_device_mesh("cpu", (4,))
        get_sizes = make_size_exchange(make_router(fake=True), mesh)
        experts = local_experts(1, 4).to(torch.bfloat16)
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
            indices, weights = balanced_routing(TOKENS, TOP_K, EXPERTS, "cpu")
            output = dispatch_to_ranks(mesh, get_sizes, x, indices, weights.bfloat16(), experts)()
            output.sum().backward()
        assert output.shape == x.grad.shape == (TOKENS, WIDTH)


def test_what_needs_no_rows_is_computed_while_they_are_sent():
    """The shared expert's 3 products, then their 6 gradients; and the rows are sorted by expert, in 2 steps.

    Nothing is left to compute while results return, and their gradients.
    """
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        moe = MoE(model_config("deepseek-v3-tiny", fake_balanced_gate=True))
        for parameter in moe.parameters():
            torch.nn.init.normal_(parameter)
        for parameter in moe.experts.parameters():
            parameter.data = parameter.data.chunk(2)[0].clone()
        moe.dispatch = partial(dispatch_to_ranks, mesh, make_size_exchange(moe.gate, mesh))
        x = torch.randn(1, 64, 64, requires_grad=True)

        def run():
            moe(x).sum().backward()

        weights, rows, results = 3, 3, 0
        assert in_flight(run) == [weights, rows, results, 0, 6]
        assert in_flight(run, ("aten::nonzero_static",))[:3] == [0, 2, 0]


class Meanwhile(torch.nn.Module):
    """Two products that are computed while x [rows, in] is on its way."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.up = torch.nn.Linear(64, 256, bias=False)
        self.down = torch.nn.Linear(256, 64, bias=False)

    def forward(self, x):
        finish = start_all_to_all(x @ x.T[:, :64], self.mesh, [32, 32], [32, 32])
        return self.down(self.up(x)) + finish()


def test_the_compiler_leaves_what_is_computed_meanwhile_where_it_is():
    """By its own order, which saves memory, it waits for the gradients at once."""
    with fake_world(2):
        module = Meanwhile(init_device_mesh("cpu", (2,)))
        compile_blocks([module], dynamic=False, communicates=True)
        x = torch.randn(64, 64, requires_grad=True)
        _, gradients = in_flight(lambda: module(x).sum().backward())
        assert gradients >= 3


# -------------------------------------------------------------------------------------------------------------- balance


@pytest.mark.parametrize("parallel", [{"ep": 2}, {"ep": 2, "tp": 2}], ids=str)
def test_a_training_step_moves_the_selection_bias(pool, parallel):
    """By the load over all ranks, micro-batches and sequence parts, each token counted once though it is recomputed."""
    small = dict(name="deepseek-v3-tiny", num_layers=2, bias_update_speed=0.01)
    batch = {"global": 8, "micro": 2, "seq_len": 16}
    tree = dict(
        model=small, device="cpu", steps=1, batch=batch, recompute="full", parallel=parallel
    )
    for bias, expected in pool.run(2 * parallel.get("tp", 1), bias_after_a_step, tree):
        assert torch.equal(bias, expected) and bias.any()


@pytest.mark.parametrize(
    "per_sequence, micro, parallel",
    [(False, 2, {"ep": 2}), (True, 1, {"ep": 2, "cp": 2})],
    ids=str,
)
def test_auxiliary_loss(pool, per_sequence, micro, parallel):
    """The gradients of one process that sees all rows at once; per sequence also in several micro-batches."""
    model = dict(
        name="mixtral-8x7b-tiny", num_layers=1, router_aux_loss_coef=1.0, seq_aux=per_sequence
    )
    tree = dict(
        model=model,
        batch={"global": 4, "micro": micro, "seq_len": 24},
        optim=dict(name="sgd", lr=0.1),
    )
    check_against_one_process(pool, 2, tree | {"parallel": parallel, "recompute": "full"})


# -------------------------------------------------------------------------------------------------------------- compile


def two_steps(tree):
    """Losses and gradient norms of two steps, and how many graphs were compiled, and how often one broke."""
    counters.clear()
    config = configs.from_dict(tree | {"device": "cpu"})
    with mock.patch("torch.compile", partial(torch.compile, backend="aot_eager")):
        trainer = Trainer(config, start(config))
        data = Mock(config.batch.seq_len, config.model.config.vocab_size, seed=0, split=0)
        numbers = [
            {key: value.item() for key, value in trainer.step(data, step).items()}
            for step in range(2)
        ]
    return numbers, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize("fake, recompute", [(False, "full"), (True, "selective")])
def test_a_block_compiles_as_one_graph(pool, fake, recompute):
    """With sizes that differ from layer to layer and step to step. The same operations in bf16, so the same bits."""
    model = {"name": "qwen3-30b-a3b-tiny", "num_layers": 2, "fake_balanced_gate": fake}
    tree = TREE | {
        "model": model,
        "precision": "bf16",
        "recompute": recompute,
        "parallel": {"ep": 2},
    }
    for eager, compiled in zip(
        *(pool.run(2, two_steps, tree | {"compile": c}) for c in (False, True)), strict=True
    ):
        assert compiled == (eager[0], 1, 0)


# ---------------------------------------------------------------------------------------------------------- checkpoints

STORED = TRAINED | {"model": {"name": "deepseek-v3-tiny", "num_layers": 2}}


def test_a_checkpoint_loads_into_another_layout(pool, tmp_path):
    """With the states of AdamW: from two ranks with the same experts to none, and to other ones."""
    _, saved = pool.run(4, train, STORED | {"parallel": {"ep": 2}}, tmp_path, 1)[0]
    assert_equal(pool.run(1, load, STORED, tmp_path)[0], saved)
    for loaded in pool.run(4, load, STORED | {"parallel": {"ep": 4}}, tmp_path):
        assert_equal(loaded, saved)


def read_and_gather(tree):
    """Each expert stack's local elements, and all weights gathered as for an export."""
    config = configs.from_dict(tree)
    model = build_model(config, start(config), fill_weights)
    local = {
        name: p.to_local().numel() for name, p in model.named_parameters() if ".experts." in name
    }
    return local, {
        name: full_tensor(tensor.detach()) for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("name", ["mixtral-8x7b-tiny", "gpt-oss-20b-tiny"])
def test_published_weights_in_and_out(pool, tmp_path, name):
    model = Decoder(model_config(name, num_layers=1))
    initialize(model, seed=3)
    save_pretrained(model, tmp_path)
    tree = STORED | {"model": str(tmp_path), "parallel": {"ep": 2}}
    for local, weights in pool.run(4, read_and_gather, tree):
        assert_equal(weights, dict(model.state_dict()))
        assert all(4 * count == weights[name].numel() for name, count in local.items()) and local


# -------------------------------------------------------------------------------------------------- settings, shrinking


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [((4, 6, 9), 1, 2), ((4, 6, 9), 2, 1), ((4, 6, 9), 3, 2), ((4, 8, 6), 2, 1), ((8, 3), 2, 1)],
)
def test_experts_are_sharded_where_that_is_even(shape, ranks, dim):
    """Along the widest dimension but the first, of those that can be."""
    assert widest_dimension(torch.empty(shape), ranks) == Shard(dim)


@pytest.mark.parametrize(
    "ranks, tree, line",
    [
        (
            2,
            {"model": "llama3-8b-tiny", "parallel": {"ep": 2}},
            "parallel.ep=2 needs a model with experts",
        ),
        (
            4,
            {"parallel": {"ep": 3}},
            r"parallel.ep=3 does not divide num_experts=8 \(use 1, 2, 4 or 8\)",
        ),
        (4, {"parallel": {"ep": 0}}, "parallel.ep=0 must be at least 1"),
        (
            4,
            {"parallel": {"ep": 4, "pp": 2}},
            r"ep=4 does not divide dp_shard x cp x tp = 2 ranks \(use 1 or 2\)",
        ),
        (
            4,
            {"parallel": {"ep": 4, "dp_replicate": 2}},
            r"ep=4 does not divide dp_shard x cp x tp = 2 ranks",
        ),
        (
            12,
            {"parallel": {"ep": 8}},
            r"ep=8 does not divide dp_shard x cp x tp = 12 ranks \(use 1, 2 or 4\)",
        ),
        (
            64,
            {"parallel": {"ep": 2}},
            "ep=2 leaves 32 ranks with the same experts, which do not divide moe_intermediate_",
        ),
        (
            12,
            {"model": "nemotron3-super-120b-a12b-tiny", "parallel": {"ep": 4}},
            "do not divide moe_latent_size",
        ),
        (
            6,
            {"parallel": {"ep": 2}},
            "ep=2 leaves 3 ranks with the same experts, which do not divide hidden_size=64",
        ),
    ],
)
def test_mistakes_are_one_line(ranks, tree, line):
    tree = {
        "model": "mixtral-8x7b-tiny",
        "batch": {"global": 24, "micro": 1, "seq_len": 16},
    } | tree
    with pytest.raises(InputError, match=line) as caught:
        check_layout(configs.from_dict(tree), ranks)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "parallel, ranks, small",
    [
        ({"dp_shard": 8, "ep": 8}, 8, (2, 2)),  # dp_shard and ep of the small one
        ({"dp_shard": 16, "ep": 8}, 16, (4, 2)),  # two ranks have the same experts
        ({"dp_shard": 8, "tp": 2, "ep": 8}, 16, (2, 2)),
        ({"dp_shard": 1, "cp": 4, "ep": 4}, 4, (1, 2)),
    ],
)
def test_shrink(parallel, ranks, small):
    tree = {
        "model": "qwen3-30b-a3b",
        "parallel": parallel,
        "batch": {"global": 64, "micro": 1, "seq_len": 4096},
    }
    config = configs.from_dict(tree)
    check_layout(config, ranks)
    found = shrink_parallel(config)
    assert (found.dp_shard, found.ep) == small
    shrink(config)  # is a layout that fits
