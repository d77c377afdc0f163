"""What a single setting cannot know: which settings contradict each other, and whether the ranks can run them.

All of it is checked before anything is built or any process group starts.
"""

import importlib.util
import math
import os
from functools import reduce
from typing import TYPE_CHECKING

from minitrain.errors import InputError
from minitrain.formats.config_hf import check_exportable
from minitrain.formats.peft import LARGEST_ALPHA, LARGEST_RANK, adapter_shapes
from minitrain.parallel.pipeline import pipeline_needs
from minitrain.rollout.sampling import COLDEST
from minitrain.training.flow import check_diffusion

if TYPE_CHECKING:
    from minitrain.models.decoder_config import DecoderConfig
    from minitrain.settings import Config


def validate(config: "Config") -> None:
    """Refuse settings that contradict each other. What depends on the number of ranks is in `check_layout`."""
    c, b, p, o = config, config.batch, config.parallel, config.optim
    _at_least(c, 1, "steps", "batch.global", "batch.micro", "batch.seq_len", "parallel.dp_replicate", "parallel.tp",
              "parallel.cp", "parallel.pp", "parallel.vp", "parallel.ep", "parallel.head_layers", "checkpoint.keep",
              "validation.batches")  # fmt: skip
    _at_least(c, 0, "seed", "parallel.prefetch", "optim.lr", "optim.warmup", "optim.weight_decay", "validation.every",
              "validation.exact_match", "checkpoint.every", "checkpoint.minutes")  # fmt: skip
    if c.optim.name == "adamw":
        _at_least(c, 1e-30, "optim.eps")  # without it, weights that get no gradient become 0 / 0
    if p.dp_shard < 1 and p.dp_shard != -1:
        raise InputError(f"parallel.dp_shard={p.dp_shard} must be at least 1, or -1 for all remaining ranks")
    if b.global_ % b.micro:
        raise InputError(f"batch.micro={b.micro} does not divide batch.global={b.global_}")
    if len(o.betas) != 2 or not all(0 <= beta < 1 for beta in o.betas):
        raise InputError(f"optim.betas={o.betas} must be two numbers, each at least 0 and below 1")
    if o.clip is not None and o.clip <= 0:
        raise InputError(f"optim.clip={o.clip} must be above 0, or null for no clipping")
    if not 0 <= o.final_lr <= 1:
        raise InputError(f"optim.final_lr={o.final_lr} must be between 0 and 1, a share of optim.lr")
    if not 0 <= c.data.validation < 1:
        raise InputError(f"data.validation={c.data.validation} must be at least 0 and below 1")
    if c.data.kind not in ("mock", "shapes") and not c.data.path:
        raise InputError(f"data.kind={c.data.kind} needs data.path")
    check_diffusion(c.diffusion)
    _validate_folders(c)
    _validate_sizes(c)
    _validate_packed(c)
    _validate_observation(c)
    _validate_states(c)
    _validate_recompute(c)
    _validate_fp8(c)
    _validate_lora(c)
    _validate_expert_parallel(c)
    _validate_rollout(c)
    _validate_exact_match(c)
    (_validate_diffusion if c.task == "diffusion" else _validate_language)(c)
    _validate_pipeline(c)
    if c.task == "grpo":
        _validate_grpo(c)
    elif c.grpo.generation_ranks:
        raise InputError(f"grpo.generation_ranks={c.grpo.generation_ranks} is for task=grpo, not {c.task}")


def _validate_folders(c: "Config") -> None:
    """What a run starts from is not to be overwritten by what it writes at its end."""
    if not c.out_dir:
        raise InputError("out_dir is empty (give the folder that is to hold the run)")
    for name, path in (("model.path", c.model.path), ("lora.path", c.lora.path if c.lora else "")):
        if path and os.path.realpath(path) == os.path.realpath(c.out_dir):
            raise InputError(f"out_dir={c.out_dir!r} is {name}, which the result would overwrite (use another out_dir)")


def _validate_sizes(c: "Config") -> None:
    """Beyond these a run would only fill memory, or never begin."""
    _at_least(c, 1, "data.text_tokens")
    _at_most(c, 1 << 30, "batch.seq_len", "rollout.max_tokens", "rollout.chunk")
    _at_most(c, 1 << 24, "batch.global", "grpo.prompts", "grpo.group", "rollout.pages")
    _at_most(c, 1 << 20, "data.text_tokens", "rollout.slots", "rollout.page_size", "rollout.steps",
             "grpo.eval_samples", "grpo.warmup_steps")  # fmt: skip
    _at_most(c, 1000, "grpo.mock_digits", "grpo.generations")
    if max(c.data.size, default=0) > 1 << 20:
        raise InputError(f"data.size={c.data.size} must be numbers of at most {1 << 20:,}")


def _validate_packed(c: "Config") -> None:
    if c.data.packed is not None and c.task not in ("sft", "lora"):
        raise InputError(
            f"data.packed={str(c.data.packed).lower()} is for task=sft and lora, not for task={c.task} (leave it out)"
        )


def _validate_observation(c: "Config") -> None:
    steps = c.profile.steps
    _at_least(c, 1, "optim.max_skipped", "timeout_s")
    _at_most(c, 1_000_000, "timeout_s")
    _at_least(c, 0, "metrics.spike")
    if c.metrics.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise InputError("metrics.tensorboard=true needs the package tensorboard (pip install it, or use false)")
    if steps and (len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= c.steps):
        raise InputError(f"profile.steps={steps} must be the first and last step to record, of 1 to steps={c.steps}")


def _validate_language(c: "Config") -> None:
    check_exportable(c.model.config)
    if c.batch.seq_len > c.model.config.max_position_embeddings:
        limit = c.model.config.max_position_embeddings
        raise InputError(f"batch.seq_len={c.batch.seq_len} exceeds the model's max_position_embeddings={limit}")
    if c.data.kind in ("latents", "shapes"):
        raise InputError(f"data.kind={c.data.kind} holds videos: it needs task=diffusion")
    if c.validation.every and c.data.kind != "mock" and not c.data.validation:
        raise InputError(f"validation.every={c.validation.every} needs data.validation above 0, the share held out")
    if c.task in ("sft", "lora") and c.data.kind not in ("jsonl", "mock"):
        raise InputError(f"data.kind={c.data.kind} holds no chats, as task={c.task} needs (use jsonl or mock)")
    _validate_router(c)
    _validate_tensor(c)
    _validate_context(c)


def _validate_router(c: "Config") -> None:
    """A weight divided by itself is 1, whatever a new router says; one whose weights are read may have learned."""
    model = c.model.config
    alike = model.norm_topk_prob and 1 == model.num_experts_per_tok < model.num_experts
    if alike and not (model.fake_balanced_gate or c.model.path or c.lora):
        why = "each token's weight would be 1, and the router get no gradient"
        raise InputError(f"model.num_experts_per_tok=1 with norm_topk_prob=true: {why} (use 2, or false)")


def _validate_fp8(config: "Config") -> None:
    model, tp = config.model.config, config.parallel.tp
    width = model.dim if config.task == "diffusion" else model.hidden_size
    if config.precision == "fp8" and width % (16 * tp):
        raise InputError(
            f"precision=fp8 needs a model width that is a multiple of 16 x parallel.tp={tp}, not {width} (use bf16)"
        )
    if config.fp8.experts and (config.precision != "fp8" or not getattr(model, "num_experts", 0)):
        raise InputError("fp8.experts=true needs precision=fp8 and a model with experts (use false)")
    if config.fp8.keep_transposed and config.precision == "fp8" and config.parallel.reshard_after_forward is not False:
        raise InputError(
            "fp8.keep_transposed=true needs weights that stay whole between forward and backward passes (use "
            "parallel.reshard_after_forward=false, or fp8.keep_transposed=false)"
        )


def _validate_lora(config: "Config") -> None:
    lora = config.lora
    if lora is None:
        return
    _at_least(config, 1, "lora.rank")
    _at_most(config, LARGEST_RANK, "lora.rank")
    if lora.alpha <= 0:
        raise InputError(f"lora.alpha={lora.alpha} must be above 0: it is what adapters count, divided by rank")
    _at_most(config, LARGEST_ALPHA, "lora.alpha")
    if not 0 <= lora.dropout < 1:
        raise InputError(f"lora.dropout={lora.dropout} must be at least 0 and below 1")
    speed = getattr(config.model.config, "bias_update_speed", 0)
    if speed and config.task != "grpo":  # which never moves it
        raise InputError(f"model.bias_update_speed={speed}: lora freezes the model, no adapter has the bias (use 0)")
    adapter_shapes(config.model.config, lora)  # says which targets the model has not, or PEFT no form for


def _validate_states(config: "Config") -> None:
    o = config.optim
    if o.name != "adamw" and (o.states != "fp32" or o.stochastic_rounding):
        raise InputError(f"optim.states={o.states} and stochastic_rounding are for optim.name=adamw, not {o.name}")
    trained = config.lora.dtype == "bf16" if config.lora else config.precision == "bf16-pure"
    if o.stochastic_rounding and not trained and o.states != "bf16":
        weights = "lora.dtype=bf16" if config.lora else "precision=bf16-pure"
        raise InputError(f"optim.stochastic_rounding=true needs bf16 to round to: {weights} or optim.states=bf16")


def _validate_exact_match(config: "Config") -> None:
    p, data, exact = config.parallel, config.data, config.validation.exact_match
    if exact and p.tp * p.cp * p.pp > 1:
        raise InputError(f"validation.exact_match={exact} generates token by token, so tp, cp and pp must be 1")
    if exact and not (config.task in ("sft", "lora") and data.kind == "jsonl" and data.validation):
        raise InputError(
            f"validation.exact_match={exact} needs chats that are held out: task=sft or lora, data.kind=jsonl and "
            f"data.validation above 0"
        )


def _validate_diffusion(config: "Config") -> None:
    p, model, data, length = config.parallel, config.model.config, config.data, config.batch.seq_len
    if data.kind not in ("mock", "latents", "shapes"):
        raise InputError(f"data.kind={data.kind} holds no videos (for task=diffusion use latents, shapes or mock)")
    if p.pp > 1 or p.async_tp:
        raise InputError(f"parallel.pp={p.pp}, async_tp={str(p.async_tp).lower()} are not for diffusion (use 1, false)")
    if model.in_channels < model.out_channels:
        raise InputError(
            f"model.in_channels={model.in_channels} must be at least out_channels={model.out_channels}: the noisy "
            f"latents, and behind them an image-to-video model's condition"
        )
    if data.kind == "mock":
        _validate_video_size(data.size, list(model.patch_size), length)
    heads = p.cp * p.tp if p.context == "ulysses" else p.tp
    parts = {"num_attention_heads": (model.num_attention_heads, heads), "ffn_dim": (model.ffn_dim, p.tp)}
    for name, (size, ranks) in (parts | {"batch.seq_len": (length, p.cp * p.tp)}).items():
        if size % ranks:
            raise InputError(f"parallel.tp={p.tp} x cp={p.cp} with context={p.context} does not divide {name}={size}")


def _validate_video_size(size: list[int], patch: list[int], length: int) -> None:
    if len(size) != 3 or min(size) < 1 or any(s % n for s, n in zip(size, patch, strict=True)):
        raise InputError(f"data.size={size} must be frames, height and width, which patches of {patch} divide")
    patches = math.prod(size) // math.prod(patch)
    if length != patches:
        raise InputError(f"batch.seq_len={length} is not the number of patches of data.size={size}, {patches}")


def _validate_context(config: "Config") -> None:
    p, model, length = config.parallel, config.model.config, config.batch.seq_len
    heads, groups = model.num_key_value_heads, model.mamba_n_groups
    unit = 2 * p.cp if p.context == "allgather" else p.cp
    if p.cp > 1 and "M" in model.layer_pattern and groups % (p.cp * p.tp):
        raise InputError(
            f"parallel.cp={p.cp} x tp={p.tp} does not divide mamba_n_groups={groups} "
            f"(use cp={_alternatives(_divisors(groups // p.tp))})"
        )
    if p.cp > 1 and length % unit:
        possible = [n for n in (length // unit * unit, length // unit * unit + unit) if n]
        raise InputError(
            f"batch.seq_len={length} is not a multiple of {unit}, which parallel.cp={p.cp} needs with "
            f"context={p.context} (use {_alternatives(possible)})"
        )
    if p.cp > 1 and p.context == "ulysses" and heads % (p.cp * p.tp):
        possible = _divisors(max(1, heads // p.tp))
        raise InputError(
            f"parallel.cp={p.cp} x tp={p.tp} with context=ulysses does not divide num_key_value_heads={heads} "
            f"(use context=allgather, or cp={_alternatives(possible)})"
        )


def _validate_recompute(config: "Config") -> None:
    if isinstance(config.recompute, int) and config.recompute < 2:
        raise InputError(
            f"recompute={config.recompute} must be none, full, attention, selective or a whole number of at least 2 "
            f"(every n-th block)"
        )


def _validate_tensor(config: "Config") -> None:
    model, batch, p = config.model.config, config.batch, config.parallel
    sizes = _split_sizes(model, p.tp, p.ep)
    sizes["batch.seq_len" if p.cp == 1 else f"batch.seq_len / parallel.cp={p.cp}, i.e. seq_len"] = batch.seq_len // p.cp
    _must_divide("parallel.tp", p.tp, sizes)
    if p.async_tp and (config.task == "grpo" or (config.lora and config.lora.dropout)):
        raise InputError("parallel.async_tp=true is not for task=grpo or lora.dropout above 0 (use false)")
    if p.async_tp and (p.tp == 1 or not config.compile):
        raise InputError("parallel.async_tp=true needs parallel.tp above 1 and compile=true")


def _split_sizes(model: "DecoderConfig", tp: int, ep: int) -> dict[str, int]:
    """What of a decoder tensor parallelism splits, by what its layers consist of."""
    parts = {part for layer in range(model.num_layers) for part in model.parts(layer)}
    fields = {
        "attention": ["num_key_value_heads", "num_attention_heads"],
        "mamba": ["mamba_n_groups"],
        "mlp": ["intermediate_size"],
        "moe": ["shared_expert_intermediate_size"],
    }
    sizes = {field: getattr(model, field) for part in fields if part in parts for field in fields[part]}
    if tp % model.num_key_value_heads == 0:  # several ranks can have the same one
        sizes.pop("num_key_value_heads", None)
    if "moe" in parts and ep == 1:  # in steps that grouped products can take
        sizes["moe_intermediate_size / 8"] = model.moe_intermediate_size // 8
    return sizes | {"vocab_size": model.vocab_size}


def _validate_expert_parallel(config: "Config") -> None:
    ep, experts = config.parallel.ep, getattr(config.model.config, "num_experts", 0)
    if ep > 1 and not experts:
        raise InputError(f"parallel.ep={ep} needs a model with experts (use ep=1)")
    _must_divide("parallel.ep", ep, {"num_experts": experts})


def _check_expert_parallel(config: "Config", ranks: int) -> None:
    """ranks: how many see different tokens and have the same layers, in one replica."""
    p, model = config.parallel, config.model.config
    if ranks % p.ep:
        possible = _divisors(math.gcd(ranks, model.num_experts))
        raise InputError(
            f"parallel.ep={p.ep} does not divide dp_shard x cp x tp = {ranks} ranks (use {_alternatives(possible)})"
        )
    same = ranks // p.ep
    for name in ("moe_intermediate_size", "moe_latent_size" if model.moe_latent_size else "hidden_size"):
        if getattr(model, name) % same:
            raise InputError(
                f"parallel.ep={p.ep} leaves {same} ranks with the same experts, which do not divide "
                f"{name}={getattr(model, name)} (use a larger ep)"
            )


def _validate_pipeline(config: "Config") -> None:
    p, slots, stages = config.parallel, config.model.config.num_layers + 2, config.parallel.pp * config.parallel.vp
    if p.pp == 1 and (p.vp > 1 or p.layers_per_stage or p.head_layers > 1):
        given = f"vp={p.vp}, layers_per_stage={p.layers_per_stage}, head_layers={p.head_layers}"
        raise InputError(f"parallel.{given} need parallel.pp above 1 (use 1, null and 1)")
    if p.pp == 1:
        return
    if p.schedule in ("GPipe", "1F1B") and p.vp > 1:
        raise InputError(
            f"parallel.schedule={p.schedule} has one stage per rank, not vp={p.vp} "
            f"(use vp=1, or Interleaved1F1B, LoopedBFS or InterleavedZeroBubble)"
        )
    if p.schedule in ("ZBVZeroBubble", "DualPipeV") and p.vp != 2:
        raise InputError(f"parallel.schedule={p.schedule} has two stages per rank, not vp={p.vp} (use vp=2)")
    split = p.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    if split and (config.compile or config.precision == "fp8" or config.recompute != "none"):
        raise InputError(
            f"parallel.schedule={p.schedule} runs each backward pass in two parts: with compile=true or precision=fp8 "
            f"all of it would run twice, with recompute={config.recompute} a block's forward once per weight (use "
            f"compile=false, bf16 and recompute=none, or Interleaved1F1B)"
        )
    given = p.layers_per_stage
    if given and (len(given) != stages or sum(given) != slots or min(given) < 1):
        raise InputError(
            f"parallel.layers_per_stage={given} must be {stages} numbers (pp={p.pp} x vp={p.vp} stages) of at least 1 "
            f"with sum {slots} (num_layers={slots - 2}, embedding and head)"
        )
    if given and p.head_layers > 1:
        raise InputError(
            f"parallel.head_layers={p.head_layers} is for stages that are as even as possible, not for "
            f"layers_per_stage={given} (use one of the two)"
        )
    if stages > slots:
        raise InputError(
            f"parallel.pp={p.pp} x vp={p.vp} stages are more than the {slots} that num_layers={slots - 2}, embedding "
            f"and head can fill (use at most {slots} stages)"
        )
    each, more = divmod(slots - 1 + p.head_layers, stages)
    if p.head_layers > each + (more > 1):
        raise InputError(
            f"parallel.head_layers={p.head_layers} is more than a stage's even share of num_layers={slots - 2} over "
            f"pp={p.pp} x vp={p.vp} stages (use less, or fewer stages)"
        )


def _validate_rollout(config: "Config") -> None:
    r = config.rollout
    _at_least(config, 1, "rollout.max_tokens", "rollout.slots", "rollout.page_size", "rollout.chunk")
    _at_least(config, 0, "rollout.temperature", "rollout.pages", "rollout.steps")
    if 0 < r.temperature < COLDEST:
        raise InputError(f"rollout.temperature={r.temperature} must be 0, or at least {COLDEST}")
    if not 0 < r.memory <= 1:
        raise InputError(f"rollout.memory={r.memory} must be above 0 and at most 1: a share of the free memory")


def _validate_grpo(config: "Config") -> None:
    g, b, limit = config.grpo, config.batch, config.rollout
    _at_least(config, 1, "grpo.prompts", "grpo.generations", "grpo.mock_digits", "grpo.eval_samples", "rollout.tp",
              "rollout.ep")  # fmt: skip
    _at_least(config, 2, "grpo.group")
    _at_least(config, 0, "grpo.clip_low", "grpo.clip_high", "grpo.kl", "grpo.importance_low", "grpo.importance_high",
              "grpo.overlong_buffer", "grpo.overlong_penalty", "grpo.generation_ranks", "grpo.warmup_steps",
              "grpo.warmup_lr", "grpo.keep_rollouts")  # fmt: skip
    # above any ratio (e^20, see objective.py), below what fp32 holds
    _at_most(config, 10**9, "grpo.clip_low", "grpo.clip_high", "grpo.importance_low", "grpo.importance_high")
    if config.data.kind not in ("mock", "jsonl"):
        raise InputError(f"data.kind={config.data.kind} holds no problems, as task=grpo needs (use jsonl or mock)")
    if g.prompts * g.group % b.global_:
        raise InputError(
            f"batch.global={b.global_} does not divide grpo.prompts={g.prompts} x group={g.group} = "
            f"{g.prompts * g.group} responses per step"
        )
    if limit.temperature <= 0:
        raise InputError(f"rollout.temperature={limit.temperature} must be above 0, for samples that differ")
    if g.dual_clip is not None and g.dual_clip <= 1 + g.clip_high:
        raise InputError(f"grpo.dual_clip={g.dual_clip} must be above 1 + clip_high={1 + g.clip_high}")
    if g.dual_clip is not None and g.surrogate != "clip":
        raise InputError(f"grpo.dual_clip={g.dual_clip} is of surrogate=clip alone, not of {g.surrogate} (use null)")
    if g.ratio == "sequence" and g.surrogate == "reinforce":
        raise InputError("grpo.ratio=sequence: surrogate=reinforce has no ratio (use ratio=token)")
    if g.importance_low > g.importance_high:
        raise InputError(f"grpo.importance_low={g.importance_low} exceeds importance_high={g.importance_high}")
    if g.overlong_buffer > limit.max_tokens:
        raise InputError(f"grpo.overlong_buffer={g.overlong_buffer} exceeds rollout.max_tokens={limit.max_tokens}")
    if config.parallel.cp > 1 and (g.ratio == "sequence" or g.importance == "sequence-mask"):
        raise InputError(f"parallel.cp={config.parallel.cp}: no rank sees whole sequences, as ratio=sequence and "
                         f"importance=sequence-mask need (use cp=1)")  # fmt: skip
    _validate_sampler_split(config)
    if config.lora and config.lora.dropout:
        raise InputError(f"lora.dropout={config.lora.dropout}: the sampler would disagree with the trainer (use 0)")
    if g.offload and (g.lag or g.keep_cache):
        raise InputError("grpo.offload=true is for ranks that train or sample: it needs lag=0 and keep_cache=false")
    if g.generation_ranks and not g.lag:
        raise InputError(f"grpo.generation_ranks={g.generation_ranks} of their own need grpo.lag=1")


def _validate_sampler_split(config: "Config") -> None:
    model, tp, ep = config.model.config, config.rollout.tp, config.rollout.ep
    if ep not in (1, tp):
        raise InputError(f"rollout.ep={ep} must be 1 or rollout.tp={tp}: the ranks that share a sampler's model")
    if ep > 1 and not model.num_experts:
        raise InputError(f"rollout.ep={ep} needs a model with experts (use ep=1)")
    sizes = _split_sizes(model, tp, ep) | ({"num_experts": model.num_experts} if ep > 1 else {})
    _must_divide("rollout.tp", tp, sizes)


def _training_ranks(config: "Config", world_size: int) -> int:
    """How many ranks train; those that only sample must be a multiple of them."""
    sampling = config.grpo.generation_ranks
    training = world_size - sampling
    if sampling and (training < 1 or sampling % training):
        possible = [n for n in range(world_size) if n % (world_size - n) == 0]
        raise InputError(
            f"grpo.generation_ranks={sampling} of {world_size} ranks must be a multiple of those that train "
            f"(use {_alternatives(possible)})"
        )
    tp = config.rollout.tp
    if training % tp:
        raise InputError(f"rollout.tp={tp} does not divide the {training} ranks that train")
    return training


def _alternatives(values: list) -> str:
    return " or ".join(filter(None, [", ".join(map(str, values[:-1])), str(values[-1])]))


def _at_least(config: "Config", least: int, *names: str) -> None:
    for name in names:
        if (value := _setting(config, name)) < least:
            raise InputError(f"{name}={value} must be at least {least}")


def _at_most(config: "Config", most: int, *names: str) -> None:
    for name in names:
        if (value := _setting(config, name)) > most:
            raise InputError(f"{name}={value} must be at most {most:,}")


def _setting(config: "Config", name: str) -> float:
    """The value of the setting that the command line calls `name`."""
    return reduce(getattr, name.replace("global", "global_").split("."), config)


def _must_divide(name: str, ranks: int, sizes: dict[str, int]) -> None:
    """Raises InputError if `ranks`, the setting `name`, does not divide all sizes, which have names too."""
    for of, size in sizes.items():
        if size % ranks:
            possible = _alternatives(_divisors(math.gcd(*sizes.values())))
            raise InputError(f"{name}={ranks} does not divide {of}={size} (use {possible})")


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def check_layout(config: "Config", world_size: int) -> None:
    """Can `world_size` ranks run this config? Raises an InputError that says what would be possible."""
    p, b = config.parallel, config.batch
    if config.task == "grpo":
        world_size = _training_ranks(config, world_size)
    others = p.dp_replicate * p.tp * p.cp * p.pp
    if p.dp_shard == -1 and world_size % others:
        raise InputError(
            f"parallel.dp_replicate={p.dp_replicate} x tp={p.tp} x cp={p.cp} x pp={p.pp} = {others} "
            f"does not divide the number of ranks, {world_size} (start {others}, or a multiple, with torchrun)"
        )
    if p.dp_shard != -1 and others * p.dp_shard != world_size:
        raise InputError(
            f"parallel.dp_replicate={p.dp_replicate} x dp_shard={p.dp_shard} x tp={p.tp} x cp={p.cp} x pp={p.pp} = "
            f"{others * p.dp_shard} is not the number of ranks, {world_size} (start so many with torchrun; bench.py's "
            f"--dry-run, --simulate and --shrink need none)"
        )
    if p.ep > 1:
        _check_expert_parallel(config, world_size // (p.dp_replicate * p.pp))
    data_ranks = world_size // (p.tp * p.cp * p.pp)
    if b.global_ % (b.micro * data_ranks):
        fitting = next((n for n in range(b.micro, 0, -1) if b.global_ % (n * data_ranks) == 0), None)
        smaller = f"batch.micro={fitting}, or " if fitting else ""
        raise InputError(
            f"batch.global={b.global_} is not a multiple of batch.micro={b.micro} x {data_ranks} data-parallel ranks "
            f"(use {smaller}a multiple of {b.micro * data_ranks})"
        )
    micro_batches = b.global_ // (b.micro * data_ranks)
    if needed := pipeline_needs(p, micro_batches):
        raise InputError(
            f"parallel.schedule={p.schedule} with pp={p.pp} needs {needed} micro-batches per rank and step, not "
            f"{micro_batches} (batch.global={b.global_} / batch.micro={b.micro} / data ranks)"
        )
