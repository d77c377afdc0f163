"""Split parameters over ranks as DTensors, and let modules compute with local tensors.

DTensors tell FSDP, the optimizer and checkpoints what a rank has. Computing with plain tensors
spares the host the dispatch through DTensor, and lets a block compile as one graph.
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

# the dimension of an adapter's matrix that is its rank
RANK_DIM = {"lora_A": -2, "lora_B": -1}


def split_parameters(
    module: Module, mesh: DeviceMesh, placement: Placement, start: str = ""
) -> None:
    """Replace a module's own parameters by DTensors with `placement` on the 1-D `mesh`.

    They are equal on all ranks before. Those that are DTensors already stay.
    start: only parameters whose names begin so.
    Two kinds are replicated instead: the adapter's matrix whose split dimension would be its rank,
    and a bias that lacks the split dimension. Every rank adds this bias, so `use_local_tensors`
    divides the one named `module.added_by_all` by the number of ranks.
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


# not compiled: graphs take plain tensors, since with DTensors some fail in torch 2.13
@torch.compiler.disable
def use_local_tensors(unit: Module, inputs: tuple) -> None:
    """Give all modules of `unit` local tensors in place of DTensors, as a forward pre-hook after FSDP's.

    The local tensors are attributes that hide the parameters of the same names. They are views of
    what FSDP gathers, frees and gathers again, so they serve recomputation in the backward pass too.
    """
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                continue
            # a replicated parameter gets a gradient from this rank's tokens or heads only
            gradients = [Partial() if p.is_replicate() else p for p in parameter.placements]
            part = parameter.to_local(grad_placements=gradients)
            if hasattr(module, "own_rows") and not name.endswith("lora_A"):
                part = part[module.own_rows]
            if name == getattr(module, "added_by_all", None):
                part = part / parameter.device_mesh.size()
            module.__dict__[name] = part
