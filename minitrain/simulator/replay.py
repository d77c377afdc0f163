"""Replay a whole pipeline from the seconds of each stage's passes, to find its bubble.

A trace shows one rank, which never waits for messages. Here all ranks run the actions in the order of
torch's schedule. An action begins as soon as its rank is free and its input has arrived: a forward
pass's from the previous stage, a backward pass's from the next stage. Messages overlap with compute;
those from one rank to another are sent one after the other. The bubble is the time between actions.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from minitrain.parallel.pipeline_stage import get_schedule_ops, schedule_class

# torch's names of actions and its letters for them; the zero-bubble papers write B for I
KIND_LETTERS = {
    "FORWARD": "F",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
}
# (stage, kind, micro-batch). Kinds: F forward, B backward; or, as two parts of a backward pass, I for
# gradients of inputs and W for gradients of weights
Action = tuple[int, str, int]


@dataclass
class Replay:
    """When every rank of a pipeline does what."""

    # begin and end of every action, in seconds
    spans: dict[Action, tuple[float, float]]
    # when each rank's last action ended
    finished: list[float]
    # stage -> its rank
    ranks: dict[int, int]

    def busy(self) -> list[float]:
        """Return the total seconds of each rank's actions."""
        totals = [0.0] * len(self.finished)
        for (stage, _, _), (begin, end) in self.spans.items():
            totals[self.ranks[stage]] += end - begin
        return totals

    def lanes(self, step: float, columns: int = 600) -> list[str]:
        """Return for each rank a letter per column; `columns` equal parts make `step` seconds.

        F, B, I, W: see Action. U: gradient reduction and update, or waiting for the others'. Dot:
        idle.
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
    # torch's list for the last rank has a micro-batch too many
    if schedule == "1F1B":
        return [one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks)]
    per_rank = get_schedule_ops(schedule_class(schedule), ranks, micro_batches, stages_per_rank)
    return [
        [action for entry in entries for action in schedule_actions(entry)]
        for entries in per_rank
    ]


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Return a rank's actions under 1F1B.

    It begins with one forward pass for each stage from its own to the last. Then backward and forward
    passes alternate.
    """
    ahead = min(ranks - rank, micro_batches)
    actions = [(rank, "F", batch) for batch in range(ahead)]
    for batch in range(micro_batches):
        actions.append((rank, "B", batch))
        if batch + ahead < micro_batches:
            actions.append((rank, "F", batch + ahead))
    return actions


def schedule_actions(entry) -> list[Action]:
    """Return the actions of an entry of torch's schedule.

    Overlapped actions become consecutive ones. Idle slots and gradient reductions are left out.
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
    """Run each rank's actions in order, each as soon as its input has arrived.

    order: actions of each rank. seconds(action): returns its duration.
    message: seconds of sending a stage's result to another rank.
    ready: when each rank can begin; by default at 0.
    """
    ranks = {stage: rank for rank, actions in enumerate(order) for stage, _, _ in actions}
    spans: dict[Action, tuple[float, float]] = {}
    # when an action's result has reached the rank that needs it
    arrived: dict[Action, float] = {}
    # (source, target) -> when the link becomes free
    links: defaultdict[tuple[int, int], float] = defaultdict(float)
    clocks = list(ready or [0.0] * len(order))
    # index of the next action of each rank
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
    """Return when an action's input from another stage arrives; None if that is not known yet.

    0 if no other stage sends it one: its rank has computed the input before. ranks: of the stages.
    """
    stage, kind, batch = action
    source, kinds = (stage - 1, "F") if kind == "F" else (stage + 1, "BI")
    if kind == "W" or source not in ranks:
        return 0.0
    return next((arrived[source, k, batch] for k in kinds if (source, k, batch) in arrived), None)
