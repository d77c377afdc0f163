"""Quantize to FP8 with power-of-two scales, one per tensor or per block: dividing by one is exact."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

# how many rows and columns share a scale; None: all of them
Block = tuple[int | None, int | None]
WHOLE: Block = (None, None)

# the exponent bits of an fp32, which begin at bit 23
EXPONENT = 0x7F800000
MANTISSA_BITS = 23
# smaller maxima are scaled as this one, so that no scale overflows
SMALLEST = 2.0**-100


def quantize(
    x: Tensor, dtype: torch.dtype, block: Block = WHOLE, rows_known: bool = True
) -> tuple[Tensor, Tensor]:
    """Return x [..., rows, columns] in FP8 and its inverse scales: x is about their product.

    block: that share a scale; it divides x. The inverse scales are fp32 [] for a whole tensor, else
        [..., rows / block[0], columns / block[1]].
    rows_known: the compiler knows x's first size, see `Fp8Products`.
    """
    if block == WHOLE:
        scale = power_of_two_scale(largest(x, rows_known), dtype)
        return cast(x, scale, dtype), 1 / scale
    parts = split(x, block)
    scale = power_of_two_scale(finite_or_infinite(parts.detach().abs().amax((-3, -1))), dtype)
    return join(cast(parts, spread(scale), dtype)), 1 / scale


def dequantize(x8: Tensor, inverse: Tensor, dtype: torch.dtype, block: Block = WHOLE) -> Tensor:
    """Return x8 [...] times `inverse` of `quantize` in `dtype`, exact in bf16 and fp32."""
    if block == WHOLE:
        wide = x8.float() * inverse
    else:
        wide = join(split(x8.float(), block) * spread(inverse))
    # see `rotate_half` in layers.py
    return wide if wide.dtype == dtype else wide.to(dtype)


def split(x: Tensor, block: Block) -> Tensor:
    """View x [..., rows, columns] as blocks, [..., rows / a, a, columns / b, b]."""
    *_, rows, columns = x.shape
    a, b = (size or whole for size, whole in zip(block, (rows, columns), strict=True))
    return x.unflatten(-1, (columns // b, b)).unflatten(-3, (rows // a, a))


def join(parts: Tensor) -> Tensor:
    """Return what `split` has split, [..., rows, columns]."""
    return parts.flatten(-2).flatten(-3, -2)


def spread(scales: Tensor) -> Tensor:
    """View scales [..., rows / a, columns / b] to multiply what `split` returns."""
    return scales[..., :, None, :, None]


def to_exponents(inverse: Tensor) -> Tensor:
    """Return powers of two, fp32 [...], as e8m0: uint8, the exponent of fp32; 255 for infinity."""
    return (inverse.view(torch.int32) >> MANTISSA_BITS).to(torch.uint8)


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
    return finite_or_infinite(amax)


def finite_or_infinite(amax: Tensor) -> Tensor:
    """Return maxima [...] in fp32, infinity for NaN."""
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
    """Return x [...] * scale [] or [...] in FP8, clamped to its range."""
    # some versions of torch cast what is larger to NaN or infinity
    bound = torch.finfo(dtype).max
    return (x.detach().float() * scale).clamp(-bound, bound).to(dtype)


# --- layouts of FP8 tensors


def pad_rows(x: Tensor, rows: int, rows_known: bool = True) -> Tensor:
    """Pad x, FP8 [n, m], with zeros to [rows, m]; as bytes, which torch can pad.

    rows_known: see `Fp8Products`.
    """
    missing = rows - len(x)
    # without knowing n, the compiler could not decide on `not missing`
    if rows_known and not missing:
        return x
    return F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype)


@torch.library.custom_op("minitrain::transposed", mutates_args=())
def transposed(x: Tensor) -> Tensor:
    """Transpose x, FP8 [n, m] -> [m, n], by a kernel of its own.

    For the output of a norm. Its FP8 numbers are computed again in the backward pass, in the norm's
    kernel, which works row by row: if it also transposed, it would write the bytes of a row n
    apart, which is slow. Other kernels work in tiles, and transpose at no cost.
    """
    copy = compiled_transpose() if x.is_cuda else transpose
    return copy(x.view(torch.uint8)).view(x.dtype)


@transposed.register_fake
def _(x: Tensor) -> Tensor:
    # [m, n]
    return x.new_empty(x.shape[1], x.shape[0])


def transpose(x: Tensor) -> Tensor:
    """Return a row-major copy of x^T, [n, m] -> [m, n], also where contiguous() would return x."""
    return x.t().clone(memory_format=torch.contiguous_format)


@cache
def compiled_transpose() -> Callable:
    """Return `transpose` in tiles: torch's own copy reads byte by byte."""
    return torch.compile(transpose, dynamic=True)


def weight_placeholder(shape: torch.Size, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a stand-in for a parameter whose values are in FP8: one NaN, expanded to shape [...].

    It only receives the gradient. like: a tensor on its device.
    """
    return torch.full((), float("nan"), dtype=dtype, device=like.device).expand(shape)


def is_placeholder(parameter: Tensor) -> bool:
    """Return whether a parameter [..., out, in] is a `weight_placeholder`: its strides are 0."""
    return parameter.ndim > 1 and not any(parameter.stride())
