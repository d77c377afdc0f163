"""A trace whose compiled graphs are repeated is the one that runs every operator, number by number."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import boxed_nop
from torch._subclasses.fake_tensor import FakeTensorMode

from minitrain.run.config import load as configs
from minitrain.simulator import fake_world
from minitrain.simulator.repeat import Recording, RepeatedGraph
from minitrain.simulator.trace import Trace, Tracer

TREE = {
    "model": {"name": "llama3-8b-tiny", "num_layers": 2},
    "batch": {"global": 4, "micro": 1, "seq_len": 64},
    "parallel": {"dp_shard": 2, "tp": 2},
    "compile": True,
    "recompute": 2,
}


def numbered(trace: Trace) -> tuple:
    """Everything in a trace, with storages and groups numbered as they first appear."""
    storages, groups = {}, {}

    def seen(used: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(storages.setdefault(number, len(storages)), size) for number, size in used]

    events = [
        (
            e.name,
            e.kind,
            e.flops,
            seen(e.reads),
            seen(e.writes),
            e.sizes,
            e.element,
            e.payload,
            e.dimension,
            groups.setdefault(e.group, len(groups)),
        )
        for e in trace.events
    ]
    last = len(events) - 1  # what dies later, does so with the model
    died = {
        storages[number]: when
        for number, when in trace.died.items()
        if number in storages and when < last
    }
    return events, died, trace.marks, trace.peak, trace.peak_at


def traced(tree: dict) -> Trace:
    """Without the garbage collector, which frees what is in cycles at moments of its own; the compiler calls it too."""
    torch._dynamo.reset()  # or the second model would run the first one's graphs
    gc.collect()
    gc.disable()
    try:
        with torch._dynamo.config.patch(run_gc_after_compile=False):
            return fake_world.trace_step(
                configs.from_dict(tree | {"device": "cpu"}), world_size=4
            )
    finally:
        gc.enable()


def test_repeated_graphs_leave_the_same_trace(monkeypatch):
    # the first of a process leaves cycles that hold tensors: of what the compiler sets up once
    traced(TREE)
    calls = []
    repeat = Recording.repeat
    monkeypatch.setattr(Recording, "repeat", lambda *args: calls.append(1) or repeat(*args))
    short = numbered(traced(TREE))
    assert len(calls) >= 4  # the second micro-batch, in two layers, forward and backward
    monkeypatch.setattr(fake_world, "RepeatedGraph", boxed_nop)
    assert numbered(traced(TREE)) == short


class Constant(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = torch.ones(6)

    def forward(self, x, y, n):
        return (x + self.kept * y,)


def views(x, y, n):
    """Of an input, of something new, whole, and two parts of something else, and a number; some live for a moment."""
    z, w = x @ y.t() + n, (y * n).exp()
    return x, x[1:], z.t(), w[:1], w[1:3], n


def changed(x, y, n):
    """An input in place, and whatever shares its storage; then neither is needed any more."""
    total = x.add_(n).sum() + y.sum()
    return ((total * 2).exp(),)


def other_type(x, y, n):
    return x.view(torch.int32), y * n, y


def two(shape=(6, 6)):
    return [torch.ones(shape), torch.ones(shape), 2]


def one(shape=(6, 6)):
    x = torch.ones(shape)
    return [x, x, 2]


def part(first, rows=12):
    return [torch.ones(rows, 6)[first : first + 6], torch.ones(6, 6), 2]


CALLS = [
    two,
    one,
    lambda: one((3, 6)),
    lambda: [*two()[:2], 3],
    lambda: [x.t() for x in two()[:2]] + [2],
    lambda: [*torch.ones(12, 6).chunk(2), 2],
    lambda: part(0),
    lambda: part(6),
    lambda: part(6, 18),
]


def calls_of(run: Callable) -> tuple:
    """What three calls on each kind of inputs return and leave in a trace. run: takes them in a list."""
    returned, kept = [], []
    with FakeTensorMode(allow_non_fake_inputs=True), Tracer({}) as tracer:
        for make in CALLS * 3:
            kept.append(torch.ones(6))  # so that each call may be the peak
            inputs = make()
            assert all(tracer.number(x) for x in inputs[:2])
            outputs = run(inputs)
            assert not inputs
            found = [x for x in outputs if isinstance(x, Tensor)]
            storages = [x.untyped_storage() for x in found]
            layouts = [
                (x.dtype, x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes())
                for x in found
            ]
            shared = [storages.index(x) for x in storages]
            returned.append(
                (
                    layouts,
                    shared,
                    list(map(tracer.number, found)),
                    [x for x in outputs if not isinstance(x, Tensor)],
                )
            )
            del outputs, found, storages
    return returned, tracer.trace


@pytest.mark.parametrize(
    "function, repeats", [(views, 2), (changed, 2), (other_type, 0), (Constant(), 0)]
)
def test_repeated_calls_return_and_leave_the_same(function, repeats, monkeypatch):
    """On inputs that share a storage or do not, of other shapes, strides and offsets, and with other numbers."""
    counts, repeat = [], Recording.repeat
    monkeypatch.setattr(Recording, "repeat", lambda *args: counts.append(1) or repeat(*args))
    graph = torch.fx.symbolic_trace(function)
    assert calls_of(RepeatedGraph(graph, [])) == calls_of(boxed_nop(graph, []))
    assert len(counts) == repeats * len(CALLS)
