"""Start the processes' group and arrange them as a named grid.

A run is always distributed: alone, it is a world of one rank with the same code path. The grid has two dimensions,
`dp_replicate` x `dp_shard`: parameters are sharded over the second and copied over the first (HSDP; Rajbhandari et al. 2020).
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # no public name for it

from minitrain.config import Config, check_layout


def world_size() -> int:
    """The number of processes that torchrun started; 1 without torchrun. Known before any group starts."""
    return int(os.environ.get("WORLD_SIZE", 1))


def pick_device(setting: str) -> torch.device:
    """auto: this process's own GPU if there is one, else the CPU."""
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def start(config: Config) -> DeviceMesh:
    """Join the process group (NCCL on GPUs, gloo on CPUs) and return the mesh (dp_replicate, dp_shard).

    Raises InputError when the ranks cannot be laid out so; no group has started then.
    """
    check_layout(config, world_size())
    device = pick_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        alone = {} if "WORLD_SIZE" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        dist.init_process_group(backend, timeout=timedelta(minutes=10), **alone)
    return build_mesh(config, device.type)


def build_mesh(config: Config, device_type: str) -> DeviceMesh:
    """The mesh (dp_replicate, dp_shard) over the ranks of the running process group, and its flattened form `dp`."""
    replicate = config.parallel.dp_replicate
    shape = (replicate, dist.get_world_size() // replicate)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    mesh["dp_replicate", "dp_shard"]._flatten("dp")
    return mesh


def owned(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a parameter, and where it lies in the whole: `whole[slices]` has the part's shape.

    A plain tensor is all of itself. Writing to the part writes to the parameter.
    """
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, n) for n in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of all ranks' parts, on every rank: all of them must call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
