"""FP8 matrix products (Micikevicius et al. 2022), with per-tensor current scaling: what wraps a
Linear.

A Linear has three products, of its input x [tokens, in], its weight w [out, in] and its output's
gradient g:

    output                y  = x w^T     e4m3 x e4m3
    gradient of the input dx = g w       e5m2 x e4m3     gradients need range more than digits
    gradient of the weight dw = g^T x    e5m2 x e4m3

Each factor is multiplied by one scale, so that its largest element just fits into FP8, clamped and
rounded; the product is summed up at higher precision and divided by both scales. A scale is
computed from the tensor itself ("current"), in plain operations, which the compiler can fuse with
what made the tensor. It is a power of two: scaling is then exact, rounding does not depend on the
scale, and so other cuts of the same data (micro-batches, ranks), whose largest elements differ, get
the same FP8 numbers but for those 2^14 times smaller than the largest. The price is at most one of
e4m3's 18 binades. An infinity or NaN anywhere in a factor makes the whole product NaN.

Of the forward pass the FP8 input is kept, half the bytes of bf16's. A Linear's weight stays a
parameter as before; where FSDP gathers it in FP8 already (parallel/fsdp_fp8.py), that copy comes in
as `gathered`.

FP8 units sum along the rows of both factors, so the gradients' products take the weight, x and g
transposed: copies, byte by byte, which are a fifth of all that such a block does in memory. So q, k
and v, and gate and up, which have the same input, round and transpose it once, unless they have
adapters; and transposed weights can be kept for all micro-batches.

FP8 units take sizes that are multiples of 16. A Linear whose sizes are not, on any tensor-parallel
rank, stays as it is; tokens are padded with zeros in the one product that sums over them.
Embedding, head and router stay too. On CPU, what the FP8 numbers stand for is multiplied, slower
than in bf16.

Experts, if asked for, get the same three products, and each expert's weight a scale of its own.
Where a rank has one expert, because expert parallelism gives each to another, these are the
products of a Linear. Where it has more, what the FP8 numbers stand for, which bf16 and fp32 can
hold, is multiplied in the type of x: the layout does not change the results, but there FP8 costs
time, that of rounding, and saves none.

Left out: scales per row or block, delayed scaling, FP8 attention, FP8 weights without a wider copy;
and scaled grouped products, which on Hopper refuse e5m2, and save 10 % of a step with two experts
per rank, 1 % with 16 (torchao #2864).
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.models.grouped_mm import grouped_mm
from minitrain.models.layers import has_hooks
from minitrain.models.moe import Experts
from minitrain.models.quantize import E4M3, E5M2, dequantize, quantize

ALIGNMENT = 16
# how names of decoders' Linears end that read attention or an activation
READ_NO_NORM = ("o_proj", "down_proj")


def to_fp8(
    blocks: list[nn.Module], fast_accumulation: str, tp: int = 1, experts: bool = False
) -> None:
    """Make the Linears in `blocks` multiply in FP8, in place; parameters, their names, and hooks
    stay.

    fast_accumulation: which products Hopper may sum up faster, with about 14 bits: `none`,
    `forward` or `all`.
    tp: into how many parts tensor parallelism will split a weight.
    experts: whether routed experts multiply in FP8, too.
    """
    for name, module in (named for block in blocks for named in block.named_modules()):
        if type(module) is nn.Linear and fits(module.weight, ALIGNMENT * tp):
            module.__class__ = Fp8Linear
            module.reads_norm = not name.endswith(READ_NO_NORM)
        elif type(module) is Experts and experts:
            module.__class__ = Fp8Experts
        else:
            continue
        module.fast = (fast_accumulation != "none", fast_accumulation == "all")
        module.gathered = {}
    for module in (module for block in blocks for module in block.modules()):
        linears = (
            [getattr(module, name) for name in module.same_input]
            if hasattr(module, "project")
            else []
        )
        if linears and all(
            type(linear) is Fp8Linear and not hasattr(linear, "lora") for linear in linears
        ):
            module.project = partial(project, linears)


def fits(matrix: Tensor, multiple: int) -> bool:
    return not any(size % multiple for size in matrix.shape[-2:])


def in_fp8(module: nn.Module, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """A matrix of the module and its inverse scale, as from `quantize`, and its column-major copy,
    if one is kept: as they were gathered, or rounded now.

    module.gathered: by a matrix's name, all three. They count while the parameter is a
    `placeholder`.
    """
    matrix = getattr(module, name)
    if is_placeholder(matrix):
        return module.gathered[name]
    return *quantize(matrix, E4M3, each=matrix.ndim == 3), None


class Fp8Linear(nn.Linear):
    """x: [..., in] in any floating type, which y: [..., out] gets."""

    # so tensor parallelism may gather x in FP8
    multiplies_in_fp8 = True

    def forward(self, x: Tensor) -> Tensor:
        return products([self], x)[0]


class Fp8Experts(Experts):
    """As `Experts`, but for its products."""

    def _product(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        stack, (stack8, inverses, copy8) = getattr(self, name), in_fp8(self, name)
        if len(stack) == 1 and fits(stack, ALIGNMENT):
            weight = stack.squeeze(0), stack8[0], inverses.squeeze(), copy8
            # x is sorted, by a kernel of its own
            return Fp8Products.apply(x, *self.fast, False, True, *weight)[0]
        return Fp8GroupedProduct.apply(x, stack, stack8, inverses, offsets)


def project(linears: list[Fp8Linear], x: Tensor) -> list[Tensor]:
    """In place of a module's own `project`, which calls its Linears one by one, as is done here for
    hooks of others.
    """
    return (
        [linear(x) for linear in linears] if any(map(has_hooks, linears)) else products(linears, x)
    )


def products(linears: list[Fp8Linear], x: Tensor) -> list[Tensor]:
    """The outputs [..., out] of Linears for the same x [..., in]."""
    first = linears[0]
    weights = [(linear.weight, *in_fp8(linear, "weight")) for linear in linears]
    outputs = Fp8Products.apply(
        x.flatten(0, -2), *first.fast, True, first.reads_norm, *chain(*weights)
    )
    outputs = [y.unflatten(0, x.shape[:-1]) for y in outputs]
    return [
        y if linear.bias is None else y + linear.bias
        for linear, y in zip(linears, outputs, strict=True)
    ]


def placeholder(shape: torch.Size, like: Tensor, dtype: torch.dtype) -> Tensor:
    """What stands for a parameter whose values are in FP8 elsewhere, and gets its gradient: one
    NaN, `shape` times.
    """
    return torch.full((), float("nan"), dtype=dtype, device=like.device).expand(shape)


def is_placeholder(parameter: Tensor) -> bool:
    return parameter.ndim > 1 and not any(parameter.stride())


class Fp8Products(torch.autograd.Function):
    """x w^T of x [tokens, in] and each of some weights [out, in].

    Inputs: x; fast_forward, fast_backward: whether to sum up faster; rows_known: whether a compiler
    knows how many tokens there are: not those of experts; reads_norm: see `transposed`; and four of
    each weight: itself, which only gets its gradient, and what `in_fp8` gives.
    """

    @staticmethod
    # the compiler miscounts where some have names and some have not
    def forward(ctx, *inputs):
        x, fast_forward, ctx.fast, ctx.rows_known, ctx.reads_norm, *given = inputs
        weights, weights8, inverses, copies8 = (given[n::4] for n in range(4))
        ctx.needs_x, *ctx.need_weights = ctx.needs_input_grad[0], *ctx.needs_input_grad[5::4]
        ctx.dtypes = [x.dtype, *(weight.dtype for weight in weights)]
        x8, x_inverse = quantize(x, E4M3, rows_known=ctx.rows_known)
        kept = (x8, x_inverse) if any(ctx.need_weights) else (None, None)
        later = (
            w8 if copy8 is None else copy8 for w8, copy8 in zip(weights8, copies8, strict=True)
        )
        ctx.save_for_backward(*kept, *later, *inverses)
        multiply = product_of(x, ctx.rows_known)
        matrices = zip(weights8, inverses, strict=True)
        return tuple(
            multiply(x8, w8.t(), x_inverse, inverse, x.dtype, fast_forward)
            for w8, inverse in matrices
        )

    @staticmethod
    def backward(ctx, *grads):
        x8, x_inverse, *weights = ctx.saved_tensors
        multiply = product_of(grads[0], ctx.rows_known)
        dx = None
        dws = [None] * len(grads)
        grads = [quantize(grad, E5M2, rows_known=ctx.rows_known) for grad in grads]
        if ctx.needs_x:
            weights8 = weights[: len(grads)]
            inverses = weights[len(grads) :]
            for (grad8, grad_inverse), weight8, inverse in zip(
                grads, weights8, inverses, strict=True
            ):
                weight8 = column_major(weight8, grad_inverse)
                term = multiply(grad8, weight8, grad_inverse, inverse, ctx.dtypes[0], ctx.fast)
                dx = term if dx is None else dx + term
        if any(ctx.need_weights):
            tokens = len(x8) + -len(x8) % ALIGNMENT
            x8 = not_before(grads[0][1], pad_rows(x8, tokens, ctx.rows_known))
            x8 = transposed(x8) if ctx.reads_norm else x8.t().contiguous()
            for n, (grad8, grad_inverse) in enumerate(grads):
                if ctx.need_weights[n]:
                    grad8 = pad_rows(grad8, tokens, ctx.rows_known).t().contiguous()
                    dws[n] = multiply(
                        grad8, x8.t(), grad_inverse, x_inverse, ctx.dtypes[1 + n], ctx.fast
                    )
        return dx, *[None] * 4, *chain(*((dw, None, None, None) for dw in dws))


class Fp8GroupedProduct(torch.autograd.Function):
    """x W_e^T of x [rows, in], sorted by expert, and weights in FP8, [experts, out, in]; `stack`
    only gets a gradient.

    offsets: int32 [experts], where each expert's rows end.
    """

    @staticmethod
    def forward(ctx, x, stack, stack8, inverses, offsets):
        x8, x_inverse = quantize(x, E4M3, rows_known=False)
        kept = (x8, x_inverse) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(*kept, stack8, inverses, offsets)
        ctx.dtypes = x.dtype, stack.dtype
        weights = dequantize(stack8, inverses, x.dtype)
        return grouped_mm(dequantize(x8, x_inverse, x.dtype), weights.transpose(-2, -1), offsets)

    @staticmethod
    def backward(ctx, grad):
        x8, x_inverse, stack8, inverses, offsets = ctx.saved_tensors
        dtype, stack_dtype = ctx.dtypes
        grad = dequantize(*quantize(grad.contiguous(), E5M2, rows_known=False), dtype)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = grouped_mm(grad, dequantize(stack8, inverses, dtype), offsets)
        if ctx.needs_input_grad[1]:
            dw = grouped_mm(grad.T, dequantize(x8, x_inverse, dtype), offsets).to(stack_dtype)
        return dx, dw, None, None, None


def product_of(x: Tensor, rows_known: bool = True) -> Callable:
    """`scaled_mm`, or `opaque_scaled_mm`, where torch's own operator does not serve. rows_known:
    see `Fp8Products`.
    """
    return scaled_mm if rows_known and x.is_cuda else opaque_scaled_mm


def scaled_mm(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """a b x both inverse scales. a: FP8 [m, k], row-major; b: FP8 [k, n], column-major, as Hopper
    wants them.
    """
    if a.is_cuda:
        # not public in 2.11
        return torch._scaled_mm(a, b, a_inverse, b_inverse, out_dtype=dtype, use_fast_accum=fast)
    # torch's own, left to oneDNN on CPUs with AMX, takes 1,000 times as long there
    # (uxlfoundation/oneDNN #3349)
    return (a.float() @ b.float() * (a_inverse * b_inverse)).to(dtype)


@torch.library.custom_op("minitrain::scaled_mm", mutates_args=())
def opaque_scaled_mm(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """`scaled_mm` as one operator for the compiler, for no rows, too: of torch's own it asks for
    sizes that are not known when it compiles."""
    if not a.numel():
        return a.new_zeros(a.shape[0], b.shape[1], dtype=dtype)
    return scaled_mm(a, b, a_inverse, b_inverse, dtype, fast)


@opaque_scaled_mm.register_fake
def _(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


def column_major(weight8: Tensor, grad_inverse: Tensor) -> Tensor:
    """A copy, unless it is so already."""
    return (
        weight8
        if weight8.stride(0) == 1
        else not_before(grad_inverse, weight8).t().contiguous().t()
    )


@torch.library.custom_op("minitrain::transposed", mutates_args=())
def transposed(x: Tensor) -> Tensor:
    """x [n, m] of FP8 -> [m, n], by a kernel of its own.

    For inputs that come from a norm: the backward pass computes their FP8 again, inside the norm's,
    where the compiler would store each row's bytes n apart. Other computations it does in tiles,
    and transposes these in passing.
    """
    return (compiled_transpose() if x.is_cuda else transpose)(x.view(torch.uint8)).view(x.dtype)


@transposed.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0])


def transpose(x: Tensor) -> Tensor:
    # a new tensor also where contiguous() gives x
    return x.t().clone(memory_format=torch.contiguous_format)


@cache
def compiled_transpose() -> Callable:
    # in tiles; torch's own copy reads byte by byte
    return torch.compile(transpose, dynamic=True)


def not_before(grad_inverse: Tensor, x8: Tensor) -> Tensor:
    """x8 as it is, but known only once a gradient's inverse scale is, which is never negative.

    Else the compiler transposes it in the forward pass and keeps the copies, of weights for every
    micro-batch.
    """
    return (x8.view(torch.uint8) + (grad_inverse < 0).to(torch.uint8)).view(x8.dtype)


def pad_rows(x: Tensor, rows: int, rows_known: bool = True) -> Tensor:
    """FP8 [n, m] with zeros below: [rows, m]. Zero is zero as a byte, too, which can be padded.

    rows_known: see `Fp8Products`; a compiler that does not know n cannot ask whether any row is
    missing.
    """
    missing = rows - len(x)
    return (
        x
        if rows_known and not missing
        else F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype)
    )
