"""The one place that knows the order in which a model is transformed.

Pipeline split, experts, tensor, context, recompute, compile each block, shard; all but the first
for each stage by itself.

Recomputation must be inside the compiled region, so that the compiler sees it, and sharding
outside, so that its hooks gather and free weights around the compiled block.
"""

from collections.abc import Callable

import torch
import torch._dynamo.config  # the settings have no public names
import torch._functorch.config
from torch.nn import Module

from minitrain.models.wan import Wan
from minitrain.parallel.context import context_parallel
from minitrain.parallel.expert import expert_parallel
from minitrain.parallel.fsdp import shard
from minitrain.parallel.mesh import Meshes
from minitrain.parallel.pipeline import Pipeline, local_stages
from minitrain.parallel.recompute import recompute
from minitrain.parallel.tensor import overlap_collectives
from minitrain.parallel.tensor_decoder import tensor_parallel
from minitrain.parallel.tensor_wan import tensor_parallel_wan
from minitrain.settings import Config

# of a process's blocks: all kinds of layers, each in training, in evaluation and frozen; torch
# allows 8
GRAPHS = 64
# tensors that one expression may combine; torch allows 8. LoRA's queries with dropout, rotated,
# take 10
READS = 12


def parallelize(make: Callable[..., Module], config: Config, meshes: Meshes) -> Module:
    """The model `make()`, transformed; in a pipeline, this rank's stages of it, from make(layers=,
    first=, last=).
    """
    parallel = config.parallel
    if parallel.pp == 1:
        model = make()
        apply_techniques(model, config, meshes)
        return model
    parts = local_stages(parallel, config.model.config.num_layers, meshes.pp.get_local_rank())
    stages = {number: make(**part) for number, part in parts.items()}
    for stage in stages.values():
        apply_techniques(stage, config, meshes)
    dtype = torch.get_default_dtype() if config.precision == "fp32" else torch.bfloat16
    keeps_weights = parallel.reshard_after_forward is False
    return Pipeline(stages, parallel.schedule, meshes.pp, meshes.tp.size(), dtype, keeps_weights)


def apply_techniques(model: Module, config: Config, meshes: Meshes) -> None:
    """Transform `model`, still on the meta device or not, in place. It must have `.blocks`."""
    if meshes.experts is not None:
        expert_parallel(model, meshes.experts["ep"])
    if meshes.tp.size() > 1:
        (tensor_parallel_wan if isinstance(model, Wan) else tensor_parallel)(model, meshes.tp)
    if meshes.cp.size() > 1:
        context_parallel(model, meshes.cp, config.parallel.context)
    recompute(model.blocks, config.recompute, random=bool(config.lora and config.lora.dropout))
    if config.parallel.async_tp:
        overlap_collectives(meshes.tp)
    if config.compile:
        from torch._inductor import config as inductor  # takes a second to import

        torch._dynamo.config.recompile_limit = GRAPHS
        inductor.realize_acc_reads_threshold = READS
        # Mamba-2's padded gradients would be copied for their matrix product
        inductor.comprehensive_padding = False
        # and its gate kept in fp32
        torch._functorch.config.ban_recompute_long_fusible_chains = False
        # None: when another length comes
        dynamic = None if config.data.kind == "latents" else False
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=dynamic)
    # adapters are cast where they are used, and what is frozen has the right type: one rank needs
    # no FSDP for that
    compute_dtype = (
        torch.bfloat16 if config.precision in ("bf16", "fp8") and not config.lora else None
    )
    # FSDP shards, adds up tensor parallelism's partial gradients, and casts weights: one rank may
    # need it for that
    several = meshes.parameters.size() * meshes.tp.size() > 1
    if several or compute_dtype or config.precision == "fp8":
        parallel = config.parallel
        frees = (
            several if parallel.reshard_after_forward is None else parallel.reshard_after_forward
        )
        shard(
            model,
            model.blocks,
            meshes.parameters,
            compute_dtype,
            torch.float32 if parallel.reduce == "fp32" else torch.bfloat16,
            frees and parallel.pp == 1,
            parallel.prefetch,
            meshes.experts,
        )
