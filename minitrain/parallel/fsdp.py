"""Sharded data parallelism (FSDP2, ZeRO-3; Rajbhandari et al. 2020): every rank keeps 1/n of each
parameter.

Before a block runs, its weights are all-gathered; after its backward, its gradients are
reduce-scattered to their owners. Cost per micro-batch: two all-gathers (forward, backward) and one
reduce-scatter of the parameters' bytes, each moving (n - 1) / n of them per rank; or of each kind
one per step, if weights and gradients may stay whole meanwhile (ZeRO-2). With replicas (HSDP) the
shards' gradients are all-reduced between the copies, once per step.

Gradients are summed over ranks, not averaged: the loss is already divided by the tokens of all
ranks, so that ranks with more valid tokens weigh more, as they would in one process.

Parameters that must not be rounded to the type that is computed in are held by `KeepsFP32` modules.
They are small: all are gathered once per forward pass, in one message, and stay until its backward
is done. To keep a parameter in fp32, put it into such a module and read it from there.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import (
    # no public name for what it does with gradients
    FSDPParam,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Module, Parameter

from minitrain.models.layers import KeepsFP32
from minitrain.models.moe import Experts


def shard(
    model: Module,
    blocks: list[Module],
    mesh: DeviceMesh,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
    prefetch: int = 1,
    for_experts: DeviceMesh | None = None,
) -> None:
    """Shard `model` in place over `mesh`; gradients are summed over its ranks, not averaged.

    mesh: two dimensions, dp_replicate and dp_shard.

    FSDP2 averages by itself. Here the loss is to be divided by the tokens of all ranks, or for a
    mean over ranks by their number, before `backward`. Each block and the remainder are one unit.

    compute_dtype: weights are gathered and computed with in it, while shards keep their own type.
    reduce_dtype: gradients are summed over ranks in it, also those of which tensor-parallel ranks
        have partial sums.
        Over micro-batches too, but where ZeRO-3 without replicas reduces each time: there in the
        shards' own type.
    reshard_after_forward: free a block's weights after its forward pass; see `set_gradient_sync`.
    prefetch: how many blocks ahead of the running one are gathered.
    for_experts: the mesh of experts that expert parallelism has split already, of the same two
        dimensions. Those of a block are a unit of their own.
    """
    add_partial_sums_in_reduce_dtype()
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    options = {"mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    mesh = fsdp_mesh(mesh)
    holders = [module for module in model.modules() if isinstance(module, KeepsFP32)]
    if holders:
        fully_shard(
            holders,
            mesh=mesh,
            mp_policy=replace(policy, param_dtype=None),
            reshard_after_forward=False,
        )
    # of each block: itself and, if they are a unit of their own, its experts
    units = []
    for block in blocks:
        stacks = []
        if for_experts is not None:
            stacks = [module for module in block.modules() if isinstance(module, Experts)]
        for experts in stacks:
            shard_experts(experts, block, for_experts, **options)
        fully_shard(block, mesh=mesh, **options)
        units.append([block, *stacks])
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.reduces_each_time = reshard_after_forward
    # they are one unit, none of which is ever called: FSDP would not notice that it is needed
    if holders:
        model.register_forward_pre_hook(lambda module, inputs: holders[0].unshard())
    set_prefetch(units, prefetch)
    sum_gradients(model, mesh, for_experts)


def set_prefetch(units: list[list[Module]], prefetch: int) -> None:
    """Gather the weights of `prefetch` units ahead of the running one, in both directions."""
    for i, (block, *_) in enumerate(units):
        after = units[i + 1 : i + 1 + prefetch]
        before = units[max(0, i - prefetch) : i][::-1]
        block.set_modules_to_forward_prefetch([unit for other in after for unit in other])
        block.set_modules_to_backward_prefetch([unit for other in before for unit in other])


def sum_gradients(model: Module, mesh: DeviceMesh, for_experts: DeviceMesh | None) -> None:
    """Make FSDP sum gradients over ranks, where it would average them."""
    # neither setting reaches the modules below
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        # experts have a mesh of their own, of more ranks or fewer
        ranks = fsdp_mesh(for_experts) if isinstance(module, Experts) else mesh
        # alone, FSDP would divide all gradients by 1
        if ranks.size() > 1:
            module.set_gradient_divide_factor(1.0)
            # gloo cannot scale while it reduces
            module.set_force_sum_reduction_for_comms(True)


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """FSDP's mesh: (dp_replicate, dp_shard) if there are several copies (HSDP), else (dp_shard,)
    alone.
    """
    return (
        mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "dp_shard"]
    )


@cache
def add_partial_sums_in_reduce_dtype() -> None:
    """Make FSDP add up partial sums of gradients in the type that it reduces in. Up to torch 2.13
    it does so only with those that it has kept over micro-batches, and else in the type that is
    computed in (pytorch's issue 190626)."""
    own_way = FSDPParam._get_grad_inner_tensor

    def add_up(parameter: FSDPParam, grad: Tensor) -> Tensor:
        is_partial = isinstance(grad, DTensor) and any(
            placement.is_partial() for placement in grad.placements
        )
        if parameter.reduce_dtype is None or not is_partial:
            return own_way(parameter, grad)
        # the sum is rounded to what it came in: FSDP wants one type of all gradients that it
        # reduces together
        return own_way(parameter, grad.to(parameter.reduce_dtype)).to(grad.dtype)

    FSDPParam._get_grad_inner_tensor = add_up


def shard_experts(experts: Module, block: Module, mesh: DeviceMesh, **options) -> None:
    """Shard stacks [experts, ...], whose first dimension is split already, along another.

    They are gathered and freed with the block around them, not when they run: that is inside of
    what is compiled, and of what is recomputed, where the hooks of FSDP would break both.
    """
    mesh = fsdp_mesh(mesh)
    ranks = mesh.size(-1)
    fully_shard(
        experts,
        mesh=mesh,
        shard_placement_fn=lambda parameter: widest_dimension(parameter, ranks),
        **options,
    )
    # no public name says on which module the hooks are
    state = experts._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    block.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
    block.register_forward_hook(state._post_forward)


def widest_dimension(parameter: Parameter, ranks: int) -> Shard:
    """The largest of all but the first that `ranks` divide: FSDP wants equal parts there."""
    shape = parameter.shape
    return Shard(
        max(range(1, parameter.ndim), key=lambda dim: (shape[dim] % ranks == 0, shape[dim]))
    )


def set_gradient_sync(model: Module, last: bool) -> None:
    """Say whether the next backward pass is a step's last.

    If weights stay gathered between forward and backward (ZeRO-2), they do so between
    micro-batches, and so do
    gradients: they add up whole, and are reduced once. If not (ZeRO-3), no rank has room for them:
    they are reduced each time, and the shards add up; replicas exchange these sums once.
    """
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(last or model.reduces_each_time)
        model.set_requires_gradient_sync(last or model.reduces_each_time)
        model.set_requires_all_reduce(last)
