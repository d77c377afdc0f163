"""Train on the rows of a dataset, as a `Task`: all tasks except grpo."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from minitrain.data.datasets import open_dataset, with_steps
from minitrain.data.toys import TOYS
from minitrain.run.checkpoint.checkpointer import (
    Checkpointer,
    checkpoint_group,
    resume,
    save_step,
)
from minitrain.run.checkpoint.fingerprint import agreed_fingerprint
from minitrain.run.launch.start import start
from minitrain.run.monitor.health import batch_origin
from minitrain.run.monitor.progress import amount, bits_per_byte
from minitrain.run.tasks.exports import export
from minitrain.run.tasks.initial_weights import make_trainer
from minitrain.run.tasks.task import is_due
from minitrain.settings import Config
from minitrain.training.build import fp8_notes
from minitrain.training.ema import averaged_weights, check_averages
from minitrain.training.loop import training_steps
from minitrain.training.packing import Dataset


class Rows(NamedTuple):
    """The data of a run that trains on rows."""

    # the run's, with epochs converted to steps
    config: Config
    data: Dataset
    held_out: Dataset | None
    # a line on how often training goes over the data
    amount: str


def open_rows(config: Config) -> Rows:
    """Open the data of a run. Raises InputError for mistakes in it."""
    data, held_out = open_dataset(config)
    per_step = config.batch.global_
    with_number = with_steps(config, len(data), per_step)
    noun = "video" if config.task == "diffusion" else "row"
    line = amount(config, with_number.steps, len(data), per_step, noun)
    return Rows(with_number, data, held_out, line)


class RowsTask:
    """A run that trains on rows, as a Task (task.py)."""

    updates = 1

    def __init__(self, rows: Rows, folder: Path):
        self.folder = folder
        self.config = config = rows.config
        self.data = rows.data
        self.held_out = rows.held_out
        self.amount = rows.amount
        self.asks = getattr(self.data, "asks", None)
        self.bytes_per_token = getattr(self.held_out or self.data, "bytes_per_token", None)
        meshes = start(config)
        self.files = agreed_fingerprint(config)
        disks = checkpoint_group(config, range(dist.get_world_size()))
        settings = config.checkpoint
        self.checkpointer = Checkpointer(
            folder / "checkpoints", settings.keep, settings.asynchronous, disks
        )
        self.trainer = make_trainer(config, meshes)
        # must come before a checkpoint is loaded
        self.trainer.prepare(self.data, config.steps)
        if config.validation.every:
            self.trainer.prepare(self.held_out, config.validation.batches)

    def begin(self) -> int:
        self.first, self.last, _ = resume(self.checkpointer, self.config, self.trainer)
        return self.first

    def about(self) -> Iterator[str]:
        # a checkpoint may lack averages of the weights, or hold some that are no longer wanted
        if self.first:
            yield from check_averages(self.trainer.optimizer, self.config.optim, self.first)
        yield from fp8_notes(self.trainer.model, self.config, self.trainer.meshes)
        yield from filter(None, [getattr(self.data, "about", None), self.amount])
        if self.config.data.kind in TOYS and not self.first:
            yield self.draw("before.png")

    def steps(
        self, first: int, stays: Callable[[int], bool] = lambda step: True
    ) -> Iterator[dict[str, float]]:
        return training_steps(self.trainer, self.data, first, self.last.get("tokens", 0), stays)

    def origin(self, step: int) -> str:
        return batch_origin(self.data, self.config.batch.global_, step)

    def save(self, numbers: dict[str, float]) -> None:
        # `minitrain export` needs `asks`, but does not open the data
        save_step(self.checkpointer, numbers, self.trainer, asks=self.asks)

    def pin(self, step: int) -> None:
        self.checkpointer.pin(step)

    def finish(self, numbers: dict[str, float], stopping: Callable[[], str]) -> bool:
        """Add the loss on held-out data if it is due, and the exact matches after the last step."""
        config = self.config
        step = numbers["step"]
        if config.validation.every and is_due(step, config.validation.every, config.steps):
            with self.averaged():
                loss = self.trainer.evaluate(self.held_out, stopping)
            if loss is None:
                return False
            numbers["val_loss"] = loss
            if hasattr(self.trainer.objective, "held_out"):
                numbers |= self.trainer.objective.held_out(self.trainer.total)
            if self.bytes_per_token:
                numbers["val_bits_per_byte"] = bits_per_byte(loss, self.bytes_per_token)
        if step == config.steps and config.validation.exact_match:
            from minitrain.run.tasks.exact_match import exact_match

            questions = self.held_out.questions(config.validation.exact_match)
            with self.averaged():
                numbers["val_exact_match"] = exact_match(self.trainer.model, questions)
        return True

    def wait(self) -> None:
        self.checkpointer.wait()

    def end(self, say: Callable[[str], None]) -> None:
        with self.averaged():
            if self.config.data.kind in TOYS:
                say(self.draw("after.png"))
            export(self.trainer, self.config, self.folder, self.asks)

    def averaged(self) -> AbstractContextManager[None]:
        """Replace the weights by their averages inside a `with` statement, if optim.ema keeps them."""
        if not self.config.optim.ema:
            return nullcontext()
        return averaged_weights(self.trainer.model, self.trainer.optimizer)

    def draw(self, name: str) -> str:
        """Draw the model's videos of the toy world. All ranks generate; rank 0 writes the file."""
        from minitrain.run.tasks.draw_videos import draw_world

        kind = self.config.data.kind
        write = dist.get_rank() == 0
        return draw_world(self.trainer.model, kind, self.folder / name, write=write)
