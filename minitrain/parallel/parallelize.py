"""Parallelize a model: the one place that knows in which order the techniques are applied.

The order: pipeline split, experts, tensor, context, recompute, compile each block, shard. All but
the first are applied to each pipeline stage by itself. Adapters and FP8 are in the model already.

Recomputation must be inside the compiled region, so that the compiler sees it, and sharding
outside, so that its hooks gather and free weights around the compiled block.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module

from minitrain.models.wan import Wan
from minitrain.parallel.compiling import compile_blocks
from minitrain.parallel.context import context_parallel
from minitrain.parallel.expert import expert_parallel
from minitrain.parallel.fsdp import shard
from minitrain.parallel.mesh import Meshes
from minitrain.parallel.pipeline import Pipeline
from minitrain.parallel.pipeline_split import local_stages
from minitrain.parallel.recompute import recompute
from minitrain.parallel.tensor_decoder import tensor_parallel
from minitrain.parallel.tensor_wan import tensor_parallel_wan
from minitrain.settings import Config


def parallelize(make: Callable[..., Module], config: Config, meshes: Meshes) -> Module:
    """Return the model that `make` builds, parallelized, or this rank's stages as a `Pipeline`.

    make: called without arguments, or for each stage with layers, first and last (see `Decoder`).
    """
    parallel = config.parallel
    if parallel.pp == 1:
        model = make()
        apply_techniques(model, config, meshes)
        return model
    model = config.model.config
    mtp_layers = model.num_nextn_predict_layers
    parts = local_stages(parallel, model.num_layers, meshes.pp.get_local_rank(), mtp_layers)
    stages = {number: make(**part) for number, part in parts.items()}
    for stage in stages.values():
        apply_techniques(stage, config, meshes)
    return Pipeline(
        stages,
        parallel.schedule,
        meshes.pp,
        shape=partial(hidden_shape, model.hidden_size, meshes.tp.size()),
        dtype=torch.get_default_dtype() if config.precision == "fp32" else torch.bfloat16,
        keeps_weights=parallel.reshard_after_forward is False,
        tied="model.embed_tokens.weight" if model.tie_word_embeddings or mtp_layers else "",
        splits_loss=not mtp_layers,
    )


def hidden_shape(width: int, tp: int, batch: dict[str, Tensor]) -> tuple[int, int, int]:
    """Return the shape of hidden states between stages: [micro, seq / cp / tp, hidden]."""
    # [micro, seq / cp]: batches hold this context-parallel rank's tokens
    micro, length = batch["tokens"].shape
    return micro, length // tp, width


def apply_techniques(model: Module, config: Config, meshes: Meshes) -> None:
    """Transform `model` in place, on the meta device or not. It must have `.blocks`."""
    if meshes.experts is not None:
        expert_parallel(model, meshes.experts["ep"])
    if meshes.tp.size() > 1:
        if isinstance(model, Wan):
            tensor_parallel_wan(model, meshes.tp)
        else:
            tensor_parallel(model, meshes.tp)
    if meshes.cp.size() > 1:
        context_parallel(model, meshes.cp, config.parallel.context)
    if config.recompute != "none":
        # adapters draw their dropout
        random = bool(config.lora and config.lora.dropout)
        recompute(model.blocks, config.recompute, random)
    if config.compile:
        # videos vary in length
        dynamic = None if config.data.kind == "latents" else False
        # Ranks' graphs may differ in sizes that the compiler takes as constants, and then in the
        # order that it would choose: collectives inside of blocks must meet
        inside = meshes.experts is not None or meshes.tp.size() * meshes.cp.size() > 1
        compile_blocks(model.blocks, dynamic, communicates=inside)
    # with adapters nothing needs a cast by FSDP: what is frozen has the compute type, and adapters
    # are cast where they are used
    compute_dtype = (
        torch.bfloat16 if config.precision in ("bf16", "fp8") and not config.lora else None
    )
    # FSDP shards, sums tensor parallelism's Partial gradients, casts weights, and gathers in FP8:
    # one rank may need the last two
    several = meshes.parameters.size() * meshes.tp.size() > 1
    if several or compute_dtype or config.precision == "fp8":
        parallel = config.parallel
        frees = parallel.reshard_after_forward
        if frees is None:
            frees = several
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
