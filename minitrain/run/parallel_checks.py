"""How many ranks a config states, and whether they can run it: what parallelism must divide."""

import math
from typing import Any

from minitrain.errors import InputError
from minitrain.models.decoder_config import DecoderConfig
from minitrain.parallel.pipeline import pipeline_needs
from minitrain.run.rendezvous import world_size
from minitrain.settings import Config


def validate_context(config: Config) -> None:
    p = config.parallel
    model = config.model.config
    length = config.batch.seq_len
    heads = model.num_key_value_heads
    groups = model.mamba_n_groups
    unit = 2 * p.cp if p.context == "allgather" else p.cp
    if p.cp > 1 and "M" in model.layer_pattern and groups % (p.cp * p.tp):
        raise InputError(
            f"parallel.cp={p.cp} x tp={p.tp} does not divide mamba_n_groups={groups} "
            f"(use cp={alternatives(divisors(groups // p.tp))})"
        )
    if p.cp > 1 and length % unit:
        possible = [n for n in (length // unit * unit, length // unit * unit + unit) if n]
        raise InputError(
            f"batch.seq_len={length} is not a multiple of {unit}, which parallel.cp={p.cp} needs with "
            f"context={p.context} (use {alternatives(possible)})"
        )
    if p.cp > 1 and p.context == "ulysses" and heads % (p.cp * p.tp):
        possible = divisors(max(1, heads // p.tp))
        raise InputError(
            f"parallel.cp={p.cp} x tp={p.tp} with context=ulysses does not divide num_key_value_heads={heads} "
            f"(use context=allgather, or cp={alternatives(possible)})"
        )


def validate_tensor(config: Config) -> None:
    model = config.model.config
    batch = config.batch
    p = config.parallel
    sizes = split_sizes(model, p.tp, p.ep)
    sizes["batch.seq_len" if p.cp == 1 else f"batch.seq_len / parallel.cp={p.cp}, i.e. seq_len"] = (
        batch.seq_len // p.cp
    )
    must_divide("parallel.tp", p.tp, sizes)
    refuse(
        (
            p.async_tp and (config.task == "grpo" or (config.lora and config.lora.dropout)),
            "parallel.async_tp=true is not for task=grpo or lora.dropout above 0 (use false)",
        ),
        (
            p.async_tp and (p.tp == 1 or not config.compile),
            "parallel.async_tp=true needs parallel.tp above 1 and compile=true",
        ),
    )


def split_sizes(model: DecoderConfig, tp: int, ep: int) -> dict[str, int]:
    """What of a decoder tensor parallelism splits, by what its layers consist of."""
    parts = {part for layer in range(model.num_layers) for part in model.parts(layer)}
    fields = {
        "attention": ["num_key_value_heads", "num_attention_heads"],
        "mamba": ["mamba_n_groups"],
        "mlp": ["intermediate_size"],
        "moe": ["shared_expert_intermediate_size"],
    }
    sizes = {
        field: getattr(model, field) for part in fields if part in parts for field in fields[part]
    }
    if tp % model.num_key_value_heads == 0:  # several ranks can have the same one
        sizes.pop("num_key_value_heads", None)
    if "moe" in parts and ep == 1:  # in steps that grouped products can take
        sizes["moe_intermediate_size / 8"] = model.moe_intermediate_size // 8
    return sizes | {"vocab_size": model.vocab_size}


def validate_expert_parallel(config: Config) -> None:
    ep = config.parallel.ep
    experts = getattr(config.model.config, "num_experts", 0)
    if ep > 1 and not experts:
        raise InputError(f"parallel.ep={ep} needs a model with experts (use ep=1)")
    must_divide("parallel.ep", ep, {"num_experts": experts})


def check_expert_parallel(config: Config, ranks: int) -> None:
    """ranks: how many see different tokens and have the same layers, in one replica."""
    p = config.parallel
    model = config.model.config
    if ranks % p.ep:
        possible = divisors(math.gcd(ranks, model.num_experts))
        raise InputError(
            f"parallel.ep={p.ep} does not divide dp_shard x cp x tp = {ranks} ranks (use {alternatives(possible)})"
        )
    same = ranks // p.ep
    for name in (
        "moe_intermediate_size",
        "moe_latent_size" if model.moe_latent_size else "hidden_size",
    ):
        if getattr(model, name) % same:
            raise InputError(
                f"parallel.ep={p.ep} leaves {same} ranks with the same experts, which do not divide "
                f"{name}={getattr(model, name)} (use a larger ep)"
            )


def validate_pipeline(config: Config) -> None:
    p = config.parallel
    slots = config.model.config.num_layers + 2
    stages = config.parallel.pp * config.parallel.vp
    if p.pp == 1 and (p.vp > 1 or p.layers_per_stage or p.head_layers > 1):
        given = f"vp={p.vp}, layers_per_stage={p.layers_per_stage}, head_layers={p.head_layers}"
        raise InputError(f"parallel.{given} need parallel.pp above 1 (use 1, null and 1)")
    if p.pp == 1:
        return
    refuse(
        (
            p.schedule in ("GPipe", "1F1B") and p.vp > 1,
            f"parallel.schedule={p.schedule} has one stage per rank, not vp={p.vp} "
            f"(use vp=1, or Interleaved1F1B, LoopedBFS or InterleavedZeroBubble)",
        ),
        (
            p.schedule in ("ZBVZeroBubble", "DualPipeV") and p.vp != 2,
            f"parallel.schedule={p.schedule} has two stages per rank, not vp={p.vp} (use vp=2)",
        ),
    )
    split = p.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    if split and (config.compile or config.precision == "fp8" or config.recompute != "none"):
        raise InputError(
            f"parallel.schedule={p.schedule} runs each backward pass in two parts: with compile=true or precision=fp8 "
            f"all of it would run twice, with recompute={config.recompute} a block's forward once per weight (use "
            f"compile=false, bf16 and recompute=none, or Interleaved1F1B)"
        )
    given = p.layers_per_stage
    refuse(
        (
            given and (len(given) != stages or sum(given) != slots or min(given) < 1),
            f"parallel.layers_per_stage={given} must be {stages} numbers (pp={p.pp} x vp={p.vp} stages) of at least 1 "
            f"with sum {slots} (num_layers={slots - 2}, embedding and head)",
        ),
        (
            given and p.head_layers > 1,
            f"parallel.head_layers={p.head_layers} is for stages that are as even as possible, not for "
            f"layers_per_stage={given} (use one of the two)",
        ),
        (
            stages > slots,
            f"parallel.pp={p.pp} x vp={p.vp} stages are more than the {slots} that num_layers={slots - 2}, embedding "
            f"and head can fill (use at most {slots} stages)",
        ),
    )
    each, more = divmod(slots - 1 + p.head_layers, stages)
    if p.head_layers > each + (more > 1):
        raise InputError(
            f"parallel.head_layers={p.head_layers} is more than a stage's even share of num_layers={slots - 2} over "
            f"pp={p.pp} x vp={p.vp} stages (use less, or fewer stages)"
        )


def validate_sampler_split(config: Config) -> None:
    model = config.model.config
    tp = config.rollout.tp
    ep = config.rollout.ep
    refuse(
        (
            ep not in (1, tp),
            f"rollout.ep={ep} must be 1 or rollout.tp={tp}: the ranks that share a sampler's model",
        ),
        (
            ep > 1 and not model.num_experts,
            f"rollout.ep={ep} needs a model with experts (use ep=1)",
        ),
    )
    sizes = split_sizes(model, tp, ep) | ({"num_experts": model.num_experts} if ep > 1 else {})
    must_divide("rollout.tp", tp, sizes)


def ranks_that_train(config: Config, world_size: int) -> int:
    """How many ranks train; those that only sample must be a multiple of them."""
    sampling = config.grpo.generation_ranks
    training = world_size - sampling
    if sampling and (training < 1 or sampling % training):
        possible = [n for n in range(world_size) if n % (world_size - n) == 0]
        raise InputError(
            f"grpo.generation_ranks={sampling} of {world_size} ranks must be a multiple of those that train "
            f"(use {alternatives(possible)})"
        )
    tp = config.rollout.tp
    if training % tp:
        raise InputError(f"rollout.tp={tp} does not divide the {training} ranks that train")
    return training


def alternatives(values: list) -> str:
    return " or ".join(filter(None, [", ".join(map(str, values[:-1])), str(values[-1])]))


def refuse(*contradictions: tuple[Any, str]) -> None:
    """Raises InputError with the line of the first contradiction that is there."""
    for found, line in contradictions:
        if found:
            raise InputError(line)


def must_divide(name: str, ranks: int, sizes: dict[str, int]) -> None:
    """Raises InputError if `ranks`, the setting `name`, does not divide all sizes, which have names
    too.
    """
    for of, size in sizes.items():
        if size % ranks:
            possible = alternatives(divisors(math.gcd(*sizes.values())))
            raise InputError(f"{name}={ranks} does not divide {of}={size} (use {possible})")


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def check_layout(config: Config, world_size: int) -> None:
    """Can `world_size` ranks run this config? Raises an InputError that says what would be
    possible.
    """
    p = config.parallel
    b = config.batch
    if config.task == "grpo":
        world_size = ranks_that_train(config, world_size)
    others = p.dp_replicate * p.tp * p.cp * p.pp
    refuse(
        (
            p.dp_shard == -1 and world_size % others,
            f"parallel.dp_replicate={p.dp_replicate} x tp={p.tp} x cp={p.cp} x pp={p.pp} = {others} "
            f"does not divide the number of ranks, {world_size} (start {others}, or a multiple, with torchrun)",
        ),
        (
            p.dp_shard != -1 and others * p.dp_shard != world_size,
            f"parallel.dp_replicate={p.dp_replicate} x dp_shard={p.dp_shard} x tp={p.tp} x cp={p.cp} x pp={p.pp} = "
            f"{others * p.dp_shard} is not the number of ranks, {world_size} (start so many with torchrun; bench.py's "
            f"--dry-run, --simulate and --shrink need none)",
        ),
    )
    if p.ep > 1:
        check_expert_parallel(config, world_size // (p.dp_replicate * p.pp))
    data_ranks = world_size // (p.tp * p.cp * p.pp)
    if b.global_ % (b.micro * data_ranks):
        fitting = next(
            (n for n in range(b.micro, 0, -1) if b.global_ % (n * data_ranks) == 0), None
        )
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


def training_ranks(config: Config) -> int:
    """Return the product of the parallel dimensions. An open dp_shard, at least 1, takes what
    torchrun started, or for one process what the published row ran on."""
    p = config.parallel
    others = p.dp_replicate * p.tp * p.cp * p.pp
    if p.dp_shard != -1:
        return others * p.dp_shard
    gpus = world_size() if world_size() > 1 else config.reference.get("gpus", 1)
    return others * max(1, (gpus - config.grpo.generation_ranks) // others)


def stated_ranks(config: Config) -> int:
    """With those that only sample."""
    return training_ranks(config) + config.grpo.generation_ranks


def row_ranks(config: Config) -> int:
    """Ranks that take different rows of a batch."""
    p = config.parallel
    return training_ranks(config) // (p.tp * p.cp * p.pp)


def micro_batches(config: Config) -> int:
    """Of a rank, in an optimizer step."""
    return config.batch.global_ // (config.batch.micro * row_ranks(config))
