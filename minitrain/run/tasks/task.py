"""Run a training's steps: resume, save by steps and by time, log, and stop cleanly where a signal
asks for it.

One loop for all tasks: what differs between them is a `Task`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from minitrain.parallel.agreement import broadcast_flag
from minitrain.run.checkpoint.checkpointer import saved_despite_errors
from minitrain.run.launch.watch import until_signal
from minitrain.run.monitor.flops import step_flops
from minitrain.run.monitor.health import Health
from minitrain.run.monitor.meter import Meter
from minitrain.run.monitor.metrics import MetricsLog, open_log
from minitrain.run.monitor.profiling import recorded_steps
from minitrain.settings import Config
from minitrain.training.loop import is_due


class Task(Protocol):
    """What a run does, on this rank: RowsTask (rows_task.py) or GrpoTask (grpo_task.py)."""

    # the fingerprint of its data
    files: dict[str, str]
    # the number of steps that are done, and the numbers of the last of them, as of its checkpoint
    first: int
    last: dict[str, Any]
    # of the weights in a step
    updates: int
    # its first row shows what a row costs; None for GRPO
    data: Sequence | None
    # of the text that is trained on, if it is text
    bytes_per_token: float | None

    def about(self) -> Iterator[str]:
        """Yield lines to begin with."""

    def steps(self, first: int) -> Iterator[dict[str, Any]]:
        """Run the steps from `first` on, and yield the numbers of each."""

    def origin(self, step: int) -> str:
        """Tell where the batch of a step comes from."""

    def finish(self, numbers: dict[str, Any], stopping: Callable[[], str]) -> bool:
        """Add what is measured on held-out data, where that is due.

        Returns False if `stopping`, which it may ask meanwhile, told it to leave that.
        """

    def save(self, numbers: dict[str, Any]) -> None:
        """Write the checkpoint of a step, whose numbers these are."""

    def wait(self) -> None:
        """Return when the last checkpoint is on disk."""

    def end(self) -> Iterator[str]:
        """Export the model, and yield lines to end with."""


def run_task(task: Task, config: Config, folder: Path) -> None:
    """Run a task's steps that are left, and export its model at the end.

    All ranks call it together.
    """
    first = task.first
    began = time.monotonic()
    with (
        closing(open_log(config, folder, task.files, first, task.bytes_per_token)) as log,
        saved_despite_errors(task.wait),
    ):
        meter = Meter(config, step_flops(config, task.data))
        for line in task.about():
            log.say(line)
        if broadcast_flag(log.lacks_last):
            task.finish(task.last, lambda: "")
            log.step(task.last)
        skipped = log.skipped_steps(task.updates)
        health = Health(config, log.say, task.origin, task.updates, log.losses, skipped)
        steps = recorded_steps(task.steps(first), config.profile, folder, first)
        if run_steps(health.watch(meter.measured(steps)), task, config, log):
            for line in task.end():
                log.say(line)
            log.end(config, first, time.monotonic() - began, meter.about)


def run_steps(
    steps: Iterator[dict[str, Any]], task: Task, config: Config, log: MetricsLog
) -> bool:
    """Save and log each of `steps`.

    Returns False if a signal has stopped the run, True after the last step.

    A step after which the run stops has a checkpoint, but no line yet: `run_task` makes up for it.
    """
    every = config.checkpoint.every
    seconds = 60 * config.checkpoint.minutes
    saved_at = time.monotonic()
    with until_signal() as stopping:
        for numbers in steps:
            due = is_due(numbers["step"], every, config.steps)
            stop = stopping()
            saves = due or stop or broadcast_flag(0 < seconds <= time.monotonic() - saved_at)
            # before anything else that may fail, and once the lines of the steps before are on disk
            if saves:
                log.sync()
                task.save(numbers)
                saved_at = time.monotonic()
            if not stop and task.finish(numbers, stopping):
                log.step(numbers)
                continue
            if not saves:
                log.sync()
                task.save(numbers)
            task.wait()
            log.say(
                f"{stopping()}: stopped after step {numbers['step']}, with a checkpoint from which the same command "
                f"continues"
            )
            return False
    task.wait()
    return True
