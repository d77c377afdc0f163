"""Sharded data parallelism (FSDP2, ZeRO-3; Rajbhandari et al. 2020): every rank keeps 1/n of each parameter.

Before a block runs, its weights are all-gathered; after its backward, its gradients are reduce-scattered to their
owners. Cost per micro-batch: two all-gathers (forward, backward) and one reduce-scatter of the parameters' bytes, each
moving (n - 1) / n of them per rank. With replicas (HSDP) the shards' gradients are then all-reduced between the copies.

Gradients are summed over ranks, not averaged: the loss is already divided by the tokens of all ranks, so that ranks
with more valid tokens weigh more, as they would in one process.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import Module


def shard(model: Module, blocks: list[Module], mesh: DeviceMesh, compute_dtype: torch.dtype | None = None,
          reshard_after_forward: bool = True, prefetch: int = 1) -> None:
    """Shard `model` in place over `mesh` (dp_replicate, dp_shard), each block and the remainder as one unit.

    compute_dtype: weights are gathered and computed with in it, while shards and gradient sums keep their own type.
    prefetch: how many blocks ahead of the running one are gathered.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if mesh["dp_replicate"].size() == 1:
        mesh = mesh["dp_shard"]
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + prefetch])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - prefetch) : i][::-1])
    for module in model.modules():
        if isinstance(module, FSDPModule):  # neither setting reaches the modules below
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces


def set_gradient_sync(model: Module, enabled: bool) -> None:
    """Off for all but the last micro-batch of a step: gradients then add up locally and are reduced once."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
