"""Replay a whole pipeline from what each stage's passes take: who waits for whom, and how
long.

A trace shows one rank, for which every message is there at once. Here all ranks run torch's own
order of actions, each as soon as its rank is free and its input has come: a forward pass from the
stage before, a backward pass from the stage behind. Results travel beside compute, between two
ranks and in one direction one after the other. What remains between the actions is the bubble.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops  # no public name

KINDS = {
    "FORWARD": "F",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
}  # torch's names
Action = tuple[
    int, str, int
]  # stage, F | B | I | W (whole backward pass, or for the input, or for the weights), batch


@dataclass
class Replay:
    """spans: begin and end of every action, in seconds. finished: when each rank was done with its
    actions. ranks: which rank each stage is on."""

    spans: dict[Action, tuple[float, float]]
    finished: list[float]
    ranks: dict[int, int]

    def busy(self) -> list[float]:
        """Return the seconds that each rank worked."""
        totals = [0.0] * len(self.finished)
        for (stage, _, _), (begin, end) in self.spans.items():
            totals[self.ranks[stage]] += end - begin
        return totals

    def lanes(self, step: float, columns: int = 600) -> list[str]:
        """Return a letter for each of `columns` equal parts of a step of `step` seconds, by rank.

        F, B, I, W as in Action; U: it reduces gradients, waits for others to do so, or updates; a
        dot: it is idle.
        """
        lanes = [["."] * columns for _ in self.finished]
        for (stage, kind, _), (begin, end) in self.spans.items():
            first = round(begin / step * columns)
            last = round(end / step * columns)
            lanes[self.ranks[stage]][first:last] = kind * (last - first)
        for lane, end in zip(lanes, self.finished, strict=True):
            first = round(end / step * columns)
            lane[first:] = "U" * (columns - first)
        return ["".join(lane) for lane in lanes]


def schedule_order(
    schedule: str, ranks: int, micro_batches: int, stages_per_rank: int
) -> list[list[Action]]:
    """Return each rank's actions, in order."""
    if schedule == "1F1B":  # torch has it, but lists a batch too many for its last rank
        return [one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks)]
    per_rank = get_schedule_ops(schedule, ranks, micro_batches, stages_per_rank)
    return [[action for entry in entries for action in flatten(entry)] for entries in per_rank]


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Run as many forward passes as there are stages from here on, then a backward pass after
    each.
    """
    ahead = min(ranks - rank, micro_batches)
    actions = [(rank, "F", batch) for batch in range(ahead)]
    for batch in range(micro_batches):
        actions.append((rank, "B", batch))
        if batch + ahead < micro_batches:
            actions.append((rank, "F", batch + ahead))
    return actions


def flatten(entry) -> list[Action]:
    """Return an entry of torch's schedule as actions: overlapped ones in turn; idle time and
    reductions are none.
    """
    if entry is None:
        return []
    if entry.sub_actions:
        return [action for part in entry.sub_actions for action in flatten(part)]
    kind = KINDS.get(entry.computation_type.name)
    return [(entry.stage_index, kind, entry.microbatch_index)] if kind else []


def replay(
    order: list[list[Action]],
    seconds: Callable[[Action], float],
    message: float,
    ready: list[float] | None = None,
) -> Replay:
    """Run each rank's actions in order, each as soon as its input is there.

    seconds: of an action. message: seconds that a stage's result travels to another rank. ready:
    when each rank can begin (by default, at once).
    """
    ranks = {stage: rank for rank, actions in enumerate(order) for stage, _, _ in actions}
    spans: dict[Action, tuple[float, float]] = {}
    arrived: dict[Action, float] = {}  # when an action's result is where it is needed
    links: defaultdict[tuple[int, int], float] = defaultdict(
        float
    )  # until when messages occupy them
    clocks = list(ready or [0.0] * len(order))
    places = [0] * len(order)
    waiting = set(range(len(order)))
    while waiting:
        before = len(spans)
        for rank in list(waiting):
            while places[rank] < len(order[rank]):
                action = order[rank][places[rank]]
                came = arrival(action, arrived, ranks)
                if came is None:
                    break
                begin = max(clocks[rank], came)
                clocks[rank] = arrived[action] = begin + seconds(action)
                spans[action] = begin, clocks[rank]
                target = ranks.get(action[0] + (1 if action[1] == "F" else -1), rank)
                if target != rank and action[1] != "W":
                    links[rank, target] = arrived[action] = (
                        max(clocks[rank], links[rank, target]) + message
                    )
                places[rank] += 1
            if places[rank] == len(order[rank]):
                waiting.discard(rank)
        if len(spans) == before:
            raise RuntimeError("the schedule waits for itself")
    return Replay(spans, clocks, ranks)


def arrival(action: Action, arrived: dict[Action, float], ranks: dict[int, int]) -> float | None:
    """Return when an action's input from another stage is there; None if that is not known yet.
    ranks: of the stages.

    What its own stage has done is there: the same rank did it before.
    """
    stage, kind, batch = action
    source, kinds = (stage - 1, "F") if kind == "F" else (stage + 1, "BI")
    if kind == "W" or source not in ranks:
        return 0.0
    return next((arrived[source, k, batch] for k in kinds if (source, k, batch) in arrived), None)
