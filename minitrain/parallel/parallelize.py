"""The one place that knows the order in which a model is transformed: recompute, compile each block, shard.

Recomputation must be inside the compiled region, so that the compiler sees it, and sharding outside, so that its hooks
gather and free weights around the compiled block.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module

from minitrain.config import Config
from minitrain.parallel.data import shard
from minitrain.parallel.recompute import recompute


def parallelize(model: Module, config: Config, mesh: DeviceMesh) -> None:
    """Transform `model`, still on the meta device or not, in place. It must have `.blocks`."""
    if config.recompute == "full":
        for block in model.blocks:
            recompute(block)
    if config.compile:
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=False)
    compute_dtype = torch.bfloat16 if config.precision == "bf16" else None
    if mesh.size() > 1 or compute_dtype:  # one rank alone needs the wrapper only to cast its weights
        shard(model, model.blocks, mesh, compute_dtype, config.parallel.reshard_after_forward, config.parallel.prefetch)
