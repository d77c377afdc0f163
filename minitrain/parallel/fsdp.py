"""Fully sharded data parallelism (FSDP2): each of n ranks keeps 1 / n of every parameter.

    before a block's forward     all-gather its weights
    before its backward          all-gather them again (ZeRO-3), or keep them (ZeRO-2)
    after its backward           reduce-scatter its gradients to the ranks that own them

Cost: each of these moves (n - 1) / n of the parameters' bytes per rank. ZeRO-3 does so once per
micro-batch. ZeRO-2 keeps weights and gradients gathered over micro-batches, and does so once per
step. With replicas (HSDP) an all-reduce sums the shards' gradients over them, once per step.

Gradients are summed over ranks, not averaged: the loss is divided by the tokens of all ranks
already. So ranks with more valid tokens weigh more, as in one process.

Parameters that must not be rounded to the compute type are held by `KeepsFP32` modules. They are
small: one all-gather per forward pass gets them all, and they stay until its backward ends. To keep
a parameter in fp32, put it into such a module and read it from there.
Source: ZeRO (Rajbhandari et al. 2020).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import (
    FSDPParam,  # no public name for what it does with gradients
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Module, Parameter

from minitrain.models.variants import KeepsFP32


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
    """Shard `model` in place over `mesh` (dp_replicate, dp_shard). Gradients are summed over ranks.

    FSDP2 averages by default. Here the loss is divided by the tokens of all ranks (or, for a mean
    over ranks, by their number) before `backward`. Each block is one unit, and the rest another.

    compute_dtype: the type in which weights are gathered and used; shards keep their own.
    reduce_dtype: the type in which gradients are summed over ranks, tensor-parallel ones too. Also
        the type of sums over micro-batches, except in ZeRO-3 without replicas, which reduces each
        time and sums in the shards' type.
    reshard_after_forward: free a block's weights after its forward pass; see `set_gradient_sync`.
    prefetch: number of blocks gathered ahead of the running one.
    for_experts: (dp_replicate, dp_shard) for experts that expert parallelism has split already.
        Those of a block are a unit of their own.
    """
    add_partial_sums_in_reduce_dtype()
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    mesh = fsdp_mesh(mesh)
    in_fp32 = replace(policy, param_dtype=None)
    holders = [module for module in model.modules() if isinstance(module, KeepsFP32)]
    if holders:
        fully_shard(holders, mesh=mesh, mp_policy=in_fp32, reshard_after_forward=False)
    options = {"mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    # for each block: itself and, if they are a unit of their own, its experts
    units = []
    for block in blocks:
        unit = [block]
        if for_experts is not None:
            unit += expert_stacks(block)
        for experts in unit[1:]:
            shard_experts(experts, block, for_experts, **options)
        fully_shard(block, mesh=mesh, **options)
        units.append(unit)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.reduces_each_time = reshard_after_forward
    if holders:
        # FSDP gathers a unit when one of its modules is called, but nothing calls these
        model.register_forward_pre_hook(lambda module, inputs: holders[0].unshard())
    gather_once(model, [module for unit in units if is_frozen(unit[0]) for module in unit])
    set_prefetch(units, prefetch)
    sum_gradients(model, mesh, for_experts)


def expert_stacks(model: Module) -> list[Module]:
    """Return what the modules with an exchange point `dispatch` hand to it: see expert.py."""
    return [module.experts for module in model.modules() if hasattr(module, "dispatch")]


def is_frozen(module: Module) -> bool:
    return not any(parameter.requires_grad for parameter in module.parameters())


def gather_once(model: Module, units: list[Module]) -> None:
    """Gather units in the model's first forward pass, which may never call them.

    The backward pass asks all for their gradients, and fails for one that was never gathered (torch
    2.13). What is trained must be used, or its optimizer would have no gradient.
    """

    def gather(*_) -> None:
        hook.remove()
        for unit in units:
            unit.unshard()
            unit.reshard()

    if units:
        # after FSDP's own, which makes the streams
        hook = model.register_forward_pre_hook(gather)


def set_prefetch(units: list[list[Module]], prefetch: int) -> None:
    """Gather the weights of `prefetch` blocks ahead, in both directions."""
    for i, (block, *_) in enumerate(units):
        after = units[i + 1 : i + 1 + prefetch]
        before = units[max(0, i - prefetch) : i][::-1]
        block.set_modules_to_forward_prefetch([module for unit in after for module in unit])
        block.set_modules_to_backward_prefetch([module for unit in before for module in unit])


def sum_gradients(model: Module, mesh: DeviceMesh, for_experts: DeviceMesh | None) -> None:
    """Make FSDP sum gradients over ranks, not average them."""
    stacks = expert_stacks(model)
    # the settings do not reach the modules below
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # experts have more ranks, or fewer
            ranks = fsdp_mesh(for_experts) if module in stacks else mesh
            # on one rank FSDP would divide all gradients by 1
            if ranks.size() > 1:
                module.set_gradient_divide_factor(1.0)
                # gloo cannot scale while it reduces
                module.set_force_sum_reduction_for_comms(True)


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh (dp_replicate, dp_shard) if there are replicas (HSDP), else (dp_shard,)."""
    if mesh["dp_replicate"].size() == 1:
        return mesh["dp_shard"]
    return mesh["dp_replicate", "dp_shard"]


@cache
def add_partial_sums_in_reduce_dtype() -> None:
    """Make FSDP reduce Partial gradients in its reduce type (pytorch's issue 190626).

    Up to torch 2.13 it does so only for gradients kept over micro-batches, and reduces others in
    the compute type.
    """
    own_way = FSDPParam._get_grad_inner_tensor

    def add_up(parameter: FSDPParam, grad: Tensor) -> Tensor:
        """Return the local tensor [...] of a gradient, summed over tensor-parallel ranks."""
        is_partial = isinstance(grad, DTensor) and any(
            placement.is_partial() for placement in grad.placements
        )
        if parameter.reduce_dtype is None or not is_partial:
            return own_way(parameter, grad)
        # back to its type: FSDP needs one type for all gradients that it reduces together
        return own_way(parameter, grad.to(parameter.reduce_dtype)).to(grad.dtype)

    FSDPParam._get_grad_inner_tensor = add_up


def shard_experts(experts: Module, block: Module, mesh: DeviceMesh, **options) -> None:
    """Shard stacks [experts, ...], whose first dimension is split already, along another one.

    Their FSDP hooks move to the block around them. Inside of it they would run under torch.compile
    and checkpoint, and break both.
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
    """Return the placement on the largest dimension, but the first, that `ranks` divide.

    FSDP needs equal shards. If they divide none it gets the largest, and refuses.
    """
    shape = parameter.shape
    return Shard(
        max(range(1, parameter.ndim), key=lambda dim: (shape[dim] % ranks == 0, shape[dim]))
    )


def unreduced_gradients(model: Module) -> Iterator[Tensor | None]:
    """Yield gradients [...] that FSDP keeps, not reduced yet or not over replicas; None for others."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        # no public name says what it keeps
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None:
            yield group._partial_reduce_output
            yield from (parameter.unsharded_accumulated_grad for parameter in group.fsdp_params)


def reshard(model: Module) -> None:
    """Free gathered weights, as FSDP does in the backward pass, where there was none."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_gradient_sync(model: FSDPModule, last: bool) -> None:
    """Tell FSDP whether the next backward pass is a step's last.

    ZeRO-2 keeps weights gathered over micro-batches, accumulates full gradients, and reduces them
    in the last one. ZeRO-3 has no room for them: it reduces gradients each time and accumulates
    their shards, which an all-reduce sums over replicas in the last one.
    """
    model.set_reshard_after_backward(last or model.reduces_each_time)
    model.set_requires_gradient_sync(last or model.reduces_each_time)
    model.set_requires_all_reduce(last)
