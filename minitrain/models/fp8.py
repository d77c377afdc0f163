"""FP8 matrix products (Micikevicius et al. 2022) with per-tensor current scaling, in Linears.

A Linear has three products, of its input x [tokens, in], its weight w [out, in] and its output's
gradient g [tokens, out]:

    output                 y  = x w^T     e4m3 x e4m3
    gradient of the input  dx = g w       e5m2 x e4m3     gradients need range more than digits
    gradient of the weight dw = g^T x     e5m2 x e4m3

Scales. Each factor is multiplied by one scale, so that its largest element just fits into FP8, then
clamped and rounded. The product is accumulated at higher precision and divided by both scales. A
scale is computed from the tensor itself ("current"), in plain operations that the compiler can fuse
with what made the tensor. It is a power of two, so scaling is exact and rounding does not depend on
it: other micro-batches and ranks, with other largest elements, get the same FP8 numbers, but for
those 2^14 times smaller than the largest. The price is at most one of e4m3's 18 binades. With an
infinity or NaN in a factor, the whole product is NaN.

Memory. The forward pass keeps the FP8 input: half the bytes of bf16. A Linear's weight stays a
parameter. Where FSDP gathers it in FP8 (parallel/fsdp_fp8.py), that copy comes in as `gathered`.

Layouts. FP8 units sum along the rows of both factors, so the gradients' products need the weight, x
and g transposed, byte by byte: a fifth of all memory traffic of a block. So q, k and v, and gate and
up, which have the same input, round and transpose it once, unless they have adapters; and
transposed weights can be kept for all micro-batches.

Sizes must be multiples of 16. A Linear whose sizes are not, on any tensor-parallel rank, stays as
it is; tokens are padded with zeros in the one product that sums over them. Embedding, head and
router stay too. On CPU the FP8 numbers are multiplied in fp32, slower than in bf16.

A rank's only expert, under expert parallelism, can compute as a Linear does.

Left out: scales per row or block, delayed scaling, FP8 attention, FP8 weights without a wider copy;
and several experts per rank: scaled grouped products refuse e5m2 on Hopper, and save 10 % of a step
with two experts per rank, 1 % with 16 (torchao #2864).
"""

from collections.abc import Callable
from functools import cache
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.models.layers import base_class, set_variant
from minitrain.models.moe import Experts
from minitrain.models.quantize import E4M3, E5M2, quantize

ALIGNMENT = 16
# suffixes of the Linears whose input is not a norm's output
READ_NO_NORM = ("o_proj", "down_proj")


def to_fp8(
    blocks: list[nn.Module], fast_accumulation: str, tp: int = 1, experts: bool = False
) -> None:
    """Make the Linears in `blocks` multiply in FP8, in place; parameters, names and hooks stay.

    fast_accumulation: the products in which Hopper accumulates faster, with about 14 bits: `none`,
        `forward` or `all`.
    tp: the number of tensor-parallel ranks that will split a weight.
    experts: let routed experts multiply in FP8, too; each rank must have one.
    """
    fast = (fast_accumulation != "none", fast_accumulation == "all")
    for block in blocks:
        for name, module in block.named_modules():
            kind = base_class(module)
            if kind is nn.Linear and fits(module.weight, ALIGNMENT * tp):
                set_variant(module, Fp8Linear)
                module.reads_norm = not name.endswith(READ_NO_NORM)
            elif kind is Experts and experts and fits(module.down_proj, ALIGNMENT):
                set_variant(module, Fp8Experts)
            else:
                continue
            module.fast = fast
            module.gathered = {}


def fits(matrix: Tensor, multiple: int) -> bool:
    """Return whether `multiple` divides both sizes of a matrix, or of a stack's matrices."""
    return not any(size % multiple for size in matrix.shape[-2:])


def in_fp8(module: nn.Module, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a module's matrix in FP8, its inverse scale, and its column-major copy or None.

    They are those that FSDP gathered (module.gathered, by name) while the parameter is a
    `placeholder`; else it is quantized now.
    """
    matrix = getattr(module, name)
    if is_placeholder(matrix):
        return module.gathered[name]
    # of experts, a stack of one
    return *quantize(matrix.squeeze(0), E4M3), None


class Fp8Linear(nn.Linear):
    """A Linear that multiplies in FP8. x: [..., in] of any floating type, which y [..., out] gets.

    fast: accumulate faster in the forward and in the backward pass.
    reads_norm: see `transposed`.
    gathered: what FSDP gathered, by name of the parameter: see `in_fp8`.
    """

    # so tensor parallelism may gather x in FP8
    multiplies_in_fp8 = True
    fast: tuple[bool, bool]
    reads_norm: bool
    gathered: dict[str, tuple[Tensor, Tensor, Tensor | None]]

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linears([self], x)[0]

    @staticmethod
    def together(linears: "list[Fp8Linear]", x: Tensor) -> list[Tensor] | None:
        """Round and transpose x once: see `project` in layers.py."""
        if all(type(linear) is Fp8Linear for linear in linears):
            return fp8_linears(linears, x)
        return None


class Fp8Experts(Experts):
    """A rank's only expert, whose products are in FP8. Attributes: see `Fp8Linear`."""

    def _product(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        weight = getattr(self, name).squeeze(0)
        outputs = Fp8Products.apply(
            x,
            *self.fast,
            # rows_known
            False,
            # reads_norm: sorting copies x, by a kernel of its own
            True,
            weight,
            *in_fp8(self, name),
        )
        return outputs[0]


def fp8_linears(linears: list[Fp8Linear], x: Tensor) -> list[Tensor]:
    """Return the outputs [..., out] of Linears for the same x [..., in]."""
    first = linears[0]
    weights = [(linear.weight, *in_fp8(linear, "weight")) for linear in linears]
    outputs = Fp8Products.apply(
        x.flatten(0, -2), *first.fast, True, first.reads_norm, *chain(*weights)
    )
    outputs = [y.unflatten(0, x.shape[:-1]) for y in outputs]
    for i, linear in enumerate(linears):
        if linear.bias is not None:
            outputs[i] = outputs[i] + linear.bias
    return outputs


def placeholder(shape: torch.Size, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a stand-in for a parameter whose values are in FP8: one NaN, expanded to `shape`.

    It only receives the gradient.
    """
    return torch.full((), float("nan"), dtype=dtype, device=like.device).expand(shape)


def is_placeholder(parameter: Tensor) -> bool:
    """Return whether a parameter is a `placeholder`: a matrix or stack whose strides are all 0."""
    return parameter.ndim > 1 and not any(parameter.stride())


class Fp8Products(torch.autograd.Function):
    """x w^T, [tokens, out], of x [tokens, in] and each of some weights [out, in].

    Inputs: x; fast_forward and fast_backward: accumulate faster; rows_known: the compiler knows the
    number of tokens (not that of experts); reads_norm: see `transposed`; then four inputs for each
    weight: itself, which only gets its gradient, and the three of `in_fp8`.
    """

    @staticmethod
    # *inputs alone: the compiler miscounts where some have names
    def forward(ctx, *inputs):
        x, fast_forward, ctx.fast, ctx.rows_known, ctx.reads_norm, *given = inputs
        weights = given[0::4]
        weights8 = given[1::4]
        inverses = given[2::4]
        copies8 = given[3::4]
        ctx.needs_x = ctx.needs_input_grad[0]
        ctx.need_weights = ctx.needs_input_grad[5::4]
        ctx.dtypes = [x.dtype, *(weight.dtype for weight in weights)]
        x8, x_inverse = quantize(x, E4M3, rows_known=ctx.rows_known)
        kept = (x8, x_inverse) if any(ctx.need_weights) else (None, None)
        # the backward pass multiplies by column-major copies, where there are any
        later = [
            w8 if copy8 is None else copy8 for w8, copy8 in zip(weights8, copies8, strict=True)
        ]
        ctx.save_for_backward(*kept, *later, *inverses)
        multiply = choose_scaled_mm(x, ctx.rows_known)
        outputs = []
        for w8, inverse in zip(weights8, inverses, strict=True):
            product = multiply(
                x8,
                w8.t(),
                x_inverse,
                inverse,
                x.dtype,
                fast_forward,
            )
            outputs.append(product)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        x8, x_inverse, *weights = ctx.saved_tensors
        multiply = choose_scaled_mm(grads[0], ctx.rows_known)
        dx = None
        # for each weight: its gradient, and none for the three of `in_fp8`
        dws = [None] * (4 * len(grads))
        grads = [quantize(grad, E5M2, rows_known=ctx.rows_known) for grad in grads]
        if ctx.needs_x:
            weights8 = weights[: len(grads)]
            inverses = weights[len(grads) :]
            for grad, weight8, inverse in zip(grads, weights8, inverses, strict=True):
                grad8, grad_inverse = grad
                weight8 = column_major(weight8, grad_inverse)
                term = multiply(
                    grad8,
                    weight8,
                    grad_inverse,
                    inverse,
                    ctx.dtypes[0],
                    ctx.fast,
                )
                dx = term if dx is None else dx + term
        if any(ctx.need_weights):
            # padded: FP8 units sum over multiples of 16
            tokens = len(x8) + -len(x8) % ALIGNMENT
            x8 = not_before(grads[0][1], pad_rows(x8, tokens, ctx.rows_known))
            x8 = transposed(x8) if ctx.reads_norm else x8.t().contiguous()
            for n, (grad8, grad_inverse) in enumerate(grads):
                if ctx.need_weights[n]:
                    grad8 = pad_rows(grad8, tokens, ctx.rows_known).t().contiguous()
                    dws[4 * n] = multiply(
                        grad8, x8.t(), grad_inverse, x_inverse, ctx.dtypes[1 + n], ctx.fast
                    )
        return dx, None, None, None, None, *dws


def choose_scaled_mm(x: Tensor, rows_known: bool = True) -> Callable:
    """Return `scaled_mm`, or `opaque_scaled_mm` where torch's own operator does not serve.

    rows_known: see `Fp8Products`.
    """
    return scaled_mm if rows_known and x.is_cuda else opaque_scaled_mm


def scaled_mm(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return a b a_inverse b_inverse, [m, n] of `dtype`.

    a: FP8 [m, k], row-major; b: FP8 [k, n], column-major: the layouts that Hopper takes.
    fast: accumulate faster, with about 14 bits.
    """
    if a.is_cuda:
        # not public in 2.11
        return torch._scaled_mm(a, b, a_inverse, b_inverse, out_dtype=dtype, use_fast_accum=fast)
    # not torch's own: oneDNN takes 1,000 times as long on CPUs with AMX (uxlfoundation/oneDNN #3349)
    return (a.float() @ b.float() * (a_inverse * b_inverse)).to(dtype)


@torch.library.custom_op("minitrain::scaled_mm", mutates_args=())
def opaque_scaled_mm(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Compute `scaled_mm` as one operator for the compiler, which asks for known sizes in torch's
    own. Rows may be none.
    """
    if not a.numel():
        return a.new_zeros(a.shape[0], b.shape[1], dtype=dtype)
    return scaled_mm(a, b, a_inverse, b_inverse, dtype, fast)


@opaque_scaled_mm.register_fake
def _(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


def column_major(weight8: Tensor, grad_inverse: Tensor) -> Tensor:
    """Return weight8 [out, in] in column-major order, as a copy unless it is so already."""
    if weight8.stride(0) == 1:
        return weight8
    return not_before(grad_inverse, weight8).t().contiguous().t()


@torch.library.custom_op("minitrain::transposed", mutates_args=())
def transposed(x: Tensor) -> Tensor:
    """Transpose x, FP8 [n, m] -> [m, n], by a kernel of its own.

    For inputs that come from a norm: the backward pass computes their FP8 again in the norm's
    kernel, where the compiler would store a row's bytes n apart. Other kernels work in tiles, and
    transpose at no cost.
    """
    copy = compiled_transpose() if x.is_cuda else transpose
    return copy(x.view(torch.uint8)).view(x.dtype)


@transposed.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0])


def transpose(x: Tensor) -> Tensor:
    """Return a row-major copy of x^T, a new tensor even where contiguous() would return x."""
    return x.t().clone(memory_format=torch.contiguous_format)


@cache
def compiled_transpose() -> Callable:
    """Return `transpose` in tiles: torch's own copy reads byte by byte."""
    return torch.compile(transpose, dynamic=True)


def not_before(grad_inverse: Tensor, x8: Tensor) -> Tensor:
    """Return x8 with a fake dependency on a gradient's inverse scale, which is never negative.

    Otherwise the compiler would transpose x8 in the forward pass, and keep weights' copies for every
    micro-batch.
    """
    return (x8.view(torch.uint8) + (grad_inverse < 0).to(torch.uint8)).view(x8.dtype)


def pad_rows(x: Tensor, rows: int, rows_known: bool = True) -> Tensor:
    """Pad x, FP8 [n, m], with zeros to [rows, m]; as bytes, which torch can pad.

    rows_known: see `Fp8Products`. A compiler that does not know n cannot ask whether rows are
    missing.
    """
    missing = rows - len(x)
    if rows_known and not missing:
        return x
    return F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype)
