"""Write a simulation as a trace that chrome://tracing and ui.perfetto.dev can open.

Each traced rank is a process with a lane per stream and a track of its memory. On the compute stream
slices are nested: step, micro-batch, forward or backward pass, block, kernel with its shape. For a
pipeline, one more process shows all stages.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from minitrain.errors import as_input_error
from minitrain.simulator.simulate import Simulation
from minitrain.simulator.timeline import Span, Timeline
from minitrain.simulator.trace import MEMORY_KINDS, Event, Trace

MICROSECONDS = 1e6
PASSES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
# names of the enclosing slices, the outer ones first: micro-batch, pass, block
Place = tuple[str, ...]


def write_trace(simulation: Simulation, path: str) -> None:
    """Write the traced ranks with their streams, and the pipeline's actions by stage.

    Ranks show only the micro-batches that were traced (see simulate.py); stages show all of them.
    Raises InputError if `path` cannot be written.
    """
    events = []
    for rank, line in simulation.lines.items():
        trace = simulation.traces[rank]
        lanes = {
            name: number
            for number, name in enumerate(dict.fromkeys(span.stream for span in line.spans))
        }
        events += [named("thread", name, rank, number) for name, number in lanes.items()]
        events += enclosing(rank, lanes["compute"], trace, line)
        for span in line.spans:
            event = trace.events[span.event]
            name = f"{span.name} {shape_of(event)}"
            arguments = {"kind": span.kind, "FLOPs": event.flops}
            events.append(box(rank, lanes[span.stream], name, span.begin, span.end, **arguments))
        for used, at in zip(trace.memory, line.at, strict=True):
            kinds = dict(zip(MEMORY_KINDS, used, strict=True))
            counter = {"ph": "C", "pid": rank, "name": "bytes", "ts": at * MICROSECONDS}
            events.append(counter | {"args": kinds})
        name = f"rank at place {rank} of the pipeline" if simulation.pipeline else "rank 0"
        shown = f"{simulation.traced} of its {simulation.micro_batches} micro-batches"
        events.append(named("process", f"{name}: {shown}, and the optimizer", rank))
    if simulation.pipeline:
        number = len(simulation.lines)
        events.append(named("process", "all stages", number))
        stages = sorted({stage for stage, _, _ in simulation.pipeline.spans})
        events += [named("thread", f"stage {stage}", number, stage) for stage in stages]
        for (stage, kind, batch), (begin, end) in simulation.pipeline.spans.items():
            events.append(box(number, stage, f"{kind}{batch}", begin, end))
    with as_input_error(f"--trace={path} cannot be written"):
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def enclosing(rank: int, lane: int, trace: Trace, line: Timeline) -> Iterator[dict]:
    """Yield the slices that enclose the compute stream's kernels, the outer ones first.

    A kernel that is fused from operators of two blocks is shown in the second block.
    """
    spans = [span for span in line.spans if span.stream == "compute"]
    places = places_of(trace)
    yield box(rank, lane, "step", 0.0, line.end)
    for depth in range(1, 4):

        def place(span: Span, depth: int = depth) -> Place:
            return places[span.event][:depth]

        for key, group in groupby(spans, place):
            inside = list(group)
            begin = inside[0].begin
            if len(key) == depth:
                yield box(rank, lane, key[-1], begin, inside[-1].end)


def places_of(trace: Trace) -> list[Place]:
    """Return the place of each event in the step."""
    marks = dict(trace.marks)
    if any(isinstance(label, tuple) for label in marks.values()):
        # in a pipeline the schedule's actions are marked, so marks of passes within them are redundant
        marks = {i: label for i, label in trace.marks if label not in ("forward", "backward")}
    blocks = dict(trace.blocks)
    batch = -1
    outer = ()
    block = None
    places = []
    for index in range(len(trace.events)):
        if index in marks:
            label = marks[index]
            batch += label == "forward"
            # no mark shows where a block's backward pass ends
            block = None
            if isinstance(label, tuple):
                stage, kind, number = label
                outer = f"micro-batch {number}", f"{PASSES[kind]} of stage {stage}"
            elif label == "optimizer":
                outer = (label,)
            else:
                outer = (f"micro-batch {batch}", label) if label else ()
        block = blocks.get(index, block)
        places.append((*outer, block) if block and len(outer) == 2 else outer)
    return places


def shape_of(event: Event) -> str:
    """Return the sizes of a matrix product or of attention (see Event); otherwise the bytes moved."""
    if event.sizes:
        return " x ".join(str(round(size)) for size in event.sizes)
    moved = event.payload or sum(size for _, size in event.reads + event.writes)
    return f"{moved / 2**20:.3g} MiB"


def box(process: int, lane: int, name: str, begin: float, end: float, **arguments) -> dict:
    """Return a slice of a lane, from second `begin` to `end`."""
    return {
        "ph": "X",
        "pid": process,
        "tid": lane,
        "name": name,
        "ts": begin * MICROSECONDS,
        "dur": (end - begin) * MICROSECONDS,
        "args": arguments,
    }


def named(kind: str, name: str, process: int, lane: int = 0) -> dict:
    """Return the event that names a process or, with kind="thread", one of its lanes."""
    args = {"name": name}
    return {"ph": "M", "name": f"{kind}_name", "pid": process, "tid": lane, "args": args}
