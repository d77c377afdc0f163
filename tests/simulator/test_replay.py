"""Pipelines put side by side: idle time against the closed forms, and a case drawn by hand."""

import pytest

from minitrain.parallel.pipeline_split import SCHEDULES, rank_of
from minitrain.simulator.replay import replay, schedule_order

# seconds of one rank's layers: forward, gradients of inputs, of weights
FORWARD, INPUTS, WEIGHTS = (1.0, 1.25, 0.75)
WHOLE = FORWARD + INPUTS + WEIGHTS
RANKS, BATCHES = 4, 8


def idle(
    schedule: str, stages_per_rank: int, f=FORWARD, i=INPUTS, w=WEIGHTS, message=0.0
) -> float:
    """Seconds that the first rank waits until all are done."""
    share = {"F": f, "B": i + w, "I": i, "W": w}
    order = schedule_order(schedule, RANKS, BATCHES, stages_per_rank)
    result = replay(order, lambda action: share[action[1]] / stages_per_rank, message)
    return max(result.finished) - BATCHES * (f + i + w)


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "expected"),
    [
        ("GPipe", 1, (RANKS - 1) * WHOLE),
        ("1F1B", 1, (RANKS - 1) * WHOLE),
        ("LoopedBFS", 2, (RANKS - 1) * WHOLE / 2),
        ("Interleaved1F1B", 2, (RANKS - 1) * WHOLE / 2),
        ("Interleaved1F1B", 4, (RANKS - 1) * WHOLE / 4),
    ],
)
def test_idle_time_is_that_of_the_literature(schedule, stages_per_rank, expected):
    """Huang et al. 2018; Narayanan et al. 2021, section 2.2: (n - 1) / v of a micro-batch's time."""
    assert idle(schedule, stages_per_rank) == pytest.approx(expected)


def test_zero_bubble_schedules_idle_less():
    # Qi et al. 2023, section 6
    assert idle("ZBVZeroBubble", 2, 1, 1, 1) == pytest.approx((RANKS - 1) / 2)
    assert idle("InterleavedZeroBubble", 2) < idle("Interleaved1F1B", 2)
    assert idle("DualPipeV", 2) < idle("Interleaved1F1B", 2)


def test_messages_delay_by_hand():
    """Two ranks, one micro-batch: F0, message, F1, B1, message, B0."""
    result = replay(schedule_order("1F1B", 2, 1, 1), lambda action: 1.0, 0.5)
    assert result.spans == {
        (0, "F", 0): (0.0, 1.0),
        (1, "F", 0): (1.5, 2.5),
        (1, "B", 0): (2.5, 3.5),
        (0, "B", 0): (4.0, 5.0),
    }
    assert result.busy() == [2.0, 2.0]
    # and an update from 5.0 on
    assert result.lanes(step=6.0, columns=12) == ["FF......BBUU", "...FFBBUUUUU"]


def test_messages_of_two_ranks_travel_one_after_the_other():
    """Three forward passes of 1 s, whose results take 3 s each, then as many back, whose gradients do."""
    spans = replay(schedule_order("GPipe", 2, 3, 1), lambda action: 1.0, 3.0).spans
    assert [spans[0, "F", batch][0] for batch in range(3)] == [0.0, 1.0, 2.0]
    assert [spans[1, "F", batch][0] for batch in range(3)] == [4.0, 7.0, 10.0]
    assert [spans[1, "B", batch][0] for batch in range(3)] == [11.0, 12.0, 13.0]
    assert [spans[0, "B", batch][0] for batch in range(3)] == [15.0, 18.0, 21.0]


@pytest.mark.parametrize(("ready", "end"), [([0.25, 1.75], 5.25), ([0.0, 2.0], 5.5)])
def test_a_rank_that_is_not_ready_delays_only_what_has_come(ready, end):
    """As above: the second rank's input comes 1.5 after the first rank begins."""
    assert (
        max(replay(schedule_order("1F1B", 2, 1, 1), lambda action: 1.0, 0.5, ready).finished)
        == end
    )


def test_a_schedule_that_waits_for_itself_is_told():
    with pytest.raises(RuntimeError, match="the schedule waits for itself"):
        replay([[(0, "B", 0), (0, "F", 0)], [(1, "F", 0), (1, "B", 0)]], lambda action: 1.0, 0.0)


def test_no_message_where_a_v_turns():
    """Two ranks, one micro-batch: stages 1 and 2 are on the second rank."""
    spans = replay(schedule_order("ZBVZeroBubble", 2, 4, 2), lambda action: 1.0, 0.5).spans
    assert [spans[stage, "F", 0][0] for stage in range(4)] == [0.0, 1.5, 2.5, 4.0]


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_every_action_comes_after_what_it_needs(schedule):
    stages_per_rank = 1 if schedule == "1F1B" else 2
    order = schedule_order(schedule, RANKS, BATCHES, stages_per_rank)
    spans = replay(order, lambda action: 1.0, 0.25).spans
    last = RANKS * stages_per_rank - 1
    for (stage, kind, batch), (begin, _) in spans.items():
        if kind == "F" and stage:
            assert begin >= spans[stage - 1, "F", batch][1]
        if kind in "BI" and stage < last:
            behind = spans.get((stage + 1, "B", batch)) or spans[stage + 1, "I", batch]
            assert begin >= behind[1]
        if kind == "W":
            assert begin >= spans[stage, "I", batch][1]
    for rank, actions in enumerate(order):
        ends = [spans[action][1] for action in actions]
        assert ends == sorted(ends)
        assert all(
            rank_of(stage, RANKS, SCHEDULES[schedule].v_shaped) == rank for stage, _, _ in actions
        )
