"""The ways of a run's numbers: to `metrics.jsonl`, the terminal, and what metrics.* asks for.

Where there is no terminal, as under Slurm or Kubernetes, a bar would be one line of gigabytes,
which some show when it has ended: a line now and then takes its place. Rank 0 only.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count, filterfalse, takewhile
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm

from minitrain.errors import naming
from minitrain.formats.config_hf import export_fault, not_trained_with
from minitrain.formats.peft import other_dropout, unreadable_note
from minitrain.grpo.rewards import load_function
from minitrain.parallel.agreement import broadcast, lead
from minitrain.run.checkpoint.durable import write_durably
from minitrain.run.checkpoint.fingerprint import check_continuation
from minitrain.run.config.config_yaml import to_yaml
from minitrain.run.config.load import to_dict
from minitrain.run.monitor.draw_curves import curves
from minitrain.run.monitor.health import WINDOW
from minitrain.run.monitor.metrics_file import read_lines, to_line
from minitrain.run.monitor.progress import (
    LAYOUT,
    bar_width,
    closing_lines,
    fitting,
    goodness,
    telling,
    validation,
)
from minitrain.run.monitor.tensorboard import Board
from minitrain.settings import Config
from minitrain.training.optim import warmup_steps

PAUSE = 30.0  # seconds between lines, where they stand for a progress bar


def open_log(
    config: Config, folder: Path, files: dict[str, str], first: int, bytes_per_token: float | None
) -> "MetricsLog":
    """Open the log of a run in `folder` that goes on after step `first`, and tell what is special.

    files: the fingerprint of its data. Stores settings as config.yaml and what `check_continuation`
    compares, which raises InputError if it is not the same data. All ranks call it together.
    """
    file = folder / "fingerprint.json"
    notes = lead(None, check_continuation, file, config, files, first > 0)
    if dist.get_rank() == 0:
        write_durably(folder / "config.yaml", to_yaml(to_dict(config)))
        if not first:
            notes += keep_earlier(folder)
    log = MetricsLog(folder / "metrics.jsonl", config.steps, first, bytes_per_token)
    if log.enabled and config.metrics.tensorboard:
        log.loggers.append(Board(folder, first))
    if name := config.metrics.logger:
        log.loggers.append(load_function(f"metrics.logger={name!r}", name, {"numbers": {}}))
    if first:
        notes.append(f"resumed from step {first}")
    if first >= config.steps:
        notes.append("no step is left to do (for more: steps=N; to begin anew: another out_dir)")
    for note in notes_on_settings(config, first) + notes:
        log.say(note)
    return log


def notes_on_settings(config: Config, first: int) -> list[str]:
    """Return what a user may not expect of these settings, for a run that begins after `first`."""
    shape = config.model.config
    notes = (
        unreadable_note(shape, config.lora) + other_dropout(config.lora) if config.lora else []
    )
    warmup = warmup_steps(config.steps, config.optim)
    if warmup < config.optim.warmup:
        notes.append(
            f"optim.warmup={config.optim.warmup} is longer than steps={config.steps}: {warmup} steps warm up"
        )
    if config.fp8.experts and config.parallel.ep < shape.num_experts:
        notes.append(
            f"note: experts stay in bf16: fp8.experts=true needs parallel.ep={shape.num_experts}, one on each rank"
        )
    if first:
        return notes
    if config.task != "diffusion" and not config.lora and (fault := export_fault(shape)):
        notes.append(f"note: {fault}: it will be saved for minitrain alone, not for transformers")
    if not config.model.path and (config.lora or config.task in ("sft", "grpo", "dpo")):
        notes.append("note: what is fine-tuned are random weights (model=FOLDER names others)")
    if config.task != "diffusion" and (left_out := ", ".join(not_trained_with(shape))):
        notes.append(f"note: config.json says {left_out}, which training here is without")
    return notes


def keep_earlier(folder: Path) -> list[str]:
    """Rename what a run without a checkpoint has left in `folder`; returns what to tell."""
    notes = []
    for path in (folder / "metrics.jsonl", folder / "rollouts"):
        if path.exists() and path.stat().st_size:
            numbered = (path.with_stem(f"{path.stem}-{n}") for n in count(1))
            kept = path.rename(next(filterfalse(Path.exists, numbered)))
            notes.append(
                f"note: an earlier run left no checkpoint to continue from; its {path.name} is now {kept}"
            )
    if weights := sorted(file.name for file in folder.glob("*.safetensors")):
        notes.append(
            f"note: the result of this run will replace {', '.join(weights)} in {folder}"
        )
    return notes


class MetricsLog:
    """Appends steps to FILE as they come, each flushed at once.

    A resumed run drops the steps that it will repeat.
    bytes_per_token: of the text that is trained on, if it is known.
    """

    def __init__(self, file: Path, steps: int, start: int, bytes_per_token: float | None = None):
        self.enabled = dist.get_rank() == 0
        self.bytes_per_token = bytes_per_token
        # called with each step's numbers
        self.loggers: list[Callable[[dict], None]] = []
        found, strange = read_lines(file) if start and self.enabled else ([], 0)
        kept = [line for line in found if line["step"] <= start]
        steps_kept = {line["step"] for line in kept}
        # of the newest steps
        losses = [line["loss"] for line in kept if isinstance(line.get("loss"), float)]
        self.losses = deque(losses, maxlen=WINDOW)
        # how many updates each step skipped
        self.skips = [line.get("skipped", 0) for line in kept]
        # did the run end between step `start`'s checkpoint and its line?
        self.lacks_last = start > 0 and start not in steps_kept
        if not self.enabled:
            return
        write_durably(file, "".join(map(to_line, kept)))
        self.best = max(map(goodness, kept), default=-math.inf)
        self.file = file.open("a", encoding="utf-8")
        done = start - self.lacks_last
        # disable=None: unless it is a terminal
        self.bar = tqdm(
            total=steps, initial=done, ncols=bar_width(), bar_format=LAYOUT, disable=None
        )
        self.next_line = time.monotonic()
        if lost := done - len(steps_kept):
            self.say(f"note: {file} lacks {lost} of the {start} steps that are done")
        if strange:
            self.say(
                f"note: lines of {file} that were not the numbers of a step are gone: {strange}"
            )

    def step(self, numbers: dict) -> None:
        """Store one step's numbers, with every digit of their floats, and show the main ones."""
        if not self.enabled:
            return
        with naming(self.file.name):
            self.file.write(to_line(numbers))
            self.file.flush()
        self.losses.append(numbers["loss"])
        self.skips.append(numbers["skipped"])
        for logger in list(self.loggers):
            self.tell(logger, numbers)
        told = telling(numbers, self.bytes_per_token)
        self.bar.set_postfix_str(fitting(told, self.bar.total), refresh=False)
        self.bar.update()
        step = numbers["step"]
        now = time.monotonic()
        tested = validation(numbers)
        due = tested or step == self.bar.total or now >= self.next_line
        if self.bar.disable and due:
            self.next_line = now + PAUSE
            self.say(f"step {step:,} of {self.bar.total:,}: {told}")
        if tested:
            good = goodness(numbers)
            self.say(f"step {step:,}  val {tested}{', best' if good > self.best else ''}")
            self.best = max(good, self.best)

    def tell(self, logger: Callable[[dict], None], numbers: dict) -> None:
        """Call a logger. Its failure must not end a run: it is told, and the logger called no more."""
        try:
            logger(dict(numbers))
        except Exception as error:
            self.loggers.remove(logger)
            self.say(
                f"warning: a logger failed at step {numbers['step']}, and is called no more: {error!r}"
            )

    def sync(self) -> None:
        """Return when the disk has all numbers so far.

        After a power cut, a checkpoint must not be there without them.
        """
        if self.enabled:
            with naming(self.file.name):
                os.fsync(self.file.fileno())

    def skipped_steps(self, updates: int = 1) -> int:
        """Return how many of the last steps skipped all their updates.

        All ranks call it together.
        """
        skipped = takewhile(lambda skipped: skipped == updates, reversed(self.skips))
        return broadcast(len(list(skipped)))

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.enabled:
            self.bar.write(text)

    def end(self, config: Config, first: int, seconds: float, mfu_of: str) -> None:
        """Say how the run went: see `closing_lines`."""
        if self.enabled:
            lines, _ = read_lines(Path(self.file.name))
            for title, text in closing_lines(config, lines, first, seconds, mfu_of).items():
                self.say(f"{title:<11} {text}")

    def close(self) -> None:
        """End the progress bar's line, so that an error has one of its own, and the files."""
        if not self.enabled:
            return
        self.bar.close()
        with naming(self.file.name):
            self.file.close()
        file = Path(self.file.name)
        lines, _ = read_lines(file)
        if lines:
            # a disk that is full must end no run
            with suppress(OSError):
                drawing = curves({file.parent.name: lines})
                file.with_name("curves.svg").write_text(drawing, "utf-8")
        for logger in self.loggers:
            if isinstance(logger, Board):
                logger.close()
