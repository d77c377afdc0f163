"""Gradients of weights while collectives are on their way: where products run, and that nothing else changes."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from minitrain.run.config import load as configs
from minitrain.run.launch.start import meshes_of
from minitrain.simulator.fake_world import fake_world
from minitrain.training.build import lay_out, make_model
from tests.helpers.training import filled_waits, in_flight

COLLECTIVES = "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"
PRODUCTS = "aten::mm", "minitrain::grouped_mm"
LLAMA = {"name": "llama3-8b-tiny", "num_layers": 1}
QWEN = {"name": "qwen3-30b-a3b-tiny", "num_layers": 1, "fake_balanced_gate": True}


def run_block(tree, ranks, filled, measure):
    """Compile a block of rank 0, without kernels, and return measure(a call of both its passes, the block)."""
    torch._dynamo.reset()
    small = {
        "device": "cpu",
        "compile": True,
        "batch": {"global": ranks, "micro": 1, "seq_len": 64},
    }
    config = configs.from_dict(small | tree)
    aot_eager = mock.patch("torch.compile", partial(torch.compile, backend="aot_eager"))
    with fake_world(ranks), aot_eager, filled_waits() if filled else nullcontext():
        model = lay_out(partial(make_model, config), config, meshes_of(config, "cpu"))
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        tokens = torch.zeros(1, 64 // config.parallel.cp, dtype=torch.int64)

        def run():
            model.zero_grad()
            model(tokens, head=lambda hidden, weight, labels: hidden).sum().backward()

        return measure(run, model)


def products_in_flight(run, _):
    return in_flight(run, PRODUCTS, COLLECTIVES)


@pytest.mark.parametrize(
    ("tree", "ranks", "without", "with_it"),
    [
        # Of 7 gradients of weights, 3 are ready when the MLP's reduce-scatter starts, of which one runs then and one
        # during the next gather. The last reduce-scatter gets the other 5
        (
            {"model": LLAMA, "parallel": {"tp": 2}},
            2,
            6 * [0] + [0, 0, 0, 0, 0, 0] + 3 * [0],
            6 * [0] + [0, 0, 1, 1, 5, 0] + 3 * [0],
        ),
        # when keys' and values' gradients leave, all others are ready, and the input's by queries
        ({"model": LLAMA, "parallel": {"cp": 2}}, 2, [0, 0], [0, 6]),
        # both stacks' gradients, while those of inputs return: one operator each, with 4 experts' products
        ({"model": QWEN, "parallel": {"ep": 2, "dp_shard": 2}}, 2, 5 * [0], 4 * [0] + [2 + 8]),
    ],
    ids=["tp", "cp", "ep"],
)
def test_products_that_run_meanwhile(tree, ranks, without, with_it):
    assert run_block(tree, ranks, False, products_in_flight) == without
    assert run_block(tree, ranks, True, products_in_flight) == with_it


def results(run, model):
    """Return the names of collectives in their order, and all gradients."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [event.name for event in events if event.name.startswith("_c10d_functional")]
    starts = [name for name in names if "wait" not in name]
    gradients = [parameter.grad for parameter in model.parameters()]
    # the head's matrix has none
    return starts, [gradient.to_local() for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_collectives_keep_their_order_and_gradients_their_bits(recompute):
    tree = {"model": LLAMA, "parallel": {"tp": 2}, "recompute": recompute}
    before, after = (run_block(tree, 2, filled, results) for filled in (False, True))
    assert before[0] == after[0] and len(before[0]) >= 12
    assert all(map(torch.equal, before[1], after[1])) and len(after[1]) == 11
