"""Quantize to FP8: one power of two per tensor as its scale, so that dividing by it is exact."""

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

# the exponent bits of an fp32
EXPONENT = 0x7F800000

# the least maximum that is scaled for, so that no scale overflows
SMALLEST = 2.0**-100


def quantize(x: Tensor, dtype: torch.dtype, rows_known: bool = True) -> tuple[Tensor, Tensor]:
    """Return x in FP8 and its inverse scale, an fp32 scalar: x is about x8.float() * inverse.

    rows_known: see `Fp8Products`.
    """
    scale = power_of_two_scale(largest(x, rows_known), dtype)
    return cast(x, scale, dtype), 1 / scale


def dequantize(x8: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of x8 in `dtype`, exact in bf16 and fp32. inverse: from `quantize`."""
    wide = x8.float() * inverse
    # see `rotate_half` in layers.py
    return wide if wide.dtype == dtype else wide.to(dtype)


def largest(x: Tensor, rows_known: bool = True) -> Tensor:
    """Return max |x| as an fp32 scalar: 0 if x is empty, infinity if it has a NaN.

    A maximum over ranks could lose a NaN. rows_known: see `quantize`.
    """
    sizes = x.detach().abs()
    if rows_known:
        amax = sizes.amax() if x.numel() else sizes.new_zeros(())
    else:
        # padded, since there may be no rows
        amax = F.pad(sizes.amax(-1), (0, 1)).amax()
    return amax.float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def power_of_two_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest power of two whose product with `amax` is finite in `dtype`.

    amax: fp32 of any shape. If it is infinite the scale is 0, and the product with its inverse NaN.
    """
    ratio = torch.finfo(dtype).max / amax.clamp(min=SMALLEST)
    return (ratio.view(torch.int32) & EXPONENT).view(torch.float32)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x * scale in FP8, clamped: some versions of torch round larger values to NaN or
    infinity.
    """
    bound = torch.finfo(dtype).max
    return (x.detach().float() * scale).clamp(-bound, bound).to(dtype)
