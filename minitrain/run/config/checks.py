"""Check settings against each other. Checks of parallel layouts are in layout_checks.py.

All run before anything is built or a process group starts. The limits of single fields are metadata
in settings.py. All other checks are generators of (is it wrong?, message) pairs: the first pair that
is wrong becomes the error.
"""

import dataclasses
import importlib.util
import math
import os
from typing import Any

from minitrain.data.files import data_by_source
from minitrain.errors import Faults, refuse
from minitrain.formats.config_hf import check_family
from minitrain.formats.peft import adapter_shapes
from minitrain.models.fp8_forms import FORMS
from minitrain.rollout.sampling import MIN_TEMPERATURE
from minitrain.run.config.layout_checks import (
    context_faults,
    expert_parallel_faults,
    pipeline_faults,
    sampler_faults,
    tensor_faults,
    unused_pipeline_faults,
)
from minitrain.settings import GRPO, Config
from minitrain.training.distillation import BASE
from minitrain.training.mtp_loss import trains_further
from minitrain.training.sigmas import check_diffusion

VIDEOS = ("latents", "shapes")
# kinds of data that can be mixed
SOURCES = ("text", "jsonl", "tokens")
# tasks that train on chats
CHATS = ("sft", "lora", "dpo", "reward")


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
        (videos, _diffusion_faults),
        (not videos, _language_faults),
        (not videos and p.tp > 1, tensor_faults),
        (not videos and p.cp > 1, context_faults),
        (p.pp == 1, unused_pipeline_faults),
        (p.pp > 1, pipeline_faults),
        (True, _distill_faults),
        (c.task == "grpo", _grpo_faults),
        (c.task == "grpo" and c.grpo.replay_routing, _replay_faults),
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
            least = field.metadata["least"]
            most = field.metadata["most"]
            yield value < least, f"{name}={value} must be at least {least}"
            yield value > most, f"{name}={value} must be at most {most:,}"


def _value_faults(c: Config) -> Faults:
    """Check values that a least and a most cannot describe, and those that need another setting."""
    b = c.batch
    o = c.optim
    # with a smaller eps, weights without a gradient would be updated by 0 / 0
    yield o.name != "sgd" and o.eps < 1e-30, f"optim.eps={o.eps} must be at least 1e-30"
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
        o.ema == 1,
        "optim.ema=1 would never change the averages (use a number below 1, such as 0.999)",
    )
    yield (
        not 0 <= o.final_lr <= 1,
        f"optim.final_lr={o.final_lr} must be between 0 and 1, a share of optim.lr",
    )
    yield (
        not 0 <= o.decay <= 1,
        f"optim.decay={o.decay} must be between 0 and 1, a share of steps",
    )
    yield (
        isinstance(c.recompute, int) and c.recompute < 2,
        f"recompute={c.recompute} must be none, full, attention, selective, offload or a whole number of at least 2 "
        f"(every n-th block)",
    )
    yield (
        c.grpo.generation_ranks and c.task != "grpo",
        f"grpo.generation_ranks={c.grpo.generation_ranks} is for task=grpo, not {c.task}",
    )
    yield (
        0 < c.rollout.temperature < MIN_TEMPERATURE,
        f"rollout.temperature={c.rollout.temperature} must be 0, or at least {MIN_TEMPERATURE}",
    )
    yield (
        not 0 < c.rollout.memory <= 1,
        f"rollout.memory={c.rollout.memory} must be above 0 and at most 1: a share of the free memory",
    )


def _data_faults(c: Config) -> Faults:
    d = c.data
    yield (
        not 0 <= d.validation < 1,
        f"data.validation={d.validation} must be at least 0 and below 1",
    )
    made_up = d.kind in ("mock", "shapes")
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
    yield (
        d.packed is not None and c.task not in CHATS,
        f"data.packed={str(d.packed).lower()} is for task=sft, lora and dpo, not for task={c.task} (leave it out)",
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
        c.task not in ("pretrain", "sft", "lora"),
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
        fp8 and c.fp8.keep_transposed and not FORMS[form].turns,
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
    alpha = c.lora.alpha
    dropout = c.lora.dropout
    yield (
        alpha <= 0,
        f"lora.alpha={alpha} must be above 0: it is what adapters count, divided by rank",
    )
    yield not 0 <= dropout < 1, f"lora.dropout={dropout} must be at least 0 and below 1"
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
    chats = c.task in CHATS[:-1] and d.kind == "jsonl"
    yield (
        exact and not (chats and held),
        f"validation.exact_match={exact} needs chats that are held out: task=sft, lora or dpo, data.kind=jsonl and "
        f"data.validation above 0, or data.validation_path",
    )


def _language_faults(c: Config) -> Faults:
    model = c.model.config
    check_family(model)
    kind = c.data.kind
    yield (
        model.num_labels and c.task != "reward",
        f"model.num_labels={model.num_labels}: a model with a score as its head is for task=reward, not {c.task}",
    )
    yield (
        c.task == "grpo" and c.grpo.aggregation != "token" and trains_further(c),
        f"grpo.aggregation={c.grpo.aggregation}: multi-token prediction is trained along with means over tokens alone "
        f"(use aggregation=token, or mtp_weight=0)",
    )
    yield (
        c.batch.seq_len > model.max_position_embeddings,
        f"batch.seq_len={c.batch.seq_len} exceeds the model's "
        f"max_position_embeddings={model.max_position_embeddings}",
    )
    yield kind in VIDEOS, f"data.kind={kind} holds videos: it needs task=diffusion"
    yield (
        c.task in CHATS and kind not in ("jsonl", "mock"),
        f"data.kind={kind} holds no chats, as task={c.task} needs (use jsonl or mock)",
    )
    # a weight divided by itself is 1, whatever a new router computes. A router from a checkpoint may
    # have been trained otherwise
    alike = model.norm_topk_prob and 1 == model.num_experts_per_tok < model.num_experts
    yield (
        alike and not (model.fake_balanced_gate or c.model.path or c.lora),
        "model.num_experts_per_tok=1 with norm_topk_prob=true: each token's weight would be 1, and the router get "
        "no gradient (use 2, or false)",
    )


def _diffusion_faults(c: Config) -> Faults:
    p = c.parallel
    model = c.model.config
    d = c.data
    length = c.batch.seq_len
    yield (
        d.kind not in ("mock", *VIDEOS),
        f"data.kind={d.kind} holds no videos (for task=diffusion use latents, shapes or mock)",
    )
    yield p.pp > 1, f"parallel.pp={p.pp} is not for diffusion (use 1)"
    yield (
        model.in_channels < model.out_channels,
        f"model.in_channels={model.in_channels} must be at least out_channels={model.out_channels}: the noisy "
        f"latents, and behind them an image-to-video model's condition",
    )
    if d.kind == "mock":
        patch = list(model.patch_size)
        fits = len(d.size) == 3 and min(d.size) > 0
        yield (
            not fits or any(size % n for size, n in zip(d.size, patch, strict=True)),
            f"data.size={d.size} must be frames, height and width, which patches of {patch} divide",
        )
        patches = math.prod(d.size) // math.prod(patch)
        yield (
            length != patches,
            f"batch.seq_len={length} is not the number of patches of data.size={d.size}, {patches}",
        )
    heads = p.cp * p.tp if p.context == "ulysses" else p.tp
    for name, size, ranks in (
        ("num_attention_heads", model.num_attention_heads, heads),
        ("ffn_dim", model.ffn_dim, p.tp),
        ("batch.seq_len", length, p.cp * p.tp),
    ):
        yield (
            size % ranks,
            f"parallel.tp={p.tp} x cp={p.cp} with context={p.context} does not divide {name}={size}",
        )


def _distill_faults(c: Config) -> Faults:
    teachers = c.teachers
    yield (
        teachers and c.task not in ("pretrain", "sft", "lora", "grpo"),
        f"distill.teacher={teachers[:1]} is for task=pretrain, sft, lora and grpo, not {c.task} (leave it out)",
    )
    yield (
        not all(teachers),
        "data.sources: some have a teacher and others none (give each one, or distill.teacher for the rest)",
    )
    yield (
        BASE in teachers and not c.lora,
        f"distill.teacher={BASE} is the model without its adapters, and there are none (use a folder, or lora)",
    )


def _grpo_faults(c: Config) -> Faults:
    g = c.grpo
    limit = c.rollout
    dropout = c.lora and c.lora.dropout
    yield dropout, f"lora.dropout={dropout}: the sampler would disagree with the trainer (use 0)"
    yield (
        c.data.kind not in ("mock", "jsonl"),
        f"data.kind={c.data.kind} holds no problems, as task=grpo needs (use jsonl or mock)",
    )
    yield c.optim.ema, f"optim.ema={c.optim.ema} is not for task=grpo, which samples (use 0)"
    yield g.group < 2 and not c.teachers, f"grpo.group={g.group} must be at least 2"
    responses = g.prompts * g.group
    yield (
        responses % c.batch.global_,
        f"batch.global={c.batch.global_} does not divide grpo.prompts={g.prompts} x group={g.group} = {responses} "
        f"responses per step",
    )
    yield (
        limit.temperature <= 0,
        f"rollout.temperature={limit.temperature} must be above 0, for samples that differ",
    )
    clips = g.dual_clip is not None
    yield (
        clips and g.dual_clip <= 1 + g.clip_high,
        f"grpo.dual_clip={g.dual_clip} must be above 1 + clip_high={1 + g.clip_high}",
    )
    yield (
        clips and g.surrogate != "clip",
        f"grpo.dual_clip={g.dual_clip} is of surrogate=clip alone, not of {g.surrogate} (use null)",
    )
    yield (
        g.ratio == "sequence" and g.surrogate == "reinforce",
        "grpo.ratio=sequence: surrogate=reinforce has no ratio (use ratio=token)",
    )
    yield (
        g.importance_low > g.importance_high,
        f"grpo.importance_low={g.importance_low} exceeds importance_high={g.importance_high}",
    )
    yield (
        g.overlong_buffer > limit.max_tokens,
        f"grpo.overlong_buffer={g.overlong_buffer} exceeds rollout.max_tokens={limit.max_tokens}",
    )
    yield (
        c.parallel.cp > 1 and (g.ratio == "sequence" or g.importance == "sequence-mask"),
        f"parallel.cp={c.parallel.cp}: no rank sees whole sequences, as ratio=sequence and importance=sequence-mask "
        f"need (use cp=1)",
    )
    yield from sampler_faults(c)
    yield from _lag_faults(g)


def _lag_faults(g: GRPO) -> Faults:
    yield (
        g.offload and (g.lag or g.keep_cache),
        "grpo.offload=true is for ranks that train or sample: it needs lag=0 and keep_cache=false",
    )
    yield (
        g.generation_ranks and not g.lag,
        f"grpo.generation_ranks={g.generation_ranks} of their own need grpo.lag=1 or more",
    )
    yield (
        g.in_flight and not g.lag,
        "grpo.in_flight=true begins the responses of later steps: it needs grpo.lag=1 or more",
    )
    yield (
        g.in_flight and g.in_flight_cache == "keep" and not (g.generation_ranks or g.keep_cache),
        "grpo.in_flight_cache=keep: the ranks train between, which frees the cache (use "
        "grpo.keep_cache=true, or generation_ranks)",
    )


def _replay_faults(c: Config) -> Faults:
    yield (
        not c.model.config.num_experts,
        "grpo.replay_routing=true needs a model with experts (use false)",
    )
    for name, size in (
        ("parallel.pp", c.parallel.pp),
        ("parallel.tp", c.parallel.tp),
        ("rollout.tp", c.rollout.tp),
    ):
        yield (
            size > 1,
            f"grpo.replay_routing=true with {name}={size}: ranks do not know the experts of all their tokens "
            f"(use {name}=1)",
        )
    yield (
        c.grpo.in_flight,
        "grpo.replay_routing=true with in_flight=true: the experts of a response would be of several weights "
        "(use false for one of them)",
    )
    yield (
        c.compile,
        "grpo.replay_routing=true has not been tried with compile=true (use false for one of them)",
    )


# what a second model must meet, too
OF_SHAPE = (
    _language_faults,
    tensor_faults,
    context_faults,
    pipeline_faults,
    expert_parallel_faults,
)
