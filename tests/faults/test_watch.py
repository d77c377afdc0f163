"""Ranks that die are named in one line, once, and nobody waits for them; nor for ranks that fail."""

import signal
import time

import pytest
import torch.distributed as dist

from minitrain import config as configs
from minitrain.errors import InputError
from minitrain.parallel.mesh import start
from tests.faults.processes import Ranks

TREE = {"batch": {"global": 3, "micro": 1}, "device": "cpu"}


def hang(ready):
    """Wait for nobody knows whom, as in a collective that a dead rank has not joined."""
    start(configs.from_dict(TREE))
    dist.barrier()
    (ready / str(dist.get_rank())).touch()
    time.sleep(1000)


def fail(alone):
    start(configs.from_dict(TREE))
    dist.barrier()
    if not alone or dist.get_rank() == 1:
        raise InputError("this was wrong")
    dist.barrier()


def end_well():
    start(configs.from_dict(TREE))


def errors(log):
    return [line for line in log.read_text().splitlines() if line]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_death_of_a_rank_ends_all(tmp_path, victim):
    ranks = Ranks(3, tmp_path / "log", hang, tmp_path)
    while len(list(tmp_path.iterdir())) < 4:
        assert not any(ranks.codes()), ranks.log.read_text()
        time.sleep(0.01)
    time.sleep(0.2)  # for connections that are made in the background
    ranks.send(victim, signal.SIGKILL)
    assert ranks.wait(10)
    assert [code for rank, code in enumerate(ranks.codes()) if rank != victim] == [1, 1]
    (line,) = errors(tmp_path / "log")
    assert line.startswith(f"error: rank {victim} is gone: it was killed or cannot be reached; ")


@pytest.mark.parametrize("alone", [True, False])
def test_a_mistake_is_told_once_and_ends_all(tmp_path, alone):
    ranks = Ranks(3, tmp_path / "log", fail, alone)
    assert ranks.wait(10) and ranks.codes() == [2, 2, 2]
    assert errors(tmp_path / "log") == ["error: this was wrong"]


def test_a_good_end_is_silent(tmp_path):
    ranks = Ranks(3, tmp_path / "log", end_well)
    assert ranks.wait(30) and ranks.codes() == [0, 0, 0]
    assert errors(tmp_path / "log") == []
