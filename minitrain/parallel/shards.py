"""Find a rank's shard of a DTensor, and gather full tensors, whole or piece by piece."""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import Module

# a part of a tensor: one slice per dimension, with start and stop
Slices = tuple[slice, ...]


def local_shard(parameter: Tensor) -> tuple[Tensor, Slices]:
    """This rank's part of a parameter, and where it lies in the whole: `whole[slices]` has the
    part's shape.

    A plain tensor is all of itself. Writing to the part writes to the parameter.
    """
    if not isinstance(parameter, DTensor):
        return all_slices(parameter)
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def to_local(tensor: Tensor | None) -> Tensor | None:
    """This rank's part of a tensor alone, which is faster than `owned`: where it lies takes time to
    find out.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensors(
    model: Module, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor | None]]:
    """The model's tensors of `wanted` names, one at a time, whole on rank 0; None elsewhere. All
    ranks iterate.
    """
    # after a forward pass some parameters() are whole, in bf16
    for name, shard in model.state_dict().items():
        if wanted(name):
            parts = ((where, full_slice(shard, where)) for where in cut_slices(shard))
            yield name, assemble(parts, shard.shape, shard.dtype)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all ranks' parts. All ranks call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_slice(tensor: Tensor, where: Slices) -> Tensor:
    """`whole(tensor)[where]` for one of its `pieces`, of which alone the parts are gathered."""
    if not isinstance(tensor, DTensor):
        return tensor[where]
    part = tensor.to_local()[where].contiguous()
    like = torch.empty(tensor.shape, device="meta")[where].contiguous()
    piece = DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, shape=like.shape, stride=like.stride()
    )
    return piece.full_tensor()


def cut_slices(tensor: Tensor, most: int = 1 << 30) -> list[Slices]:
    """Pieces of a tensor, of about `most` bytes, to be gathered one at a time: a stack of experts
    can be larger than what a GPU has free. Cut along the longest dimension that is not sharded; if
    all are, there is one piece."""
    _, everything = all_slices(tensor)
    split = {p.dim for p in getattr(tensor, "placements", ()) if isinstance(p, Shard)}
    dim = max(
        (d for d in range(tensor.ndim) if d not in split),
        key=lambda d: tensor.shape[d],
        default=None,
    )
    if dim is None or tensor.numel() * tensor.itemsize <= most:
        return [everything]
    length = tensor.shape[dim]
    step = max(1, length * most // (tensor.numel() * tensor.itemsize))
    cuts = [slice(i, min(i + step, length)) for i in range(0, length, step)]
    return [(*everything[:dim], cut, *everything[dim + 1 :]) for cut in cuts]


def assemble(
    parts: Iterable[tuple[Slices, Tensor | None]], shape: torch.Size, dtype: torch.dtype
) -> Tensor | None:
    """The tensor that gathered pieces make up, on rank 0 in the host's memory; other ranks take
    them and get None.
    """
    result = torch.empty(shape, dtype=dtype) if dist.get_rank() == 0 else None
    for where, part in parts:
        if result is not None:
            result[where] = part
    return result


def all_slices(tensor: Tensor) -> tuple[Tensor, Slices]:
    """A tensor, and where it lies in itself: what a process that has all of it passes as its
    part.
    """
    return tensor, tuple(slice(0, n) for n in tensor.shape)
