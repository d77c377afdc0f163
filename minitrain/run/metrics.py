"""Where a run's numbers go: one JSON object per step in `metrics.jsonl`, a progress bar, and
TensorBoard if asked for.

Where there is no terminal, as under Slurm or Kubernetes, a bar would be one line of gigabytes,
which some show when it has ended: a line now and then takes its place. Rank 0 only.
"""

import json
import math
import os
import time
from collections import deque
from itertools import count, takewhile
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm

from minitrain.errors import naming
from minitrain.formats.config_hf import not_trained_with
from minitrain.formats.peft import other_dropout, unreadable_note
from minitrain.models.zoo import empty_model
from minitrain.parallel.agreement import broadcast
from minitrain.run.config_yaml import to_yaml
from minitrain.run.durable import write_durably
from minitrain.run.fingerprint import check_continuation
from minitrain.run.health import WINDOW
from minitrain.run.launch import pick_device
from minitrain.run.rendezvous import world_size
from minitrain.settings import Config, to_dict
from minitrain.training.optim import warmup_steps

PAUSE = 30.0  # seconds between lines, where they stand for a progress bar


def open_log(config: Config, folder: Path, files: dict[str, str], first: int) -> "MetricsLog":
    """The log of a run in `folder` that goes on after step `first`, with what has changed since it
    began.

    files: the fingerprint of its data. Stores settings as config.yaml and what `check_continuation`
    compares, which raises InputError if it is not the same data. All ranks call it together.
    """
    notes = check_continuation(folder / "fingerprint.json", config, files, resumed=first > 0)
    if dist.get_rank() == 0:
        write_durably(folder / "config.yaml", to_yaml(to_dict(config)))
        if not first:
            notes += keep_earlier(folder)
    log = MetricsLog(folder / "metrics.jsonl", config.steps, first, config.metrics.tensorboard)
    resumed = [f"resumed from step {first}"] * (first > 0)
    finished = ["no step is left to do (for more: steps=N; to begin anew: another out_dir)"] * (
        first >= config.steps
    )
    shape = config.model.config
    adapters = (
        unreadable_note(shape, config.lora) + other_dropout(config.lora) if config.lora else []
    )
    left_out = ", ".join(not_trained_with(shape) if config.task != "diffusion" else [])
    if left_out and first == 0:
        notes.insert(0, f"note: config.json says {left_out}, which training here is without")
    warmup = warmup_steps(config.steps, config.optim)
    short = [
        f"optim.warmup={config.optim.warmup} is longer than steps={config.steps}: {warmup} steps warm up"
    ]
    shortened = short if warmup < config.optim.warmup else []
    if (config.lora or config.task in ("sft", "grpo")) and not config.model.path and first == 0:
        notes.insert(0, "note: what is fine-tuned are random weights (model=FOLDER names others)")
    for note in [*adapters, *shortened, *notes, *resumed, *finished]:
        log.say(note)
    return log


def keep_earlier(folder: Path) -> list[str]:
    """Rename what a run without a checkpoint has left in `folder`; returns what to tell."""
    notes = []
    for path in (folder / "metrics.jsonl", folder / "rollouts"):
        if path.exists() and path.stat().st_size:
            numbered = (path.with_stem(f"{path.stem}-{n}") for n in count(1))
            kept = path.rename(next(new for new in numbered if not new.exists()))
            notes.append(
                f"note: an earlier run left no checkpoint to continue from; its {path.name} is now {kept}"
            )
    if weights := sorted(file.name for file in folder.glob("*.safetensors")):
        notes.append(f"note: the result of this run will replace {', '.join(weights)} in {folder}")
    return notes


def summary(config: Config) -> str:
    """What is trained, how, on what, and where it goes, in a line."""
    model = config.model
    ranks = world_size()
    size = sum(p.numel() for p in empty_model(model.config).parameters())
    device = pick_device(config.device).type.upper()
    weights = (
        f"weights of {model.path}"
        if model.path
        else f"{model.name or 'a model'} with random weights"
    )
    if config.lora and config.lora.path:
        weights += f" and adapters of {config.lora.path}"
    length = f"{config.epochs:g} epochs" if config.epochs else f"{config.steps:,} steps"
    return (
        f"{weights}, {size / 1e6:,.1f}M parameters: {config.task} in {config.precision} on {ranks} x {device}, "
        f"{length}, into {config.out_dir}"
    )


class MetricsLog:
    """Appends steps to FILE as they come, each flushed at once; a resumed run drops the steps it
    will repeat.

    tensorboard: show all numbers there too, from the folder `tensorboard` beside FILE.
    """

    def __init__(self, file: Path, steps: int, start: int, tensorboard: bool = False):
        self.enabled = dist.get_rank() == 0
        self.lacks_last = False  # did the run end between step `start`'s checkpoint and its line?
        self.losses: deque[float] = deque(maxlen=WINDOW)  # of the newest steps
        self.skips: list[int] = []  # how many updates each step skipped
        if not self.enabled:
            return
        found, strange = read_lines(file) if start else ([], 0)
        kept = [line for line in found if line["step"] <= start]
        write_durably(file, "".join(map(to_line, kept)))
        self.lacks_last = start > 0 and all(line["step"] != start for line in kept)
        self.losses.extend(line["loss"] for line in kept if isinstance(line.get("loss"), float))
        self.skips.extend(line.get("skipped", 0) for line in kept)
        self.file = file.open("a", encoding="utf-8")
        self.board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # what a killed run wrote after step `start` is hidden
            self.board = SummaryWriter(str(file.parent / "tensorboard"), purge_step=start + 1)
        # disable: None stands for "unless it is a terminal"
        self.bar = tqdm(
            total=steps, initial=start - self.lacks_last, unit="step", smoothing=0.1, disable=None
        )
        self.next_line = time.monotonic()
        lost = start - self.lacks_last - len({line["step"] for line in kept})
        if lost:
            self.say(f"note: {file} lacks {lost} of the {start} steps that are done")
        if strange:
            self.say(
                f"note: lines of {file} that were not the numbers of a step are gone: {strange}"
            )

    def step(self, numbers: dict) -> None:
        """Store one step's numbers, with every digit of their floats, and show the most telling
        ones.
        """
        if self.enabled:
            with naming(self.file.name):
                self.file.write(to_line(numbers))
                self.file.flush()
            self.losses.append(numbers["loss"])
            self.skips.append(numbers["skipped"])
            for name, value in numbers.items():
                if self.board and name != "step" and isinstance(value, int | float):
                    self.board.add_scalar(name, value, numbers["step"])
            shown = {
                "loss": f"{numbers['loss']:.4f}",
                "tokens/s": f"{numbers['tokens_per_sec']:,.0f}",
            }
            if "val_loss" in numbers:
                shown["val"] = f"{numbers['val_loss']:.4f}"
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update()
            last = numbers["step"] == self.bar.total
            if self.bar.disable and (last or "val" in shown or time.monotonic() >= self.next_line):
                self.next_line = time.monotonic() + PAUSE
                told = ", ".join(f"{name} {value}" for name, value in shown.items())
                self.say(f"step {numbers['step']:,} of {self.bar.total:,}: {told}")

    def sync(self) -> None:
        """Return when the disk has all numbers so far: a power cut must not leave a checkpoint and
        take them.
        """
        if self.enabled:
            with naming(self.file.name):
                os.fsync(self.file.fileno())

    def skipped_steps(self, updates: int = 1) -> int:
        """How many of the last steps skipped all their updates. All ranks call it together."""
        return broadcast(
            len(list(takewhile(lambda skipped: skipped == updates, reversed(self.skips))))
        )

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        if self.enabled:
            self.bar.write(text)

    def stop(self, step: int, signal: str) -> None:
        """Say that the run ends because of a signal."""
        self.say(
            f"{signal}: stopped after step {step}, with a checkpoint from which the same command continues"
        )

    def close(self) -> None:
        """End the progress bar's line, so that an error has one of its own, and the files."""
        if self.enabled:
            self.bar.close()
            with naming(self.file.name):
                self.file.close()
            if self.board:
                self.board.close()


def to_line(numbers: dict) -> str:
    """A line of JSON, which knows only finite numbers: all others, as those of a skipped step, are
    null.
    """
    finite = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def read_lines(file: Path) -> tuple[list[dict], int]:
    """The steps' numbers in a metrics.jsonl, and how many other lines it has, blank ones apart.

    A kill may have cut the last one short, and someone may have edited the file. There may be none.
    """
    if not file.exists():
        return [], 0
    texts = [
        text
        for text in file.read_text(encoding="utf-8-sig", errors="replace").splitlines()
        if text.strip()
    ]
    lines = [line for line in map(read_line, texts) if line is not None]
    return lines, len(texts) - len(lines)


def read_line(text: str) -> dict | None:
    try:
        line = json.loads(
            text, parse_constant=lambda word: None
        )  # NaN, which others may have written
        return line if type(line["step"]) is int else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
