"""Check settings against each other: `validate`, and what runs of every task must meet.

All run before anything is built or a process group starts. The limits of single fields are metadata
in settings.py. All other checks are generators of (is it wrong?, message) pairs: the first pair that
is wrong becomes the error. What each task needs is in task_checks.py, what parallel layouts need in
layout_checks.py.
"""

import dataclasses
import importlib.util
import math
import operator
import os
from typing import Any

from minitrain.data.sources import data_by_source
from minitrain.errors import Faults, refuse
from minitrain.formats.peft import adapter_shapes
from minitrain.models.fp8_forms import FORMS
from minitrain.rollout.sampling import MIN_TEMPERATURE
from minitrain.run.config.layout_checks import (
    context_faults,
    expert_parallel_faults,
    pipeline_faults,
    tensor_faults,
    unused_pipeline_faults,
)
from minitrain.run.config.task_checks import (
    MADE_UP,
    diffusion_faults,
    distill_faults,
    grpo_faults,
    language_faults,
    replay_faults,
)
from minitrain.settings import Config
from minitrain.tasks import TASKS
from minitrain.training.sigmas import check_diffusion

# kinds of data that can be mixed
SOURCES = ("text", "jsonl", "tokens")
# kind of limit -> what a number within it meets, and the words for it
COMPARISONS = {
    "least": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "most": (operator.le, "at most"),
    "below": (operator.lt, "below"),
}


def validate(c: Config, of_shape: bool = False) -> None:
    """Raise InputError for settings that contradict each other.

    Checks that depend on the number of ranks are in `check_layout`.
    of_shape: only those whether a language model fits the rows and the layout.
    """
    p = c.parallel
    videos = c.task == "diffusion"
    checks = [
        (True, _range_faults),
        (True, _value_faults),
        (True, _data_faults),
        (c.data.sources, _source_faults),
        (True, _run_faults),
        (True, _precision_faults),
        (p.ep > 1, expert_parallel_faults),
        (c.validation.every or c.validation.exact_match, _held_out_faults),
        (c.lora, _lora_faults),
        (videos, diffusion_faults),
        (not videos, language_faults),
        (not videos and p.tp > 1, tensor_faults),
        (not videos and p.cp > 1, context_faults),
        (p.pp == 1, unused_pipeline_faults),
        (p.pp > 1, pipeline_faults),
        (True, distill_faults),
        (c.task == "grpo", grpo_faults),
        (c.task == "grpo" and c.grpo.replay_routing, replay_faults),
    ]
    for concerned, faults in checks:
        if concerned and (faults in OF_SHAPE or not of_shape):
            refuse(faults(c))
    if videos:
        check_diffusion(c.diffusion)


def _range_faults(section: Any, prefix: str = "") -> Faults:
    """Check numbers against the limits of their fields."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        name = prefix + field.name.rstrip("_")
        if dataclasses.is_dataclass(value):
            yield from _range_faults(value, f"{name}.")
        elif field.metadata:
            kept = (COMPARISONS[kind][0](value, n) for kind, n in field.metadata.items())
            yield not all(kept), f"{name}={value} must be {_range(**field.metadata)}"
            yield value >= 2**63, f"{name}={value} must be at most {2**63 - 1:,}"


def _range(**limits: float) -> str:
    """Return in words where the numbers within these limits lie. limits: see `number`."""
    if limits.keys() == {"least", "most"}:
        return f"between {limits['least']:,} and {limits['most']:,}"
    return " and ".join(f"{COMPARISONS[kind][1]} {n:,}" for kind, n in limits.items())


def _value_faults(c: Config) -> Faults:
    """Check values that a least and a most cannot describe, and those that need another setting."""
    b = c.batch
    o = c.optim
    # with a smaller eps, weights without a gradient would be updated by 0 / 0
    yield o.name != "sgd" and o.eps < 1e-30, f"optim.eps={o.eps} must be at least 1e-30"
    yield (
        o.name == "sgd" and o.offload,
        "optim.offload=true is for optim.name=adamw or muon, not sgd, which has no states (leave it out)",
    )
    shards = c.parallel.dp_shard
    yield (
        shards < 1 and shards != -1,
        f"parallel.dp_shard={shards} must be at least 1, or -1 for all remaining ranks",
    )
    yield b.global_ % b.micro, f"batch.micro={b.micro} does not divide batch.global={b.global_}"
    yield (
        len(o.betas) != 2 or not all(0 <= beta < 1 for beta in o.betas),
        f"optim.betas={o.betas} must be two numbers, each at least 0 and below 1",
    )
    yield (
        o.clip is not None and o.clip <= 0,
        f"optim.clip={o.clip} must be above 0, or null for none",
    )
    yield (
        isinstance(c.recompute, int) and c.recompute < 2,
        f"recompute={c.recompute} must be none, full, attention, selective, offload, full-offload or a whole number "
        f"of at least 2 (every n-th block)",
    )
    yield (
        c.grpo.generation_ranks and c.task != "grpo",
        f"grpo.generation_ranks={c.grpo.generation_ranks} is for task=grpo, not {c.task}",
    )
    yield (
        0 < c.rollout.temperature < MIN_TEMPERATURE,
        f"rollout.temperature={c.rollout.temperature} must be 0, or at least {MIN_TEMPERATURE}",
    )


def _data_faults(c: Config) -> Faults:
    d = c.data
    made_up = d.kind in MADE_UP
    yield not (d.sources or made_up or d.path), f"data.kind={d.kind} needs data.path"
    yield (
        d.validation_path and made_up,
        f"data.validation_path needs data.kind, that of its files (text, jsonl, tokens or latents): "
        f"data.kind={d.kind} is made up",
    )
    yield (
        max(d.size, default=0) > 1 << 20,
        f"data.size={d.size} must be numbers of at most 1,048,576",
    )
    of_chats = ", ".join(name for name, task in TASKS.items() if task.chats)
    yield (
        d.packed is not None and not TASKS[c.task].chats,
        f"data.packed={str(d.packed).lower()} is for task={of_chats}, not for task={c.task} (leave it out)",
    )
    texts = ("text", "jsonl")
    for name, given, kinds in (
        ("packing=whole", d.packing == "whole", (*texts, "tokens")),
        (f"cache={d.cache}", d.cache, texts),
    ):
        of_others = {source.kind or d.kind for source in d.sources or [d]} - {*kinds}
        yield (
            given and (c.task != "pretrain" or of_others),
            f"data.{name} is for task=pretrain and data.kind={' or '.join(kinds)} (leave it out)",
        )


def _source_faults(c: Config) -> Faults:
    d = c.data
    for name, source in data_by_source(d).items():
        where = f"data.sources {name!r}: data.kind={source.kind}"
        yield source.kind not in SOURCES, f"{where} must be {' or '.join(SOURCES)}"
        yield not source.path, f"{where} needs data.path"
        yield (
            c.task != "pretrain" and source.kind != "jsonl",
            f"{where} holds no chats, as task={c.task} needs (use jsonl)",
        )
    yield d.path, "data.path and data.sources: give one of them"
    for source in d.sources:
        yield source.weight <= 0, f"data.sources: weight={source.weight} must be above 0"
    yield (
        not TASKS[c.task].sources,
        f"data.sources are for task=pretrain, sft and lora, not for task={c.task}",
    )
    yield (
        c.epochs or c.validation.exact_match,
        "epochs and validation.exact_match are not for data.sources (use steps, exact_match=0)",
    )


def _run_faults(c: Config) -> Faults:
    yield not c.out_dir, "out_dir is empty (give the folder that is to hold the run)"
    yield (
        c.checkpoint.best and not c.validation.every,
        "checkpoint.best=true needs validation.every, the steps after which it is known",
    )
    for name, path in (("model.path", c.model.path), ("lora.path", c.lora and c.lora.path)):
        yield (
            path and os.path.realpath(path) == os.path.realpath(c.out_dir),
            f"out_dir={c.out_dir!r} is {name}, which the result would overwrite (use another out_dir)",
        )
    yield (
        c.metrics.tensorboard and importlib.util.find_spec("tensorboard") is None,
        "metrics.tensorboard=true needs the package tensorboard (pip install it, or use false)",
    )
    steps = c.profile.steps
    last = math.inf if c.epochs else c.steps
    yield (
        steps and (len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= last),
        f"profile.steps={steps} must be the first and last step to record, of 1 to steps={c.steps}",
    )


def _precision_faults(c: Config) -> Faults:
    o = c.optim
    yield (
        o.name != "adamw" and o.states != "fp32",
        f"optim.states={o.states} is for optim.name=adamw, not {o.name} (leave it out)",
    )
    yield (
        o.name == "sgd" and o.stochastic_rounding,
        "optim.stochastic_rounding=true is for optim.name=adamw or muon, not sgd (leave it out)",
    )
    yield (
        o.name == "muon" and c.precision == "bf16-pure" and not o.stochastic_rounding,
        "optim.name=muon with precision=bf16-pure loses nearly all updates to rounding (use "
        "optim.stochastic_rounding=true, or precision=bf16)",
    )
    yield (
        o.name == "muon" and c.lora,
        "optim.name=muon is for whole matrices, not for lora's factors of them (use adamw)",
    )
    yield (
        o.name != "muon" and o.newton_schulz != "bf16",
        f"optim.newton_schulz={o.newton_schulz} is for optim.name=muon, not {o.name} (leave it out)",
    )
    trained = c.lora.dtype == "bf16" if c.lora else c.precision == "bf16-pure"
    weights = "lora.dtype=bf16" if c.lora else "precision=bf16-pure"
    yield (
        o.stochastic_rounding and not trained and o.states != "bf16",
        f"optim.stochastic_rounding=true needs bf16 to round to: {weights} or optim.states=bf16",
    )
    model = c.model.config
    width = model.dim if c.task == "diffusion" else model.hidden_size
    fp8 = c.precision == "fp8"
    form = c.fp8.form
    multiple = FORMS[form].multiple
    needs = "precision=fp8" if form == "tensor" else f"fp8.form={form}"
    yield (
        fp8 and width % (multiple * c.parallel.tp),
        f"{needs} needs a model width that is a multiple of {multiple} x parallel.tp={c.parallel.tp}, not {width} "
        f"(use bf16)",
    )
    yield (
        fp8 and c.fp8.fast_accumulation != "none" and form in ("block", "mx"),
        f"fp8.fast_accumulation={c.fp8.fast_accumulation} is for fp8.form=tensor or row, not {form} (use none)",
    )
    yield (
        fp8 and c.fp8.keep_transposed and not FORMS[form].square_blocks,
        f"fp8.keep_transposed=true needs weights that are rounded once, and fp8.form={form} rounds them for each "
        f"product (use false)",
    )
    yield (
        c.fp8.experts and not (fp8 and getattr(model, "num_experts", 0)),
        "fp8.experts=true needs precision=fp8 and a model with experts (use false)",
    )
    yield (
        fp8 and c.fp8.keep_transposed and c.parallel.reshard_after_forward is not False,
        "fp8.keep_transposed=true needs weights that stay whole between forward and backward passes (use "
        "parallel.reshard_after_forward=false, or fp8.keep_transposed=false)",
    )


def _lora_faults(c: Config) -> Faults:
    speed = getattr(c.model.config, "bias_update_speed", 0)
    # grpo never changes this bias
    yield (
        speed and c.task != "grpo",
        f"model.bias_update_speed={speed}: lora freezes the model, no adapter has the bias (use 0)",
    )
    base = c.lora.base
    stored = base != "bf16"
    multiplied = (base, c.fp8.form, c.fp8.experts) == ("fp8", "block", False)
    yield (
        stored and c.precision == "fp8" and not multiplied,
        f"lora.base={base}: with precision=fp8 only base=fp8 is multiplied as it is stored, with fp8.form=block and "
        f"fp8.experts=false (use these, or precision=bf16)",
    )
    yield (
        stored and c.task == "grpo",
        f"lora.base={base} is not for task=grpo, whose sampler takes merged weights (use bf16)",
    )
    # raises for targets that the model does not have or PEFT cannot express
    adapter_shapes(c.model.config, c.lora)


def _held_out_faults(c: Config) -> Faults:
    p = c.parallel
    d = c.data
    held = d.validation or d.validation_path
    every = c.validation.every
    has_own = (d.kind == "mock" and not d.sources) or c.task == "diffusion"
    yield (
        every and not (has_own or held),
        f"validation.every={every} needs data.validation above 0, the share held out, or data.validation_path",
    )
    exact = c.validation.exact_match
    yield (
        exact and p.tp * p.cp * p.pp > 1,
        f"validation.exact_match={exact} generates token by token, so tp, cp and pp must be 1",
    )
    chats = TASKS[c.task].replies and d.kind == "jsonl"
    yield (
        exact and not (chats and held),
        f"validation.exact_match={exact} needs chats that are held out: task=sft, lora or dpo, data.kind=jsonl and "
        f"data.validation above 0, or data.validation_path",
    )


# what a second model must meet, too
OF_SHAPE = (
    language_faults,
    tensor_faults,
    context_faults,
    pipeline_faults,
    expert_parallel_faults,
)
