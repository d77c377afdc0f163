"""The one place that knows the order in which a model is transformed: recompute, compile each block, shard.

Recomputation must be inside the compiled region, so that the compiler sees it, and sharding outside, so that its hooks
gather and free weights around the compiled block.
"""

import torch
from torch.nn import Module

from minitrain.config import Config
from minitrain.parallel.data import shard
from minitrain.parallel.mesh import Meshes
from minitrain.parallel.recompute import recompute


def parallelize(model: Module, config: Config, meshes: Meshes) -> None:
    """Transform `model`, still on the meta device or not, in place. It must have `.blocks`."""
    if config.recompute == "full":
        for block in model.blocks:
            recompute(block)
    if config.compile:
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=False)
    compute_dtype = torch.bfloat16 if config.precision == "bf16" else None
    if meshes.parameters.size() > 1 or compute_dtype:  # one rank alone needs the wrapper only to cast its weights
        parallel = config.parallel
        shard(model, model.blocks, meshes.parameters, compute_dtype, parallel.reshard_after_forward, parallel.prefetch)
