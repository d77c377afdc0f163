"""A training run, from its config to the model that it exports: what python -m minitrain.train does."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch.distributed as dist

from minitrain.data.datasets import open_dataset, with_steps
from minitrain.data.files import has_tokenizer
from minitrain.data.tokenizer import check_same_ids
from minitrain.errors import refused
from minitrain.formats.hf import find_weights
from minitrain.run.checkpoint.checkpointer import Checkpointer, resume, save_step
from minitrain.run.checkpoint.fingerprint import agreed_fingerprint
from minitrain.run.config.environment import world_size
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.launch.failures import rank, record_flights, recorded
from minitrain.run.launch.lock import locked
from minitrain.run.launch.start import checkpoint_group, make_trainer, start
from minitrain.run.monitor.health import batch_origin
from minitrain.run.monitor.progress import bits_per_byte, opening
from minitrain.run.tasks.draw_videos import draw_shapes
from minitrain.run.tasks.exact_match import exact_match
from minitrain.run.tasks.exports import check_free_of_others, export, with_ids_of_data
from minitrain.run.tasks.grpo_task import GrpoTask
from minitrain.run.tasks.task import run_task
from minitrain.settings import Config
from minitrain.training.dpo import add_reference
from minitrain.training.ema import averaged_weights, check_averages
from minitrain.training.loop import is_due, training_steps


def train(config: Config) -> None:
    """Train as the config says, from the newest checkpoint in its out_dir if there is one."""
    check_layout(config, world_size())
    config = with_ids_of_data(config)
    if config.model.path:
        find_weights(config.model.config, config.model.path)  # before room is made for them
    for source in filter(None, (config.model.path, config.lora and config.lora.path)):
        if has_tokenizer(config):
            check_same_ids(config.data.tokenizer, source, "data.tokenizer=")
    folder = Path(config.out_dir)
    check_free_of_others(config, folder)
    with refused(f"out_dir={config.out_dir!r} cannot be created"):
        folder.mkdir(parents=True, exist_ok=True)
    record_flights(folder)
    if rank() == 0:
        print(opening(config, world_size()), flush=True)
    with locked(folder, leads=rank() == 0), recorded(folder):
        if config.task == "grpo":
            task = GrpoTask(config, folder)
            task.begin()
        else:
            task = RowsTask(config, folder)
        run_task(task, task.config, folder)


class RowsTask:
    """Training on the rows of a dataset, as all tasks but grpo do; see run/tasks/task.py."""

    updates = 1

    def __init__(self, config: Config, folder: Path):
        self.folder = folder
        self.data, self.held_out = open_dataset(config)
        self.config = config = with_steps(config, len(self.data), config.batch.global_)
        self.bytes_per_token = getattr(self.held_out or self.data, "bytes_per_token", None)
        meshes = start(config)
        self.files = agreed_fingerprint(config)
        disks = checkpoint_group(config, range(dist.get_world_size()))
        settings = config.checkpoint
        self.checkpointer = Checkpointer(
            folder / "checkpoints", settings.keep, settings.asynchronous, disks
        )
        self.wait = self.checkpointer.wait
        self.trainer = make_trainer(config, meshes)
        if config.task == "dpo":
            # before a checkpoint is read
            add_reference(self.trainer, self.data, config.steps)
            if config.validation.every:
                add_reference(self.trainer, self.held_out, config.validation.batches)
        self.averaged = partial(averaged_weights, self.trainer.model, self.trainer.optimizer)
        # one rank writes what all draw
        self.draw = partial(draw_shapes, self.trainer.model, write=dist.get_rank() == 0)
        self.first, self.last = resume(self.checkpointer, config, self.trainer)
        self.notes = check_averages(self.trainer.optimizer, config.optim, self.first)

    def about(self) -> Iterator[str]:
        yield from self.notes
        if about := getattr(self.data, "about", None):
            yield about
        if self.config.data.kind == "shapes" and not self.first:
            yield self.draw(self.folder / "before.png")

    def steps(self, first: int) -> Iterator[dict[str, float]]:
        return training_steps(self.trainer, self.data, first, self.last.get("tokens", 0))

    def origin(self, step: int) -> str:
        return batch_origin(self.data, self.config.batch.global_, step)

    def save(self, numbers: dict[str, float]) -> None:
        save_step(self.checkpointer, numbers, self.trainer)

    def finish(self, numbers: dict[str, float], stopping: Callable[[], str]) -> bool:
        """Add the loss on held-out data, and after the last step the exact matches."""
        config = self.config
        step = numbers["step"]
        if config.validation.every and is_due(step, config.validation.every, config.steps):
            with self.averaged():
                loss = self.trainer.evaluate(self.held_out, stopping)
            if loss is None:
                return False
            numbers["val_loss"] = loss
            if self.bytes_per_token:
                numbers["val_bits_per_byte"] = bits_per_byte(loss, self.bytes_per_token)
        if step == config.steps and config.validation.exact_match:
            questions = self.held_out.questions(config.validation.exact_match)
            with self.averaged():
                numbers["val_exact_match"] = exact_match(self.trainer.model, questions)
        return True

    def end(self) -> Iterator[str]:
        with self.averaged():
            if self.config.data.kind == "shapes":
                yield self.draw(self.folder / "after.png")
            export(self.trainer, self.config, self.folder, getattr(self.data, "asks", None))
