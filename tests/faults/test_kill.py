"""Runs that are killed, or asked to stop, end up with the numbers of an undisturbed one, to the bit."""

import os
import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.helpers.commands import ROOT
from tests.helpers.kill import CASES, TINY, Case, Run, share, torment
from tests.helpers.processes import LIMIT, Ranks, popen


@pytest.mark.parametrize("name", CASES)
def test_kills_at_any_moment_change_nothing(tmp_path, name):
    """8 in all; `python -m tests.helpers.kill --times 50` does more."""
    torment(CASES[name], tmp_path, share(8)[name], seed=0)


def train_until_line(file, step):
    """Die between the checkpoint of a step and its line in metrics.jsonl."""
    from minitrain import train
    from minitrain.run.monitor.metrics import MetricsLog

    log_step = MetricsLog.step

    def die_or_log(log, numbers):
        if numbers["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)
        log_step(log, numbers)

    MetricsLog.step = die_or_log
    train.main(["--config", str(file)])


@pytest.mark.parametrize("name", ["one process", "GRPO"])
def test_no_line_is_lost_between_a_checkpoint_and_the_log(tmp_path, name):
    undisturbed, run = (
        Run(CASES[name], tmp_path / "undisturbed"),
        Run(CASES[name], tmp_path / "killed"),
    )
    ranks = Ranks(1, run.log, train_until_line, run.file, 2)
    assert ranks.wait(LIMIT) and ranks.codes() == [-signal.SIGKILL], run.log.read_text()
    assert (run.out / "checkpoints" / "step-00000002").exists() and len(run.numbers()) == 1
    numbers = run.finish(run.start())
    assert numbers == undisturbed.finish(undisturbed.start()) and any(
        "val" in key for key in numbers[1]
    )


def train_until_full(file):
    """From the second checkpoint on, the disk takes no more than 10 kB a file on the last rank, and deletes slowly."""
    from minitrain import train
    from minitrain.run.checkpoint.checkpointer import Checkpointer

    save = Checkpointer.save

    def save_on_full_disk(checkpointer, step, *args):
        if step > 3 and os.environ["RANK"] == "1":
            checkpointer.wait()  # the first one is on the disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        save(checkpointer, step, *args)

    rmtree = shutil.rmtree

    def slow_rmtree(folder, *args, **kwargs):
        time.sleep(1.5)
        rmtree(folder, *args, **kwargs)

    Checkpointer.save, shutil.rmtree = save_on_full_disk, slow_rmtree
    train.main(["--config", str(file)])


def test_a_full_disk_ends_the_run_in_one_line_and_keeps_the_last_checkpoint(tmp_path):
    case = CASES["FSDP, asynchronous"]
    run = Run(case, tmp_path / "full")
    ranks = Ranks(2, run.log, train_until_full, run.file)
    assert ranks.wait(LIMIT) and ranks.codes() == [2, 2], run.log.read_text()
    (line,) = [line for line in run.log.read_text().splitlines() if "error" in line]
    assert re.search("error: checkpoint .*step-00000006.tmp cannot be written: .*on rank 1", line)
    assert [path.name for path in (run.out / "checkpoints").iterdir()] == ["step-00000003"]
    undisturbed = Run(case, tmp_path / "undisturbed")
    assert run.finish(run.start()) == undisturbed.finish(undisturbed.start())


def wait_for_lines(run: Run, count: int, alive) -> None:
    deadline = time.monotonic() + LIMIT
    while len(run.numbers()) < count:
        assert alive() and time.monotonic() < deadline, run.log.read_text()
        time.sleep(0.01)


@pytest.mark.parametrize(
    "case",
    [
        Case(2, TINY | {"steps": 100_000, "checkpoint": {"every": 0, "asynchronous": True}}),
        Case(1, CASES["GRPO"].tree | {"steps": 100_000, "checkpoint": {"every": 0}}),
    ],
    ids=["FSDP", "GRPO"],
)
def test_sigterm_to_one_rank_stops_all_after_a_step_with_a_checkpoint(tmp_path, case):
    run = Run(case, tmp_path / "stopped")
    ranks = run.start()
    wait_for_lines(run, 3, lambda: None in ranks.codes())
    ranks.send(case.ranks - 1, signal.SIGTERM)
    assert ranks.wait(LIMIT) and not any(ranks.codes()), run.log.read_text()
    (checkpoint,) = (run.out / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert 3 <= step < case.tree["steps"] and not list(run.out.glob("*.safetensors"))
    assert run.log.read_text().count("SIGTERM: stopped after step") == 1
    shorter = Case(case.ranks, case.tree | {"steps": step + 2})
    run.file.write_text(yaml.safe_dump(shorter.tree | {"out_dir": str(run.out)}))
    undisturbed = Run(shorter, tmp_path / "undisturbed")
    assert run.finish(run.start()) == undisturbed.finish(undisturbed.start())


@pytest.mark.parametrize("save", [0, 2], ids=["before its checkpoint", "after its checkpoint"])
def test_sigterm_ends_a_long_validation(tmp_path, save):
    tree = TINY | {"steps": 4, "checkpoint": {"every": save}}
    endless = Case(2, tree | {"validation": {"every": 2, "batches": 10**9}})
    run = Run(endless, tmp_path / "stopped")
    ranks = run.start()
    wait_for_lines(run, 1, lambda: None in ranks.codes())
    time.sleep(0.5)  # for the second step
    ranks.send(1, signal.SIGTERM)
    assert ranks.wait(LIMIT) and not any(ranks.codes()), run.log.read_text()
    (checkpoint,) = (run.out / "checkpoints").iterdir()
    assert checkpoint.name == "step-00000002" and len(run.numbers()) == 1
    assert run.log.read_text().count("SIGTERM: stopped after step 2") == 1
    run.file.write_text(yaml.safe_dump(tree | {"out_dir": str(run.out)}))
    undisturbed = Run(Case(2, tree), tmp_path / "undisturbed")
    assert run.finish(run.start()) == undisturbed.finish(undisturbed.start())


WAITING = """
import os, time
from minitrain import train
from minitrain.run.launch import cli
from minitrain.training.loop import Trainer

update = Trainer.update

def wait_in_step_7(trainer, batches, step):
    if (step, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (6, "1", "0"):
        time.sleep(1000)
    return update(trainer, batches, step)

Trainer.update = wait_in_step_7
cli.run(train.main)
"""  # the command line, whose rank 1 waits to be killed


def test_torchrun_restarts_by_itself_after_the_death_of_a_rank(tmp_path):
    case = Case(2, TINY | {"steps": 20, "checkpoint": {"every": 5}})
    run, script = Run(case, tmp_path / "killed"), tmp_path / "waiting.py"
    script.write_text(WAITING)
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "--max-restarts",
        "3",
    ]
    with run.log.open("w") as log:
        torchrun = popen(
            [sys.executable, *command, script, "--config", run.file],
            cwd=ROOT,
            stderr=log,
            stdout=log,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    wait_for_lines(run, 6, lambda: torchrun.poll() is None)
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    assert torchrun.wait(300) == 0, run.log.read_text()
    lines = run.log.read_text().splitlines()
    assert [line for line in lines if line.startswith("error: ")] == [
        "error: rank 1 is gone: it was killed or cannot be reached; "
        "the run ends, and the same command continues from its last checkpoint"
    ]
    assert "resumed from step 5" in lines and "Traceback" not in run.log.read_text()
    undisturbed = Run(case, tmp_path / "undisturbed")
    assert run.numbers() == undisturbed.finish(undisturbed.start())
