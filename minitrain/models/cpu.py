"""Multiply fp32 matrices by oneDNN on AMD's CPUs with AVX-512: on Zen 5 twice as fast as by MKL.

torch takes MKL, which keeps its AVX-512 kernels for Intel's CPUs, and on others uses half the
width. oneDNN, which comes with torch too, generates kernels for the CPU that it finds. Zen 4
double-pumps AVX-512, and gains an eighth.

`use_cpu_linears` lets a model's Linears multiply so. Losses call `matmul` and `add_matmul`, and
grouped_mm.py `grouped_matmul`: those call torch's product where it is as fast, as for small
matrices, on other CPUs, on GPUs and in other types. No other file of a model or a loss knows more.
Left out: products inside attention, and of more than two dimensions. And torch's own FP8 product,
which oneDNN computes 1,000 times too slowly on CPUs with AMX (oneDNN #3349): see fp8.py.
"""

import math
import re
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from minitrain.models.variants import base_class, set_variant


def amd_family(cpuinfo: str) -> int:
    """Return the family in the text of /proc/cpuinfo. 26: Zen 5; 25: Zen 3 and 4; 0: not AMD."""
    found = re.search(r"AuthenticAMD\ncpu family\s*: (\d+)", cpuinfo)
    return int(found[1]) if found else 0


def read_cpuinfo() -> str:
    """Return the first processor's part of /proc/cpuinfo, empty where there is no such file."""
    try:
        with open("/proc/cpuinfo") as file:
            # the file has hundreds of kilobytes on large machines
            return file.read(1000)
    except OSError:
        return ""


FAMILY = amd_family(read_cpuinfo())
# whether oneDNN is faster than MKL on this CPU
FASTER = (
    FAMILY > 0
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and torch.backends.mkldnn.is_available()
)
# FLOPs of a product below which a call of oneDNN takes longer than it saves
MIN_FLOPS = 1 << 24
# a column-major left factor is copied: that pays from this number of columns of the product on
TRANSPOSED = 256 if FAMILY > 25 else math.inf
# a product into given memory is copied there: that pays from this number of terms per sum on
COPIED = 256 if FAMILY > 25 else 512


def use_cpu_linears(model: nn.Module) -> None:
    """Let the Linears of `model` multiply by oneDNN where that pays."""
    for module in model.modules() if FASTER else ():
        if base_class(module) is nn.Linear:
            set_variant(module, CpuLinear)


def takes(x: Tensor, flops: int) -> bool:
    """Return whether oneDNN should compute a product of x [...] with this many FLOPs.

    Not for fake tensors, which stand for a GPU's.
    """
    # first what the compiler knows: with rows of experts, `flops` is not known to it
    if not FASTER or x.dtype != torch.float32 or x.device.type != "cpu":
        return False
    return flops >= MIN_FLOPS and type(x) in (Tensor, nn.Parameter)


def multiplies(a: Tensor, b: Tensor) -> bool:
    """Return whether oneDNN should compute a @ b. a: [m, k], copied if column-major; b: [k, n]."""
    in_rows = a.stride(1) == 1 or b.shape[1] >= TRANSPOSED
    return in_rows and takes(a, 2 * a.shape[0] * a.shape[1] * b.shape[1])


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b, [m, n], by torch.mm or oneDNN. a: [m, k]; b: [k, n]; both in any strides.

    It has no gradient if oneDNN computes it; `Product` is for that. out: where to put it, [m, n].
    """
    if not multiplies(a, b) or (out is not None and a.shape[1] < COPIED):
        return torch.mm(a, b, out=out)
    product = torch.ops.minitrain.cpu_linear(a, b.T, None)
    return product if out is None else out.copy_(product)


def add_matmul(total: Tensor, a: Tensor, b: Tensor, add: bool = True) -> None:
    """Compute total += a @ b, or total = a @ b. total: [m, n], of the type of a and b or fp32.

    a: [m, k]; b: [k, n].
    """
    if a.dtype == total.dtype and not multiplies(a, b):
        total.addmm_(a, b, beta=int(add))
    elif add:
        total += matmul(a, b)
    else:
        total.copy_(matmul(a, b))


class CpuLinear(nn.Linear):
    """A Linear that multiplies by oneDNN where that pays. x: [..., in]."""

    def forward(self, x: Tensor) -> Tensor:
        # [..., in] -> [..., out]
        if not takes(x, 2 * x.numel() * self.out_features):
            return super().forward(x)
        rows = x.flatten(0, -2)
        y = Product.apply(rows, self.weight, self.bias)
        return y.unflatten(0, x.shape[:-1])


class Product(torch.autograd.Function):
    """x w^T + bias. x: [tokens, in]; w: [out, in]; bias: [out] or None."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        need_x, need_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        return torch.ops.minitrain.cpu_linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            matmul(grad, weight) if need_x else None,
            matmul(grad.T, x) if need_weight else None,
            grad.sum(0) if need_bias else None,
        )


torch.library.define("minitrain::cpu_linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


@torch.library.impl("minitrain::cpu_linear", "CompositeExplicitAutograd")
def cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear, [..., out], without a gradient. x: [..., in].

    weight: [out, in], in any strides or packed (rollout/weights.py).
    torch's operator has no public name, and the compiler takes it only with weights that are
    constants of the graph: hence one of our own.
    """
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


@torch.library.register_fake("minitrain::cpu_linear")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # [..., out]
    return x.new_empty(*x.shape[:-1], len(weight))


@register_flop_formula(torch.ops.minitrain.cpu_linear)
def _(x_shape: torch.Size, weight_shape: torch.Size, *_, **__) -> int:
    return 2 * x_shape.numel() * weight_shape[0]


def pack(weight: Tensor) -> Tensor:
    """Return a weight [out, in] in oneDNN's own layout, for `cpu_linear`: no public name."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def takes_groups(x: Tensor, y: Tensor) -> bool:
    """Return whether oneDNN should compute `grouped_matmul`. x: [m, k]; y: [..., n]."""
    return takes(x, 2 * x.numel() * y.shape[-1])


def grouped_matmul(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Return F.grouped_mm(x, y, offs=offsets), by torch, or by oneDNN one group after the other.

    x [rows, in], y [groups, in, out]: each row times its group's matrix, [rows, out].
    x [in, rows], y [rows, out]: for each group x y over its rows, [groups, in, out].
    offsets: int32 [groups], the end of each group's rows. Without a gradient.
    """
    if not takes_groups(x, y):
        return F.grouped_mm(x, y, offs=offsets)
    # where the rows of each begin and end
    groups = list(pairwise([0, *offsets.tolist()]))
    if y.ndim == 3:
        out = x.new_empty(x.shape[0], y.shape[2])
        for (begin, end), matrix in zip(groups, y, strict=True):
            matmul(x[begin:end], matrix, out=out[begin:end])
        return out
    out = x.new_empty(len(groups), x.shape[0], y.shape[1])
    for (begin, end), product in zip(groups, out, strict=True):
        matmul(x[:, begin:end], y[begin:end], out=product)
    return out
