"""Tell what a config needs without running it: memory by tracing a step, sizes by a dry run."""

import os
from functools import partial

import torch.distributed as dist

from minitrain.errors import InputError
from minitrain.parallel.parallelize import parallelize
from minitrain.parallel.recompute import OFFLOADED
from minitrain.parallel.shards import to_local
from minitrain.run.config.environment import rank, world_size
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.config.ranks import micro_batches, stated_ranks
from minitrain.run.launch.start import meshes_of
from minitrain.settings import Config
from minitrain.simulator.fake_world import fake_world, trace_step
from minitrain.simulator.simulate import few_micro_batches, with_balanced_experts
from minitrain.simulator.simulate_policy import training_config
from minitrain.training.build import make_model
from minitrain.training.footprint import GIB, describe_sizes, footprint, on_host


def estimate_memory(config: Config, world_size: int) -> dict[str, float]:
    """Return rank 0's peak memory in GiB, by kind (parameters, gradients, ...).

    Call before a process group starts.
    """
    return {kind: size / 2**30 for kind, size in trace_step(config, world_size).peak.items()}


def announce_memory(row: str, config: Config) -> dict[str, float]:
    """Print how much memory a rank will need, before any is allocated.

    Returns the keys for the config's result: none on other ranks than 0 and, under torchrun, none
    after the first config, whose process group must stay.
    """
    if rank() != 0:
        return {}
    # an earlier config left a group; the estimate needs a fake one
    if dist.is_initialized():
        if "WORLD_SIZE" in os.environ:
            return {}
        dist.destroy_process_group()
    kinds = estimate_memory(config, world_size())
    parts = ", ".join(f"{kind} {size:.3g}" for kind, size in kinds.items())
    print(f"{row}: estimated peak memory {sum(kinds.values()):.3g} GiB ({parts})", flush=True)
    working = kinds["activations"] + kinds["gathered"]
    return {"estimated_memory_gib": sum(kinds.values()), "estimated_activations_gib": working}


def offloaded_activations(config: Config, ranks: int) -> str:
    """Return in words what rank 0 and its host hold of activations, with their bytes if they can be traced.

    The few micro-batches of a trace hold as much as a step's.
    """
    if config.task == "grpo":
        config = training_config(config)
    try:
        trace = trace_step(few_micro_batches(with_balanced_experts(config)), ranks)
    except InputError:
        # a second model, or experts in fp32
        return "activations of two blocks; those of all others are on the host"
    kept = (trace.peak["activations"] + trace.peak["gathered"]) / GIB
    return (
        f"{kept:.1f} GiB of activations, of two blocks at a time; {trace.host_peak / GIB:.1f} GiB of those of all "
        f"others are on the host"
    )


def dry_run(config: Config) -> str:
    """Parallelize the config's model on the meta device and return a line of its sizes.

    Raises InputError for a config that cannot run.
    """
    ranks = stated_ranks(config)
    check_layout(config, ranks)
    with fake_world(ranks):
        model = parallelize(partial(make_model, config), config, meshes_of(config, "cpu"))
        total = sum(p.numel() for p in make_model(config).parameters())
        mine = sum(to_local(p).numel() for p in model.parameters())
        sizes = footprint(model, config)
        away = on_host(model, config)
    count = micro_batches(config)
    others = "activations"
    if config.recompute in OFFLOADED:
        others = offloaded_activations(config, ranks)
    if away:
        others += f"; {away / GIB:.1f} GiB of optimizer states are on the host"
    return (
        f"{total:,} parameters over {ranks} ranks, {mine:,} on rank 0, which takes "
        f"{describe_sizes(sizes)} and {others}; "
        f"{count} micro-batch(es) a step: ok"
    )
