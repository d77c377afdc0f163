"""What a single setting cannot know: which settings contradict each other, and whether the ranks
can run them.

All of it is checked before anything is built or any process group starts.
"""

import dataclasses
import importlib.util
import math
import os
from typing import Any

from minitrain.errors import InputError
from minitrain.formats.config_hf import check_exportable
from minitrain.formats.peft import adapter_shapes
from minitrain.rollout.sampling import MIN_TEMPERATURE
from minitrain.run.parallel_checks import (
    refuse,
    validate_context,
    validate_expert_parallel,
    validate_pipeline,
    validate_sampler_split,
    validate_tensor,
)
from minitrain.settings import Config
from minitrain.training.flow import check_diffusion


def validate(c: Config) -> None:
    """Refuse settings that contradict each other. `check_layout` does so for a number of ranks."""
    _check_ranges(c)
    _validate_values(c)
    check_diffusion(c.diffusion)
    _validate_folders(c)
    _validate_observation(c)
    _validate_states(c)
    _validate_fp8(c)
    _validate_lora(c)
    validate_expert_parallel(c)
    _validate_exact_match(c)
    (_validate_diffusion if c.task == "diffusion" else _validate_language)(c)
    validate_pipeline(c)
    if c.task == "grpo":
        _validate_grpo(c)


def _validate_values(c: Config) -> None:
    """Refuse values that no least or most of a field can say."""
    b = c.batch
    p = c.parallel
    o = c.optim
    refuse(
        # weights that get no gradient would become 0 / 0
        (o.name == "adamw" and o.eps < 1e-30, f"optim.eps={o.eps} must be at least 1e-30"),
        (
            p.dp_shard < 1 and p.dp_shard != -1,
            f"parallel.dp_shard={p.dp_shard} must be at least 1, or -1 for all remaining ranks",
        ),
        (b.global_ % b.micro, f"batch.micro={b.micro} does not divide batch.global={b.global_}"),
        (
            len(o.betas) != 2 or not all(0 <= beta < 1 for beta in o.betas),
            f"optim.betas={o.betas} must be two numbers, each at least 0 and below 1",
        ),
        (
            o.clip is not None and o.clip <= 0,
            f"optim.clip={o.clip} must be above 0, or null for no clipping",
        ),
        (
            not 0 <= o.final_lr <= 1,
            f"optim.final_lr={o.final_lr} must be between 0 and 1, a share of optim.lr",
        ),
        (
            not 0 <= c.data.validation < 1,
            f"data.validation={c.data.validation} must be at least 0 and below 1",
        ),
        (
            c.data.kind not in ("mock", "shapes") and not c.data.path,
            f"data.kind={c.data.kind} needs data.path",
        ),
        (
            max(c.data.size, default=0) > 1 << 20,
            f"data.size={c.data.size} must be numbers of at most {1 << 20:,}",
        ),
        (
            c.data.packed is not None and c.task not in ("sft", "lora"),
            f"data.packed={str(c.data.packed).lower()} is for task=sft and lora, not for task={c.task} (leave it out)",
        ),
        (
            isinstance(c.recompute, int) and c.recompute < 2,
            f"recompute={c.recompute} must be none, full, attention, selective or a whole number of at least 2 "
            f"(every n-th block)",
        ),
        (
            c.grpo.generation_ranks and c.task != "grpo",
            f"grpo.generation_ranks={c.grpo.generation_ranks} is for task=grpo, not {c.task}",
        ),
        (
            0 < c.rollout.temperature < MIN_TEMPERATURE,
            f"rollout.temperature={c.rollout.temperature} must be 0, or at least {MIN_TEMPERATURE}",
        ),
        (
            not 0 < c.rollout.memory <= 1,
            f"rollout.memory={c.rollout.memory} must be above 0 and at most 1: a share of the free memory",
        ),
        (not c.out_dir, "out_dir is empty (give the folder that is to hold the run)"),
    )


def _validate_folders(c: Config) -> None:
    """What a run starts from is not to be overwritten by what it writes at its end."""
    for name, path in (("model.path", c.model.path), ("lora.path", c.lora.path if c.lora else "")):
        if path and os.path.realpath(path) == os.path.realpath(c.out_dir):
            raise InputError(
                f"out_dir={c.out_dir!r} is {name}, which the result would overwrite (use another out_dir)"
            )


def _validate_observation(c: Config) -> None:
    steps = c.profile.steps
    refuse(
        (
            c.metrics.tensorboard and importlib.util.find_spec("tensorboard") is None,
            "metrics.tensorboard=true needs the package tensorboard (pip install it, or use false)",
        ),
        (
            steps and (len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= c.steps),
            f"profile.steps={steps} must be the first and last step to record, of 1 to steps={c.steps}",
        ),
    )


def _validate_language(c: Config) -> None:
    check_exportable(c.model.config)
    if c.batch.seq_len > c.model.config.max_position_embeddings:
        limit = c.model.config.max_position_embeddings
        raise InputError(
            f"batch.seq_len={c.batch.seq_len} exceeds the model's max_position_embeddings={limit}"
        )
    refuse(
        (
            c.data.kind in ("latents", "shapes"),
            f"data.kind={c.data.kind} holds videos: it needs task=diffusion",
        ),
        (
            c.validation.every and c.data.kind != "mock" and not c.data.validation,
            f"validation.every={c.validation.every} needs data.validation above 0, the share held out",
        ),
        (
            c.task in ("sft", "lora") and c.data.kind not in ("jsonl", "mock"),
            f"data.kind={c.data.kind} holds no chats, as task={c.task} needs (use jsonl or mock)",
        ),
    )
    _validate_router(c)
    validate_tensor(c)
    validate_context(c)


def _validate_router(c: Config) -> None:
    """A weight divided by itself is 1, whatever a new router says; one whose weights are read may
    have learned.
    """
    model = c.model.config
    alike = model.norm_topk_prob and 1 == model.num_experts_per_tok < model.num_experts
    if alike and not (model.fake_balanced_gate or c.model.path or c.lora):
        why = "each token's weight would be 1, and the router get no gradient"
        raise InputError(
            f"model.num_experts_per_tok=1 with norm_topk_prob=true: {why} (use 2, or false)"
        )


def _validate_fp8(config: Config) -> None:
    model = config.model.config
    tp = config.parallel.tp
    width = model.dim if config.task == "diffusion" else model.hidden_size
    refuse(
        (
            config.precision == "fp8" and width % (16 * tp),
            f"precision=fp8 needs a model width that is a multiple of 16 x parallel.tp={tp}, not {width} (use bf16)",
        ),
        (
            config.fp8.experts
            and (config.precision != "fp8" or not getattr(model, "num_experts", 0)),
            "fp8.experts=true needs precision=fp8 and a model with experts (use false)",
        ),
        (
            config.fp8.keep_transposed
            and config.precision == "fp8"
            and config.parallel.reshard_after_forward is not False,
            "fp8.keep_transposed=true needs weights that stay whole between forward and backward passes (use "
            "parallel.reshard_after_forward=false, or fp8.keep_transposed=false)",
        ),
    )


def _validate_lora(config: Config) -> None:
    lora = config.lora
    if lora is None:
        return
    refuse(
        (
            lora.alpha <= 0,
            f"lora.alpha={lora.alpha} must be above 0: it is what adapters count, divided by rank",
        ),
        (not 0 <= lora.dropout < 1, f"lora.dropout={lora.dropout} must be at least 0 and below 1"),
    )
    speed = getattr(config.model.config, "bias_update_speed", 0)
    if speed and config.task != "grpo":  # which never moves it
        raise InputError(
            f"model.bias_update_speed={speed}: lora freezes the model, no adapter has the bias (use 0)"
        )
    adapter_shapes(
        config.model.config, lora
    )  # says which targets the model has not, or PEFT no form for


def _validate_states(config: Config) -> None:
    o = config.optim
    if o.name != "adamw" and (o.states != "fp32" or o.stochastic_rounding):
        raise InputError(
            f"optim.states={o.states} and stochastic_rounding are for optim.name=adamw, not {o.name}"
        )
    trained = config.lora.dtype == "bf16" if config.lora else config.precision == "bf16-pure"
    if o.stochastic_rounding and not trained and o.states != "bf16":
        weights = "lora.dtype=bf16" if config.lora else "precision=bf16-pure"
        raise InputError(
            f"optim.stochastic_rounding=true needs bf16 to round to: {weights} or optim.states=bf16"
        )


def _validate_exact_match(config: Config) -> None:
    p = config.parallel
    data = config.data
    exact = config.validation.exact_match
    refuse(
        (
            exact and p.tp * p.cp * p.pp > 1,
            f"validation.exact_match={exact} generates token by token, so tp, cp and pp must be 1",
        ),
        (
            exact
            and not (config.task in ("sft", "lora") and data.kind == "jsonl" and data.validation),
            f"validation.exact_match={exact} needs chats that are held out: task=sft or lora, data.kind=jsonl and "
            f"data.validation above 0",
        ),
    )


def _validate_diffusion(config: Config) -> None:
    p = config.parallel
    model = config.model.config
    data = config.data
    length = config.batch.seq_len
    refuse(
        (
            data.kind not in ("mock", "latents", "shapes"),
            f"data.kind={data.kind} holds no videos (for task=diffusion use latents, shapes or mock)",
        ),
        (
            p.pp > 1 or p.async_tp,
            f"parallel.pp={p.pp}, async_tp={str(p.async_tp).lower()} are not for diffusion (use 1, false)",
        ),
        (
            model.in_channels < model.out_channels,
            f"model.in_channels={model.in_channels} must be at least out_channels={model.out_channels}: the noisy "
            f"latents, and behind them an image-to-video model's condition",
        ),
    )
    if data.kind == "mock":
        _validate_video_size(data.size, list(model.patch_size), length)
    heads = p.cp * p.tp if p.context == "ulysses" else p.tp
    parts = {
        "num_attention_heads": (model.num_attention_heads, heads),
        "ffn_dim": (model.ffn_dim, p.tp),
    }
    for name, (size, ranks) in (parts | {"batch.seq_len": (length, p.cp * p.tp)}).items():
        if size % ranks:
            raise InputError(
                f"parallel.tp={p.tp} x cp={p.cp} with context={p.context} does not divide {name}={size}"
            )


def _validate_video_size(size: list[int], patch: list[int], length: int) -> None:
    if len(size) != 3 or min(size) < 1 or any(s % n for s, n in zip(size, patch, strict=True)):
        raise InputError(
            f"data.size={size} must be frames, height and width, which patches of {patch} divide"
        )
    patches = math.prod(size) // math.prod(patch)
    if length != patches:
        raise InputError(
            f"batch.seq_len={length} is not the number of patches of data.size={size}, {patches}"
        )


def _validate_grpo(config: Config) -> None:
    g = config.grpo
    b = config.batch
    limit = config.rollout
    if config.lora and config.lora.dropout:
        raise InputError(
            f"lora.dropout={config.lora.dropout}: the sampler would disagree with the trainer (use 0)"
        )
    refuse(
        (g.group < 2, f"grpo.group={g.group} must be at least 2"),
        (
            config.data.kind not in ("mock", "jsonl"),
            f"data.kind={config.data.kind} holds no problems, as task=grpo needs (use jsonl or mock)",
        ),
        (
            g.prompts * g.group % b.global_,
            f"batch.global={b.global_} does not divide grpo.prompts={g.prompts} x group={g.group} = "
            f"{g.prompts * g.group} responses per step",
        ),
        (
            limit.temperature <= 0,
            f"rollout.temperature={limit.temperature} must be above 0, for samples that differ",
        ),
        (
            g.dual_clip is not None and g.dual_clip <= 1 + g.clip_high,
            f"grpo.dual_clip={g.dual_clip} must be above 1 + clip_high={1 + g.clip_high}",
        ),
        (
            g.dual_clip is not None and g.surrogate != "clip",
            f"grpo.dual_clip={g.dual_clip} is of surrogate=clip alone, not of {g.surrogate} (use null)",
        ),
        (
            g.ratio == "sequence" and g.surrogate == "reinforce",
            "grpo.ratio=sequence: surrogate=reinforce has no ratio (use ratio=token)",
        ),
        (
            g.importance_low > g.importance_high,
            f"grpo.importance_low={g.importance_low} exceeds importance_high={g.importance_high}",
        ),
        (
            g.overlong_buffer > limit.max_tokens,
            f"grpo.overlong_buffer={g.overlong_buffer} exceeds rollout.max_tokens={limit.max_tokens}",
        ),
        (
            config.parallel.cp > 1 and (g.ratio == "sequence" or g.importance == "sequence-mask"),
            f"parallel.cp={config.parallel.cp}: no rank sees whole sequences, as ratio=sequence and "
            f"importance=sequence-mask need (use cp=1)",
        ),
    )
    validate_sampler_split(config)
    refuse(
        (
            g.offload and (g.lag or g.keep_cache),
            "grpo.offload=true is for ranks that train or sample: it needs lag=0 and keep_cache=false",
        ),
        (
            g.generation_ranks and not g.lag,
            f"grpo.generation_ranks={g.generation_ranks} of their own need grpo.lag=1",
        ),
    )


def _check_ranges(section: Any, prefix: str = "") -> None:
    """Raises InputError for the first number outside the limits that its field states."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        name = prefix + field.name.rstrip("_")
        if dataclasses.is_dataclass(value):
            _check_ranges(value, f"{name}.")
        elif "least" in field.metadata and value < field.metadata["least"]:
            raise InputError(f"{name}={value} must be at least {field.metadata['least']}")
        elif "most" in field.metadata and value > field.metadata["most"]:
            raise InputError(f"{name}={value} must be at most {field.metadata['most']:,}")
