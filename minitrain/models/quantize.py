"""Quantize to FP8 with one scale per tensor, a power of two, so that dividing by it is exact."""

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

# the exponent bits of an fp32
EXPONENT = 0x7F800000
# smaller maxima are scaled as this one, so that no scale overflows
SMALLEST = 2.0**-100


def quantize(x: Tensor, dtype: torch.dtype, rows_known: bool = True) -> tuple[Tensor, Tensor]:
    """Return x [...] in FP8 and its inverse scale, fp32 []: x is about x8.float() * inverse.

    rows_known: the compiler knows x's first size, see `Fp8Products`.
    """
    scale = power_of_two_scale(largest(x, rows_known), dtype)
    return cast(x, scale, dtype), 1 / scale


def dequantize(x8: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x8 [...] times `inverse` [] of `quantize` in `dtype`, exact in bf16 and fp32."""
    wide = x8.float() * inverse
    # see `rotate_half` in layers.py
    return wide if wide.dtype == dtype else wide.to(dtype)


def largest(x: Tensor, rows_known: bool = True) -> Tensor:
    """Return max |x| of x [...], fp32 []: 0 if x is empty, infinity if it has a NaN.

    A maximum over ranks could lose a NaN, but keeps an infinity. rows_known: see `quantize`.
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

    amax: fp32 [...], as the result. If it is infinite the scale is 0 and its inverse infinite, so
    that a product with both is NaN.
    """
    ratio = torch.finfo(dtype).max / amax.clamp(min=SMALLEST)
    # round down to a power of two: the exponent alone
    return (ratio.view(torch.int32) & EXPONENT).view(torch.float32)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [...] * scale [] in FP8, clamped to its range."""
    # some versions of torch cast what is larger to NaN or infinity
    bound = torch.finfo(dtype).max
    return (x.detach().float() * scale).clamp(-bound, bound).to(dtype)
