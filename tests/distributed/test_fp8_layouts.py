"""FP8 under every layout: the gradients of one process, weights rounded once a step and to the same bits."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from minitrain.data.text.text_rows import Mock
from minitrain.models import fp8, quantize
from minitrain.models.decoder import Decoder
from minitrain.models.moe import Experts
from minitrain.parallel import fsdp_fp8 as gathering
from minitrain.parallel import tensor
from minitrain.parallel.shards import full_tensor
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import start
from minitrain.training.build import fp8_notes
from minitrain.training.loop import Trainer
from tests.helpers.experts import all_to_the_first
from tests.helpers.oracle import (
    Count,
    check_against_one_process,
    collective,
    count_calls,
    train,
    train_compiled,
)

TREE = {
    "model": {
        "name": "llama3-8b-tiny",
        "vocab_size": 128,
        "num_layers": 2,
        "initializer_range": 0.05,
    },
    "batch": {"global": 12, "micro": 2, "seq_len": 16},
    "optim": {"name": "sgd", "lr": 0.1},
    "precision": "fp8",
    "device": "cpu",
}


def train_otherwise_in_fp32(*args):
    """`train` with fp32 wherever there is bf16, and graphs handed to autograd instead of to a C++ compiler."""
    compiler = mock.patch(
        "torch.compile", partial(torch.compile, backend="aot_eager_decomp_partition")
    )
    with mock.patch.object(torch, "bfloat16", torch.float32), compiler:
        return train(*args)


class EachExpert(Experts):
    """All experts in one process, each in FP8 for itself."""

    def _product(self, name, x, offsets):
        counts = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
        outputs = []
        for rows, weight in zip(x.split(counts), getattr(self, name), strict=True):
            in_fp8 = *quantize.quantize(weight, quantize.E4M3), None
            how = "tensor", False, False, False, True
            outputs += fp8.Fp8Products.apply(rows, *how, weight, *in_fp8)
        return torch.cat(outputs)


def fp8_decoder(config):
    model = Decoder(config)
    fp8.to_fp8(model.blocks, "forward")
    for module in model.modules():
        if type(module) is Experts:
            module.__class__ = EachExpert
    return model


@pytest.mark.parametrize(
    "world_size, changes",
    [
        (3, {}),  # shards of 22, 22 and 20 rows
        (
            4,
            {
                "parallel": {"dp_replicate": 2, "reshard_after_forward": False},
                "recompute": "full",
            },
        ),
        (4, {"parallel": {"tp": 2}, "recompute": "selective", "compile": True}),
        (4, {"parallel": {"pp": 2, "tp": 2}}),
        (2, {"parallel": {"cp": 2}}),
        (4, {"parallel": {"tp": 2}, "model": TREE["model"] | {"num_nextn_predict_layers": 1}}),
    ],
    ids=str,
)
def test_layouts(pool, world_size, changes):
    """The tolerance is for the few elements that lie between two FP8 numbers, where fp32's rounding decides: one more
    or less of e5m2's steps is an eighth. A wrong scale would be wrong by a factor of 2."""
    with mock.patch("tests.helpers.oracle.Decoder", fp8_decoder):
        tree = (
            TREE | {"batch": TREE["batch"] | {"global": 12 if world_size == 3 else 8}} | changes
        )
        check_against_one_process(
            pool, world_size, tree, tolerance=0.05, run=train_otherwise_in_fp32
        )


@pytest.mark.parametrize(
    "world_size, experts, changes",
    [
        # one expert on each rank, which is not sharded any further
        (2, 2, {"parallel": {"ep": 2}}),
        (4, 2, {"parallel": {"ep": 2}, "compile": True}),  # two ranks with halves of the same
        (4, 4, {"parallel": {"ep": 4, "tp": 2}, "recompute": "selective"}),
        (4, 2, {"parallel": {"ep": 2, "pp": 2}}),
        (4, 2, {"parallel": {"ep": 2, "dp_replicate": 2}, "recompute": "full"}),
    ],
    ids=str,
)
def test_layouts_of_experts(pool, world_size, experts, changes):
    """With two choices of expert for each token, one may get no token at all."""
    model = TREE["model"] | {"name": "mixtral-8x7b-tiny", "num_experts": experts}
    tree = (
        TREE
        | {"model": model, "batch": TREE["batch"] | {"global": 8}, "fp8": {"experts": True}}
        | changes
    )
    with mock.patch("tests.helpers.oracle.Decoder", fp8_decoder):
        check_against_one_process(
            pool, world_size, tree, tolerance=0.05, run=train_otherwise_in_fp32
        )


def train_with_idle_ranks(*args):
    with all_to_the_first():
        return train_otherwise_in_fp32(*args)


@pytest.mark.parametrize("compiled", [False, True])
def test_experts_of_ranks_without_tokens(pool, compiled):
    model = TREE["model"] | {"name": "mixtral-8x7b-tiny", "num_experts": 4, "num_layers": 1}
    settings = {"parallel": {"ep": 4}, "fp8": {"experts": True}, "compile": compiled}
    tree = TREE | {"model": model, "batch": TREE["batch"] | {"global": 8}} | settings
    with mock.patch("tests.helpers.oracle.Decoder", fp8_decoder), all_to_the_first():
        check_against_one_process(pool, 4, tree, tolerance=0.05, run=train_with_idle_ranks)


# whole blocks on two tensor-parallel ranks
WIDE = {"num_layers": 1, "hidden_size": 256, "intermediate_size": 256}
WIDE |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}


def decoder_in_form(form, config):
    model = Decoder(config)
    fp8.to_fp8(model.blocks, "none", experts=True, form=form)
    return model


@pytest.mark.parametrize(
    "world_size, form, changes",
    [
        (2, "block", {}),  # shards of whole blocks
        (3, "block", {}),  # and of others
        (4, "block", {"parallel": {"tp": 2}, "recompute": "full"}),
        (4, "row", {"parallel": {"pp": 2, "tp": 2}}),
        (2, "mx", {"parallel": {"cp": 2}}),
        (
            2,
            "row",
            {"model": {"name": "mixtral-8x7b-tiny", "num_experts": 4}, "parallel": {"ep": 2}},
        ),
        (
            4,
            "mx",
            {
                "model": {"name": "mixtral-8x7b-tiny", "num_experts": 4},
                "parallel": {"ep": 2, "tp": 2},
                "recompute": "selective",
            },
        ),
        (
            2,
            "block",
            {"model": {"name": "mixtral-8x7b-tiny", "num_experts": 4}, "parallel": {"tp": 2}},
        ),
    ],
    ids=str,
)
def test_layouts_of_forms(pool, world_size, form, changes):
    """Tokens are cut into other blocks than in one process, which changes none but the smallest numbers of a block."""
    model = TREE["model"] | WIDE | changes.get("model", {})
    tree = TREE | {"batch": TREE["batch"] | {"global": 12 if world_size == 3 else 8}} | changes
    tree |= {"model": model, "fp8": {"form": form, "experts": "mixtral" in model["name"]}}
    with mock.patch("tests.helpers.oracle.Decoder", partial(decoder_in_form, form)):
        check_against_one_process(
            pool, world_size, tree, tolerance=0.05, run=train_otherwise_in_fp32
        )


@pytest.mark.parametrize(
    "world_size, form, wide", [(2, "block", 0), (3, "block", 7), (2, "row", 7), (2, "tensor", 0)]
)
def test_weights_that_are_gathered_in_bf16_are_counted_and_told(pool, world_size, form, wide):
    tree = TREE | {"model": TREE["model"] | WIDE, "fp8": {"form": form}}
    told = pool.run(world_size, notes_of, tree)[0]
    assert bool(told) == bool(wide)
    if wide:
        assert (
            f"fp8.form={form}: FSDP gathers {wide} of this rank's FP8 weights in bf16" in told[0]
        )


def notes_of(tree):
    trainer, _ = new_trainer(tree)
    return list(fp8_notes(trainer.model, trainer.config, trainer.meshes))


# ------------------------------------------------------------------------------- what tensor parallelism gathers


def gathered(op, args):
    """The size of an element that an all-gather between the modules of a model sends."""
    return args[0].element_size() if collective(op, args) == "all_gather_into_tensor" else None


def train_gathering_rounded(tree, rounded):
    """rounded: as it is, or all in the type of what is gathered."""
    decide = mock.patch.object(
        tensor, "only_multiplies_in_fp8", tensor.only_multiplies_in_fp8 if rounded else no
    )
    with (
        decide,
        nullcontext() if tree.get("compile") else Count(gathered) as gathers,
    ):  # not both can see the operators
        trace = train_compiled(tree, 1)
    return trace.gradients[0] | {
        "loss": torch.tensor(trace.losses[0])
    }, gathers and gathers.counts


def no(linear):
    return False


LORA = {"task": "lora", "lora": {"rank": 4, "targets": ["k_proj", "down_proj"]}}


@pytest.mark.parametrize(
    "model, world_size, changes, per_batch",
    [
        # inputs of attention and MLP, and gradients of their outputs
        ("llama3-8b-tiny", 2, {}, 8),
        ("llama3-8b-tiny", 4, {"recompute": "full"}, 12),
        ("gpt3-175b-tiny", 2, {}, 4),  # biases of the last Linears
        ("llama3-8b-tiny", 2, LORA, 4),  # inputs of the MLP, gradients of attention's output
        # attention, two shared experts, and what comes out of Mamba-2
        ("nemotron3-super-120b-a12b-tiny", 2, {}, 7),
        ("qwen2.5-7b-tiny", 2, {"compile": True}, None),
    ],
    ids=str,
)
def test_gathering_rounded_activations_changes_no_bit(
    pool, model, world_size, changes, per_batch
):
    shape = {"name": model, "num_layers": 4 if "nemotron3" in model else 2}
    tree = TREE | {"model": TREE["model"] | shape, "parallel": {"tp": 2}} | changes
    runs = [
        pool.run(world_size, train_gathering_rounded, tree, rounded) for rounded in (True, False)
    ]
    batches = TREE["batch"]["global"] // TREE["batch"]["micro"] // (world_size // 2)
    for (actual, gathers), (expected, wide) in zip(*runs, strict=True):
        if per_batch:
            assert gathers[1] == per_batch * batches and not wide[1]
            assert gathers.total() == wide.total()
        assert actual.keys() == expected.keys()
        for name, gradient in actual.items():
            assert torch.equal(gradient, expected[name]), name


# ----------------------------------------------------------------------------------------------------- what is gathered


def new_trainer(tree):
    config = from_dict(tree)
    return Trainer(config, start(config)), Mock(16, 128, seed=0, split=0)


def check_gathered_after_changes(tree):
    """After steps of optimizers and writes to weights, modules must get what one process rounds whole weights to."""
    trainer, dataset = new_trainer(tree)
    model, batch = trainer.model, trainer.micro_batches(dataset, 0)[0]
    kinds = (fp8.Fp8Linear, fp8.Fp8Experts)
    modules = {
        name: module for name, module in model.named_modules() if isinstance(module, kinds)
    }
    seen = {}

    def look(name, module, inputs):
        for key, (rounded, inverse, copy) in module.gathered.items():
            seen[f"{name}.{key}"] = rounded.clone(), inverse.clone()
            assert not inverse.data_ptr() % 16 and not rounded.data_ptr() % 16, (
                "cuBLAS refuses others"
            )
            assert rounded.ndim == 2
            assert (copy is not None) == trainer.config.fp8.keep_transposed
            if copy is not None:
                assert copy.t().is_contiguous() and torch.equal(copy.float(), rounded.float())

    for name, module in modules.items():
        module.register_forward_pre_hook(partial(look, name))
    weights = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    for name, p in weights.items():
        if p.ndim == 3:  # experts of different sizes
            p.to_local().detach().mul_(
                own_part(name, None, trainer.meshes, 4.0 ** torch.arange(len(p))[:, None, None])
            )
    for change in (
        lambda: None,
        torch.optim.SGD(weights.values(), lr=0.1, foreach=True).step,
        torch.optim.AdamW(weights.values(), lr=0.1, fused=True).step,
        lambda: [p.mul_(3) for p in weights.values()],
        lambda: [p.to_local().div_(5) for p in weights.values()],
    ):
        with torch.no_grad():
            change()
        trainer.objective.loss(model, batch).backward()
        assert len(seen) == sum(
            2 if isinstance(module, fp8.Fp8Experts) else 1 for module in modules.values()
        )
        for name, (rounded, inverse) in seen.items():
            weight = full_tensor(weights[name])
            part = partial(own_part, name, modules[name.rpartition(".")[0]], trainer.meshes)
            if weight.ndim == 3:  # this rank's expert, with a scale of its own
                whole_rounded, whole_inverse = quantize.quantize(
                    part(weight).squeeze(0), quantize.E4M3
                )
                assert torch.equal(rounded.view(torch.uint8), whole_rounded.view(torch.uint8)), (
                    name
                )
            else:
                block = gathering.block_of(modules[name.rpartition(".")[0]])
                whole_rounded, whole_inverse = quantize.quantize(weight, quantize.E4M3, block)
                assert torch.equal(
                    rounded.view(torch.uint8), part(whole_rounded.view(torch.uint8))
                ), name
                if whole_inverse.ndim:  # of blocks
                    whole_inverse = part(whole_inverse)
            assert torch.equal(inverse, whole_inverse), name


def own_part(name, module, meshes, tensor):
    """Of what is whole, what this rank computes with."""
    if tensor.ndim == 3:
        return tensor.chunk(meshes.experts["ep"].size())[meshes.experts["ep"].get_local_rank()]
    if hasattr(module, "local_rows"):
        return tensor[module.local_rows]
    by = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
    return tensor.chunk(meshes.tp.size(), by)[meshes.tp.get_local_rank()]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("world_size, tp, heads", [(3, 1, 4), (4, 2, 4), (4, 4, 2)])
def test_gathered_weights_are_those_of_one_process_after_every_change(
    pool, world_size, tp, heads, keep
):
    """Of a head that two ranks have, too."""
    settings = {
        "parallel": {"tp": tp, "reshard_after_forward": not keep},
        "model": TREE["model"] | {"num_key_value_heads": heads, "head_dim": 32},
        "fp8": {"keep_transposed": keep},
    }
    pool.run(world_size, check_gathered_after_changes, TREE | settings)


@pytest.mark.parametrize("keep", [False, True])
# two halves of stacks of one; whole
@pytest.mark.parametrize(("ep", "experts"), [(2, 2), (4, 4)])
def test_gathered_experts_are_those_of_one_process_after_every_change(pool, ep, experts, keep):
    settings = {
        "parallel": {"ep": ep, "reshard_after_forward": not keep},
        "model": TREE["model"] | {"name": "mixtral-8x7b-tiny", "num_experts": experts},
        "fp8": {"experts": True, "keep_transposed": keep},
    }
    pool.run(
        4,
        check_gathered_after_changes,
        TREE | {"batch": TREE["batch"] | {"global": 8}} | settings,
    )


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("world_size, tp", [(2, 1), (4, 2)])
def test_gathered_blocks_are_those_of_one_process_after_every_change(pool, world_size, tp, keep):
    settings = {
        "parallel": {"tp": tp, "reshard_after_forward": not keep},
        "model": TREE["model"]
        | WIDE
        | {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128},
        "fp8": {"form": "block", "keep_transposed": keep},
    }
    pool.run(
        world_size,
        check_gathered_after_changes,
        TREE | {"batch": TREE["batch"] | {"global": 8}} | settings,
    )


def test_shards_that_are_gone_hear_of_no_step():
    before = len(_global_optimizer_post_hooks)
    shards = gathering.Fp8Shards([], keep_transposed=False)
    assert len(_global_optimizer_post_hooks) == before + 1
    del shards
    assert len(_global_optimizer_post_hooks) == before


def train_counting_copies(tree):
    """The gradients of two steps, and how many weights were transposed to be kept, and how many to be multiplied."""
    with (
        mock.patch.object(gathering, "transposed", wraps=fp8.transposed) as kept,
        mock.patch.object(fp8, "column_major", wraps=fp8.column_major) as used,
    ):
        trace = train(tree, 2)
    passed = sum(call.args[0].stride(0) == 1 for call in used.call_args_list)
    return trace.gradients, kept.call_count, passed, used.call_count


@pytest.mark.parametrize(
    "changes, transposed_per_step",
    [
        ({}, 14),
        ({"task": "lora", "lora": {"rank": 4}}, 7),  # once for ever
        ({"parallel": {"pp": 2, "reshard_after_forward": False}}, 7),
        (
            {
                "parallel": {"ep": 2, "reshard_after_forward": False},
                "fp8": {"keep_transposed": True, "experts": True},
                "model": TREE["model"] | {"name": "mixtral-8x7b-tiny", "num_experts": 2},
            },
            12,
        ),
    ],
    ids=str,
)
def test_kept_copies_change_no_bit_and_are_made_once_per_step(pool, changes, transposed_per_step):
    gathered = {"parallel": {"reshard_after_forward": False}, "fp8": {"keep_transposed": True}}
    batch = {"batch": TREE["batch"] | {"global": 8}}
    tree = TREE | gathered | batch | changes
    without = tree | {"fp8": tree["fp8"] | {"keep_transposed": False}}
    (ours, kept, passed, used), (expected, none, not_passed, _) = (
        pool.run(2, train_counting_copies, settings)[0] for settings in (tree, without)
    )
    assert kept == 2 * transposed_per_step and passed == used > kept
    assert none == not_passed == 0
    for step, gradients in enumerate(ours):
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected[step][name]), name


def count_work(tree, steps):
    """Of some steps: weights rounded, matrix products in FP8, and bytes that this rank has gathered."""
    trainer, dataset = new_trainer(tree)
    with (
        mock.patch.object(gathering, "cast", wraps=quantize.cast) as cast,
        mock.patch.object(gathering, "quantize", wraps=quantize.quantize) as blocks,
        mock.patch.object(fp8, "scaled_mm", wraps=fp8.scaled_mm) as product,
        count_calls("all_gather") as gather,
    ):
        for step in range(steps):
            trainer.step(dataset, step)
    return (
        cast.call_count + blocks.call_count,
        product.call_count,
        sum(call.args[0].nbytes for call in gather.call_args_list),
    )


def test_weights_are_rounded_once_per_step_and_gathered_as_bytes(pool):
    steps, batches = 2, 3
    (rounded, products, fp8_bytes), (_, _, bf16_bytes) = (
        pool.run(2, count_work, TREE | {"precision": precision, "recompute": "full"}, steps)[0]
        for precision in ("fp8", "bf16")
    )
    linears = [
        p.numel()
        for name, p in Decoder(from_dict(TREE).model.config).named_parameters()
        if "proj" in name
    ]
    assert rounded == steps * len(linears)
    assert products == steps * batches * (1 + 1 + 2) * len(linears)
    # gathered forward and backward
    assert bf16_bytes - fp8_bytes == steps * batches * 2 * sum(linears)


@pytest.mark.parametrize("form", ["tensor", "block"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_frozen_base_of_adapters_is_rounded_once_for_ever(pool, world_size, form):
    shape = {} if form == "tensor" else WIDE | {"num_layers": 2}
    tree = TREE | {
        "model": TREE["model"] | shape,
        "fp8": {"form": form},
        "task": "lora",
        "lora": {"rank": 4},
        "batch": {"global": 4, "micro": 2, "seq_len": 16},
    }
    steps, batches, linears = 3, 2 // world_size, 14
    rounded, products, _ = pool.run(world_size, count_work, tree, steps)[0]
    assert rounded == linears
    # outputs and gradients of inputs, none of weights
    assert products == steps * batches * 2 * linears
