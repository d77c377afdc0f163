"""Check parallel layouts: the number of ranks, and whether it divides the sizes that it splits."""

import math

from minitrain.errors import Faults, InputError, refuse
from minitrain.models.decoder_config import DecoderConfig
from minitrain.parallel.pipeline_split import SCHEDULES, head_fits, pipeline_needs
from minitrain.settings import Config

# recurrent mixer -> the field with the number of its groups of heads, which ranks share
GROUPS = {"mamba": "mamba_n_groups", "delta": "linear_num_key_heads"}


def context_faults(config: Config) -> Faults:
    p = config.parallel
    model = config.model.config
    length = config.batch.seq_len
    mixers = {model.parts(layer)[0] for layer in model.all_layers}
    for mixer, field in GROUPS.items():
        groups = getattr(model, field)
        yield (
            mixer in mixers and groups % (p.cp * p.tp),
            f"parallel.cp={p.cp} x tp={p.tp} does not divide {field}={groups} "
            f"(use cp={alternatives(divisors(groups // p.tp))})",
        )
    unit = 2 * p.cp if p.context == "allgather" else p.cp
    below = length // unit * unit
    yield (
        length % unit,
        f"batch.seq_len={length} is not a multiple of {unit}, which parallel.cp={p.cp} needs with "
        f"context={p.context} (use {alternatives([n for n in (below, below + unit) if n])})",
    )
    heads = model.num_attention_heads // p.tp
    kv_heads = max(1, model.num_key_value_heads // p.tp)
    possible = [n for n in divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0]
    yield (
        p.context == "ulysses" and p.cp not in possible,
        f"parallel.cp={p.cp} x tp={p.tp} with context=ulysses: a rank cannot have equally many of "
        f"num_attention_heads={model.num_attention_heads} and num_key_value_heads={model.num_key_value_heads} "
        f"(use context=allgather, or cp={alternatives(possible)})",
    )


def tensor_faults(config: Config) -> Faults:
    p = config.parallel
    sizes = split_sizes(config.model.config, p.tp, p.ep)
    name = "batch.seq_len" if p.cp == 1 else f"batch.seq_len / parallel.cp={p.cp}, i.e. seq_len"
    sizes[name] = config.batch.seq_len // p.cp
    yield from division_faults("parallel.tp", p.tp, sizes)


def split_sizes(model: DecoderConfig, tp: int, ep: int) -> dict[str, int]:
    """Return the sizes of a decoder that tensor parallelism splits, for the kinds of layers it has."""
    parts = {part for layer in model.all_layers for part in model.parts(layer)}
    fields = {
        "attention": ["num_key_value_heads", "num_attention_heads"],
        **{mixer: [field] for mixer, field in GROUPS.items()},
        "mlp": ["intermediate_size"],
        "moe": ["shared_expert_intermediate_size"],
    }
    sizes = {
        field: getattr(model, field) for part in fields if part in parts for field in fields[part]
    }
    # several ranks can hold copies of one key-value head
    if tp % model.num_key_value_heads == 0:
        sizes.pop("num_key_value_heads", None)
    # grouped matrix products need widths that are multiples of 8
    if "moe" in parts and ep == 1:
        sizes["moe_intermediate_size / 8"] = model.moe_intermediate_size // 8
    return sizes | {"vocab_size": model.vocab_size}


def expert_parallel_faults(config: Config) -> Faults:
    ep = config.parallel.ep
    experts = getattr(config.model.config, "num_experts", 0)
    yield ep > 1 and not experts, f"parallel.ep={ep} needs a model with experts (use ep=1)"
    yield from division_faults("parallel.ep", ep, {"num_experts": experts})


def expert_layout_faults(config: Config, ranks: int) -> Faults:
    """Check that the sizes of the experts can be divided.

    ranks: the number of ranks of one replica that have the same layers.
    """
    p = config.parallel
    model = config.model.config
    possible = divisors(math.gcd(ranks, model.num_experts))
    yield (
        ranks % p.ep,
        f"parallel.ep={p.ep} does not divide dp_shard x cp x tp = {ranks} ranks (use {alternatives(possible)})",
    )
    same = ranks // p.ep
    width = "moe_latent_size" if model.moe_latent_size else "hidden_size"
    for name in ("moe_intermediate_size", width):
        yield (
            getattr(model, name) % same,
            f"parallel.ep={p.ep} leaves {same} ranks with the same experts, which do not divide "
            f"{name}={getattr(model, name)} (use a larger ep)",
        )


def unused_pipeline_faults(config: Config) -> Faults:
    """Check for settings of a pipeline when parallel.pp is 1."""
    p = config.parallel
    given = f"vp={p.vp}, layers_per_stage={p.layers_per_stage}, head_layers={p.head_layers}"
    wrong = p.vp > 1 or p.layers_per_stage or p.head_layers > 1
    yield wrong, f"parallel.{given} need parallel.pp above 1 (use 1, null and 1)"


def pipeline_faults(config: Config) -> Faults:
    p = config.parallel
    schedule = SCHEDULES[p.schedule]
    yield (
        schedule.stages == 1 and p.vp > 1,
        f"parallel.schedule={p.schedule} has one stage per rank, not vp={p.vp} "
        f"(use vp=1, or Interleaved1F1B, LoopedBFS or InterleavedZeroBubble)",
    )
    yield (
        schedule.stages == 2 and p.vp != 2,
        f"parallel.schedule={p.schedule} has two stages per rank, not vp={p.vp} (use vp=2)",
    )
    recomputes = config.recompute not in ("none", "offload")
    twice = config.compile or config.precision == "fp8" or recomputes
    yield (
        schedule.splits_backward and twice,
        f"parallel.schedule={p.schedule} runs each backward pass in two parts: with compile=true or precision=fp8 "
        f"all of it would run twice, with recompute={config.recompute} a block's forward once per weight (use "
        f"compile=false, bf16 and recompute=none, or Interleaved1F1B)",
    )
    slots = config.model.config.num_layers + 2
    stages = p.pp * p.vp
    given = p.layers_per_stage
    if given:
        yield (
            len(given) != stages or sum(given) != slots or min(given) < 1,
            f"parallel.layers_per_stage={given} must be {stages} numbers (pp={p.pp} x vp={p.vp} stages) of at least "
            f"1 with sum {slots} (num_layers={slots - 2}, embedding and head)",
        )
        yield (
            p.head_layers > 1,
            f"parallel.head_layers={p.head_layers} is for stages that are as even as possible, not for "
            f"layers_per_stage={given} (use one of the two)",
        )
    yield (
        stages > slots,
        f"parallel.pp={p.pp} x vp={p.vp} stages are more than the {slots} that num_layers={slots - 2}, embedding "
        f"and head can fill (use at most {slots} stages)",
    )
    yield (
        not head_fits(p.head_layers, slots - 2, stages),
        f"parallel.head_layers={p.head_layers} is more than a stage's even share of num_layers={slots - 2} over "
        f"pp={p.pp} x vp={p.vp} stages (use less, or fewer stages)",
    )


def sampler_faults(config: Config) -> Faults:
    model = config.model.config
    tp = config.rollout.tp
    ep = config.rollout.ep
    yield (
        ep not in (1, tp),
        f"rollout.ep={ep} must be 1 or rollout.tp={tp}: the ranks that share a sampler's model",
    )
    yield (
        ep > 1 and not model.num_experts,
        f"rollout.ep={ep} needs a model with experts (use ep=1)",
    )
    sizes = split_sizes(model, tp, ep)
    if ep > 1:
        sizes["num_experts"] = model.num_experts
    yield from division_faults("rollout.tp", tp, sizes)


def ranks_that_train(config: Config, world_size: int) -> int:
    """Return how many ranks train.

    Raises InputError unless the number of those that only sample is a multiple of it.
    """
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
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


def division_faults(name: str, ranks: int, sizes: dict[str, int]) -> Faults:
    """Check that a number of ranks divides all of `sizes`. name: the setting with that number."""
    possible = divisors(math.gcd(*sizes.values()))
    for of, size in sizes.items():
        yield (
            size % ranks,
            f"{name}={ranks} does not divide {of}={size} (use {alternatives(possible)})",
        )


def divisors(number: int) -> list[int]:
    """Return all divisors in order; [1] for 0."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({1, *small, *(number // n for n in small)})


def check_layout(config: Config, world_size: int) -> None:
    """Raise InputError if this config cannot run on so many ranks. The message says what can."""
    if config.task == "grpo":
        world_size = ranks_that_train(config, world_size)
    refuse(_layout_faults(config, world_size))


def _layout_faults(config: Config, world_size: int) -> Faults:
    p = config.parallel
    b = config.batch
    others = p.dp_replicate * p.tp * p.cp * p.pp
    product = f"tp={p.tp} x cp={p.cp} x pp={p.pp}"
    yield (
        p.dp_shard == -1 and world_size % others,
        f"parallel.dp_replicate={p.dp_replicate} x {product} = {others} does not divide the number of ranks, "
        f"{world_size} (start {others}, or a multiple, with torchrun)",
    )
    yield (
        p.dp_shard != -1 and others * p.dp_shard != world_size,
        f"parallel.dp_replicate={p.dp_replicate} x dp_shard={p.dp_shard} x {product} = {others * p.dp_shard} is not "
        f"the number of ranks, {world_size} (start so many with torchrun; of bench.py, --proxy 2 needs one GPU, "
        f"--dry-run, --simulate and --shrink none)",
    )
    if p.ep > 1:
        yield from expert_layout_faults(config, world_size // (p.dp_replicate * p.pp))
    data_ranks = world_size // (p.tp * p.cp * p.pp)
    fitting = [n for n in range(1, b.micro) if b.global_ % (n * data_ranks) == 0]
    smaller = f"batch.micro={fitting[-1]}, or " if fitting else ""
    yield (
        b.global_ % (b.micro * data_ranks),
        f"batch.global={b.global_} is not a multiple of batch.micro={b.micro} x {data_ranks} data-parallel ranks "
        f"(use {smaller}a multiple of {b.micro * data_ranks})",
    )
    if p.pp == 1:
        return
    count = b.global_ // (b.micro * data_ranks)
    needed = pipeline_needs(p.schedule, p.pp, count)
    yield (
        needed,
        f"parallel.schedule={p.schedule} with pp={p.pp} needs {needed} micro-batches per rank and step, not "
        f"{count} (batch.global={b.global_} / batch.micro={b.micro} / data ranks)",
    )
