"""What a single setting cannot know: which settings contradict each other, and whether the ranks can run them.

All of it is checked before anything is built or any process group starts.
"""

from typing import TYPE_CHECKING

from minitrain.errors import InputError
from minitrain.models.config_hf import exportable_family

if TYPE_CHECKING:
    from minitrain.config import Config


def validate(config: "Config") -> None:
    """Refuse settings that contradict each other. What depends on the number of ranks is in `check_layout`."""
    c, b, p, o = config, config.batch, config.parallel, config.optim
    _at_least(1, ("steps", c.steps), ("batch.global", b.global_), ("batch.micro", b.micro),
              ("batch.seq_len", b.seq_len), ("parallel.dp_replicate", p.dp_replicate), ("parallel.tp", p.tp),
              ("parallel.cp", p.cp), ("parallel.pp", p.pp), ("parallel.vp", p.vp),
              ("checkpoint.keep", c.checkpoint.keep), ("validation.batches", c.validation.batches))  # fmt: skip
    exportable_family(c.model.config)
    _at_least(0, ("seed", c.seed), ("parallel.prefetch", p.prefetch), ("optim.lr", o.lr), ("optim.warmup", o.warmup),
              ("optim.eps", o.eps), ("optim.weight_decay", o.weight_decay), ("validation.every", c.validation.every),
              ("checkpoint.every", c.checkpoint.every))  # fmt: skip
    if p.dp_shard < 1 and p.dp_shard != -1:
        raise InputError(f"parallel.dp_shard={p.dp_shard} must be at least 1, or -1 for all remaining ranks")
    if b.global_ % b.micro:
        raise InputError(f"batch.micro={b.micro} does not divide batch.global={b.global_}")
    if b.seq_len > c.model.config.max_position_embeddings:
        limit = c.model.config.max_position_embeddings
        raise InputError(f"batch.seq_len={b.seq_len} exceeds the model's max_position_embeddings={limit}")
    if len(o.betas) != 2 or not all(0 <= beta < 1 for beta in o.betas):
        raise InputError(f"optim.betas={o.betas} must be two numbers, each at least 0 and below 1")
    if o.clip is not None and o.clip <= 0:
        raise InputError(f"optim.clip={o.clip} must be above 0, or null for no clipping")
    for name, share in (("optim.final_lr", o.final_lr), ("data.validation", c.data.validation)):
        if not 0 <= share < 1 and (name, share) != ("optim.final_lr", 1):
            raise InputError(f"{name}={share} must be at least 0 and below 1")
    if o.warmup > c.steps:
        raise InputError(f"optim.warmup={o.warmup} exceeds steps={c.steps}")
    if c.data.kind != "mock" and not c.data.path:
        raise InputError(f"data.kind={c.data.kind} needs data.path")
    if c.validation.every and c.data.kind != "mock" and not c.data.validation:
        raise InputError(f"validation.every={c.validation.every} needs data.validation above 0, the share held out")
    _validate_recompute(c)
    _validate_context(c)
    _validate_tensor(c)
    _validate_experts(c)
    _validate_pipeline(c)


def _validate_context(config: "Config") -> None:
    p, heads, length = config.parallel, config.model.config.num_key_value_heads, config.batch.seq_len
    unit = 2 * p.cp if p.context == "allgather" else p.cp
    if p.cp > 1 and "M" in config.model.config.layer_pattern:
        raise InputError(f"parallel.cp={p.cp}: the state of Mamba-2 layers runs through the whole sequence (use cp=1)")
    if p.cp > 1 and length % unit:
        raise InputError(
            f"batch.seq_len={length} is not a multiple of {unit}, which parallel.cp={p.cp} needs with "
            f"context={p.context} (use {length // unit * unit} or {length // unit * unit + unit})"
        )
    if p.cp > 1 and p.context == "ulysses" and heads % (p.cp * p.tp):
        possible = [n for n in range(1, heads + 1) if heads % (n * p.tp) == 0]
        raise InputError(
            f"parallel.cp={p.cp} x tp={p.tp} with context=ulysses does not divide num_key_value_heads={heads} "
            f"(use context=allgather, or cp={_alternatives(possible)})"
        )


def _validate_recompute(config: "Config") -> None:
    setting, budget = config.recompute, isinstance(config.recompute, float)
    if (budget and not 0 < setting < 1) or (isinstance(setting, int) and setting < 2):
        raise InputError(
            f"recompute={setting} must be none, full, selective, a whole number of at least 2 (every so many blocks), "
            f"or a memory budget between 0 and 1"
        )
    if budget and not config.compile:
        raise InputError(f"recompute={setting} is a memory budget for the compiler: it needs compile=true")


def _validate_tensor(config: "Config") -> None:
    model, batch, p = config.model.config, config.batch, config.parallel
    fields = ("num_key_value_heads", "num_attention_heads", "intermediate_size", "vocab_size")
    sizes = {field: getattr(model, field) for field in fields}
    sizes["batch.seq_len" if p.cp == 1 else f"batch.seq_len / parallel.cp={p.cp}, i.e. seq_len"] = batch.seq_len // p.cp
    for name, size in sizes.items():
        if size % p.tp:
            possible = [n for n in range(1, size + 1) if not any(other % n for other in sizes.values())]
            raise InputError(f"parallel.tp={p.tp} does not divide {name}={size} (use {_alternatives(possible)})")
    for name in ("layer_pattern", "num_experts", "kv_lora_rank", "sinks", "o_bias"):
        if p.tp > 1 and getattr(model, name):
            raise InputError(f"parallel.tp={p.tp} cannot split models with {name}={getattr(model, name)} (use tp=1)")
    if p.async_tp and (p.tp == 1 or not config.compile):
        raise InputError("parallel.async_tp=true needs parallel.tp above 1 and compile=true")


def _validate_experts(config: "Config") -> None:
    if config.compile and config.precision == "fp32" and config.model.config.num_experts:
        raise InputError("compile=true with precision=fp32: experts compile in bf16 only (use bf16 or bf16-pure)")


def _validate_pipeline(config: "Config") -> None:
    p, slots, stages = config.parallel, config.model.config.num_layers + 2, config.parallel.pp * config.parallel.vp
    if p.pp == 1 and (p.vp > 1 or p.layers_per_stage):
        raise InputError(f"parallel.vp={p.vp} and layers_per_stage={p.layers_per_stage} need parallel.pp above 1")
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
    if split and (config.compile or config.recompute != "none"):
        raise InputError(
            f"parallel.schedule={p.schedule} runs each backward pass in two parts: with compile=true all of it would "
            f"run twice, with recompute={config.recompute} a block's forward once per weight (use compile=false and "
            f"recompute=none, or Interleaved1F1B)"
        )
    given = p.layers_per_stage
    if given and (len(given) != stages or sum(given) != slots or min(given) < 1):
        raise InputError(
            f"parallel.layers_per_stage={given} must be {stages} numbers (pp={p.pp} x vp={p.vp} stages) of at least 1 "
            f"with sum {slots} (num_layers={slots - 2}, embedding and head)"
        )
    if stages > slots:
        raise InputError(
            f"parallel.pp={p.pp} x vp={p.vp} stages are more than the {slots} that num_layers={slots - 2}, embedding "
            f"and head can fill (use at most {slots} stages)"
        )


def _check_pipeline(config: "Config", micro_batches: int) -> None:
    p = config.parallel
    least = {"1F1B": p.pp, "DualPipeV": 2 * p.pp}.get(p.schedule, 1)
    rounds = max(1, micro_batches // p.pp) if p.schedule.startswith("Interleaved") else 1
    if p.pp > 1 and (micro_batches < least or micro_batches % rounds):
        needed = f"at least {least}" if micro_batches < least else f"a multiple of {p.pp}, or fewer than {2 * p.pp},"
        raise InputError(
            f"parallel.schedule={p.schedule} with pp={p.pp} needs {needed} micro-batches per rank and step, not "
            f"{micro_batches} (batch.global={config.batch.global_} / batch.micro={config.batch.micro} / data ranks)"
        )


def _alternatives(values: list) -> str:
    return " or ".join(filter(None, [", ".join(map(str, values[:-1])), str(values[-1])]))


def _at_least(least: int, *settings: tuple[str, float]) -> None:
    for name, value in settings:
        if value < least:
            raise InputError(f"{name}={value} must be at least {least}")


def check_layout(config: "Config", world_size: int) -> None:
    """Can `world_size` ranks run this config? Raises an InputError that says what would be possible."""
    p, b = config.parallel, config.batch
    others = p.dp_replicate * p.tp * p.cp * p.pp
    if p.dp_shard == -1 and world_size % others:
        raise InputError(
            f"parallel.dp_replicate={p.dp_replicate} x tp={p.tp} x cp={p.cp} x pp={p.pp} = {others} "
            f"does not divide the {world_size} ranks"
        )
    if p.dp_shard != -1 and others * p.dp_shard != world_size:
        raise InputError(
            f"parallel.dp_replicate={p.dp_replicate} x dp_shard={p.dp_shard} x tp={p.tp} x cp={p.cp} x pp={p.pp} = "
            f"{others * p.dp_shard} is not the number of ranks, {world_size}"
        )
    data_ranks = world_size // (p.tp * p.cp * p.pp)
    if b.global_ % (b.micro * data_ranks):
        raise InputError(
            f"batch.global={b.global_} is not a multiple of batch.micro={b.micro} x {data_ranks} data-parallel ranks "
            f"(use a multiple of {b.micro * data_ranks})"
        )
    _check_pipeline(config, b.global_ // (b.micro * data_ranks))
