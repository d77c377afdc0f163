"""Predict a config on another machine: `bench.py --config ROW --simulate [--system NAME]`.

fake_world.py traces the step of one rank (in a pipeline, of one rank per stage) on fake tensors in the
config's full world. This gives exact FLOPs, messages and memory. timeline.py turns them into seconds
on a system, and replay.py runs a pipeline's ranks side by side. Only the seconds are modeled.

Only a few micro-batches are traced: the first, a middle one that stands for all others, and the last.
In a pipeline they are twice as many as its ranks, or all if the schedule holds them in memory at once.
If a rank with several stages frees weights after each pass, the gathers between passes are counted
only as often as they were traced.

The fake balanced gate selects experts, so the host knows the counts of tokens. With a real router the
host reads them back in every layer; the latency of that copy is left out, and so is that some experts
get more tokens than others. But a token's rows go to as many ranks as with a real router.
"""

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from math import comb
from statistics import median_high

from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.models.fp8_forms import without_kernel
from minitrain.parallel.expert import balanced_sizes
from minitrain.parallel.pipeline_split import SCHEDULES, local_stages
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.config.ranks import micro_batches, row_ranks, stated_ranks
from minitrain.run.monitor.flops import visible_share
from minitrain.settings import Config
from minitrain.simulator import tracers
from minitrain.simulator.fake_world import trace_step
from minitrain.simulator.replay import Action, Replay, replay, schedule_order
from minitrain.simulator.timeline import AS_TRACED, Rows, System, Timeline, play
from minitrain.simulator.trace import Trace

# settings of `recompute` that repeat all matrix products of a forward pass
TWICE = ("full", "attention", "full-offload")


@dataclass
class Simulation:
    """A simulated step."""

    # place in the pipeline (0 without one) -> trace and timeline of the rank there
    traces: dict[int, Trace]
    lines: dict[int, Timeline]
    # micro-batches in a rank's step, and how many of them were traced
    micro_batches: int
    traced: int
    # seconds of the whole step
    step: float
    # actions of all stages of a pipeline
    pipeline: Replay | None = None
    # seconds that each rank of a pipeline waits for others
    idle: list[float] | None = None
    # seconds in which the device waits for the host, and in which all wait for the slowest rank
    host: float = 0.0
    slowest: float = 0.0

    def times(self, place: int = 0) -> list[int]:
        """Return how often each traced event happens in the whole step."""
        trace = self.traces[place]
        others = self.micro_batches - self.traced
        typical = typical_events(trace) if others else set()
        return [1 + others * (index in typical) for index in range(len(trace.events))]

    def breakdown(self, place: int = 0) -> dict[str, float]:
        """Return the seconds of one rank's step: compute by kind, exposed copies and communication, gaps.

        In a pipeline also its bubble. There, exposed communication is the rest of the step, because
        waits between a rank's actions do not count as in its trace (see `pipelined`).
        """
        times = self.times(place)
        parts = Counter()
        waited = copied = 0.0
        for span in self.lines[place].spans:
            if span.stream == "compute":
                parts[span.kind] += times[span.event] * (span.end - span.begin)
                waited += times[span.event] * (span.waited - span.copied)
                copied += times[span.event] * span.copied
        if copied:
            parts["exposed copies"] = copied
        rest = self.step - self.host - self.slowest - sum(parts.values())
        if self.idle is None:
            others = {"exposed communication": waited, "tail": max(0.0, rest - waited)}
        else:
            bubble = min(self.idle[place], rest)
            others = {"exposed communication": rest - bubble, "bubble": bubble}
        return dict(parts) | others | {"slowest rank": self.slowest, "gaps": self.host}


def record(config: Config) -> dict[int, Trace]:
    """Return the trace of a few micro-batches of one rank for each place in the pipeline."""
    ranks = stated_ranks(config)
    check_layout(config, ranks)
    small = few_micro_batches(with_balanced_experts(config))
    stage_ranks = ranks // config.parallel.pp
    visible = visible_share(open_dataset(small)[0])
    alike = representatives(config)
    jobs = {
        place: partial(trace_step, small, ranks, rank=place * stage_ranks, visible=visible)
        for place in set(alike.values())
    }
    traces = trace_all(jobs)
    return {place: traces[representative] for place, representative in alike.items()}


def time_traces(
    config: Config, traces: dict[int, Trace], system: System, at_once: int = 0
) -> Simulation:
    """Turn traces into seconds. at_once: micro-batches until a pipeline drains; 0: all of the step."""
    check_simulated(config, system)
    fp8 = system.fp8 * system.fp8_shares[config.fp8.form]
    system = replace(system, fp8=fp8, rows=sent_rows(config, system))
    # places with the same layers share a trace, which is played once
    distinct = {id(trace): trace for trace in traces.values()}
    played = {key: play(trace, system, config.compile) for key, trace in distinct.items()}
    lines = {place: played[id(trace)] for place, trace in traces.items()}
    count = micro_batches(config)
    if config.parallel.pp > 1:
        simulation = pipelined(config, traces, lines, system, min(at_once or count, count))
    else:
        step = accumulated(traces[0], lines[0], count) + system.step
        simulation = Simulation(traces, lines, count, few(config), step, host=system.step)
    simulation.slowest = system.slowest(stated_ranks(config)) * (simulation.step - system.step)
    simulation.step = max(simulation.step + simulation.slowest, launch_seconds(config, system))
    return simulation


def sent_rows(config: Config, system: System) -> Rows:
    """Return how many more rows are sent to experts than in a trace, whose gate is a fake one.

    sent_to: see System. If experts are drawn at random, a token has some on n (1 - q) of n parts of
    the ranks, see parallel/expert.py.
    """
    shape = config.model.config
    experts = getattr(shape, "num_experts", 0)
    ranks = config.parallel.ep
    if not experts or ranks == 1:
        return AS_TRACED
    top_k = shape.num_experts_per_tok

    def holding(parts: int) -> float:
        return parts * (1 - comb(experts - experts // parts, top_k) / comb(experts, top_k))

    # rows of a token in the trace: so many tokens select each expert equally often
    traced = sum(balanced_sizes(top_k, experts, ranks, 0, experts).sends) / experts
    copies = top_k / traced
    if system.sent_to == "experts":
        return Rows(copies, copies, copies)
    if system.sent_to == "ranks":
        sent = 1.0 if shape.fake_balanced_gate else holding(ranks) / traced
        return Rows(sent, sent, copies)
    domains = max(1, ranks // system.domain)
    return Rows(holding(ranks) / traced, holding(domains) / traced, copies)


def check_simulated(config: Config, system: System) -> None:
    """Raise InputError for FP8 products that the system dequantizes."""
    form = config.fp8.form
    if config.precision == "fp8" and form != "tensor":
        products = without_kernel(form, config.fp8.experts, system.capability)
        if products:
            raise InputError(
                f"fp8.form={form} is not simulated on {system.name}, which has no units for its {products} (use "
                f"fp8.form=tensor)"
            )


def launch_seconds(config: Config, system: System) -> float:
    """Return a lower bound on a step's seconds: the host's time in layers of experts."""
    p = config.parallel
    shape = config.model.config
    experts = getattr(shape, "num_experts", 0)
    if not experts:
        return 0.0
    layers = sum(shape.parts(layer)[1] == "moe" for layer in shape.all_layers)
    # passes of micro-batches through layers, including the pipeline's filling and draining
    passes = (micro_batches(config) + (p.pp - 1) / p.vp) * layers / p.pp
    if config.recompute in TWICE:
        passes *= 4 / 3
    return passes * (system.expert_layer + system.local_expert * experts / p.ep)


def trace_all(jobs: dict[object, Callable[[], Trace]]) -> dict[object, Trace]:
    """Run each job in a process of its own, because torch keeps process groups of earlier jobs."""
    tracers.start_server()
    workers = min(len(jobs), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, tracers.CONTEXT, max_tasks_per_child=1) as pool:
        traces = pool.map(without_collection, jobs.values())
        return dict(zip(jobs, traces, strict=True))


def without_collection(job: Callable[[], Trace]) -> Trace:
    """Run a job without Python's garbage collection, which would take a tenth of the time."""
    gc.disable()
    trace = job()
    gc.collect()
    return trace


def with_balanced_experts(config: Config) -> Config:
    """Return the config with a balanced gate, since fake tensors have no values to select experts by.

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
    """Return the config with only those micro-batches per step that are traced."""
    rows = few(config) * config.batch.micro * row_ranks(config)
    return replace(config, batch=replace(config.batch, global_=rows))


def few(config: Config) -> int:
    """Return the number of micro-batches of a rank that are traced."""
    count = micro_batches(config)
    p = config.parallel
    if p.pp > 1 and SCHEDULES[p.schedule].all_at_once:
        return count
    return min(count, 3 if p.pp == 1 else 2 * p.pp)


def stages_of(config: Config, place: int) -> dict[int, dict]:
    """Return the stages of a place in the pipeline, see `local_stages`."""
    model = config.model.config
    mtp_layers = model.num_nextn_predict_layers
    return local_stages(config.parallel, model.num_layers, place, mtp_layers)


def representatives(config: Config) -> dict[int, int]:
    """Map each place in the pipeline to the first place that holds the same kinds of layers."""
    if config.parallel.pp == 1:
        return {0: 0}
    model = config.model.config
    first = {}
    alike = {}
    kinds = [model.kind(layer) for layer in range(model.num_layers)]
    for place in range(config.parallel.pp):
        parts = stages_of(config, place).values()
        held = tuple(
            (tuple(kinds[layer] for layer in part["layers"]), part["first"], part["last"])
            for part in parts
        )
        alike[place] = first.setdefault(held, place)
    return alike


# --- from the traced micro-batches to all


def typical_events(trace: Trace) -> set[int]:
    """Return the indices of the second micro-batch's events, including its sends and receives."""
    parts = list(traced_actions(trace))
    if not parts:
        _, second, third = (index for index, label in trace.marks if label == "forward")
        return set(range(second, third))
    batches = sorted({batch for (_, _, batch), _, _ in parts})
    of_second = [range(first, end) for (_, _, batch), first, end in parts if batch == batches[1]]
    return set().union(*of_second, messages_per_micro_batch(trace, len(batches)))


def traced_actions(trace: Trace) -> Iterator[tuple[Action, int, int]]:
    """Yield (action, index of its first event, index after its last) of a traced pipeline rank."""
    begun = None
    for index, label in trace.marks:
        if label is None:
            yield *begun, index
        elif isinstance(label, tuple):
            begun = label, index


def messages_per_micro_batch(trace: Trace, micro_batches: int) -> list[int]:
    """Return the indices of as many sends and receives as a micro-batch has."""
    sent, received = (
        [i for i, event in enumerate(trace.events) if event.name == name]
        for name in ("send", "recv")
    )
    return sent[: len(sent) // micro_batches] + received[: len(received) // micro_batches]


def accumulated(trace: Trace, line: Timeline, micro_batches: int) -> float:
    """Return the seconds of a step; the middle one of three traced micro-batches stands for all."""
    starts = [line.at[index] for index, label in trace.marks if label == "forward"]
    return line.end + ((starts[2] - starts[1]) * (micro_batches - 3) if len(starts) == 3 else 0.0)


# --- pipelines


def pipelined(
    config: Config,
    traces: dict[int, Trace],
    lines: dict[int, Timeline],
    system: System,
    at_once: int,
) -> Simulation:
    """Replay all ranks' actions for `at_once` micro-batches, up to the slowest rank's update."""
    p = config.parallel
    run = few(config)
    # seconds of each action
    measured = {}
    # seconds of each rank after its last action, and before its first
    tails = []
    ready = []
    for place, trace in traces.items():
        spans = action_spans(trace, lines[place])
        ready.append(min(begin for begin, _ in spans.values()))
        # the trace may be shared with another place: give the actions this place's stages
        traced = sorted({stage for stage, _, _ in spans})
        held = sorted(stages_of(config, place))
        number = dict(zip(traced, held, strict=True))
        for (stage, kind, batch), (begin, end) in spans.items():
            measured[number[stage], kind, batch] = end - begin
        tails.append(lines[place].end - max(end for _, end in spans.values()))
    order = schedule_order(p.schedule, p.pp, at_once, p.vp)
    seconds = action_seconds(measured, at_once, run)
    # any message between neighboring stages; all have the same size
    passed = next(event for event in traces[0].events if event.name in ("send", "recv"))
    message = system.collective_seconds(passed, traces[0].groups[passed.group][1])
    replayed = replay(order, seconds, message, ready)
    # how often the pipeline fills and drains: a fraction if the last time has fewer micro-batches
    times = micro_batches(config) / at_once
    last = max(end + tail for end, tail in zip(replayed.finished, tails, strict=True))
    # gathered weights stay, so only the first filling has to wait for `ready`
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

    Time between two actions, in which weights are gathered, belongs to the second one. The first
    action gets the duration of the next one of its kind. The rest of its time is gathering, which
    needs no input and so happens before it.
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
    """Return a function from an action to its seconds.

    The first micro-batches and the last take the traced times, those in between the median.
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
