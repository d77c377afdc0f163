"""Find settings that were given but have no effect on this run.

A table holds the settings that only some runs read, and which; every run reads all others. Such a
setting gets a note and no error, because one base config may serve several tasks.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from minitrain.data.sources import data_by_source
from minitrain.run.config.task_checks import MADE_UP
from minitrain.settings import Config
from minitrain.tasks import TASKS
from minitrain.training.mtp_loss import knows_mtp


class Reader(NamedTuple):
    """The condition under which a setting is read."""

    # in a user's words
    name: str
    # returns something true for runs that meet it
    runs: Callable[[Config], Any]


def kinds(c: Config) -> set[str]:
    return {data.kind for data in data_by_source(c.data).values()}


def has_chats(c: Config) -> bool:
    return TASKS[c.task].chats and "jsonl" in kinds(c)


TOKENS = Reader("data.kind=tokens", lambda c: "tokens" in kinds(c))
FILES = Reader("files of data", lambda c: kinds(c) - {*MADE_UP})
PROBLEMS = Reader(
    "task=grpo, data.kind=jsonl", lambda c: c.task == "grpo" and "jsonl" in kinds(c)
)
VALIDATION = Reader("validation.every", lambda c: c.validation.every)
CORRECTION = Reader("grpo.importance", lambda c: c.grpo.importance != "none")
ENVIRONMENT = Reader("grpo.environment", lambda c: c.grpo.environment)
NORMAL = Reader(
    "diffusion.sampling=logit_normal or mixed",
    lambda c: c.diffusion.sampling in ("logit_normal", "mixed"),
)
SPLITS = Reader("no data.validation_path", lambda c: not c.data.validation_path)

# section or setting -> when it is read. A setting in a section needs both conditions
READERS: dict[str, Reader] = {
    "diffusion": Reader("task=diffusion", lambda c: c.task == "diffusion"),
    "dpo": Reader("task=dpo", lambda c: c.task == "dpo"),
    "distill": Reader("distill.teacher", lambda c: c.teachers),
    "distill.divergence": Reader("tasks other than grpo", lambda c: c.task != "grpo"),
    "distill.beta": Reader("distill.divergence=js", lambda c: c.distill.divergence == "js"),
    "grpo": Reader("task=grpo", lambda c: c.task == "grpo"),
    "rollout": Reader("task=grpo", lambda c: c.task == "grpo"),
    "mtp_weight": Reader(
        "models with num_nextn_predict_layers, except task=dpo, reward and distillation",
        lambda c: getattr(c.model.config, "num_nextn_predict_layers", 0) and knows_mtp(c),
    ),
    "fp8": Reader("precision=fp8", lambda c: c.precision == "fp8"),
    "steps": Reader("epochs=0", lambda c: not c.epochs),
    "data.size": Reader("mock videos", lambda c: c.task == "diffusion" and c.data.kind == "mock"),
    "data.text_tokens": Reader("task=diffusion", lambda c: c.task == "diffusion"),
    "data.exclude": FILES,
    "data.on_error": FILES,
    "data.field": Reader(
        "task=pretrain, data.kind=jsonl", lambda c: c.task == "pretrain" and "jsonl" in kinds(c)
    ),
    "data.template": Reader(
        "chats of data.kind=jsonl, or task=grpo", lambda c: c.task == "grpo" or has_chats(c)
    ),
    "data.over_long": Reader("chats of data.kind=jsonl", has_chats),
    "data.token_dtype": TOKENS,
    "data.document_end": TOKENS,
    "data.validation": SPLITS,
    "data.validation_path": Reader(
        "validation.every or exact_match",
        lambda c: c.validation.every or c.validation.exact_match,
    ),
    "validation.batches": VALIDATION,
    "parallel.context": Reader("parallel.cp above 1", lambda c: c.parallel.cp > 1),
    "parallel.schedule": Reader("parallel.pp above 1", lambda c: c.parallel.pp > 1),
    "optim.betas": Reader("optim.name=adamw or muon", lambda c: c.optim.name != "sgd"),
    "optim.eps": Reader("optim.name=adamw or muon", lambda c: c.optim.name != "sgd"),
    "optim.ema_warmup": Reader("optim.ema", lambda c: c.optim.ema),
    "optim.decay": Reader("optim.schedule=wsd", lambda c: c.optim.schedule == "wsd"),
    "optim.final_lr": Reader(
        "an optim.schedule that falls", lambda c: c.optim.schedule != "constant"
    ),
    "lora.dropout_position": Reader("lora.dropout", lambda c: c.lora.dropout),
    "diffusion.mean": NORMAL,
    "diffusion.std": NORMAL,
    "diffusion.mode_scale": Reader(
        "diffusion.sampling=mode", lambda c: c.diffusion.sampling == "mode"
    ),
    "diffusion.uniform_share": Reader(
        "diffusion.sampling=mixed", lambda c: c.diffusion.sampling == "mixed"
    ),
    "grpo.reward": Reader("no grpo.environment", lambda c: not c.grpo.environment),
    "grpo.turns": ENVIRONMENT,
    "grpo.environment_seconds": ENVIRONMENT,
    "grpo.environment_failure": ENVIRONMENT,
    "grpo.environment_wait": ENVIRONMENT,
    "grpo.prompt_key": PROBLEMS,
    "grpo.answer_key": PROBLEMS,
    "grpo.mock_digits": Reader("data.kind=mock", lambda c: c.data.kind == "mock"),
    "grpo.kl_estimator": Reader("grpo.kl", lambda c: c.grpo.kl),
    "grpo.importance_low": CORRECTION,
    "grpo.importance_high": CORRECTION,
    "grpo.overlong_penalty": Reader("grpo.overlong_buffer", lambda c: c.grpo.overlong_buffer),
    "grpo.warmup_lr": Reader("grpo.warmup_steps", lambda c: c.grpo.warmup_steps),
    "grpo.in_flight_cache": Reader("grpo.in_flight", lambda c: c.grpo.in_flight),
    "grpo.eval_samples": VALIDATION,
}


def unread(config: Config, also_read: Collection[str] = ()) -> Iterator[str]:
    """Yield a note for each setting that differs from its default and that this run does not read.

    also_read: sections that this run reads for any task, such as those of `bench.py --generate`.
    """
    for name, value in given(config):
        section = name.partition(".")[0]
        if section in also_read:
            continue
        for key in dict.fromkeys((section, name)):
            reader = READERS.get(key)
            if reader and not reader.runs(config):
                shown = str(value).lower() if isinstance(value, bool) else value
                yield f"note: nothing reads {name}={shown}, which is for {reader.name}"
                break


def given(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each setting that differs from its default."""
    defaults = Config()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("model", "reference"):
            continue
        if not dataclasses.is_dataclass(value):
            if value != getattr(defaults, field.name):
                yield field.name, value
            continue
        default = type(value)()
        for each in dataclasses.fields(value):
            own = getattr(value, each.name)
            if own != getattr(default, each.name):
                yield f"{field.name}.{each.name.rstrip('_')}", own
