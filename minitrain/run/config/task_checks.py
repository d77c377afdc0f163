"""Check what each task, and each kind of model, needs of the settings. checks.py calls these."""

import math

from minitrain.errors import Faults
from minitrain.formats.config_hf import check_family
from minitrain.run.config.layout_checks import sampler_faults
from minitrain.settings import GRPO, Config
from minitrain.tasks import TASKS
from minitrain.training.distillation import BASE
from minitrain.training.mtp_loss import trains_mtp

# kinds of data that no file holds
MADE_UP = ("mock", "shapes")
# kinds of data that hold videos
VIDEOS = ("latents", "shapes")


def language_faults(c: Config) -> Faults:
    model = c.model.config
    check_family(model)
    kind = c.data.kind
    yield (
        model.num_labels and c.task != "reward",
        f"model.num_labels={model.num_labels}: a model with a score as its head is for task=reward, not {c.task}",
    )
    yield (
        c.task == "grpo" and c.grpo.aggregation != "token" and trains_mtp(c),
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
        TASKS[c.task].chats and kind not in ("jsonl", "mock"),
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


def diffusion_faults(c: Config) -> Faults:
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


def distill_faults(c: Config) -> Faults:
    teachers = c.teachers
    yield (
        teachers and not TASKS[c.task].teachers,
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


def grpo_faults(c: Config) -> Faults:
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


def replay_faults(c: Config) -> Faults:
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
    for name, compiles in (("compile", c.compile), ("rollout.compile", c.rollout.compile)):
        yield (
            compiles,
            f"grpo.replay_routing=true has not been tried with {name}=true (use false for one of them)",
        )
