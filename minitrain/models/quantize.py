"""Quantize to FP8: one power of two per tensor as its scale, so that dividing by it is exact."""

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

# these bits of an fp32
EXPONENT = 0x7F800000

# a largest element below this is taken for this, so that no scale overflows
SMALLEST = 2.0**-100


def quantize(
    x: Tensor, dtype: torch.dtype, each: bool = False, rows_known: bool = True
) -> tuple[Tensor, Tensor]:
    """x in FP8, and its inverse scale in fp32, a scalar: x is about x8.float() * inverse.

    each: whether each matrix of a stack has a scale of its own; they are [len(x), 1, 1].
    rows_known: see `Fp8Products`.
    """
    scale = power_of_two_scale(largest(x, each, rows_known), dtype)
    return cast(x, scale, dtype), 1 / scale


def dequantize(x8: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Exact in bf16 and fp32."""
    wide = x8.float() * inverse
    # see `rotate_half` in layers.py
    return wide if wide.dtype == dtype else wide.to(dtype)


def largest(x: Tensor, each: bool = False, rows_known: bool = True) -> Tensor:
    """max |x| as an fp32 scalar; infinite where x has a NaN, which a maximum over ranks could lose;
    0 of nothing.

    each, rows_known: see `quantize`.
    """
    sizes = x.detach().abs()
    if each:
        amax = sizes.amax((1, 2), keepdim=True)
    elif rows_known:
        amax = sizes.amax() if x.numel() else sizes.new_zeros(())
    else:
        # of at least one number, whatever rows there are
        amax = F.pad(sizes.amax(-1), (0, 1)).amax()
    return amax.float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def power_of_two_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two that takes `amax` (fp32, any shape) to at most the largest number of
    `dtype`.

    Zero for an infinite amax: then everything divided by it is NaN.
    """
    ratio = torch.finfo(dtype).max / amax.clamp(min=SMALLEST)
    return (ratio.view(torch.int32) & EXPONENT).view(torch.float32)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in FP8. Clamped first: of what is larger, some versions of torch make NaN or
    infinity.
    """
    bound = torch.finfo(dtype).max
    return (x.detach().float() * scale).clamp(-bound, bound).to(dtype)
