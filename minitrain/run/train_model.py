"""A training run, from its config to the model that it exports: what python -m minitrain.train does."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from minitrain.data.chat import end_of_reply
from minitrain.data.chat_templates import Template, asking_with, choose_template
from minitrain.data.datasets import open_dataset, with_steps
from minitrain.data.tokenizer import (
    CHAT_TEMPLATE,
    check_free_of_tokenizer,
    check_same_ids,
    load_tokenizer,
)
from minitrain.errors import InputError, refused
from minitrain.formats.config_hf import end_also_at
from minitrain.formats.hf import check_free_of_adapters, find_weights, save_tensors
from minitrain.formats.peft import save_adapter
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.lora import is_adapter
from minitrain.models.zoo import model_config
from minitrain.parallel.pipeline import Pipeline
from minitrain.parallel.shards import full_tensors
from minitrain.run.checkpoint import Checkpointer, resume, save_step
from minitrain.run.evaluate import exact_match
from minitrain.run.failures import rank, record_flights, recorded
from minitrain.run.fingerprint import agreed_fingerprint
from minitrain.run.generate_video import draw_shapes
from minitrain.run.health import batch_origin
from minitrain.run.launch import checkpoint_group, make_trainer, start, wait_for_ever
from minitrain.run.lock import locked
from minitrain.run.metrics import MetricsLog, summary
from minitrain.run.parallel_checks import check_layout
from minitrain.run.policy import Run
from minitrain.run.rendezvous import world_size
from minitrain.run.task import run_task
from minitrain.settings import Config
from minitrain.training.loop import Trainer, is_due, training_steps


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
        print(summary(config), flush=True)
    with locked(folder, leads=rank() == 0), recorded(folder):
        if config.task == "grpo":
            task = PolicyTask(config, folder)
            task.begin()
        else:
            task = RowsTask(config, folder)
        run_task(task, task.config, folder)


class RowsTask:
    """Training on the rows of a dataset, as all tasks but grpo do; see run/task.py."""

    updates = 1

    def __init__(self, config: Config, folder: Path):
        self.folder = folder
        self.data, self.held_out = open_dataset(config)
        self.config = config = with_steps(config, len(self.data), config.batch.global_)
        meshes = start(config)
        self.files = agreed_fingerprint(config)
        disks = checkpoint_group(config, range(dist.get_world_size()))
        settings = config.checkpoint
        self.checkpointer = Checkpointer(
            folder / "checkpoints", settings.keep, settings.asynchronous, disks
        )
        self.wait = self.checkpointer.wait
        self.trainer = make_trainer(config, meshes)
        names = ("loss", "tokens_per_sec", "tokens")
        model = self.trainer.model
        optimizer = self.trainer.optimizer
        self.first, self.last = resume(self.checkpointer, config, model, optimizer, *names)

    def about(self) -> Iterator[str]:
        if about := getattr(self.data, "about", None):
            yield about
        if self.config.data.kind == "shapes" and not self.first:
            yield self.draw("before.png")

    def steps(self, first: int) -> Iterator[dict[str, float]]:
        return training_steps(self.trainer, self.data, first, self.last.get("tokens", 0))

    def origin(self, step: int) -> str:
        return batch_origin(self.data, self.config.batch.global_, step)

    def save(self, numbers: dict[str, float]) -> None:
        save_step(self.checkpointer, numbers, self.trainer.model, self.trainer.optimizer)

    def finish(
        self, numbers: dict[str, float], log: MetricsLog, stopping: Callable[[], str]
    ) -> bool:
        """Add the loss on held-out data, and after the last step the exact matches."""
        config = self.config
        step = numbers["step"]
        held_out = self.held_out
        if config.validation.every and is_due(step, config.validation.every, config.steps):
            loss = self.trainer.evaluate(held_out, stopping)
            if loss is None:
                return False
            numbers["val_loss"] = loss
            if bytes_per_token := getattr(held_out, "bytes_per_token", None):
                numbers["val_bits_per_byte"] = loss / math.log(2) / bytes_per_token
        if step == config.steps and config.validation.exact_match:
            questions = held_out.questions(config.validation.exact_match)
            numbers["val_exact_match"] = exact_match(self.trainer.model, questions)
            log.say(f"exact match on held-out chats: {numbers['val_exact_match']:.1%}")
        return True

    def end(self, log: MetricsLog) -> None:
        if self.config.data.kind == "shapes":
            log.say(self.draw("after.png"))
        export(self.trainer, self.config, self.folder, getattr(self.data, "asks", None))

    def draw(self, name: str) -> str:
        return draw_shapes(self.trainer.model, self.folder / name, write=dist.get_rank() == 0)


class PolicyTask(Run):
    """Training by GRPO."""

    def end(self, log: MetricsLog) -> None:
        if self.learner:
            export(self.learner.trainer, self.config, self.folder)


def export(trainer: Trainer, config: Config, folder: Path, asks: str | None = None) -> None:
    """Write the model in Hugging Face layout, or its adapters in PEFT's; every rank must call it,
    rank 0 writes.

    asks: the prompt that replies follow in training, if the tokenizer's chat template has another
    one.
    """
    wanted = is_adapter if config.lora else lambda name: True
    model = trainer.model
    tensors = (
        model.full_tensors(wanted) if isinstance(model, Pipeline) else full_tensors(model, wanted)
    )
    wait_for_ever()  # others do while rank 0 writes; the watch sees those that die
    if dist.get_rank() != 0:
        for _ in tensors:
            pass
        return
    shape = config.model.config
    end = document_end(config)
    if has_tokenizer(config):
        tokenizer = load_tokenizer(config.data.tokenizer)
        tokenizer.save(folder)
        if config.task != "pretrain":
            template = choose_template(config.data.template, tokenizer)
            end = end_of_reply(template, tokenizer)
            if isinstance(template, Template):  # else it came with the tokenizer
                (folder / CHAT_TEMPLATE).write_text(template.jinja(tokenizer), encoding="utf-8")
            elif asks is not None:
                (folder / CHAT_TEMPLATE).write_text(
                    asking_with(asks, tokenizer.chat_template), encoding="utf-8"
                )
        if shape.eos_token_id is None:
            shape = replace(shape, eos_token_id=tokenizer.eos_id)
    if config.task != "diffusion":
        shape = end_also_at(shape, end)  # where transformers ends a text
    if config.lora:
        save_adapter(tensors, shape, config.lora, folder, config.model.path or config.model.name)
    else:
        save_tensors(tensors, shape, next(model.parameters()).dtype, folder)


def check_free_of_others(config: Config, folder: Path) -> None:
    """Raises InputError for what an earlier run has left in `folder` that would be taken for this
    one's.
    """
    if config.lora is None and config.task != "diffusion":
        check_free_of_adapters(folder)
    if config.lora and (folder / "config.json").exists():
        raise InputError(
            f"{folder} holds a model, which adapters beside it do not belong to (use another out_dir)"
        )
    if not has_tokenizer(config):
        check_free_of_tokenizer(folder)


def with_ids_of_data(config: Config) -> Config:
    """Return the config with its data's bos, eos and pad, in place of the zoo's, where weights
    start at random.

    Raises InputError for an eos or bos in the settings that is neither the zoo's nor the
    tokenizer's.
    """
    shape = config.model.config
    if config.model.path or config.task == "diffusion":
        return config
    if has_tokenizer(config):
        tokenizer = load_tokenizer(config.data.tokenizer)
        ids = {"bos_token_id": tokenizer.named_id("bos"), "eos_token_id": tokenizer.eos_id}
        pad = tokenizer.named_id("pad")
        zoo = model_config(config.model.name) if config.model.name else DecoderConfig()
        for key, own in ids.items():
            given = getattr(shape, key)
            if isinstance(given, list) and own in given:
                ids[key] = given
            elif given not in (None, own, getattr(zoo, key)):
                raise InputError(
                    f"model.{key}={given}, but data.tokenizer={config.data.tokenizer} has {own}"
                )
        extra = {"pad_token_id": pad if pad is not None and pad < shape.vocab_size else None}
        shape = replace(shape, **ids, extra_config=shape.extra_config | extra)
    elif document_end(config) is not None:
        shape = replace(shape, eos_token_id=document_end(config))
    return replace(config, model=replace(config.model, config=shape))


def document_end(config: Config) -> int | None:
    """Return the token that ends a document in files of tokens, if there is one."""
    return config.data.document_end if config.data.kind == "tokens" else None


def has_tokenizer(config: Config) -> bool:
    """Is data.tokenizer what made the run's tokens? Files of tokens may be any other's, unless it
    is named.
    """
    kind = config.data.kind
    return (
        kind in ("text", "jsonl")
        or config.task == "grpo"
        or (kind == "tokens" and config.data.tokenizer != "bytes")
    )
