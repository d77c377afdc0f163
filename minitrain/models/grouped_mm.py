"""Grouped matrix products over rows that are sorted by expert: one call for all experts.

This is torch's F.grouped_mm with three additions: gradients that are 0 for experts without rows on
every GPU, an operator that compiles in types other than bf16, and faster kernels on some CPUs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain.models.cpu import grouped_matmul, takes_groups


def grouped_mm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Multiply matrices expert by expert. offsets: int32 [experts], the end of each expert's rows.

    x [rows, in], y [experts, in, out]: each row times its expert's matrix, [rows, out].
    x [in, rows], y [rows, out]: for each expert x y over its rows, [experts, in, out]. This is 0
        for an expert without rows.
    """
    garbage = leaves_garbage(x.device.type)
    if garbage and y.ndim == 3:
        # the gradient of y is a product of the second kind
        y = CleanGradient.apply(y, offsets)
    # the compiler knows the shapes of torch's operator in bf16 only
    opaque = torch.compiler.is_compiling() and x.dtype != torch.bfloat16
    if opaque or takes_groups(x, y):
        product = _grouped_mm(x, y, offsets)
    else:
        product = F.grouped_mm(x, y, offs=offsets)
    return zero_where_empty(product, offsets) if garbage and y.ndim == 2 else product


def has_fast_kernel(stack: Tensor) -> bool:
    """Return whether F.grouped_mm has a kernel for a stack's type on its GPU.

    Of torch 2.11 to 2.13 only compute capabilities 9.x and 10.x have one, in bf16. Elsewhere (RTX
    50: 12.0) products run expert by expert, and the host waits for the numbers of rows.
    """
    major, _ = torch.cuda.get_device_capability(stack.device)
    return stack.dtype == torch.bfloat16 and major in (9, 10)


@torch.compiler.assume_constant_result
def leaves_garbage(device: str) -> bool:
    """Return whether F.grouped_mm leaves memory unwritten for experts without rows.

    It does on Blackwell (pytorch's issue 172439, open in 2.13).
    """
    return device == "cuda" and torch.cuda.get_device_capability() >= (10, 0)


def zero_where_empty(stack: Tensor, offsets: Tensor) -> Tensor:
    """Return `stack` [experts, ...] in its layout, with 0 for experts without rows."""
    empty = offsets.diff(prepend=offsets.new_zeros(1)) == 0
    return torch.where(empty[:, None, None], 0, stack)


class CleanGradient(torch.autograd.Function):
    """The identity on a stack [experts, ...], whose gradient becomes 0 for experts without rows."""

    @staticmethod
    def forward(ctx, stack, offsets):
        ctx.save_for_backward(offsets)
        return stack.view_as(stack)

    @staticmethod
    def backward(ctx, grad):
        return zero_where_empty(grad, *ctx.saved_tensors), None


@torch.library.custom_op("minitrain::grouped_mm", mutates_args=())
def _grouped_mm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    # shapes as in `grouped_mm`: [rows, out] or [experts, in, out]
    return grouped_matmul(x, y, offsets)


@_grouped_mm.register_fake
def _(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    # [rows, out], or [experts, in, out]
    experts = () if y.ndim == 3 else offsets.shape
    return x.new_empty(*experts, x.shape[0], y.shape[-1])


def _grouped_mm_backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    # grad: [rows, out]; only the first kind of product is differentiated
    x, stack, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = grad_stack = None
    if ctx.needs_input_grad[0]:
        grad_x = _grouped_mm(grad, stack.transpose(-2, -1), offsets)
    if ctx.needs_input_grad[1]:
        # [experts, out, in]: contiguous as the weights, of which `stack` is the transpose
        grad_stack = _grouped_mm(grad.T, x, offsets).transpose(-2, -1)
    return grad_x, grad_stack, None


_grouped_mm.register_autograd(
    _grouped_mm_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)
