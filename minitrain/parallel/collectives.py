"""Collectives inside a block: traceable by torch.compile, and differentiable where they say so.

torch.distributed's public collectives write into given tensors, which autograd and the compiler
cannot follow (`sum_over_` is one, for use outside of a block); those of torch.distributed.nn.functional
do not compile. So this file uses two private modules, which exist from torch 2.11 to 2.13: the
functional collectives, and the operators behind them, whose public names differ between these
versions.

A collective's `name` is that of its process group, and `size` its number of ranks.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

operators = torch.ops._c10d_functional
# torch 2.11 knows only the second names, later versions warn about them
_all_gather = (
    getattr(functional, "all_gather_single_autograd", None)
    or functional.all_gather_tensor_autograd
)

_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def sum_over_(mesh: DeviceMesh, tensor: Tensor) -> Tensor:
    """Sum a tensor [...] over the ranks of a mesh, in place, and return it."""
    if mesh.size() > 1:
        dist.all_reduce(tensor, group=mesh.get_group())
    return tensor


def gather_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather x [rows, ...] of all ranks: [ranks, rows, ...]. Without a gradient.

    One launch: into a list of tensors, NCCL's results are copied one by one.
    """
    gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
    _gather_into(gathered, x.contiguous(), group=group)
    return gathered.unflatten(0, (group.size(), -1))


def stack_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather x [...] of all ranks: [ranks, ...]. Backward sums each rank's gradients over ranks."""
    return _all_gather(x.contiguous()[None], 0, mesh)


def all_to_all(
    x: Tensor, mesh: DeviceMesh, receives: list[int] | None = None, sends: list[int] | None = None
) -> Tensor:
    """Send rows to each rank; return those received. Backward sends their gradients back.

    x: [rows to send, ...], those to rank 0 first. Returns [received rows, ...], rank 0's first.
    receives, sends: numbers of rows by rank; None: equally many for each.
    """
    if receives is None:
        receives = sends = [len(x) // mesh.size()] * mesh.size()
    return start_all_to_all(x, mesh, receives, sends)()


def start_all_to_all(
    x: Tensor, mesh: DeviceMesh, receives: list[int], sends: list[int]
) -> Callable[[], Tensor]:
    """Start `all_to_all`, and return a function that waits for its result.

    What is computed between the two calls runs meanwhile. So does its backward pass: the gradients
    are sent when that reaches the second call, and waited for when it reaches the first.
    """
    name = mesh.get_group().group_name
    coming = operators.all_to_all_single(x.detach(), receives, sends, name)
    sent = AwaitGradient.apply(x)
    return lambda: Arrive.apply(sent, coming, (sends, receives, name))


class AwaitGradient(torch.autograd.Function):
    """The identity on x [...]. Backward waits for the gradient that `Arrive` has sent."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return operators.wait_tensor(grad)


class Arrive(torch.autograd.Function):
    """Wait for an all-to-all of `sent`: `coming`, [received rows, ...]. Backward starts it back."""

    @staticmethod
    def forward(ctx, sent, coming, back):
        ctx.back = back
        return operators.wait_tensor(coming)

    @staticmethod
    def backward(ctx, grad):
        return operators.all_to_all_single(grad.contiguous(), *ctx.back), None, None


def all_reduce(x: Tensor, op: str, name: str) -> Tensor:
    """Reduce x [...] over ranks by `op` ("sum", "max"), in x's shape. Without a gradient."""
    return operators.wait_tensor(operators.all_reduce(x.contiguous(), op, name))


# torch's operators gather and scatter along dim 0. With a batch of 1, usual for long sequences,
# that is seq, and nothing is copied.


def all_gather(x: Tensor, size: int, name: str) -> Tensor:
    """Gather [batch, seq / size, width] along seq: [batch, seq, width]. Without a gradient."""
    batch, length, width = x.shape
    if batch > 1:
        # [size x batch, seq / size, width]
        gathered = operators.all_gather_into_tensor(x.contiguous(), size, name)
        return torch.cat(operators.wait_tensor(gathered).split(batch), dim=1)
    gathered = operators.all_gather_into_tensor(x.contiguous().view(length, width), size, name)
    return operators.wait_tensor(gathered).view(1, size * length, width)


def reduce_scatter(x: Tensor, size: int, name: str) -> Tensor:
    """Sum [batch, seq, width] over ranks, and keep this rank's [batch, seq / size, width].

    Without a gradient.
    """
    batch, length, width = x.shape
    if batch > 1:
        # [size x batch, seq / size, width]
        parts = torch.cat(x.split(length // size, dim=1))
        return operators.wait_tensor(operators.reduce_scatter_tensor(parts, "sum", size, name))
    parts = x.contiguous().view(length, width)
    total = operators.wait_tensor(operators.reduce_scatter_tensor(parts, "sum", size, name))
    # not registered as a view: FSDP warns of those where a pipeline's first stage is the embedding
    # and returns this
    return torch.ops.aten._unsafe_view(total, (1, length // size, width))
