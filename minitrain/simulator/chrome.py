"""Write a simulation as a trace that chrome://tracing and ui.perfetto.dev open.

A process for each rank of a pipeline, and one for all its stages. In a rank, a lane for each stream
and a track of the memory that it holds. On the compute stream slices are nested: the step, a
micro-batch, its forward or backward pass, a block, a kernel with its shape.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from minitrain.errors import refused
from minitrain.simulator.simulate import Simulation
from minitrain.simulator.timeline import Span, Timeline
from minitrain.simulator.trace import MEMORY_KINDS, Event, Trace

MICROSECONDS = 1e6
PASSES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
# micro-batch, pass, block; as many of them as an event is part of
Place = tuple[str, ...]


def write_trace(simulation: Simulation, path: str) -> None:
    """Write every rank that was run, with its streams, and the pipeline's actions by stage.

    A rank shows the micro-batches that were run, which stand for all (see simulate.py); the stages
    show all of them. Raises InputError if `path` cannot be written.
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
            told = {"kind": span.kind, "FLOPs": event.flops}
            events.append(box(rank, lanes[span.stream], name, span.begin, span.end, **told))
        for held, at in zip(trace.held, line.at, strict=True):
            kinds = dict(zip(MEMORY_KINDS, held, strict=True))
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
    with refused(f"--trace={path} cannot be written"):
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def enclosing(rank: int, lane: int, trace: Trace, line: Timeline) -> Iterator[dict]:
    """Yield the slices around the compute stream's kernels, the outer ones first.

    A kernel that the compiler fuses from two blocks counts as the second's.
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
    """Return where in the step each event is."""
    marks = dict(trace.marks)
    if any(isinstance(label, tuple) for label in marks.values()):
        # inside a pipeline's actions a stage marks its passes, too
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
            # a block's backward pass has no mark where it ends
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
    """Return the sizes of a product or attention, as in Event, or else the bytes that move."""
    if event.sizes:
        return " x ".join(str(round(size)) for size in event.sizes)
    moved = event.payload or sum(size for _, size in event.reads + event.writes)
    return f"{moved / 2**20:.3g} MiB"


def box(process: int, lane: int, name: str, begin: float, end: float, **arguments) -> dict:
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
    """Name a process or, with kind="thread", a lane of it."""
    told = {"name": name}
    return {"ph": "M", "name": f"{kind}_name", "pid": process, "tid": lane, "args": told}
