"""Split parameters over ranks as DTensors, and let modules compute with local tensors.

As DTensors, parameters tell FSDP, the optimizer and checkpoints what a rank holds. Modules compute
with plain local tensors: that saves the host the time of DTensor's dispatch, and lets a block
compile as one graph.

Besides exchange points, techniques leave notes on a model's modules: `added_by_all` (here),
`local_rows` (tensor_decoder.py), `group_name` (tensor_wan.py), `reduces_each_time` (fsdp.py) and
`shards` (fsdp_fp8.py).
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

from minitrain.errors import InputError

# The dimension that is neither in nor out, by the ends of names: that is LoRA's rank, where A is
# [rank, in], B is [out, rank]; and two numbers for each row of a frozen matrix (models/frozen.py).
OTHER_DIM = {"lora_A": -2, "lora_B": -1, "_ends": -1}


def split_parameters(
    module: Module, mesh: DeviceMesh, placement: Placement, start: str = ""
) -> None:
    """Replace a module's own parameters by DTensors with `placement` on the 1-D `mesh`.

    Before, they are equal on all ranks. DTensors stay as they are.
    start: take only parameters whose names begin so.
    Two kinds are replicated instead. One would be split along a dimension of OTHER_DIM. The other
    is the bias [out] of a row-parallel weight, which lacks dimension 1. Its name becomes
    `module.added_by_all`: each rank adds it, so `use_local_tensors` divides it by their number.
    Raises InputError for a frozen matrix of which ranks would get parts of what shares a scale.
    """
    split = placement.dim if isinstance(placement, Shard) else None
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not name.startswith(start) or isinstance(parameter, DTensor):
            continue
        lacks_dim = split == parameter.ndim
        is_other = any(
            name.endswith(end) and split == parameter.ndim + dim for end, dim in OTHER_DIM.items()
        )
        if lacks_dim:
            module.added_by_all = name
        elif split == parameter.ndim - 1:
            check_columns(module, name, mesh.size())
        where = [Replicate() if lacks_dim or is_other else placement]
        part = distribute_tensor(parameter.detach(), mesh, where, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def check_columns(module: Module, name: str, ranks: int) -> None:
    """Raise InputError if ranks cannot share the columns of a frozen matrix (models/frozen.py)."""
    width = getattr(module, "widths", {}).get(name, 0)
    if width and width % (module.columns * ranks):
        most = max(1, width // module.columns)
        raise InputError(
            f"lora.base={module.store}: parallel.tp={ranks} cuts columns of which {module.columns} share a "
            f"scale, in a matrix with {width} (use a tp that divides {most}, or lora.base=bf16)"
        )


# not compiled: graphs take plain tensors, since with DTensors some fail in torch 2.13
@torch.compiler.disable
def use_local_tensors(unit: Module, inputs: tuple) -> None:
    """Give all modules of `unit` local tensors in place of DTensors, as a forward pre-hook.

    It runs after FSDP's own hook.
    The local tensors are attributes that hide the parameters of the same names. They are views of
    the memory that FSDP gathers into, frees and gathers into again. So they also serve when the
    backward pass recomputes the block. Elsewhere, read `named_parameters()`: the attributes are
    those of the last forward pass.
    """
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                continue
            # a replicated parameter's gradient is one term, of this rank's tokens or heads
            gradients = [Partial() if p.is_replicate() else p for p in parameter.placements]
            part = parameter.to_local(grad_placements=gradients)
            if hasattr(module, "local_rows") and not name.endswith("lora_A"):
                part = part[module.local_rows]
            if name == getattr(module, "added_by_all", None):
                part = part / parameter.device_mesh.size()
            module.__dict__[name] = part
