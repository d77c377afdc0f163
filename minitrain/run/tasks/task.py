"""Run a training's steps: save by steps and by time, log, and stop where a signal asks for it.

One loop for all tasks: what differs between them is a `Task`.
"""

import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from minitrain.parallel.agreement import broadcast_flag
from minitrain.run.launch.watch import until_signal
from minitrain.run.monitor.flops import step_flops
from minitrain.run.monitor.health import Health
from minitrain.run.monitor.meter import Meter
from minitrain.run.monitor.metrics import MetricsLog
from minitrain.settings import Config
from minitrain.training.packing import Dataset


class Task(Protocol):
    """What a run does, on this rank: RowsTask (rows_task.py) or GrpoTask (grpo_task.py)."""

    # its settings, with the steps that its data make
    config: Config
    # where its files go
    folder: Path
    # the fingerprint of its data
    files: dict[str, dict[str, str]]
    # the number of steps that are done, and the numbers of the last of them, as of its checkpoint
    first: int
    last: dict[str, Any]
    # the number of updates of the weights in a step
    updates: int
    # The dataset, whose first row shows what a row costs; None for GRPO.
    data: Dataset | None
    # the ratio of the text that is trained on, if it is text
    bytes_per_token: float | None

    def begin(self) -> int:
        """Load the newest checkpoint, if there is one; return the number of steps that are done.

        `first` and `last` are known from here on.
        """

    def about(self) -> Iterator[str]:
        """Yield lines to begin with."""

    def steps(
        self, first: int, stays: Callable[[int], bool] = lambda step: True
    ) -> Iterator[dict[str, Any]]:
        """Run the steps from `first` on, and yield the numbers of each.

        Where stays(step) is False, those of the step 1, 2, ... may come while the next one runs.
        """

    def origin(self, step: int) -> str:
        """Tell where the batch of a step comes from."""

    def finish(self, numbers: dict[str, Any], stopping: Callable[[], str]) -> bool:
        """Add what is measured on held-out data, where that is due.

        Returns False if that was left undone because `stopping`, called meanwhile, named a signal.
        """

    def save(self, numbers: dict[str, Any]) -> None:
        """Write the checkpoint of a step, whose numbers these are."""

    def wait(self) -> None:
        """Return when the last checkpoint is on disk."""

    def end(self, say: Callable[[str], None]) -> None:
        """Export the model. say: prints and logs a line."""


def run_task(task: Task, log: MetricsLog) -> None:
    """Run a task's steps that are left, and export its model at the end.

    All ranks call it together.
    """
    began = time.monotonic()
    config = task.config
    meter = Meter(config, step_flops(config, task.data))
    for line in task.about():
        log.say(line)
    if broadcast_flag(log.lacks_last):
        task.finish(task.last, lambda: "")
        log.step(task.last)
    skipped = log.skipped_steps(task.updates)
    health = Health(config, log.say, task.origin, task.updates, log.losses, skipped)
    if run_steps(task, log, meter, health):
        task.end(log.say)
        log.end(config, task.first, time.monotonic() - began, meter.about)


def run_steps(task: Task, log: MetricsLog, meter: Meter, health: Health) -> bool:
    """Run, check, save and log each of the steps that are left.

    Returns False if a signal has stopped the run, True after the last step.

    A step after which the run stops has a checkpoint, but no line yet: `run_task` makes up for it.
    """
    config = task.config
    seconds = 60 * config.checkpoint.minutes
    saved_at = time.monotonic()
    with until_signal() as stopping:
        # asked when a step is launched, and when its numbers come, perhaps after the next launch
        @lru_cache(maxsize=2)
        def stops_and_saves(step: int) -> tuple[str, bool]:
            stop = stopping()
            due = is_due(step, config.checkpoint.every, config.steps)
            late = due or stop or broadcast_flag(0 < seconds <= time.monotonic() - saved_at)
            return stop, bool(late)

        def stays(step: int) -> bool:
            validates = config.validation.every
            return any(stops_and_saves(step)) or (
                validates > 0 and is_due(step, validates, config.steps)
            )

        for numbers in profiled_steps(task, stays):
            numbers |= meter.measure(numbers)
            numbers |= health.check(numbers)
            stop, saves = stops_and_saves(numbers["step"])
            # before anything else that may fail, and once the lines of the steps before are on disk
            if saves:
                log.sync()
                task.save(numbers)
                saved_at = time.monotonic()
            if not stop and task.finish(numbers, stopping):
                log.step(numbers)
                health.stop_if_stuck(numbers)
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


def is_due(step: int, every: int, last: int) -> bool:
    """Return True at multiples of `every` (0: never), and after the last step."""
    return step == last or (every > 0 and step % every == 0)


def profiled_steps(task: Task, stays: Callable[[int], bool]) -> Iterator[dict[str, Any]]:
    """Return the numbers of the task's steps, which are profiled where profile.* asks for it."""
    settings = task.config.profile
    if not (settings.steps or settings.memory):
        return task.steps(task.first, stays)
    # the profiler is not imported for a run without it
    from minitrain.run.monitor.profiling import recorded_steps

    first, last = settings.steps or (0, 0)
    # what is recorded is the work of these steps alone
    steps = task.steps(task.first, lambda step: stays(step) or first - 1 <= step <= last)
    return recorded_steps(steps, settings, task.folder, task.first)
