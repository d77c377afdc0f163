"""The forms of scaled FP8: which numbers share a scale, and what multiplies them.

    form     one scale for                        gradients  GPUs with a kernel for it   grouped
    tensor   a tensor                             e5m2       8.9 and later               none
    row      a row along the summed dimension     e4m3       9.0 to 11.0                 9.0, 10.0
    block    1 x 128 of x and g, 128 x 128 of w   e4m3       9.0 alone (cuBLAS 12.9)     none
    mx       1 x 32 of each, as e8m0 in tiles     e4m3       10.0 and later              10.0

GPUs are named by CUDA's compute capability; `grouped` products are those of experts. A product
sums over the columns of both factors, [m, k] and [n, k]; "1 x 128" means 128 elements of the sum.
So a tensor that two products sum along different dimensions is rounded twice, unless its blocks are
square: a whole tensor, or 128 x 128.

    product                   sums over   x           g           w
    output            x w^T   in          1 x block               as w
    gradient of x     g w     out                     1 x block   w8^T if square, else w^T anew
    gradient of w     g^T x   tokens      x^T anew    g^T anew

Elsewhere the factors are dequantized and multiplied in the output's type, on the CPU in fp32. That
is the same product: FP8 numbers times powers of two are exact in bf16, and sums are in fp32. But it
is slower than bf16 without FP8, so a run says so once (`dequantized_note`).

All scales are powers of two, also where the form allows others: see quantize.py. For 1 x 32 that is
the rounding of scales upwards, with which no element is clamped (NVIDIA's recipe for MXFP8).

Sources: OCP Microscaling Formats 1.0; DeepSeek-V3, section 3.3; cuBLAS 12.9, "Narrow precision".
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain.models.grouped_mm import grouped_mm, zero_where_empty
from minitrain.models.quantize import (
    E4M3,
    E5M2,
    WHOLE,
    Block,
    cast,
    dequantize,
    finite_or_infinite,
    pad_rows,
    power_of_two_scale,
    quantize,
    split,
    spread,
    to_exponents,
)


class Form(NamedTuple):
    """A form of scaled FP8, see the table above."""

    # what shares a scale, of x and g along the summed dimension, and of w
    block: Block
    weight_block: Block
    gradient: torch.dtype
    # sizes of weights are multiples of it, and tokens are padded to them where they are summed
    multiple: int
    # and an expert's tokens to these
    group: int
    # of a compute capability: whether a kernel multiplies it, and groups of it
    has_kernel: Callable[[tuple[int, int]], bool]
    has_grouped_kernel: Callable[[tuple[int, int]], bool]

    @property
    def square_blocks(self) -> bool:
        """Return whether a weight's FP8 numbers serve the products that sum over its rows, too."""
        rows, columns = self.weight_block
        return rows == columns


def no_kernel(capability: tuple[int, int]) -> bool:
    return False


FORMS = {
    "tensor": Form(WHOLE, WHOLE, E5M2, 16, 16, lambda device: device >= (8, 9), no_kernel),
    "row": Form(
        (1, None),
        (1, None),
        E4M3,
        16,
        16,
        # cuBLAS has no kernel for 12.0 (pytorch's issue 192707)
        lambda device: (9, 0) <= device < (12, 0),
        lambda device: device in ((9, 0), (10, 0)),
    ),
    "block": Form(
        (1, 128), (128, 128), E4M3, 128, 128, lambda device: device == (9, 0), no_kernel
    ),
    "mx": Form(
        (1, 32),
        (1, 32),
        E4M3,
        32,
        # tiles of scales
        128,
        lambda device: device >= (10, 0),
        lambda device: device == (10, 0),
    ),
}


def without_kernel(form: str, experts: bool, capability: tuple[int, int]) -> str:
    """Return which products of a form are dequantized at a compute capability; empty for none.

    experts: routed experts multiply in FP8, too.
    """
    products = [] if FORMS[form].has_kernel(capability) else ["products"]
    # those of `tensor` are products of one expert
    if experts and form != "tensor" and not FORMS[form].has_grouped_kernel(capability):
        products.append("products of experts")
    return " and ".join(products)


def dequantized_note(form: str, experts: bool, device: torch.device) -> str | None:
    """Return a line for the user if products of this form are dequantized on a GPU, or None.

    experts: routed experts multiply in FP8, too.
    """
    if device.type != "cuda":
        return None
    products = without_kernel(form, experts, torch.cuda.get_device_capability(device))
    if not products:
        return None
    name = torch.cuda.get_device_name(device)
    return (
        f"note: fp8.form={form}: {name} has no units for its {products}: they are "
        f"computed from dequantized factors, exact but slower than precision=bf16"
    )


# --- quantizing along the rows


def quantize_transposed(x: Tensor, dtype: torch.dtype, form: Form) -> tuple[Tensor, Tensor]:
    """Return x^T in FP8, [columns, rows], and inverse scales: for sums over the rows of x.

    The rows are padded with zeros to whole blocks.
    """
    blocks = max(1, -(-len(x) // form.multiple))
    missing = blocks * form.multiple - len(x)
    # without rows to add, pad would copy
    padded = F.pad(x.detach(), (0, 0, 0, missing)) if missing else x
    x8, inverse = quantize(padded.t(), dtype, form.block)
    return x8.contiguous(), inverse


def wait_for_gradient(grad_inverse: Tensor, x: Tensor) -> Tensor:
    """Return x [...] unchanged, but depending on a gradient's inverse scales [...].

    So the compiler cannot transpose x before there is a gradient. Else it would do so in the
    forward pass, and keep transposed weights for every micro-batch.
    """
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    # one scale is enough, and there is none without tokens
    first = grad_inverse if grad_inverse.ndim == 0 else grad_inverse[:1, :1].sum()
    # an inverse scale is never negative: this adds 0
    return (x.view(bits) + (first < 0).to(bits)).view(x.dtype)


@torch.library.custom_op("minitrain::quantize_groups", mutates_args=())
def quantize_groups(
    x: Tensor, offsets: Tensor, form: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x^T in FP8, with the rows of each expert for themselves: for sums over its rows.

    x: [rows, columns], sorted by expert. offsets: int32 [experts], the end of each expert's rows.
    Returns [columns, places], where every expert begins at a multiple of `group`; inverse
    scales, fp32 [columns, places / multiple]; and the ends of experts' places, int32 [experts]. The
    number of places only depends on that of rows. What no row fills is 0.
    """
    row = FORMS[form]
    multiple = row.multiple
    place, ends = places_of_rows(len(x), offsets, row.group)
    places = count_places(len(x), len(offsets), row.group)
    laid_out = x.new_zeros(places, x.shape[1]).index_copy_(0, place, x)
    parts = split(laid_out, (multiple, 1))
    # [blocks, columns]
    amax = finite_or_infinite(parts.abs().amax((-3, -1)))
    if row.block == (1, None):
        # one scale for an expert's rows; the places behind the last have a row of their own
        starts = torch.arange(0, places, multiple, device=x.device, dtype=torch.int32)
        owner = torch.bucketize(starts, ends, right=True)
        of_experts = amax.new_zeros(len(offsets) + 1, x.shape[1])
        rows_of = owner.long()[:, None].expand_as(amax)
        amax = of_experts.scatter_reduce_(0, rows_of, amax, "amax")[owner]
    scale = power_of_two_scale(amax, dtype)
    x8 = cast(parts, spread(scale), dtype).view(laid_out.shape)
    return x8.t().contiguous(), (1 / scale).t().contiguous(), ends


@quantize_groups.register_fake
def _(x: Tensor, offsets: Tensor, form: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    row = FORMS[form]
    # len() would make the compiler take the number of rows as a constant
    rows, columns = x.shape
    places = count_places(rows, len(offsets), row.group)
    return (
        x.new_empty(columns, places, dtype=dtype),
        x.new_empty(columns, places // row.multiple, dtype=torch.float32),
        torch.empty_like(offsets),
    )


def places_of_rows(rows: int, offsets: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the place of each row, and the ends of experts' places, if each pads to a `group`.

    offsets: int32 [experts], the end of each expert's rows. Returns int64 [rows], int32 [experts].
    """
    counts = offsets.diff(prepend=offsets.new_zeros(1))
    padded = (counts + group - 1) // group * group
    ends = padded.cumsum(0, dtype=torch.int32)
    number = torch.arange(rows, device=offsets.device, dtype=torch.int32)
    expert = torch.bucketize(number, offsets, right=True)
    # by expert, how far its rows move
    shift = (ends - padded) - (offsets - counts)
    return (number + shift[expert]).long(), ends


def count_places(rows: int, experts: int, group: int) -> int:
    """Return how many places suffice for `rows` that each of the experts pads to a `group`."""
    return (rows // group + experts) * group


# --- multiplying


def multiply_in_form(
    a: Tensor,
    b: Tensor,
    a_inverse: Tensor,
    b_inverse: Tensor,
    form: str,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Return a b, [m, n] of `dtype`, for a form with more than one scale.

    a: FP8 [m, k], row-major. b: FP8 [k, n], column-major.
    a_inverse: fp32, of blocks of a. b_inverse: fp32, of blocks of b^T [n, k]. fast: as in
        `scaled_mm`.
    """
    block = FORMS[form].block
    # b is a weight, or what the gradient of one is made of
    b_block = block if len(b_inverse) == b.shape[1] else FORMS[form].weight_block
    if has_kernel(form, a):
        rows = len(a)
        # cuBLAS takes multiples of 4 rows with blocks
        missing = -rows % 4 if form == "block" else 0
        a = pad_rows(a, rows + missing)
        a_inverse = F.pad(a_inverse, (0, 0, 0, missing))
        scales = KERNEL_SCALES[form](a_inverse, b_inverse, b_block[0])
        # not all kernels return fp32
        bf16 = torch.bfloat16
        product = F.scaled_mm(a, b, *scales, output_dtype=bf16, use_fast_accum=fast)
        return product[:rows].to(dtype)
    wide = dtype if a.is_cuda else torch.float32
    factors = dequantize(a, a_inverse, wide, block), dequantize(b.t(), b_inverse, wide, b_block)
    return (factors[0] @ factors[1].t()).to(dtype)


def has_kernel(form: str, x: Tensor) -> bool:
    """Return whether the device of x has a kernel for a form."""
    return x.is_cuda and FORMS[form].has_kernel(torch.cuda.get_device_capability(x.device))


def row_scales(a: Tensor, b: Tensor, b_rows: int) -> tuple:
    """Return what F.scaled_mm takes of scales [m, 1] and [n, 1]: [m, 1] and [1, n].

    b_rows: how many rows of b^T [n, k] share a scale; as in the next functions.
    """
    kind = F.ScalingType.RowWise
    return a, kind, b.t(), kind


def block_scales(a: Tensor, b: Tensor, b_rows: int) -> tuple:
    """Return the same for [m, k / 128] and [n / b_rows, k / 128].

    Scales of 1 x 128 are column-major. Those of 128 x 128 are [k / 128, n / 128], column-major, and
    padded with zeros to a multiple of 4 rows.
    """
    row = F.ScalingType.BlockWise1x128
    a = a.t().contiguous().t()
    if b_rows == 1:
        return a, row, b.t().contiguous().t(), row
    padded = F.pad(b, (0, -b.shape[1] % 4)).contiguous()
    return a, row, padded.t(), F.ScalingType.BlockWise128x128


def mx_scales(a: Tensor, b: Tensor, b_rows: int) -> tuple:
    """Return the same for [m, k / 32] and [n, k / 32], in tiles as e8m0."""
    kind = F.ScalingType.BlockWise1x32
    tiles = F.SwizzleType.SWIZZLE_32_4_4
    return swizzle(a), kind, swizzle(b), kind, tiles, tiles


def swizzle(inverse: Tensor) -> Tensor:
    """Return scales [..., m, n] as e8m0 in tiles of 128 x 4, padded with zeros: [..., all].

    A tile is stored as 32 x 4 x 4: its row r = 32 j + i lies at [i, j].
    """
    tiles = tiles_of(inverse)
    return tiles.flatten(-3).view(torch.float8_e8m0fnu)


def tiles_of(inverse: Tensor) -> Tensor:
    """Return scales [..., m, n] as tiles, uint8 [..., m / 128, n / 4, 512], both rounded up."""
    *_, rows, columns = inverse.shape
    padded = F.pad(to_exponents(inverse), (0, -columns % 4, 0, -rows % 128))
    # [..., m / 128, 4, 32, n / 4, 4]
    parts = padded.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4, 32))
    return parts.movedim(-2, -4).transpose(-2, -3).flatten(-3)


KERNEL_SCALES = {"row": row_scales, "block": block_scales, "mx": mx_scales}


def has_grouped_kernel(form: str, x: Tensor) -> bool:
    """Return whether the device of x has a kernel for groups of a form."""
    return x.is_cuda and FORMS[form].has_grouped_kernel(
        torch.cuda.get_device_capability(x.device)
    )


class RowsOfGroups:
    """Scales of rows as F.scaled_grouped_mm takes them."""

    @staticmethod
    def kind() -> tuple:
        return F.ScalingType.RowWise, None

    @staticmethod
    def rows(inverse: Tensor, offsets: Tensor) -> Tensor:
        """Return scales [rows, 1] as [rows]."""
        return inverse.flatten()

    @staticmethod
    def stack(inverse: Tensor) -> Tensor:
        """Return scales [experts, n, 1] as [experts, n]."""
        return inverse.flatten(1).contiguous()

    @staticmethod
    def places(inverse: Tensor, offsets: Tensor) -> Tensor:
        """Return scales [m, places / 16], equal for an expert, as [experts x m]."""
        starts = offsets - offsets.diff(prepend=offsets.new_zeros(1))
        # an expert without places may begin behind the last one
        first = (starts // FORMS["row"].multiple).clamp(max=inverse.shape[1] - 1)
        return inverse[:, first].t().flatten()


class TilesOfGroups:
    """Scales of 1 x 32 as F.scaled_grouped_mm takes them: tiles, each expert's for themselves.

    Its kernel is in builds of torch with MSLK, and reads an expert's tiles from where those of the
    experts before it end, rounded up to whole tiles.
    """

    @staticmethod
    def kind() -> tuple:
        return F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4

    @staticmethod
    def rows(inverse: Tensor, offsets: Tensor) -> Tensor:
        """Return scales [rows, k / 32], with each expert's rows padded to 128, as [places, ...]."""
        group = FORMS["mx"].group
        place, _ = places_of_rows(len(inverse), offsets, group)
        places = count_places(len(inverse), len(offsets), group)
        padded = inverse.new_zeros(places, inverse.shape[1]).index_copy_(0, place, inverse)
        return swizzle(padded).view(places, -1)

    @staticmethod
    def stack(inverse: Tensor) -> Tensor:
        """Return scales [experts, n, k / 32] as [experts, all]."""
        return swizzle(inverse)

    @staticmethod
    def places(inverse: Tensor, offsets: Tensor) -> Tensor:
        """Return scales [m, places / 32] as [m rounded up, places / 32].

        An expert has whole columns of tiles here. They lie row by row, as if alone.
        """
        tiles = tiles_of(inverse)
        rows, columns = tiles.shape[:2]
        # [experts + 1]: ends in columns of tiles; what lies behind the experts is one more
        ends = torch.cat([offsets // FORMS["mx"].group, offsets.new_full((1,), columns)])
        starts = F.pad(ends[:-1], (1, 0))
        column = torch.arange(columns, device=offsets.device, dtype=torch.int32)
        owner = torch.bucketize(column, ends, right=True)
        start, width = starts[owner], (ends - starts)[owner]
        row = torch.arange(rows, device=offsets.device)[:, None]
        # [m / 128, places / 128]: where each tile goes
        place = rows * start + row * width + (column - start)
        laid_out = torch.empty_like(tiles.flatten(0, 1)).index_copy_(
            0, place.flatten().long(), tiles.flatten(0, 1)
        )
        return laid_out.view(torch.float8_e8m0fnu).view(128 * rows, 4 * columns)


GROUPED_KERNEL_SCALES = {"row": RowsOfGroups, "mx": TilesOfGroups}


@torch.library.custom_op("minitrain::scaled_grouped_mm", mutates_args=())
def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    a_inverse: Tensor,
    b_inverse: Tensor,
    offsets: Tensor,
    form: str,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Multiply expert by expert. offsets: int32 [experts], the ends of experts' rows or places.

    a [rows, k], b [experts, n, k], FP8: each row times its expert's b^T, [rows, n] of `dtype`.
    a [m, places], b [n, places], from `quantize_groups`: for each expert a b^T over its places,
        [experts, m, n] of `dtype`; 0 for an expert without any.
    a_inverse, b_inverse: fp32, of blocks. fast: as in `scaled_mm`.
    """
    row = FORMS[form]
    if has_grouped_kernel(form, a):
        make_scales = GROUPED_KERNEL_SCALES[form]
        if b.ndim == 3:
            scales = make_scales.rows(a_inverse, offsets), make_scales.stack(b_inverse)
        else:
            scales = [make_scales.places(inverse, offsets) for inverse in (a_inverse, b_inverse)]
        kind, tiles = make_scales.kind()
        product = F.scaled_grouped_mm(
            a,
            b.transpose(-2, -1),
            scales[0],
            kind,
            scales[1],
            kind,
            tiles,
            tiles,
            offs=offsets,
            output_dtype=torch.bfloat16,
            use_fast_accum=fast,
        ).to(dtype)
        return product if b.ndim == 3 else zero_where_empty(product, offsets)
    wide = dtype if a.is_cuda else torch.float32
    if b.ndim == 3:
        blocks = row.block, row.weight_block
    else:
        blocks = [(1, row.multiple)] * 2
    a = dequantize(a, a_inverse, wide, blocks[0])
    b = dequantize(b, b_inverse, wide, blocks[1])
    return grouped_mm(a, b.transpose(-2, -1), offsets).to(dtype)


@scaled_grouped_mm.register_fake
def _(
    a: Tensor,
    b: Tensor,
    a_inverse: Tensor,
    b_inverse: Tensor,
    offsets: Tensor,
    form: str,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    # [rows, n], or [experts, m, n]
    experts = () if b.ndim == 3 else offsets.shape
    return a.new_empty(*experts, a.shape[0], b.shape[-2], dtype=dtype)
