"""Let modules compute with local tensors while their parameters are DTensors.

FSDP can shard the DTensors once more and checkpoints store full tensors. No operation is dispatched
through DTensor on the host, and a block compiles as one graph.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn import Module

# dimension of an adapter's rank: it is not split with the matrix
RANK_DIM = {"lora_A": -2, "lora_B": -1}


def split_parameters(
    module: Module, mesh: DeviceMesh, placement: Placement, start: str = ""
) -> None:
    """Replace a module's own parameters, equal on all ranks, by DTensors with `placement` on
    `mesh`.

    start: only parameters whose names begin so. DTensors stay as they are.
    Two kinds are replicated instead: the matrix of an adapter whose split dimension would be its
    rank, and a bias without the split dimension. Every rank adds that bias: its name becomes
    `module.added_by_all`.
    """
    split = placement.dim if isinstance(placement, Shard) else None
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not name.startswith(start) or isinstance(parameter, DTensor):
            continue
        lacks_dim = split == parameter.ndim
        is_rank = name[-6:] in RANK_DIM and split == parameter.ndim + RANK_DIM[name[-6:]]
        if lacks_dim:
            module.added_by_all = name
        where = [Replicate() if lacks_dim or is_rank else placement]
        part = distribute_tensor(parameter.detach(), mesh, where, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


# so that compiled graphs take plain tensors: with DTensors some fail in torch 2.13
@torch.compiler.disable
def use_local_tensors(unit: Module, inputs: tuple) -> None:
    """Give the modules of `unit` local tensors as parameters: a forward pre-hook, after FSDP's.

    The local tensors are attributes that shadow the parameters. They stay for recomputation in the
    backward pass, and are views of what FSDP frees and gathers again.
    """
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                continue
            # ranks see the gradient of a replicated parameter for their own tokens or heads only
            gradients = [Partial() if p.is_replicate() else p for p in parameter.placements]
            part = parameter.to_local(grad_placements=gradients)
            if hasattr(module, "own_rows") and not name.endswith("lora_A"):
                part = part[module.own_rows]
            if name == getattr(module, "added_by_all", None):
                part = part / parameter.device_mesh.size()
            module.__dict__[name] = part
