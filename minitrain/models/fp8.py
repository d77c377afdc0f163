"""FP8 Linears: matrix products in FP8 with one current scale per tensor (Micikevicius et al. 2022).

A Linear has three products, of its input x [tokens, in], its weight w [out, in] and its output's
gradient g [tokens, out]:

    output                  y  = x w^T  e4m3 x e4m3
    gradient of the input   dx = g w    e5m2 x e4m3   gradients need range more than precision
    gradient of the weight  dw = g^T x  e5m2 x e4m3

Scales. Each factor is multiplied by a scale with which its largest element just fits into FP8, then
clamped and rounded. The product is accumulated at higher precision and divided by both scales. A
scale is computed from the tensor itself ("current"), by plain operations that the compiler can fuse
with those that made the tensor. With an infinity or NaN in a factor, the whole product is NaN.

A scale is a power of two, so scaling is exact. Thus an element is rounded to the same value
whatever the scale is, in any split into micro-batches or ranks. Only elements 2^14 times smaller
than the largest, which become subnormal in FP8, depend on it. The price: up to one of e4m3's 18
binades is not used.

Memory. The forward pass saves the input in FP8: half the bytes of bf16. The weight is a parameter
in its own type, rounded in each forward pass. Or FSDP gathers it in FP8 (parallel/fsdp_fp8.py):
then the FP8 copy is in the module's `gathered`, and the parameter is a `weight_placeholder`.

Layouts. FP8 units need both factors with the summed dimension contiguous. So the products of the
backward pass need w, x and g transposed, and these copies are a fifth of a block's memory traffic.
Two things save some: an input that several Linears read (q, k, v; gate, up) is rounded and
transposed once, unless they have adapters; and transposed weights can be kept for all
micro-batches.

Sizes must be multiples of 16. A Linear whose sizes are not, on any tensor-parallel rank, stays
unchanged. Tokens are padded with zeros in the one product that sums over them. Embedding, head and
router stay unchanged. On CPU the FP8 numbers are multiplied in fp32, slower than bf16.

Experts. With one expert per rank (parallel/expert.py) its products are those of a Linear, and can
be in FP8. With several they are grouped products, which stay as they are: scaled grouped products
refuse e5m2 on Hopper, and save 10 % of a step with two experts per rank, 1 % with 16 (torchao
#2864).

Left out: scales per row or block, delayed scaling, FP8 attention, FP8 weights without a wider copy.
"""

from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.models.moe import Experts
from minitrain.models.quantize import E4M3, E5M2, quantize
from minitrain.models.variants import base_class, in_tuples, set_variant

# FP8 units take sizes that are multiples of it
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
    # in the forward, in the backward pass
    fast = (fast_accumulation != "none", fast_accumulation == "all")
    for block in blocks:
        for name, module in block.named_modules():
            kind = base_class(module)
            if kind is nn.Linear and sizes_divisible(module.weight, ALIGNMENT * tp):
                set_variant(module, Fp8Linear)
                module.reads_norm = not name.endswith(READ_NO_NORM)
            elif kind is Experts and experts and sizes_divisible(module.down_proj, ALIGNMENT):
                set_variant(module, Fp8Experts)
            else:
                continue
            module.fast = fast
            module.gathered = {}


def sizes_divisible(matrix: Tensor, multiple: int) -> bool:
    """Return whether `multiple` divides out and in of a matrix or stack [..., out, in]."""
    return not any(size % multiple for size in matrix.shape[-2:])


def in_fp8(module: nn.Module, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a module's matrix in FP8, [out, in], its inverse scale, [], and a column-major copy.

    If the parameter is a `weight_placeholder`, FSDP has gathered them; else the matrix is rounded
    now. The copy is None unless FSDP keeps one.
    """
    matrix = getattr(module, name)
    if is_placeholder(matrix):
        return module.gathered[name]
    # an expert's is a stack of one, [1, out, in]
    return *quantize(matrix.squeeze(0), E4M3), None


class Fp8Linear(nn.Linear):
    """A Linear that multiplies in FP8. x: [..., in], of any floating type; y: [..., out], as x.

    fast: accumulate faster in the forward, in the backward pass.
    reads_norm: x is the output of a norm, see `transposed`.
    gathered: by the parameter's name, the result of `in_fp8` as FSDP gathered it.
    """

    # tells tensor parallelism that it may gather x in FP8
    multiplies_in_fp8 = True
    fast: tuple[bool, bool]
    reads_norm: bool
    gathered: dict[str, tuple[Tensor, Tensor, Tensor | None]]

    def forward(self, x: Tensor) -> Tensor:
        # [..., in] -> [..., out]
        return fp8_linears([self], x)[0]

    @staticmethod
    def together(linears: "list[Fp8Linear]", x: Tensor) -> list[Tensor] | None:
        """Return the outputs [..., out] for x [..., in], rounded and transposed once for all.

        None if they are not all in FP8, or some have adapters: see `project` in variants.py.
        """
        if all(type(linear) is Fp8Linear for linear in linears):
            return fp8_linears(linears, x)
        return None


class Fp8Experts(Experts):
    """A rank's only expert, whose products are in FP8. Attributes: see `Fp8Linear`."""

    def _product(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        # x: [rows, in], all for the one expert
        weight = getattr(self, name).squeeze(0)
        outputs = Fp8Products.apply(
            x,
            *self.fast,
            # rows_known
            False,
            # reads_norm: the kernel that made x copied rows, and cannot transpose them on the way
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


def weight_placeholder(shape: torch.Size, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a stand-in for a parameter whose values are in FP8: one NaN, expanded to shape [...].

    It only receives the gradient. like: a tensor on its device.
    """
    return torch.full((), float("nan"), dtype=dtype, device=like.device).expand(shape)


def is_placeholder(parameter: Tensor) -> bool:
    """Return whether a parameter [..., out, in] is a `weight_placeholder`: its strides are 0."""
    return parameter.ndim > 1 and not any(parameter.stride())


class Fp8Weight(NamedTuple):
    """A weight [out, in], its gradients, or whether those are needed.

    parameter: only receives the gradient. The others are what `in_fp8` returns.
    """

    parameter: Tensor | None = None
    weight8: Tensor | None = None
    inverse: Tensor | None = None
    copy8: Tensor | None = None


class Fp8Products(torch.autograd.Function):
    """x w^T, [tokens, out], of x [tokens, in] and each of some weights [out, in].

    Inputs, in this order:
    x: [tokens, in].
    fast_forward, fast_backward: accumulate faster.
    rows_known: the compiler knows the number of tokens; it does not if a router decides it.
    reads_norm: x is the output of a norm, see `transposed`.
    Then the four of an `Fp8Weight` for each weight.
    """

    @staticmethod
    # *inputs alone: the compiler miscounts where some have names
    def forward(ctx, *inputs):
        x, fast_forward, ctx.fast, ctx.rows_known, ctx.reads_norm, *given = inputs
        weights = in_tuples(Fp8Weight, given)
        ctx.needs_x, *_ = ctx.needs_input_grad
        ctx.need_weights = [
            needed.parameter
            for needed in in_tuples(Fp8Weight, ctx.needs_input_grad[-len(given) :])
        ]
        ctx.dtypes = [x.dtype, *(weight.parameter.dtype for weight in weights)]
        x8, x_inverse = quantize(x, E4M3, rows_known=ctx.rows_known)
        kept = (x8, x_inverse) if any(ctx.need_weights) else (None, None)
        # the backward pass takes column-major weights: save the copies where there are any
        later = [w.weight8 if w.copy8 is None else w.copy8 for w in weights]
        ctx.save_for_backward(*kept, *later, *(w.inverse for w in weights))
        multiply = choose_scaled_mm(x, ctx.rows_known)
        # [tokens, out] each
        outputs = [
            multiply(x8, w.weight8.t(), x_inverse, w.inverse, x.dtype, fast_forward)
            for w in weights
        ]
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        x8, x_inverse, *weights = ctx.saved_tensors
        multiply = choose_scaled_mm(grads[0], ctx.rows_known)
        dx = None
        dws = [Fp8Weight()] * len(grads)
        # pairs of a gradient in FP8, [tokens, out], and its inverse scale
        grads = [quantize(grad, E5M2, rows_known=ctx.rows_known) for grad in grads]
        if ctx.needs_x:
            weights8 = weights[: len(grads)]
            inverses = weights[len(grads) :]
            for grad, weight8, inverse in zip(grads, weights8, inverses, strict=True):
                grad8, grad_inverse = grad
                # [out, in]
                weight8 = column_major(weight8, grad_inverse)
                # [tokens, in]
                term = multiply(grad8, weight8, grad_inverse, inverse, ctx.dtypes[0], ctx.fast)
                dx = term if dx is None else dx + term
        if any(ctx.need_weights):
            # the number of tokens, rounded up: FP8 units sum over multiples of 16
            tokens = len(x8) + -len(x8) % ALIGNMENT
            # [in, tokens]
            x8 = wait_for_gradient(grads[0][1], pad_rows(x8, tokens, ctx.rows_known))
            x8 = transposed(x8) if ctx.reads_norm else x8.t().contiguous()
            for n, (grad8, grad_inverse) in enumerate(grads):
                if ctx.need_weights[n]:
                    # [out, tokens]
                    grad8 = pad_rows(grad8, tokens, ctx.rows_known).t().contiguous()
                    dw = multiply(
                        grad8, x8.t(), grad_inverse, x_inverse, ctx.dtypes[1 + n], ctx.fast
                    )
                    dws[n] = Fp8Weight(parameter=dw)
        return dx, None, None, None, None, *chain(*dws)


def choose_scaled_mm(x: Tensor, rows_known: bool = True) -> Callable:
    """Return `scaled_mm`, or `opaque_scaled_mm` where the compiler cannot trace that.

    x: any factor [rows, ...], for its device. rows_known: see `Fp8Products`.
    """
    return scaled_mm if rows_known and x.is_cuda else opaque_scaled_mm


def scaled_mm(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return a b a_inverse b_inverse, [m, n] of `dtype`.

    a: FP8 [m, k], row-major; b: FP8 [k, n], column-major: the layouts that Hopper takes.
    a_inverse, b_inverse: fp32 [], the inverse scales.
    fast: accumulate faster, with about 14 bits.
    """
    if a.is_cuda:
        # F.scaled_mm calls another operator, which nobody has measured here
        return torch._scaled_mm(a, b, a_inverse, b_inverse, out_dtype=dtype, use_fast_accum=fast)
    # not torch's own, which takes 1,000 times as long on CPUs with AMX (see cpu.py)
    return (a.float() @ b.float() * (a_inverse * b_inverse)).to(dtype)


@torch.library.custom_op("minitrain::scaled_mm", mutates_args=())
def opaque_scaled_mm(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Compute `scaled_mm` as one operator of the compiler's graph; a: [m, k], where m may be 0.

    The compiler takes torch's own operator only with known sizes.
    """
    if not a.numel():
        return a.new_zeros(a.shape[0], b.shape[1], dtype=dtype)
    return scaled_mm(a, b, a_inverse, b_inverse, dtype, fast)


@opaque_scaled_mm.register_fake
def _(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    # [m, n]
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


def column_major(weight8: Tensor, grad_inverse: Tensor) -> Tensor:
    """Return weight8 [out, in] in column-major order, as a copy unless it is so already.

    The copy depends on grad_inverse [], see `wait_for_gradient`.
    """
    if weight8.stride(0) == 1:
        return weight8
    return wait_for_gradient(grad_inverse, weight8).t().contiguous().t()


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


def wait_for_gradient(grad_inverse: Tensor, x8: Tensor) -> Tensor:
    """Return x8 [...] unchanged, but depending on a gradient's inverse scale [].

    So the compiler cannot transpose x8 before there is a gradient. Else it would do so in the
    forward pass, and keep transposed weights for every micro-batch.
    """
    # an inverse scale is never negative: this adds 0
    return (x8.view(torch.uint8) + (grad_inverse < 0).to(torch.uint8)).view(x8.dtype)


def pad_rows(x: Tensor, rows: int, rows_known: bool = True) -> Tensor:
    """Pad x, FP8 [n, m], with zeros to [rows, m]; as bytes, which torch can pad.

    rows_known: see `Fp8Products`.
    """
    missing = rows - len(x)
    # without knowing n, the compiler could not decide on `not missing`
    if rows_known and not missing:
        return x
    return F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype)
