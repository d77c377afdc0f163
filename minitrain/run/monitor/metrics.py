"""Write a run's numbers to `metrics.jsonl`, to the terminal, and to loggers. Rank 0 only.

Without a terminal, as under Slurm or Kubernetes, a progress bar would become one huge line that some
viewers show only at the end. A line is then printed every PAUSE seconds instead.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import TextIO

import torch.distributed as dist
from tqdm import tqdm

from minitrain.errors import writing
from minitrain.parallel.agreement import broadcast
from minitrain.run.checkpoint.durable import write_durably
from minitrain.run.monitor.draw_curves import curves
from minitrain.run.monitor.health import WINDOW
from minitrain.run.monitor.metrics_file import read_lines, to_line
from minitrain.run.monitor.progress import (
    LAYOUT,
    bar_width,
    closing_lines,
    fitting,
    goodness,
    step_figures,
    validation,
)
from minitrain.settings import Config

# seconds between lines that replace a progress bar
PAUSE = 30.0


class MetricsLog:
    """Append each step's numbers to a file, and show them. Ranks other than 0 do nothing.

    If a run resumes, the lines of steps that it repeats are dropped.
    bytes_per_token: of the text that is trained on, if known.
    """

    def __init__(self, file: Path, steps: int, start: int, bytes_per_token: float | None = None):
        self.enabled = dist.get_rank() == 0
        self.bytes_per_token = bytes_per_token
        # called with the numbers of each step
        self.loggers: list[Callable[[dict], None]] = []
        # called at the end
        self.closers: list[Callable[[], None]] = []
        # losses of the last steps
        self.losses = deque(maxlen=WINDOW)
        # number of skipped updates of each step
        self.skips = []
        # True if the run ended after it had saved step `start`, but before it had written its line
        self.lacks_last = False
        # the score of the best validation, and its step; 0 if there was none
        self.best = -math.inf
        self.best_step = 0
        # only rank 0 has them
        self.file: TextIO | None = None
        self.bar: tqdm | None = None
        # when a line replaces the progress bar again
        self.next_line = time.monotonic()
        if not self.enabled:
            return
        notes = []
        kept = []
        if start:
            kept, notes = self.take_up(file, start)
        write_durably(file, "".join(map(to_line, kept)))
        for line in kept:
            self.take_best(line)
        self.file = file.open("a", encoding="utf-8")
        # disable=None: no bar if this is not a terminal
        self.bar = tqdm(
            total=steps,
            initial=start - self.lacks_last,
            ncols=bar_width(),
            bar_format=LAYOUT,
            disable=None,
        )
        for note in notes:
            self.say(note)

    def take_up(self, file: Path, start: int) -> tuple[list[dict], list[str]]:
        """Return an earlier run's lines up to step `start`, and notes on missing or strange ones."""
        found, strange = read_lines(file)
        kept = [line for line in found if line["step"] <= start]
        steps = {line["step"] for line in kept}
        self.losses += [line["loss"] for line in kept if isinstance(line.get("loss"), float)]
        self.skips = [line.get("skipped", 0) for line in kept]
        self.lacks_last = start not in steps
        notes = []
        if lost := start - self.lacks_last - len(steps):
            notes.append(f"note: {file} lacks {lost} of the {start} steps that are done")
        if strange:
            notes.append(
                f"note: lines of {file} that were not the numbers of a step are gone: {strange}"
            )
        return kept, notes

    def step(self, numbers: dict) -> None:
        """Write a step's numbers with all digits, and show the main ones."""
        if not self.enabled:
            return
        with writing(self.file.name):
            self.file.write(to_line(numbers))
            self.file.flush()
        self.losses.append(numbers["loss"])
        self.skips.append(numbers["skipped"])
        for logger in list(self.loggers):
            self.call(logger, numbers)
        figures = step_figures(numbers, self.bytes_per_token)
        self.bar.set_postfix_str(fitting(figures, self.bar.total), refresh=False)
        self.bar.update()
        step = numbers["step"]
        now = time.monotonic()
        validated = validation(numbers)
        due = validated or step == self.bar.total or now >= self.next_line
        if self.bar.disable and due:
            self.next_line = now + PAUSE
            self.say(f"step {step:,} of {self.bar.total:,}: {figures}")
        if validated:
            # the first validation is not called the best
            better = self.is_best(numbers) and self.best_step
            self.say(f"step {step:,}  val {validated}{', best' if better else ''}")
            self.take_best(numbers)

    def is_best(self, numbers: dict) -> bool:
        """Return whether a step's validation is the best so far; False on other ranks than 0."""
        return self.enabled and goodness(numbers) > self.best

    def take_best(self, numbers: dict) -> None:
        """Remember a step's validation if it is the best so far."""
        if self.is_best(numbers):
            self.best = goodness(numbers)
            self.best_step = numbers["step"]

    def add(self, logger: Callable[[dict], None]) -> None:
        """Call `logger` with the numbers of each step, and its `close`, if it has one, at the end."""
        self.loggers.append(logger)
        if hasattr(logger, "close"):
            self.closers.append(logger.close)

    def call(self, logger: Callable[[dict], None], numbers: dict) -> None:
        """Call a logger. If it fails, warn and do not call it again; the run continues."""
        try:
            logger(dict(numbers))
        except Exception as error:
            self.loggers.remove(logger)
            self.say(
                f"warning: a logger failed at step {numbers['step']}, and is called no more: {error!r}"
            )

    def sync(self) -> None:
        """Return when all numbers so far are on disk.

        This is called before a checkpoint is written, so that after a power cut there is no
        checkpoint without the numbers of its steps.
        """
        if self.enabled:
            with writing(self.file.name):
                os.fsync(self.file.fileno())

    def skipped_steps(self, updates: int = 1) -> int:
        """Return how many steps at the end skipped all their updates. All ranks call it.

        updates: per step.
        """
        skipped = takewhile(lambda skipped: skipped == updates, reversed(self.skips))
        return broadcast(len(list(skipped)))

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.enabled:
            self.bar.write(text)

    def end(self, config: Config, first: int, seconds: float, mfu_of: str) -> None:
        """Print the run's closing lines: see `closing_lines`."""
        if self.enabled:
            # closed first, or the bar would be drawn below these lines
            self.bar.close()
            lines, _ = read_lines(Path(self.file.name))
            for line in closing_lines(config, lines, first, seconds, mfu_of):
                self.say(line)

    def close(self) -> None:
        """Close the progress bar (so that an error gets its own line), the file and the loggers."""
        if not self.enabled:
            return
        self.bar.close()
        with writing(self.file.name):
            self.file.close()
        file = Path(self.file.name)
        lines, _ = read_lines(file)
        if lines:
            # a full disk must not make the run fail here
            with suppress(OSError):
                drawing = curves({file.parent.name: lines})
                file.with_name("curves.svg").write_text(drawing, "utf-8")
        for close in self.closers:
            close()
