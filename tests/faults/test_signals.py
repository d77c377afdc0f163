"""Runs on a real terminal: Ctrl-C, a terminal that goes, and what a run leaves behind for the next one."""

import fcntl
import json
import os
import re
import select
import signal
import socket
import struct
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.helpers.kill import CASES, TINY, Case, Run
from tests.helpers.processes import LIMIT, fork, start_server

LONG = Case(1, TINY | {"steps": 100_000, "checkpoint": {"every": 0}})


def train_on_terminal(
    file: Path, terminal: str, ignored: list[int], environment: dict[str, str]
) -> None:
    """Train as the first program of a session on this terminal, as ssh starts a shell."""
    os.environ.clear()  # the server has that of the test which it was started in
    os.environ.update(environment)
    os.setsid()
    descriptor = os.open(terminal, os.O_RDWR)
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(descriptor, number)
        setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    os.close(descriptor)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    import torch

    from minitrain import train
    from minitrain.run.launch import cli

    torch.set_num_threads(1)
    cli.run(lambda _: train.main(["--config", str(file)]))


class OnTerminal:
    """A run of `file` on a pseudo-terminal; `seen` is what the terminal has shown so far."""

    def __init__(self, file: Path, *ignored: int):
        start_server()
        self.master, terminal = os.openpty()
        # for the progress bar
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        self.seen = ""
        arguments = (file, os.ttyname(terminal), list(ignored), dict(os.environ))
        self.process = fork(train_on_terminal, *arguments)
        self.keep = terminal  # until the run has it open: else it would have gone at once

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not re.search(pattern, self.seen):
            assert time.monotonic() < deadline and self.process.is_alive(), self.seen
            self.read()

    def read(self) -> None:
        if select.select([self.master], [], [], 0.1)[0]:
            with suppress(OSError):  # nobody has the other end open any more
                self.seen += os.read(self.master, 1 << 16).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def hang_up(self) -> None:
        os.close(self.keep)
        os.close(self.master)

    def end(self) -> int:
        """The exit code, after all has been read that was shown."""
        deadline = time.monotonic() + LIMIT
        while self.process.is_alive() and time.monotonic() < deadline:
            self.read()
        self.read()
        self.process.join(1)
        return self.process.exitcode


def continues_undisturbed(run: Run, tmp_path: Path) -> None:
    """The same command, with two steps more than there are, gives the numbers of a run that nobody stopped."""
    (checkpoint,) = (run.out / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert 3 <= step < LONG.tree["steps"] and not list(run.out.glob("*.safetensors"))
    shorter = Case(1, LONG.tree | {"steps": step + 2})
    run.file.write_text(yaml.safe_dump(shorter.tree | {"out_dir": str(run.out)}))
    undisturbed = Run(shorter, tmp_path / "undisturbed")
    assert run.finish(run.start()) == undisturbed.finish(undisturbed.start())


def test_control_c_stops_after_the_step_with_a_checkpoint(tmp_path):
    run = Run(LONG, tmp_path / "run")
    shown = OnTerminal(run.file)
    shown.wait_for(r"\b[3-9]\d*/100000 ")
    shown.type("\x03")
    assert shown.end() == 0
    assert (
        "SIGINT: the run stops after this step, with a checkpoint (again: at once)" in shown.seen
    )
    assert re.search(
        r"SIGINT: stopped after step \d+, .* from which the same command continues", shown.seen
    )
    continues_undisturbed(run, tmp_path)


def test_a_second_control_c_ends_the_run_at_once(tmp_path):
    tree = CASES["GRPO"].tree
    grpo = tree["grpo"] | {"reward": "tests.faults.test_signals:endless"}
    run = Run(Case(1, tree | {"grpo": grpo, "validation": {}}), tmp_path / "run")
    shown = OnTerminal(run.file)
    shown.wait_for("waiting for ever")
    shown.type("\x03")
    shown.wait_for("again: at once")
    shown.type("\x03")
    assert shown.end() == -signal.SIGINT
    assert not list((run.out / "checkpoints").iterdir())


def endless(response, answer, row) -> float:
    print("waiting for ever", flush=True)
    while True:
        time.sleep(0.01)


def wait_for_others(file: Path, log: Path) -> None:
    """Train as rank 0 of two, of which the other never starts; a signal may take half a second."""
    with log.open("w") as written:
        os.dup2(written.fileno(), 2)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    from minitrain import train
    from minitrain.run.launch import cli, interrupts, start

    interrupts.PATIENCE = 0.5
    join = start.join
    start.join = lambda device: (print("joining", file=sys.stderr, flush=True), join(device))
    cli.run(lambda _: train.main(["--config", str(file)]))


@pytest.mark.parametrize(
    "name, line", {"SIGINT": "interrupted", "SIGTERM": "ended by SIGTERM"}.items()
)
def test_a_rank_that_waits_for_the_others_ends(tmp_path, name, line):
    """It waits in C++, where no Python handler runs; and another rank's death cannot be noticed yet."""
    run = Run(Case(2, TINY), tmp_path / "run")
    start_server()
    process = fork(wait_for_others, run.file, run.log)
    deadline = time.monotonic() + LIMIT
    while not (run.log.exists() and "joining" in run.log.read_text()):
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.05)
    # into the wait
    time.sleep(0.5)
    os.kill(process.pid, signal.Signals[name])
    process.join(LIMIT)
    assert process.exitcode == 128 + signal.Signals[name]
    assert run.log.read_text().endswith(f"joining\n{line}\n")


def test_a_terminal_that_goes_stops_the_run_with_a_checkpoint(tmp_path):
    run = Run(LONG, tmp_path / "run")
    shown = OnTerminal(run.file)
    shown.wait_for(r"\b[3-9]\d*/100000 ")
    shown.hang_up()
    shown.process.join(LIMIT)
    assert shown.process.exitcode == 0
    continues_undisturbed(run, tmp_path)


def test_under_nohup_a_run_goes_on_though_its_terminal_has_gone(tmp_path):
    run = Run(Case(1, TINY | {"steps": 60}), tmp_path / "run")
    shown = OnTerminal(run.file, signal.SIGHUP)
    shown.wait_for(r"\b[3-9]\d*/60 ")
    shown.hang_up()
    shown.process.join(LIMIT)
    assert shown.process.exitcode == 0 and len(run.numbers()) == 60
    assert (run.out / "model.safetensors").exists()


def test_checkpoints_by_time(tmp_path):
    """Every step lasts longer than 1e-6 minutes."""
    by_time = Run(
        Case(1, TINY | {"steps": 5, "checkpoint": {"minutes": 1e-6, "keep": 9}}),
        tmp_path / "by time",
    )
    by_time.finish(by_time.start())
    assert len(list((by_time.out / "checkpoints").iterdir())) == 5
    never = Run(Case(1, TINY | {"steps": 5, "checkpoint": {"minutes": 0}}), tmp_path / "never")
    never.finish(never.start())
    (checkpoint,) = (never.out / "checkpoints").iterdir()
    assert checkpoint.name == "step-00000005"


def test_the_numbers_of_a_run_without_a_checkpoint_are_kept(tmp_path):
    run = Run(Case(1, TINY | {"steps": 3}), tmp_path / "run")
    first = run.finish(run.start())
    for start in (1, 2):
        for file in (run.out / "checkpoints").iterdir():
            file.rename(tmp_path / f"{file.name}-{start}")
        (run.out / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "loss": float(start)}) + "\n"
        )
        assert run.finish(run.start()) == first
        kept = run.out / f"metrics-{start}.jsonl"
        assert json.loads(kept.read_text()) == {"step": 1, "loss": start}
        said = run.log.read_text()
        assert f"its metrics.jsonl is now {kept}" in said
    assert (
        said.count(f"note: the result of this run will replace model.safetensors in {run.out}")
        == 2
    )


@pytest.mark.parametrize("task", ["pretrain", "diffusion"])
def test_tokens_that_were_seen_are_counted_on_whatever_the_batch_is_then(tmp_path, task):
    tree = TINY | {"steps": 3}
    if task == "diffusion":
        tree |= {"task": task, "model": "wan2.1-1.3b-tiny", "data": {"size": [1, 8, 8]}}
    run = Run(Case(1, tree), tmp_path / "run")
    run.finish(run.start())
    tree |= {"steps": 5, "batch": tree["batch"] | {"global": 2}, "out_dir": str(run.out)}
    run.file.write_text(yaml.safe_dump(tree))
    assert [line["tokens"] for line in run.finish(run.start())] == [64, 128, 192, 224, 256]
