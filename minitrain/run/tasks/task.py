"""Run all steps of a task: measure, check, save, validate and log each, and stop on a signal.

The loop is the same for all tasks; a `Task` has what differs.
"""

import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch

from minitrain.parallel.agreement import broadcast, broadcast_flag
from minitrain.run.launch.watch import until_signal
from minitrain.run.monitor.flops import step_flops
from minitrain.run.monitor.health import Health
from minitrain.run.monitor.meter import Meter
from minitrain.run.monitor.metrics import MetricsLog
from minitrain.settings import Config
from minitrain.training.packing import Dataset


class Task(Protocol):
    """A training run on this rank: RowsTask (rows_task.py) or GrpoTask (grpo_task.py)."""

    # the settings; epochs are converted to steps
    config: Config
    # out_dir
    folder: Path
    # the fingerprint of the data, see checkpoint/fingerprint.py
    files: dict[str, dict[str, str]]
    # the number of steps that are done, and the numbers of the last one, from its checkpoint
    first: int
    last: dict[str, Any]
    # the number of updates of the weights per step
    updates: int
    # the dataset; None for GRPO
    data: Dataset | None
    # mean bytes per token of the data; None if it is not text
    bytes_per_token: float | None

    def begin(self) -> int:
        """Load the newest checkpoint, if there is one; return the number of steps that are done.

        Sets `first` and `last`.
        """

    def about(self) -> Iterator[str]:
        """Yield lines to print at the beginning."""

    def steps(
        self, first: int, stays: Callable[[int], bool] = lambda step: True
    ) -> Iterator[dict[str, Any]]:
        """Run the steps from `first` on, and yield the numbers of each.

        stays(step): returns whether the weights must stay as they are after step 1, 2, ... until its
        numbers have been handled. If not, they may be yielded while the next step runs.
        """

    def origin(self, step: int) -> str:
        """Return where the batch of a step comes from."""

    def finish(self, numbers: dict[str, Any], stopping: Callable[[], str]) -> bool:
        """Add the results of a validation to the numbers of a step, if one is due.

        stopping(): returns the name of a signal that asks the run to stop, or "". A validation that
        is long calls it; if there is a signal, the rest is skipped, and False returned.
        """

    def save(self, numbers: dict[str, Any]) -> None:
        """Write the checkpoint of the step with these numbers."""

    def pin(self, step: int) -> None:
        """Keep the checkpoint of this step in addition to the newest ones, and no longer an earlier one."""

    def wait(self) -> None:
        """Return when the last checkpoint is on disk."""

    def end(self, say: Callable[[str], None]) -> None:
        """Export the model. say(line): prints a line."""


def run_task(task: Task, log: MetricsLog, device: torch.device) -> None:
    """Run the remaining steps of a task, and export its model at the end. All ranks call it.

    device: this rank's.
    """
    began = time.monotonic()
    config = task.config
    meter = Meter(config, step_flops(config, task.data), device)
    for line in task.about():
        log.say(line)
    if broadcast_flag(log.lacks_last):
        task.finish(task.last, lambda: "")
        log.step(task.last)
    skipped = log.skipped_steps(task.updates)
    health = Health(config, log.say, task.origin, task.updates, log.losses, skipped)
    if config.checkpoint.best:
        task.pin(broadcast(log.best_step))
    if run_steps(task, log, meter, health):
        task.end(log.say)
        log.end(config, task.first, time.monotonic() - began, meter.about)


def run_steps(task: Task, log: MetricsLog, meter: Meter, health: Health) -> bool:
    """Run, check, save and log each of the remaining steps.

    Returns False if a signal has stopped the run, True after the last step. The step at which a run
    stops has a checkpoint, but no line in metrics.jsonl: when the run continues, `run_task` adds it.
    """
    config = task.config
    seconds = 60 * config.checkpoint.minutes
    saved_at = time.monotonic()
    with until_signal() as stopping:
        # called twice for a step: when it is launched, and when its numbers come, perhaps after the
        # next launch. Both calls must return the same
        @lru_cache(maxsize=2)
        def stops_and_saves(step: int) -> tuple[str, bool]:
            """Return the signal that stops the run after a step, or "", and whether the step is saved."""
            stop = stopping()
            due = is_due(step, config.checkpoint.every, config.steps)
            late = due or stop or broadcast_flag(0 < seconds <= time.monotonic() - saved_at)
            return stop, bool(late)

        def stays(step: int) -> bool:
            validates = config.validation.every
            return any(stops_and_saves(step)) or (
                validates > 0 and is_due(step, validates, config.steps)
            )

        def save(numbers: dict[str, Any]) -> None:
            """Write the step's checkpoint, once the lines of earlier steps are on disk."""
            nonlocal saved_at
            log.sync()
            task.save(numbers)
            saved_at = time.monotonic()

        for numbers in profiled_steps(task, stays):
            numbers |= meter.measure(numbers)
            numbers |= health.check(numbers)
            stop, saves = stops_and_saves(numbers["step"])
            # before anything else can fail
            if saves:
                save(numbers)
            if not stop and task.finish(numbers, stopping):
                if config.checkpoint.best and broadcast_flag(log.is_best(numbers)):
                    if not saves:
                        save(numbers)
                    task.pin(numbers["step"])
                log.step(numbers)
                health.stop_if_stuck(numbers)
                continue
            if not saves:
                save(numbers)
            task.wait()
            log.say(
                f"{stopping()}: stopped after step {numbers['step']}, with a checkpoint from which the same command "
                f"continues"
            )
            return False
    task.wait()
    return True


def is_due(step: int, every: int, last: int) -> bool:
    """Return True at multiples of `every` (0: never), and after the last step."""
    return step == last or (every > 0 and step % every == 0)


def profiled_steps(task: Task, stays: Callable[[int], bool]) -> Iterator[dict[str, Any]]:
    """Return the numbers of the task's steps, and profile them as profile.* says."""
    settings = task.config.profile
    if not (settings.steps or settings.memory):
        return task.steps(task.first, stays)
    # imported only if it is needed
    from minitrain.run.monitor.profiling import recorded_steps

    first, last = settings.steps or (0, 0)
    # no other step may run while these steps are recorded
    steps = task.steps(task.first, lambda step: stays(step) or first - 1 <= step <= last)
    return recorded_steps(steps, settings, task.folder, task.first)
