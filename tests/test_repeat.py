"""A trace whose compiled graphs are repeated is the one that runs every operator, number by number."""

import gc

import torch
from torch._dynamo.backends.debugging import boxed_nop

from minitrain import config as configs
from minitrain.bench import fake_world
from minitrain.bench.repeat import Recording
from minitrain.bench.trace import Trace

TREE = {
    "model": {"name": "llama3-8b-tiny", "num_layers": 2}, "batch": {"global": 4, "micro": 1, "seq_len": 64},
    "parallel": {"dp_shard": 2, "tp": 2}, "compile": True, "recompute": 2,
}  # fmt: skip


def numbered(trace: Trace) -> tuple:
    """Everything in a trace, with storages and groups numbered as they first appear."""
    storages, groups = {}, {}

    def seen(used: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(storages.setdefault(number, len(storages)), size) for number, size in used]

    events = [
        (e.name, e.kind, e.flops, seen(e.reads), seen(e.writes), e.sizes, e.element, e.payload, e.dimension,
         groups.setdefault(e.group, len(groups)))
        for e in trace.events
    ]  # fmt: skip
    last = len(events) - 1  # what dies later, does so with the model
    died = {storages[number]: when for number, when in trace.died.items() if number in storages and when < last}
    return events, died, trace.marks, trace.peak, trace.peak_at


def traced(tree: dict) -> Trace:
    """Without the garbage collector, which frees what is in cycles at moments of its own; the compiler calls it too."""
    torch._dynamo.reset()  # or the second model would run the first one's graphs
    gc.collect()
    gc.disable()
    try:
        with torch._dynamo.config.patch(run_gc_after_compile=False):
            return fake_world.trace_step(configs.from_dict(tree | {"device": "cpu"}), world_size=4)
    finally:
        gc.enable()


def test_repeated_graphs_leave_the_same_trace(monkeypatch):
    traced(TREE)  # the first of a process leaves cycles that hold tensors: of what the compiler sets up once
    calls = []
    repeat = Recording.repeat
    monkeypatch.setattr(Recording, "repeat", lambda *args: calls.append(1) or repeat(*args))
    short = numbered(traced(TREE))
    assert len(calls) >= 4  # the second micro-batch, in two layers, forward and backward
    monkeypatch.setattr(fake_world, "RepeatedGraph", boxed_nop)
    assert numbered(traced(TREE)) == short
