"""Copies to the host and updates there: what a trace counts, and when they happen."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from minitrain.parallel import activation_offload
from minitrain.run.config.load import from_dict
from minitrain.simulator.fake_world import trace_step
from minitrain.simulator.simulate import Simulation
from minitrain.simulator.timeline import load_system, play
from minitrain.simulator.trace import Event, Trace
from tests.helpers.oracle import plain_model
from tests.helpers.simulator import SECOND

TREE = {
    "model": {"name": "llama3-8b-tiny", "num_layers": 3},
    "batch": {"global": 1, "micro": 1, "seq_len": 64},
    "device": "cpu",
}
# hidden states of a row in fp32
HIDDEN = 64 * 64 * 4


def copies(trace: Trace) -> dict[str, int]:
    """The bytes that go out and come back."""
    events = [event for event in trace.events if event.kind == "copy"]
    out = sum(size for event in events for _, size in event.reads)
    return {"out": out, "back": sum(size for event in events for _, size in event.writes)}


def saved_by_blocks(config) -> list[int]:
    """What each block of a plain model saves, in bytes: storages that are not its weights or of indices."""
    model = plain_model(config)
    sizes = []

    def watched(block, call):
        def run(hidden, *others, **more):
            kept = [*block.parameters(), *(x for x in others if isinstance(x, torch.Tensor))]
            kept += [x for pair in others if isinstance(pair, tuple) for x in pair]
            kept = {x.untyped_storage().data_ptr() for x in kept if isinstance(x, torch.Tensor)}
            found = {}

            def pack(x):
                if x.is_floating_point() and x.untyped_storage().data_ptr() not in kept:
                    found[x.untyped_storage().data_ptr()] = x.untyped_storage()
                return x

            with saved_tensors_hooks(pack, lambda x: x):
                out = call(hidden, *others, **more)
            sizes.append(sum(storage.nbytes() for storage in found.values()))
            return out

        return run

    for block in model.blocks:
        block.forward = watched(block, block.forward)
    model(torch.arange(64)[None])
    return sizes


def test_a_trace_has_the_bytes_that_blocks_save(monkeypatch):
    """But for the last block's, which its backward pass finds on the device, all return."""
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 0)
    config = from_dict(TREE | {"recompute": "offload"})
    trace = trace_step(config, 1, visible=None)
    sizes = saved_by_blocks(config)
    assert len(sizes) == 3 and trace.host_peak == sum(sizes)
    assert copies(trace) == {"out": sum(sizes), "back": sum(sizes[:2])}
    plain = trace_step(from_dict(TREE), 1, visible=None)
    assert trace.peak["activations"] < plain.peak["activations"] - 0.9 * sizes[0]
    assert trace.flops() == plain.flops()


@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_that_recompute_send_their_inputs(monkeypatch, compiled):
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 0)
    alike = TREE | {"compile": compiled}
    trace = trace_step(from_dict(alike | {"recompute": "full-offload"}), 1)
    assert trace.host_peak == 3 * HIDDEN
    assert copies(trace) == {"out": 3 * HIDDEN, "back": 2 * HIDDEN}
    assert trace.flops() == trace_step(from_dict(alike | {"recompute": "full"}), 1).flops()


def test_states_on_the_host_are_updated_there():
    """8 bytes a number go out, 4 return, and 28 move in the host's memory: gradients are only read."""
    trace = trace_step(from_dict(TREE | {"optim": {"offload": True}}), 1)
    updates = [event for event in trace.events if event.kind == "host update"]
    count = trace.peak["parameters"] / 4
    out, back = (
        sum(size for event in updates for _, size in getattr(event, kind))
        for kind in ("reads", "writes")
    )
    moved = sum(event.payload for event in updates)
    assert (out, back, trace.peak["optimizer"]) == (8 * count, 4 * count, 0)
    assert 28 * count <= moved < 34 * count
    for system, seconds in (
        (SECOND, moved),
        (replace(SECOND, host_memory=100, host_link=1), out),
    ):
        line = play(trace, system, False)
        spent = sum(span.end - span.begin for span in line.spans if span.kind == "host update")
        assert spent == pytest.approx(seconds)


def test_copies_run_beside_kernels_and_hold_up_what_needs_them():
    """A byte over the bus takes 2 seconds; one of memory, 1."""
    made, other, last, back, result = range(1, 6)

    def kernel(reads, writes):
        return Event("mul", "memory", 0, reads, writes)

    def host(name, kind, reads=(), writes=()):
        return Event(name, kind, 0, list(reads), list(writes), dimension="host")

    trace = Trace(
        [
            kernel([], [(made, 3)]),
            host("to_host", "copy", [(made, 3)]),
            kernel([(made, 3)], [(other, 1)]),
            # the memory is free only at 9
            host("released", "copied", [(made, 0)]),
            kernel([(other, 1)], [(last, 1)]),
            host("to_device", "copy", writes=[(back, 4)]),
            kernel([(last, 1)], [(other, 1)]),
            kernel([(back, 4)], [(result, 1)]),
        ]
    )
    line = play(trace, replace(SECOND, host_link=0.5), False)
    spans = [(span.stream, span.begin, span.end) for span in line.spans]
    assert spans == [
        ("compute", 0, 3),
        ("host", 3, 9),
        ("compute", 3, 7),
        ("compute", 9, 11),
        # after what the compute stream was given, beside what comes next
        ("host", 11, 19),
        ("compute", 11, 13),
        ("compute", 19, 24),
    ]
    found = Simulation({0: trace}, {0: line}, 1, 1, line.end).breakdown()
    assert found["exposed copies"] == 2 + 6 and found["memory"] == 3 + 4 + 2 + 2 + 5
    assert found["exposed communication"] == found["tail"] == 0


@pytest.mark.parametrize(
    "name, link", [("dgx-h100", 50e9), ("h200", 50e9), ("dgx-gb200", 173e9), ("dgx-gb300", 173e9)]
)
def test_links_to_the_host(name, link):
    """PCIe 5, and NVLink-C2C of Grace, whose memory is faster too."""
    system = load_system(name)
    assert system.host_link == link
    assert system.host_memory == (128e9 if link > 1e11 else 38e9)
