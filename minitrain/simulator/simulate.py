"""Predict a config on another machine: `bench.py --config ROW --simulate [--system NAME]`.

One rank's step (in a pipeline, that of one rank of every stage) runs on fake tensors in the
config's full world (fake_world.py). This gives its FLOPs, messages and memory exactly. timeline.py
turns them into seconds on a system, and replay.py puts a pipeline's ranks side by side. The seconds
are a model, the rest is counted.

Of many micro-batches a few are run: the first, one in the middle that stands for all others, and
the last. In a pipeline they are twice as many as ranks, or all if it has them in memory at once.
Where a rank with several stages frees weights after each pass, gathers between passes are counted
as often as they were run.

Experts are selected by the fake balanced gate, whose splits the host knows. With a real router our
host reads counts back in every layer; that wait, a copy's latency, is left out.
"""

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import median_high

from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.parallel.pipeline_split import SCHEDULES, local_stages
from minitrain.run.config.layout_checks import (
    check_layout,
    micro_batches,
    row_ranks,
    stated_ranks,
)
from minitrain.run.monitor.flops import visible_share
from minitrain.settings import Config
from minitrain.simulator import tracers
from minitrain.simulator.fake_world import trace_step
from minitrain.simulator.replay import Action, Replay, replay, schedule_order
from minitrain.simulator.timeline import System, Timeline, play
from minitrain.simulator.trace import Trace

# settings of `recompute` with which all matrix products of a forward pass run again
TWICE = ("full", "attention")


@dataclass
class Simulation:
    """A simulated step.

    traces, lines: of each rank in turn that shares a pipeline, by its place in it; else at 0.
    micro_batches, traced: how many a rank's step has, and how many of them were run.
    step: seconds of the step. host: those in which the device waits for the host.
    pipeline: all stages' actions, or None. idle: seconds that each of its ranks waits for others.
    """

    traces: dict[int, Trace]
    lines: dict[int, Timeline]
    micro_batches: int
    traced: int
    step: float
    pipeline: Replay | None = None
    idle: list[float] | None = None
    host: float = 0.0

    def times(self, place: int = 0) -> list[int]:
        """Count how often each traced event happens; a typical micro-batch stands for others."""
        trace = self.traces[place]
        others = self.micro_batches - self.traced
        typical = typical_events(trace) if others else set()
        return [1 + others * (index in typical) for index in range(len(trace.events))]

    def breakdown(self, place: int = 0) -> dict[str, float]:
        """Return the seconds of one rank's step: compute by kind, exposed communication, gaps.

        A pipeline also has a bubble. There communication is what is left: only a rank's actions
        take time (see `pipelined`), not what its trace waits for between them.
        """
        times = self.times(place)
        parts = Counter()
        waited = 0.0
        for span in self.lines[place].spans:
            if span.stream == "compute":
                parts[span.kind] += times[span.event] * (span.end - span.begin)
                waited += times[span.event] * span.waited
        rest = self.step - self.host - sum(parts.values())
        if self.idle is None:
            others = {"exposed communication": waited, "tail": max(0.0, rest - waited)}
        else:
            bubble = min(self.idle[place], rest)
            others = {"exposed communication": rest - bubble, "bubble": bubble}
        return dict(parts) | others | {"gaps": self.host}


def record(config: Config) -> dict[int, Trace]:
    """Trace a few micro-batches of one rank for each place in the pipeline."""
    ranks = stated_ranks(config)
    check_layout(config, ranks)
    small = few_micro_batches(with_balanced_experts(config))
    stage_ranks = ranks // config.parallel.pp
    visible = visible_share(open_dataset(small)[0])
    alike = representatives(config)
    by_place = trace_all(
        {place: (small, ranks, place * stage_ranks, visible) for place in set(alike.values())}
    )
    return {place: by_place[representative] for place, representative in alike.items()}


def time_traces(
    config: Config, traces: dict[int, Trace], system: System, at_once: int = 0
) -> Simulation:
    """Turn traces into seconds. at_once: micro-batches until a pipeline drains; 0: all."""
    # one trace may stand for several places
    distinct = {id(trace): trace for trace in traces.values()}
    played = {key: play(trace, system, config.compile) for key, trace in distinct.items()}
    lines = {place: played[id(trace)] for place, trace in traces.items()}
    count = micro_batches(config)
    if config.parallel.pp > 1:
        simulation = pipelined(config, traces, lines, system, min(at_once or count, count))
    else:
        step = accumulated(traces[0], lines[0], count) + system.step
        simulation = Simulation(traces, lines, count, few(config), step, host=system.step)
    simulation.step = max(simulation.step, launch_seconds(config, system))
    return simulation


def launch_seconds(config: Config, system: System) -> float:
    """Return the least seconds of a step in which the host waits for counts of tokens."""
    p = config.parallel
    shape = config.model.config
    experts = getattr(shape, "num_experts", 0)
    if not experts:
        return 0.0
    # of a layer, with those in which a pipeline fills and drains
    passes = (micro_batches(config) + (p.pp - 1) / p.vp) * len(shape.all_layers) / p.pp
    if config.recompute in TWICE:
        passes *= 4 / 3
    return passes * (system.expert_layer + system.local_expert * experts / p.ep)


def trace_all(jobs: dict[int, tuple]) -> dict[int, Trace]:
    """Run `trace_step` for each job in a process of its own: torch remembers process groups."""
    tracers.start_server()
    workers = min(len(jobs), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, tracers.CONTEXT, max_tasks_per_child=1) as pool:
        traces = pool.map(trace_once, jobs.values())
        return dict(zip(jobs, traces, strict=True))


def trace_once(job: tuple) -> Trace:
    """Run `trace_step` without garbage collection, which would take a tenth of the time."""
    gc.disable()
    trace = trace_step(*job)
    gc.collect()
    return trace


def with_balanced_experts(config: Config) -> Config:
    """Return the config with a balanced gate: fake tensors cannot tell which experts are selected.

    Raises InputError for fp32.
    """
    if not getattr(config.model.config, "num_experts", 0):
        return config
    if config.precision == "fp32":
        raise InputError(
            "precision=fp32 is not simulated for experts: fake grouped products take bf16 (use bf16)"
        )
    shape = replace(config.model.config, fake_balanced_gate=True)
    return replace(config, model=replace(config.model, config=shape))


def few_micro_batches(config: Config) -> Config:
    """Return the config with fewer micro-batches per step."""
    rows = few(config) * config.batch.micro * row_ranks(config)
    return replace(config, batch=replace(config.batch, global_=rows))


def few(config: Config) -> int:
    """Count the micro-batches of a rank that are run."""
    count = micro_batches(config)
    p = config.parallel
    if p.pp > 1 and SCHEDULES[p.schedule].all_at_once:
        return count
    return min(count, 3 if p.pp == 1 else 2 * p.pp)


def stages_of(config: Config, place: int) -> dict[int, dict]:
    """Return the stages of a place in the pipeline, see `local_stages`."""
    model = config.model.config
    further = model.num_nextn_predict_layers
    return local_stages(config.parallel, model.num_layers, place, further)


def representatives(config: Config) -> dict[int, int]:
    """Map each place in the pipeline to the first one that holds the same kinds of layers."""
    if config.parallel.pp == 1:
        return {0: 0}
    model = config.model.config
    first = {}
    alike = {}
    kinds = [(*model.parts(layer), model.windowed(layer)) for layer in range(model.num_layers)]
    for place in range(config.parallel.pp):
        parts = stages_of(config, place).values()
        held = tuple(
            (tuple(kinds[layer] for layer in part["layers"]), part["first"], part["last"])
            for part in parts
        )
        alike[place] = first.setdefault(held, place)
    return alike


# --- from few micro-batches


def typical_events(trace: Trace) -> set[int]:
    """Return the indices of the second micro-batch's events, with its messages in a pipeline."""
    parts = list(traced_actions(trace))
    if not parts:
        _, second, third = (index for index, label in trace.marks if label == "forward")
        return set(range(second, third))
    batches = sorted({batch for (_, _, batch), _, _ in parts})
    of_second = [range(first, end) for (_, _, batch), first, end in parts if batch == batches[1]]
    return set().union(*of_second, messages_per_micro_batch(trace, len(batches)))


def traced_actions(trace: Trace) -> Iterator[tuple[Action, int, int]]:
    """Yield the actions of a traced rank of a pipeline, as (action, first event, end)."""
    begun = None
    for index, label in trace.marks:
        if label is None:
            yield *begun, index
        elif isinstance(label, tuple):
            begun = label, index


def messages_per_micro_batch(trace: Trace, micro_batches: int) -> list[int]:
    """Return the first of a pipeline's sends and receives, as many as a micro-batch has."""
    sent, received = (
        [i for i, event in enumerate(trace.events) if event.name == name]
        for name in ("send", "recv")
    )
    return sent[: len(sent) // micro_batches] + received[: len(received) // micro_batches]


def accumulated(trace: Trace, line: Timeline, micro_batches: int) -> float:
    """Return the seconds of a step, with the middle micro-batch as often as it stands for others."""
    starts = [line.at[index] for index, label in trace.marks if label == "forward"]
    return line.end + ((starts[2] - starts[1]) * (micro_batches - 3) if len(starts) == 3 else 0.0)


# --- a pipeline's ranks together


def pipelined(
    config: Config,
    traces: dict[int, Trace],
    lines: dict[int, Timeline],
    system: System,
    at_once: int,
) -> Simulation:
    """Run all ranks' actions for `at_once` micro-batches, up to the slowest rank's update."""
    p = config.parallel
    run = few(config)
    # seconds of each action; of each rank, those after its last action and before its first
    measured = {}
    tails = []
    ready = []
    for place, trace in traces.items():
        spans = action_spans(trace, lines[place])
        ready.append(min(begin for begin, _ in spans.values()))
        # the trace may be that of another place
        traced = sorted({stage for stage, _, _ in spans})
        held = sorted(stages_of(config, place))
        number = dict(zip(traced, held, strict=True))
        for (stage, kind, batch), (begin, end) in spans.items():
            measured[number[stage], kind, batch] = end - begin
        tails.append(lines[place].end - max(end for _, end in spans.values()))
    order = schedule_order(p.schedule, p.pp, at_once, p.vp)
    seconds = action_seconds(measured, at_once, run)
    # a message between neighboring stages
    passed = next(event for event in traces[0].events if event.name in ("send", "recv"))
    message = system.collective_seconds(passed, traces[0].groups[passed.group][1])
    replayed = replay(order, seconds, message, ready)
    # how often the pipeline fills and drains; the last time there may be fewer micro-batches
    times = micro_batches(config) / at_once
    last = max(end + tail for end, tail in zip(replayed.finished, tails, strict=True))
    # weights that are gathered once stay: only the first time begins with `ready`
    step = (times - 1) * max(replay(order, seconds, message).finished) + last
    idle = [
        step - times * b - tail - r
        for b, tail, r in zip(replayed.busy(), tails, ready, strict=True)
    ]
    return Simulation(
        traces, lines, micro_batches(config), run, step + system.step, replayed, idle, system.step
    )


def action_spans(trace: Trace, line: Timeline) -> dict[Action, tuple[float, float]]:
    """Return when each action of a traced rank began and ended.

    The time between two actions, in which weights are gathered, is counted to the second one. Of
    the first action only the time of the next one of its kind is counted: what it takes longer is
    gathering, which needs no input and can be done before.
    """
    parts = list(traced_actions(trace))
    ends = [line.at[end - 1] for _, _, end in parts]
    spans = {
        action: span for (action, _, _), span in zip(parts, pairwise([0.0, *ends]), strict=True)
    }
    first = parts[0][0]
    alike = [
        end - begin
        for (stage, kind, _), (begin, end) in spans.items()
        if (stage, kind) == first[:2]
    ]
    gathering = alike[0] - alike[min(1, len(alike) - 1)]
    spans[first] = max(0.0, gathering), ends[0]
    return spans


def action_seconds(
    measured: dict[Action, float], micro_batches: int, traced: int
) -> Callable[[Action], float]:
    """Return a function that returns the seconds of any action.

    The first micro-batches and the last have theirs as traced, those in between the median.
    """
    every = defaultdict(list)
    for (stage, kind, _), seconds in measured.items():
        every[stage, kind].append(seconds)

    def seconds(action: Action) -> float:
        stage, kind, batch = action
        if batch == micro_batches - 1:
            action = stage, kind, traced - 1
        elif batch >= traced - 1:
            action = None
        typical = median_high(every.get((stage, kind), [0.0]))
        return measured.get(action, typical)

    return cache(seconds)
