"""Count the ranks that a config states."""

from minitrain.run.rendezvous import world_size
from minitrain.settings import Config


def training_ranks(config: Config) -> int:
    """Return the product of the parallel dimensions. An open dp_shard, at least 1, takes what torchrun started, or for
    one process what the published row ran on."""
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
