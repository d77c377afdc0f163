"""Find a rank's shard of a DTensor, and gather full tensors, at once or slice by slice."""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import Module

# part of a tensor: one slice per dimension, with start and stop
Slices = tuple[slice, ...]


def local_shard(tensor: Tensor) -> tuple[Tensor, Slices]:
    """Return this rank's shard of a tensor [...], and its slices of the full tensor.

    Writing to the shard writes to the tensor. A plain tensor is a shard of itself.
    """
    if not isinstance(tensor, DTensor):
        return all_slices(tensor)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    slices = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    return tensor.to_local(), slices


def to_local(tensor: Tensor | None) -> Tensor | None:
    """Return this rank's shard of a tensor [...] alone, which is faster than `local_shard`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensors(
    model: Module, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the model's tensors of `wanted` names, full [...] on rank 0, None elsewhere.

    All ranks iterate together.
    """
    # parameters() may be gathered, in bf16, after a forward pass; state_dict() has the shards
    for name, shard in model.state_dict().items():
        if wanted(name):
            parts = ((where, full_slice(shard, where)) for where in cut_slices(shard))
            yield name, assemble(parts, shard.shape, shard.dtype)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather the full tensor [...] from all ranks, which call this together.

    torch warns of a suboptimal order where tensor parallelism and FSDP split one dimension: the
    result is right.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_slice(tensor: Tensor, where: Slices) -> Tensor:
    """Gather full_tensor(tensor)[where], for `where` of `cut_slices`, and nothing else."""
    if not isinstance(tensor, DTensor):
        return tensor[where]
    part = tensor.to_local()[where].contiguous()
    # for the shape and strides of the slice: `where` does not cut sharded dimensions
    like = torch.empty(tensor.shape, device="meta")[where].contiguous()
    piece = DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, shape=like.shape, stride=like.stride()
    )
    return piece.full_tensor()


def cut_slices(tensor: Tensor, most: int = 1 << 30) -> list[Slices]:
    """Cut a tensor [...] into slices of about `most` bytes, to gather one after the other.

    A stack of experts can be larger than the free memory of a GPU. The cut is along the longest
    dimension that is not sharded; if all are, there is one slice.
    """
    _, everything = all_slices(tensor)
    sharded = {p.dim for p in getattr(tensor, "placements", ()) if isinstance(p, Shard)}
    dims = [dim for dim in range(tensor.ndim) if dim not in sharded]
    size = tensor.numel() * tensor.itemsize
    if not dims or size <= most:
        return [everything]
    dim = max(dims, key=lambda dim: tensor.shape[dim])
    length = tensor.shape[dim]
    step = max(1, length * most // size)
    cuts = [slice(i, min(i + step, length)) for i in range(0, length, step)]
    return [(*everything[:dim], cut, *everything[dim + 1 :]) for cut in cuts]


def assemble(
    parts: Iterable[tuple[Slices, Tensor | None]], shape: torch.Size, dtype: torch.dtype
) -> Tensor | None:
    """Join gathered slices to a tensor [...] in rank 0's host memory; other ranks get None."""
    result = torch.empty(shape, dtype=dtype) if dist.get_rank() == 0 else None
    # all ranks iterate, since that is what gathers the parts
    for where, part in parts:
        if result is not None:
            result[where] = part
    return result


def all_slices(tensor: Tensor) -> tuple[Tensor, Slices]:
    """Return a tensor [...] and the slices of all of it: `local_shard` of an unsharded tensor."""
    return tensor, tuple(slice(0, n) for n in tensor.shape)


def copy_to_host(x: Tensor) -> Tensor:
    """Copy a tensor [...] to the host, into pinned memory and asynchronously if it is on CUDA."""
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type == "cuda")
    return copy.copy_(x, non_blocking=True)
