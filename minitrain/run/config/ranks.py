"""Count the ranks and micro-batches that a config asks for."""

from minitrain.run.config.environment import world_size
from minitrain.settings import Config


def training_ranks(config: Config) -> int:
    """Return the product of the parallel dimensions: the number of ranks that train.

    dp_shard=-1 stands for the ranks that remain of those that torchrun started. In a single process
    they are the GPUs of the published result (`reference`). It is at least 1.
    """
    p = config.parallel
    others = p.dp_replicate * p.tp * p.cp * p.pp
    if p.dp_shard != -1:
        return others * p.dp_shard
    gpus = world_size() if world_size() > 1 else config.reference.get("gpus", 1)
    return others * max(1, (gpus - config.grpo.generation_ranks) // others)


def stated_ranks(config: Config) -> int:
    """Return the number of all ranks, with those that only sample."""
    return training_ranks(config) + config.grpo.generation_ranks


def row_ranks(config: Config) -> int:
    """Return how many ranks have different rows of a batch: the data-parallel ranks."""
    p = config.parallel
    return training_ranks(config) // (p.tp * p.cp * p.pp)


def micro_batches(config: Config) -> int:
    """Return how many micro-batches a rank runs in an optimizer step."""
    return config.batch.global_ // (config.batch.micro * row_ranks(config))
