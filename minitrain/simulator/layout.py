"""Check a config without running it: lay its model out, without memory, for the number of ranks that it states."""

from functools import partial

from minitrain.parallel.mesh import build_meshes, local, world_size
from minitrain.parallel.parallelize import lay_out
from minitrain.run.config_checks import check_layout
from minitrain.settings import Config
from minitrain.simulator.fake_world import fake_world
from minitrain.training.build import make_model


def training_ranks(config: Config) -> int:
    """The product of the parallel dimensions. An open dp_shard takes what this process was started with, at least 1."""
    p, sampling = config.parallel, config.grpo.generation_ranks
    others = p.dp_replicate * p.tp * p.cp * p.pp
    return others * (max(1, (world_size() - sampling) // others) if p.dp_shard == -1 else p.dp_shard)


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


def dry_run(config: Config) -> str:
    """Validate and lay out on the meta device, and describe the result. Raises InputError for what cannot work."""
    ranks = stated_ranks(config)
    check_layout(config, ranks)
    with fake_world(ranks):
        model = lay_out(partial(make_model, config), config, build_meshes(config, "cpu"))
        total = sum(p.numel() for p in make_model(config).parameters())
        mine = sum(local(p).numel() for p in model.parameters())
    count = micro_batches(config)
    return f"{total:,} parameters over {ranks} ranks, {mine:,} on rank 0; {count} micro-batch(es) a step: ok"
