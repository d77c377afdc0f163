"""Parameters that are DTensors, in modules that compute with this rank's parts of them, plain
tensors.

So FSDP can shard them once more and checkpoints store them whole, but no operation is dispatched
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

# of adapters, which is not split where the matrix is
RANK_DIM = {"lora_A": -2, "lora_B": -1}


def split_parameters(
    module: Module, mesh: DeviceMesh, placement: Placement, start: str = ""
) -> None:
    """Replace the module's own parameters, the same on all ranks, by DTensors that are placed so on
    `mesh`.

    start: only those whose names begin with it. Those that are DTensors already stay as they are.
    Two kinds stay whole: of an adapter, the matrix whose split dimension is its rank; and a bias
    that lacks the split dimension, which every rank adds: `module.added_by_all` is its name.
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


# so that compiled graphs take plain tensors: in torch 2.13 some fail on DTensors
@torch.compiler.disable
def use_local_tensors(unit: Module, inputs: tuple) -> None:
    """A forward pre-hook, after FSDP's: give the modules of `unit` plain tensors, this rank's
    parts, as parameters.

    They are attributes that hide the parameters of the same names. They stay, for recomputation in
    the backward pass, and are views of what FSDP frees and gathers again.
    """
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # all ranks have such a parameter whole, and see its gradient for their own tokens or
            # heads
            gradients = [
                Partial() if placement.is_replicate() else placement
                for placement in parameter.placements
            ]
            part = parameter.to_local(grad_placements=gradients)
            if hasattr(module, "own_rows") and not name.endswith("lora_A"):
                part = part[module.own_rows]
            is_term = name == getattr(module, "added_by_all", None)
            module.__dict__[name] = part / parameter.device_mesh.size() if is_term else part
