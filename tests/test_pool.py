"""The pool itself: what a wrong rank looks like from the test."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.pool import Pool, RankFailure


@pytest.fixture
def small_pool():
    """One of its own, since these tests kill its workers."""
    pool = Pool(least=2)
    yield pool
    pool.close()


def sum_of_ranks(factor):
    total = torch.tensor(float(dist.get_rank() * factor))
    dist.all_reduce(total)
    return dist.get_world_size(), int(os.environ["WORLD_SIZE"]), total.item()


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise KeyError("here")
    dist.barrier()


def die_on_rank_1():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def die_on_rank_1_when_rank_0_has_failed():
    if dist.get_rank() == 1:
        time.sleep(0.5)
        os._exit(7)
    raise ConnectionError("closed by peer")


def sleep_on_rank_0():
    if dist.get_rank() == 0:
        time.sleep(60)


@pytest.mark.parametrize("world_sizes", [(1, 4, 2, 4)])
def test_world_sizes(pool, world_sizes):
    for n in world_sizes:
        assert pool.run(n, sum_of_ranks, 3) == [(n, n, 3.0 * sum(range(n)))] * n


def test_failures_are_told_and_do_not_last(small_pool, monkeypatch):
    with pytest.raises(
        RankFailure, match=r"(?s)rank 1 of 2.*in fail_on_rank_1.*KeyError: 'here'"
    ):
        small_pool.run(2, fail_on_rank_1)
    # both ranks answer, however slow the machine is
    monkeypatch.setattr("tests.helpers.pool.GRACE", 60)
    for die in die_on_rank_1, die_on_rank_1_when_rank_0_has_failed:
        with pytest.raises(RankFailure, match=r"(?s)^rank 1 of 2.*exit code 7"):
            small_pool.run(2, die)
    assert small_pool.run(2, sum_of_ranks, 1) == [(2, 2, 1.0)] * 2
    with pytest.raises(
        RankFailure, match=r"(?s)no answer from ranks \[0\] of 2.*in sleep_on_rank_0"
    ):
        small_pool.run(2, sleep_on_rank_0, timeout=5)
