"""Ranks that die are named in one line, once, and nobody waits for them; nor for ranks that fail."""

import atexit
import os
import signal
import socket
import sys
import time
from functools import partial
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from minitrain.errors import InputError
from minitrain.run.config import load as configs
from minitrain.run.launch import watch
from minitrain.run.launch.interrupts import Stopped
from minitrain.run.launch.start import start
from minitrain.run.launch.watch import Watch, until_signal
from tests.helpers.processes import LIMIT, Ranks, default_signals

TREE = {"batch": {"global": 3, "micro": 1}, "device": "cpu"}


def hang(ready, victim):
    """Wait for nobody knows whom, as in a collective that a dead rank has not joined; one rank at the good end."""
    start(configs.from_dict(TREE))
    disturb()
    dist.barrier()
    (ready / str(dist.get_rank())).touch()
    if dist.get_rank() != (victim + 1) % 3:
        time.sleep(1000)


def disturb():
    """Knock at the door of the watch as a stranger who knows no key."""
    port = _get_default_store().get("minitrain/watch").split()[0]
    with socket.create_connection(("localhost", int(port))) as connection:
        connection.sendall("é".encode() * 12)


def fail(alone):
    start(configs.from_dict(TREE))
    dist.barrier()
    if not alone or dist.get_rank() == 1:
        raise InputError("this was wrong")
    dist.barrier()


def fail_while_rank_1_prints_slowly():
    start(configs.from_dict(TREE))
    dist.barrier()
    if dist.get_rank() == 1:
        watch.print = lambda *words, **options: (time.sleep(2.5), print(*words, **options))
    else:
        time.sleep(0.5)
    raise InputError("this was wrong")


def fail_when_rank_0_has_gone():
    """Rank 0 leaves at once, and the others' watches are slow to hear of it."""
    start(configs.from_dict(TREE))
    dist.barrier()
    if dist.get_rank() == 0:
        watch.FAREWELL = 0.0
    else:
        hear = Watch.hear
        Watch.hear = lambda *args: (time.sleep(2), hear(*args))
        time.sleep(1)
    raise InputError("this was wrong")


def end_well():
    """Rank 0 has more to write than others have patience in a collective, and groups cannot be destroyed: NCCL's cannot
    while there are CUDA graphs of its kernels."""
    dist.destroy_process_group = partial(time.sleep, 1000)
    start(configs.from_dict(TREE | {"timeout_s": 1.0}))
    if dist.get_rank() == 0:
        time.sleep(2)


def end_without_cli(code):
    """As an interpreter ends that runs somebody's own script: rank 1 first, and rank 0 when that is gone."""
    start(configs.from_dict(TREE))
    dist.barrier()
    if dist.get_rank() != 1:
        time.sleep(1)
        print("done", file=sys.stderr)
    elif code:
        sys.last_value = ValueError()  # as after a traceback
    atexit._run_exitfuncs()
    os._exit(code)


def lose_torchrun():
    """Its first rank has another parent all at once."""
    start(configs.from_dict(TREE | {"batch": {"global": 2, "micro": 1}}))
    dist.barrier()
    os.environ |= {"TORCHELASTIC_RUN_ID": "a", "LOCAL_RANK": str(dist.get_rank())}
    if dist.get_rank() == 0:
        os.getppid = lambda: 1
    time.sleep(1000)


def on_nccl(ready, victim):
    """As far as that goes without GPUs: with a group for control messages beside the default one."""
    with patch("torch.distributed.get_backend", lambda *_: "nccl"):
        hang(ready, victim)


def errors(log):
    return [line for line in log.read_text().splitlines() if line]


@pytest.mark.parametrize(
    ("victim", "function", "told"),
    [
        (0, hang, "killed"),
        (1, hang, "killed"),
        (2, on_nccl, "killed, gave up waiting (see out_dir/logs/nccl-rank-*)"),
    ],
)
def test_the_death_of_a_rank_ends_all(tmp_path, victim, function, told):
    ranks = Ranks(3, tmp_path / "log", function, tmp_path, victim)
    while len(list(tmp_path.iterdir())) < 4:
        assert not any(ranks.codes()), ranks.log.read_text()
        time.sleep(0.01)
    time.sleep(0.2)  # for connections that are made in the background
    ranks.send(victim, signal.SIGKILL)
    assert ranks.wait(LIMIT)
    assert [code for rank, code in enumerate(ranks.codes()) if rank != victim] == [1, 1]
    # torch itself may be quick enough to log that the barrier at the end has failed
    (line,) = [line for line in errors(tmp_path / "log") if "error: " in line]
    assert line.startswith(f"error: rank {victim} is gone: it was {told} or cannot be reached; ")


@pytest.mark.parametrize("alone", [True, False])
def test_a_mistake_is_told_once_and_ends_all(tmp_path, alone):
    ranks = Ranks(3, tmp_path / "log", fail, alone)
    assert ranks.wait(LIMIT) and ranks.codes() == [2, 2, 2]
    assert errors(tmp_path / "log") == ["error: this was wrong"]


@pytest.mark.parametrize("function", [fail_while_rank_1_prints_slowly, fail_when_rank_0_has_gone])
def test_a_mistake_is_told_once_however_slow_a_rank_is(tmp_path, function):
    ranks = Ranks(3, tmp_path / "log", function)
    assert ranks.wait(LIMIT) and ranks.codes() == [2, 2, 2]
    # torch itself tells of a store that has gone
    assert [line for line in errors(tmp_path / "log") if "error: " in line] == [
        "error: this was wrong"
    ]


def test_a_good_end_is_silent(tmp_path):
    ranks = Ranks(3, tmp_path / "log", end_well)
    assert ranks.wait(LIMIT) and ranks.codes() == [0, 0, 0], ranks.log.read_text()
    assert errors(tmp_path / "log") == []


@pytest.mark.parametrize("code", [0, 1])
def test_scripts_that_end_without_our_command_line(tmp_path, code):
    ranks = Ranks(3, tmp_path / "log", end_without_cli, code)
    assert ranks.wait(LIMIT) and ranks.codes() == [code] * 3
    assert errors(tmp_path / "log") == ([] if code else ["done", "done"])


def test_ranks_without_torchrun_end(tmp_path):
    ranks = Ranks(2, tmp_path / "log", lose_torchrun)
    assert ranks.wait(LIMIT) and ranks.codes() == [1, 1]
    (line,) = errors(tmp_path / "log")
    assert line.startswith("error: torchrun is gone; ")


@pytest.fixture
def heeded():
    """Signals that whoever started the tests has let them ignore, as nohup does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    default_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stops(*sent: int) -> list[str]:
    """After which of three steps a run is to stop, and why, if these signals come after the first."""
    found = []
    with until_signal() as stopping:
        for step in range(3):
            found.append(stopping())
            for number in sent if step == 0 else ():
                signal.raise_signal(number)
    return found


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_a_signal_stops_the_run_that_got_it_and_none_that_follows(heeded, name):
    start(configs.from_dict(TREE | {"batch": {"global": 1, "micro": 1}}))
    number = signal.Signals[name]
    before = signal.getsignal(number)
    assert stops(number) == ["", name, name]
    assert stops() == ["", "", ""]
    assert signal.getsignal(number) == before


def test_ignored_signals_stay_ignored(monkeypatch):
    """As SIGHUP under nohup, and SIGINT in what a shell's script runs in the background."""
    start(configs.from_dict(TREE | {"batch": {"global": 1, "micro": 1}}))
    for number in (signal.SIGHUP, signal.SIGINT):
        before = signal.signal(number, signal.SIG_IGN)
        try:
            assert stops(number, number) == ["", "", ""]
        finally:
            signal.signal(number, before)


def test_torchruns_echo_of_the_first_interrupt_is_no_second_one(heeded, monkeypatch):
    start(configs.from_dict(TREE | {"batch": {"global": 1, "micro": 1}}))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert stops(signal.SIGINT, signal.SIGINT) == ["", "SIGINT", "SIGINT"]


def below_the_compiler(function) -> None:
    """Call a function from a frame of the module in which torch compiles."""
    space = {"__name__": "torch._inductor.compile_fx", "function": function}
    exec("def compile_fx(): function()", space)
    space["compile_fx"]()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_in_mid_compilation(heeded, name):
    """It ends a run that has no step; later the step is finished, or what the signal has broken is told by its line."""
    start(configs.from_dict(TREE | {"batch": {"global": 1, "micro": 1}}))

    def send() -> None:
        signal.raise_signal(signal.Signals[name])

    def fail() -> None:
        raise RuntimeError("a compiler's 1,347 lines")

    line = f"{name}: ended while torch.compile was at work on the"
    with pytest.raises(Stopped, match=f"{line} first step"), until_signal():
        below_the_compiler(send)
    with until_signal() as stopping:
        assert stopping() == ""
        below_the_compiler(send)
        assert stopping() == name
    with pytest.raises(Stopped, match=f"{line} step") as told, until_signal():
        send()
        below_the_compiler(fail)
    assert told.value.code == 128 + signal.Signals[name]
    # other errors are told as ever
    for before, where in (
        (lambda: None, below_the_compiler),
        (send, lambda function: function()),
    ):
        with pytest.raises(RuntimeError, match="1,347"), until_signal():
            before()
            where(fail)
