"""Recomputation: the same gradients whatever is kept, less memory the less is, and no collective more than needed."""

import ast
from functools import partial
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from minitrain.bench.breakdown import working_memory
from minitrain.bench.measure import activation_bytes
from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.models import cpu
from minitrain.models import fp8 as fp8_models
from minitrain.models.fp8 import to_fp8
from minitrain.parallel.recompute import OWN_ATTENTION, OWN_PRODUCTS, recompute
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import start
from minitrain.training.loop import Trainer
from tests.helpers.house import TREES
from tests.helpers.oracle import (
    Count,
    check_against_one_process,
    collective,
    packed_batch,
    plain_model,
    train,
)

MODEL = {"name": "llama3-8b-tiny", "vocab_size": 128, "num_layers": 4, "initializer_range": 0.05}
TREE = {
    "model": MODEL,
    "batch": {"global": 4, "micro": 2, "seq_len": 16},
    "optim": {"name": "sgd", "lr": 0.1},
}


# of our own operators: cheap ones, and the backward pass of one
RECOMPUTED = {"quantize_groups", "transposed", "attention_part_backward"}


def registered_in_models():
    """Return the names of operators that files of models/ register, from their source text."""
    calls = (
        node
        for file, tree in TREES.items()
        if file.parts[1] == "models"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    )
    return {
        call.args[0].value.removeprefix("minitrain::")
        for call in calls
        if call.func.attr in ("custom_op", "define")
    }


def test_each_operator_of_our_own_is_saved_or_recomputed_on_purpose():
    """A product with a new name would else be computed twice, and nobody would be told."""
    saved = {*OWN_ATTENTION, *OWN_PRODUCTS}
    assert registered_in_models() == saved | RECOMPUTED and not saved & RECOMPUTED


@pytest.mark.parametrize("recompute", ["full", "attention", "selective", 2, 3])
def test_gradients(pool, recompute):
    check_against_one_process(pool, 2, TREE | {"recompute": recompute}, double=True)


# ------------------------------------------------------------------------------------------------------------- compiled


def train_compiled(*args):
    """`train` with graphs handed to autograd, split as for the real compiler; a compilation after step 2 fails."""
    torch.compiler.reset()
    graphs = []

    def batch(config, step):
        graphs.append(counters["stats"]["unique_graphs"])
        return packed_batch(config, step)

    tree, steps, _ = args
    with mock.patch(
        "torch.compile", partial(torch.compile, backend="aot_eager_decomp_partition")
    ):
        trace = train(tree, steps, batch)
    assert 0 < graphs[1] - graphs[0] <= 4, f"graphs compiled before each step: {graphs}"
    assert counters["stats"]["unique_graphs"] == graphs[2], (
        f"graphs compiled before each step: {graphs}"
    )
    return trace


@pytest.mark.parametrize(
    ("parallel", "recompute"),
    [
        ({}, "selective"),
        ({"tp": 2}, "full"),
        ({"tp": 2}, "selective"),
        ({"cp": 2}, "full"),
        ({"cp": 2}, "attention"),
        ({"cp": 2, "context": "ulysses"}, "selective"),
    ],
    ids=str,
)
def test_compiled(pool, parallel, recompute):
    tree = TREE | {"compile": True, "recompute": recompute, "parallel": parallel}
    check_against_one_process(
        pool, 2, tree, steps=3, batch=packed_batch, run=train_compiled, double=True
    )


def compile_in_all_ways(tree):
    """As GRPO does: training, a pass of the same model without gradients, and one of a frozen model."""
    torch.compiler.reset()
    config, before = (
        from_dict(tree | {"device": "cpu", "compile": True}),
        counters["stats"]["unique_graphs"],
    )
    with mock.patch("torch.compile", partial(torch.compile, backend="eager")):
        meshes = start(config)
        models = [Trainer(config, meshes).model for _ in range(2)]
        models[1].requires_grad_(False)
        tokens = torch.arange(16)[None]
        models[0](tokens).sum().backward()
        with torch.no_grad():
            outputs = [model(tokens) for model in models]
    assert torch.equal(*outputs)
    return counters["stats"]["unique_graphs"] - before


def test_a_hybrids_kinds_of_layers_in_all_ways(pool):
    """Three times three graphs: the compiler's own limit is 8, and then it fails."""
    assert pool.run(1, compile_in_all_ways, TREE | {"model": "nemotron3-nano-30b-a3b-tiny"}) == [
        9
    ]


@pytest.mark.parametrize("setting", ["full", "selective"])
def test_stages_of_a_pipeline_share_what_is_compiled(setting):
    """Otherwise eight stages would compile each block eight times, and a ninth would run uncompiled."""
    torch.compiler.reset()
    blocks = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    before = counters["stats"]["unique_graphs"]
    for block in blocks:
        recompute([block], setting)
        block.compile(backend="eager")
        block(torch.ones(1, 4)).sum().backward()
    assert counters["stats"]["unique_graphs"] - before == 1


# --------------------------------------------------------------------------------------------------------------- memory


def measured_activations(tree):
    torch.compiler.reset()
    config = from_dict(tree | {"device": "cpu"})
    data, _ = open_dataset(config)
    with mock.patch(
        "torch.compile", partial(torch.compile, backend="aot_eager_decomp_partition")
    ):
        return activation_bytes(Trainer(config, start(config)), data)


def activations(pool, **settings):
    (size,) = pool.run(
        1,
        measured_activations,
        TREE | {"batch": {"global": 2, "micro": 2, "seq_len": 64}} | settings,
    )
    return size


def test_every_kth_block_is_counted_from_the_first():
    blocks = [torch.nn.Identity() for _ in range(7)]
    recompute(blocks, 3)
    assert [type(block).__name__ == "Recomputing" for block in blocks] == [
        True,
        False,
        False,
    ] * 2 + [True]


def test_the_less_is_kept_the_less_memory(pool):
    none, every_third, every_second, selective, full = (
        activations(pool, recompute=setting) for setting in ("none", 3, 2, "selective", "full")
    )
    assert full < every_second < every_third < none
    assert full < selective < none


@pytest.mark.parametrize("setting, kept", [("full", 64), ("attention", 64 + 8 * (16 + 1))])
def test_what_is_kept_of_each_block(pool, setting, kept):
    """Twice the blocks, with the same work at hand: their inputs, [2, 64, 64] in fp32, are all that is added; with
    `attention` also its output, 16 channels for each of 8 heads, and the log of its sum."""
    small, large = (
        activations(pool, recompute=setting, model=MODEL | {"num_layers": n}) for n in (4, 8)
    )
    assert large - small == pytest.approx(4 * 2 * 64 * kept * 4, rel=0.05)


def choices_of_experts(tree):
    """How often tokens choose experts, and rows are sorted by them, in a compiled step; and how many products run."""
    torch.compiler.reset()
    config = from_dict(tree | {"device": "cpu", "compile": True})
    data, _ = open_dataset(config)
    with mock.patch(
        "torch.compile", partial(torch.compile, backend="aot_eager_decomp_partition")
    ):
        trainer = Trainer(config, start(config))
        trainer.step(data, 0)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            trainer.step(data, 1)
    counts = {event.key: event.count for event in profiler.key_averages()}
    return counts["aten::topk"], counts["aten::sort"], counts["aten::mm"]


def test_experts_are_chosen_once_where_their_outputs_are_kept(pool):
    """Of activations that are computed again, rounded otherwise, others could be chosen, and their rows misplaced."""
    tree = {
        "model": {"name": "qwen3-30b-a3b-tiny", "num_layers": 2},
        "batch": {"global": 2, "micro": 2, "seq_len": 16},
    }
    none, selective, full = (
        pool.run(1, choices_of_experts, tree | {"recompute": setting})[0]
        for setting in ("none", "selective", "full")
    )
    assert none[:2] == selective[:2] == (2, 2)
    assert full[:2] == (4, 4)  # all again is consistent in itself


def test_working_memory_is_what_is_alive_at_once():
    def function():
        a = torch.zeros(100_000)
        b = torch.zeros(50_000)
        del a
        c = torch.zeros(60_000)
        del b, c

    assert working_memory(function, torch.device("cpu")) == 4 * 150_000
    kept = []
    assert working_memory(lambda: kept.append(torch.zeros(1000)), torch.device("cpu")) == 4000
    assert working_memory(kept.clear, torch.device("cpu")) == 0


# ---------------------------------------------------------------------------------------------------------- collectives


def count_collectives(tree):
    config = from_dict(tree | {"device": "cpu"})
    data, _ = open_dataset(config)
    trainer = Trainer(config, start(config))
    with Count(collective) as counter:
        trainer.step(data, 0)
    return [
        sum(n for name, n in counter.counts.items() if part in name)
        for part in ("reduce_scatter", "all_to_all")
    ]


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"cp": 2, "context": "ulysses"}], ids=str)
def test_selective_does_not_send_again_what_it_keeps(pool, parallel):
    tree = TREE | {"parallel": parallel}
    none, selective, full = (
        pool.run(2, count_collectives, tree | {"recompute": setting})[0]
        for setting in ("none", "selective", "full")
    )
    assert none == selective
    assert sum(full) > sum(none)


# --------------------------------------------------------------------------------------------------------------- config


def product(op, args):
    """Matrix products and attention, in whatever form."""
    name = op.overloadpacket.__name__
    return name if name.endswith(("mm", "cpu_linear")) or "attention" in name else None


def scaled_mm_of_torch(a, b, a_inverse, b_inverse, dtype, fast):
    return torch._scaled_mm(a, b, a_inverse, b_inverse, out_dtype=dtype, use_fast_accum=fast)


def products(
    setting,
    name,
    compiling=False,
    fp8=False,
    form="tensor",
    as_on_gpus=False,
    by_cpu_linears=False,
    **shape,
):
    """Those of a forward and a backward pass.

    compiling: in the form that the compiler gets. as_on_gpus: FP8 by torch's operator, which the test puts there.
    """
    config = from_dict({"model": {"name": name, "vocab_size": 128, "num_layers": 4, **shape}})
    model = plain_model(config)
    if fp8:
        to_fp8(model.blocks, "none", experts=True, form=form)
    if by_cpu_linears:
        cpu.use_cpu_linears(model)
    recompute(model.blocks, setting)
    tokens = torch.arange(32).view(2, 16)
    with (
        mock.patch.object(torch.compiler, "is_compiling", lambda: compiling),
        Count(product) as seen,
    ):
        model(tokens).square().sum().backward()
    return seen.counts


@pytest.mark.parametrize(
    ("kinds", "settings"),
    [
        (["addmm"], {"name": "gpt3-175b-tiny"}),
        (["mm", "bmm"], {"name": "nemotron3-nano-30b-a3b-tiny"}),
        (["_grouped_mm"], {"name": "mixtral-8x7b-tiny"}),
        (["grouped_mm"], {"name": "mixtral-8x7b-tiny", "compiling": True}),
        (["_scaled_mm"], {"name": "qwen2.5-7b-tiny", "fp8": True, "as_on_gpus": True}),
        (["scaled_mm"], {"name": "qwen2.5-7b-tiny", "fp8": True}),
        (
            ["scaled_mm"],
            {
                "name": "mixtral-8x7b-tiny",
                "fp8": True,
                "num_experts": 1,
                "num_experts_per_tok": 1,
            },
        ),
        (
            ["scaled_mm", "scaled_grouped_mm"],
            {"name": "mixtral-8x7b-tiny", "fp8": True, "form": "row"},
        ),
        (["cpu_linear"], {"name": "llama3-8b-tiny", "by_cpu_linears": True}),
    ],
    ids=str,
)
def test_selective_computes_no_product_again(kinds, settings, monkeypatch):
    monkeypatch.setattr(cpu, "FASTER", settings.get("by_cpu_linears", False))
    monkeypatch.setattr(cpu, "MIN_FLOPS", 1)
    if settings.get("as_on_gpus"):
        monkeypatch.setattr(fp8_models, "choose_scaled_mm", lambda *_: scaled_mm_of_torch)
    none, selective, full = (
        products(setting, **settings) for setting in ("none", "selective", "full")
    )
    assert selective == none and set(kinds) <= (full - none).keys()


@pytest.mark.parametrize(
    "setting, line",
    [
        (
            1,
            "recompute=1 must be none, full, attention, selective, offload, full-offload or a whole number of at "
            "least 2",
        ),
        (1.5, "recompute=1.5 is not one of none, full, attention, selective"),
        (0.5, "recompute=0.5 is not one of none, full, attention, selective"),
        ("sum", "recompute='sum' is not one of none, full, attention, selective"),
        (True, "recompute=True is not one of none, full, attention, selective"),
    ],
)
def test_refusals(setting, line):
    with pytest.raises(InputError, match=line):
        from_dict({"recompute": setting})


@pytest.mark.parametrize("setting", ["some", "2", "", 0, -1])
def test_a_setting_that_the_table_does_not_have(setting):
    with pytest.raises(ValueError, match=f"recompute={setting!r} is none, full"):
        recompute([], setting)
