"""Check a config without running it: lay its model out, without memory, for the number of ranks that it states."""

from functools import partial

from minitrain.parallel.mesh import build_meshes, local, world_size
from minitrain.parallel.parallelize import lay_out
from minitrain.run.config_checks import check_layout
from minitrain.settings import Config
from minitrain.simulator.fake_world import fake_world
from minitrain.training.build import make_model


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
