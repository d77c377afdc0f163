"""Two runs in one out_dir: the second waits for the first to end, however it ends, and gives up in one line."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from minitrain.errors import InputError
from minitrain.run.config.load import from_dict
from minitrain.run.launch import lock
from minitrain.run.launch.lock import locked
from minitrain.run.tasks.train_model import train
from tests.helpers.processes import popen

PROGRAM = """
import sys
from pathlib import Path
from minitrain.run.launch.lock import locked
with locked(Path(sys.argv[1]), leads=True):
    print("in", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def another(tmp_path):
    """A process that has locked tmp_path."""
    words = [sys.executable, "-c", PROGRAM, tmp_path]
    root = Path(__file__).parents[2]
    process = popen(words, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "in\n"
    return process


def test_a_second_run_is_kept_out(another, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lock, "PATIENCE", 0.15)
    with pytest.raises(
        InputError,
        match=rf"^process {another.pid} on \S+ is training in out_dir='{tmp_path}' \(wait",
    ):
        locked(tmp_path, leads=True).__enter__()
    told = capsys.readouterr().err
    assert told.startswith(f"waiting for process {another.pid} on ") and told.count("\n") == 1
    with locked(tmp_path, leads=False):  # its first rank has seen to that
        pass


@pytest.mark.parametrize("left_over", [{}, {"RANK": "3"}])
def test_training_is_kept_out(another, tmp_path, monkeypatch, left_over):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    # by a batch script; without WORLD_SIZE a run is one process
    for name, value in left_over.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lock, "PATIENCE", 0.0)
    with pytest.raises(InputError, match=f"^process {another.pid} on "):
        train(from_dict({"model": "llama3-8b-tiny", "device": "cpu", "out_dir": str(tmp_path)}))
    # nothing of the run that was kept out
    assert {path.name for path in tmp_path.rglob("*")} == {".lock"}


def test_lock_of_a_killed_run_is_taken_over(another, tmp_path, monkeypatch):
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: another.kill())
    with locked(tmp_path, leads=True):
        pass


def test_lock_of_an_ended_run_is_taken_over(another, tmp_path, monkeypatch, capsys):
    another.communicate()
    monkeypatch.setattr(lock, "PATIENCE", 0.0)
    with locked(tmp_path, leads=True):
        assert (
            tmp_path / ".lock"
        ).read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    assert capsys.readouterr().err == ""


# POSIX allows either for a lock that is taken
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES])
def test_both_ways_to_say_that_a_lock_is_taken(tmp_path, monkeypatch, number):
    monkeypatch.setattr(
        lock.fcntl, "lockf", lambda *_: (_ for _ in ()).throw(OSError(number, "taken"))
    )
    monkeypatch.setattr(lock, "PATIENCE", -1.0)
    with pytest.raises(InputError, match="^another process is training in"):
        locked(tmp_path, leads=True).__enter__()


def test_runs_start_where_files_cannot_be_locked(another, tmp_path, monkeypatch):
    monkeypatch.setattr(
        lock.fcntl, "lockf", lambda *_: (_ for _ in ()).throw(OSError(37, "No locks available"))
    )
    with locked(tmp_path, leads=True):
        pass
