"""Ranks that sample on while others train, and get new weights in between."""

from itertools import count
from unittest.mock import patch

import numpy as np
import pytest

from minitrain.grpo.rollouts import RolloutWorker
from minitrain.run.config import load as configs
from tests.helpers.lagging_runs import (
    STEPS,
    check_log_probs,
    lagging_tree,
    responses,
    run_lagging,
)


def run_apart(tree, folder, saves):
    """A run whose samplers take at most 3 steps while others train, so that responses are unfinished then."""
    decode_until = RolloutWorker.decode_until

    def decode_briefly(self, done):
        steps = count()
        decode_until(self, lambda: done() or next(steps) == 3)

    with patch.object(RolloutWorker, "decode_until", decode_briefly):
        lines, weights, _ = run_lagging(tree, folder, saves)
    return lines, weights


@pytest.mark.parametrize(("tp", "cache"), [(1, "keep"), (2, "recompute")])
def test_samplers_go_on_while_others_train(pool, tmp_path, tp, cache):
    """Half of the ranks train, the others sample; resumed, they go on with what they had drawn. No token is too old."""
    grpo = {"in_flight": True, "in_flight_cache": cache, "generation_ranks": tp}
    tree = lagging_tree(1, **grpo)
    tree |= {"rollout": tree["rollout"] | {"tp": tp}}
    (lines, weights), *others = pool.run(2 * tp, run_apart, tree, tmp_path, [2])
    assert all(
        [line["loss"] for line in found] == [line["loss"] for line in lines]
        for found, _ in others
    )
    (resumed, again), *_ = pool.run(2 * tp, run_apart, tree, tmp_path, [])
    assert [line["step"] for line in resumed] == [3, 4, 5]
    versions = [r.token_versions() for step in range(STEPS) for r in responses(tmp_path, step)]
    # in the middle of responses
    assert sum(len(set(each)) > 1 for each in versions) > 5
    ages = [line["age_max"] for line in lines[:2] + resumed]
    assert max(ages) == 1 and max(np.diff(each).max(initial=0) for each in versions) == 1
    if cache == "recompute":
        check_log_probs(configs.from_dict(tree), tmp_path, weights[:2] + again, most=1)
