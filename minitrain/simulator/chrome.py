"""Write a simulation as a trace that chrome://tracing and ui.perfetto.dev open.

Each stream of a rank has a lane, and so has each stage of a pipeline.
"""

import json
from pathlib import Path

from minitrain.errors import refused
from minitrain.simulator.simulate import Simulation

MICROSECONDS = 1e6


def write_trace(simulation: Simulation, path: str) -> None:
    """Write every rank that was run, with its streams, and the pipeline's actions by stage.

    A rank shows the micro-batches that were run, which stand for all (see simulate.py); the stages
    show all of them. Raises InputError if `path` cannot be written.
    """
    events = []
    for place, line in simulation.lines.items():
        lanes = {
            name: number
            for number, name in enumerate(dict.fromkeys(span.stream for span in line.spans))
        }
        events += [named("thread", name, place, number) for name, number in lanes.items()]
        events += [
            box(place, lanes[s.stream], s.name, s.begin, s.end, kind=s.kind) for s in line.spans
        ]
        name = f"rank at place {place} of the pipeline" if simulation.pipeline else "rank 0"
        shown = f"{simulation.traced} of its {simulation.micro_batches} micro-batches"
        events.append(named("process", f"{name}: {shown}, and the optimizer", place))
    if simulation.pipeline:
        number = len(simulation.lines)
        events.append(named("process", "all stages", number))
        stages = sorted({stage for stage, _, _ in simulation.pipeline.spans})
        events += [named("thread", f"stage {stage}", number, stage) for stage in stages]
        for (stage, kind, batch), (begin, end) in simulation.pipeline.spans.items():
            events.append(box(number, stage, f"{kind}{batch}", begin, end, stage=stage))
    with refused(f"--trace={path} cannot be written"):
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


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
