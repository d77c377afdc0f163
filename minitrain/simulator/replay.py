"""Replay a whole pipeline from the seconds of each stage's passes: who waits for whom, how long.

A trace shows one rank, for which every message is there at once. Here all ranks run torch's own
order of actions, each as soon as its rank is free and its input has come: a forward pass from the
stage before, a backward pass from the stage behind. Results travel beside compute, between two
ranks and in one direction one after the other. What remains between the actions is the bubble.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from minitrain.parallel.pipeline_stage import get_schedule_ops, schedule_class

# torch's names and letters; the zero-bubble papers write B for I
KIND_LETTERS = {
    "FORWARD": "F",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
}
# stage, kind, micro-batch: F forward, B backward pass, or its parts, I for inputs and W for weights
Action = tuple[int, str, int]


@dataclass
class Replay:
    """What every rank of a pipeline does when.

    spans: begin and end of every action, in seconds.
    finished: when each rank was done with its actions.
    ranks: which rank each stage is on.
    """

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
    # torch has it, but lists a batch too many for its last rank
    if schedule == "1F1B":
        return [one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks)]
    per_rank = get_schedule_ops(schedule_class(schedule), ranks, micro_batches, stages_per_rank)
    return [
        [action for entry in entries for action in schedule_actions(entry)]
        for entries in per_rank
    ]


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Return a rank's actions under 1F1B.

    It runs as many forward passes as there are stages from it on. Then backward and forward passes
    alternate.
    """
    ahead = min(ranks - rank, micro_batches)
    actions = [(rank, "F", batch) for batch in range(ahead)]
    for batch in range(micro_batches):
        actions.append((rank, "B", batch))
        if batch + ahead < micro_batches:
            actions.append((rank, "F", batch + ahead))
    return actions


def schedule_actions(entry) -> list[Action]:
    """Return an entry of torch's schedule as actions.

    Overlapped actions come one after the other. Idle time and reductions are no actions.
    """
    if entry is None:
        return []
    if entry.sub_actions:
        return [action for part in entry.sub_actions for action in schedule_actions(part)]
    kind = KIND_LETTERS.get(entry.computation_type.name)
    return [(entry.stage_index, kind, entry.microbatch_index)] if kind else []


def replay(
    order: list[list[Action]],
    seconds: Callable[[Action], float],
    message: float,
    ready: list[float] | None = None,
) -> Replay:
    """Run each rank's actions in order, each as soon as its input is there.

    seconds(action): returns its duration.
    message: seconds that a stage's result travels to another rank.
    ready: when each rank can begin; by default, at once.
    """
    ranks = {stage: rank for rank, actions in enumerate(order) for stage, _, _ in actions}
    spans: dict[Action, tuple[float, float]] = {}
    # when an action's result is where it is needed
    arrived: dict[Action, float] = {}
    # (source, target) -> until when messages occupy the link
    links: defaultdict[tuple[int, int], float] = defaultdict(float)
    clocks = list(ready or [0.0] * len(order))
    # the next action of each rank
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
                # outputs go to the next stage, input gradients to the one before
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

    ranks: of the stages. Inputs from its own stage are there: the same rank made them before.
    """
    stage, kind, batch = action
    source, kinds = (stage - 1, "F") if kind == "F" else (stage + 1, "BI")
    if kind == "W" or source not in ranks:
        return 0.0
    return next((arrived[source, k, batch] for k in kinds if (source, k, batch) in arrived), None)
