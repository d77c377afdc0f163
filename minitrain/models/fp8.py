"""FP8 Linears and experts: products in FP8 with current scales (Micikevicius et al. 2022).

A Linear has three products, of its input x [tokens, in], its weight w [out, in] and its output's
gradient g [tokens, out]:

    output                  y  = x w^T  e4m3 x e4m3
    gradient of the input   dx = g w    e5m2 x e4m3   gradients need range more than precision
    gradient of the weight  dw = g^T x  e5m2 x e4m3

This is the form `tensor`, with one scale for a tensor. Others have one for a row or a block, and
gradients in e4m3 as well: see the table of fp8_forms.py. What follows is about `tensor`, unless it
says otherwise.

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

Other forms. A factor that is summed along another dimension has other scales. So the forward pass
rounds the input twice, and saves it for the weight's gradient as x^T, in as many bytes. A weight
whose blocks are not square is rounded anew in the backward pass.

Experts. With one expert per rank (parallel/expert.py) its products are those of a Linear, and can
be in FP8. With several they are grouped products, which have no kernel for e5m2: in the form
`tensor` they stay as they are. In the others they are in FP8, with any number of experts. Where
products sum over an expert's rows, these are padded to whole blocks, in that copy alone.
Grouped FP8 saves 10 % of a step with two experts per rank, 1 % with 16 (torchao #2864).

Left out: delayed scaling, FP8 attention, FP8 weights without a wider copy.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minitrain.errors import InputError
from minitrain.models.fp8_forms import (
    FORMS,
    Form,
    multiply_in_form,
    quantize_groups,
    quantize_transposed,
    scaled_grouped_mm,
    wait_for_gradient,
)
from minitrain.models.moe import Experts
from minitrain.models.quantize import E4M3, WHOLE, is_placeholder, pad_rows, quantize, transposed
from minitrain.models.variants import base_class, in_tuples, set_variant

# suffixes of the Linears whose input is not a norm's output
READ_NO_NORM = ("o_proj", "down_proj")


def to_fp8(
    blocks: list[nn.Module],
    fast_accumulation: str,
    tp: int = 1,
    experts: bool = False,
    form: str = "tensor",
    experts_tp: int = 1,
) -> None:
    """Make the Linears in `blocks` multiply in FP8, in place; parameters, names and hooks stay.

    fast_accumulation: the products in which Hopper accumulates faster, with about 14 bits: `none`,
        `forward` or `all`.
    tp, experts_tp: the numbers of tensor-parallel ranks that will split a weight, or an expert's.
    experts: let routed experts multiply in FP8, too; in the form `tensor` each rank must have one.
    form: of FORMS.
    Raises InputError for a weight of whole blocks that tensor parallelism would cut.
    """
    # in the forward, in the backward pass
    fast = (fast_accumulation != "none", fast_accumulation == "all")
    for block in blocks:
        for name, module in block.named_modules():
            kind = base_class(module)
            if kind is nn.Linear and takes_form(name, module.weight, form, tp):
                set_variant(module, Fp8Linear)
                module.reads_norm = not name.endswith(READ_NO_NORM)
                names = ["weight"]
            elif (
                kind is Experts
                and experts
                and takes_form(name, module.down_proj, form, experts_tp)
            ):
                set_variant(module, Fp8Experts)
                names = [module.first, "down_proj"]
            else:
                continue
            module.form = form
            module.fast = fast
            module.gathered = dict.fromkeys(names)


def takes_form(name: str, matrix: Tensor, form: str, tp: int) -> bool:
    """Return whether a matrix or stack [..., out, in] has whole blocks on all tp ranks.

    Raise InputError if it has, but its shards have not: for `tensor` those stay unchanged.
    """
    multiple = FORMS[form].multiple
    if sizes_divisible(matrix, multiple * tp):
        return True
    if form != "tensor" and sizes_divisible(matrix, multiple):
        out, into = matrix.shape[-2:]
        raise InputError(
            f"fp8.form={form}: parallel.tp={tp} cuts {name or 'a weight'} of {out} x {into} into "
            f"parts that are no multiples of {multiple} (use a smaller tp, or fp8.form=tensor)"
        )
    return False


def sizes_divisible(matrix: Tensor, multiple: int) -> bool:
    """Return whether `multiple` divides out and in of a matrix or stack [..., out, in]."""
    return not any(size % multiple for size in matrix.shape[-2:])


def in_fp8(module: nn.Module, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a module's matrix in FP8, [out, in], its inverse scales, and a column-major copy.

    If the parameter is a `weight_placeholder`, FSDP has gathered them; if it is FP8 it stays;
    else it is rounded now. The copy is None unless FSDP keeps one.
    """
    matrix = getattr(module, name)
    if is_placeholder(matrix):
        return module.gathered[name]
    if matrix.dtype == torch.uint8:
        # frozen, as bytes (frozen.py); the rows of a block have the same scales
        return matrix.view(E4M3), module.weight_scale_inv[:: FORMS["block"].multiple], None
    # an expert's is a stack of one, [1, out, in]
    return *quantize(matrix.squeeze(0), E4M3, FORMS[module.form].weight_block), None


class Fp8Linear(nn.Linear):
    """A Linear that multiplies in FP8. x: [..., in], of any floating type; y: [..., out], as x.

    form: of FORMS.
    fast: accumulate faster in the forward, in the backward pass.
    reads_norm: x is the output of a norm, see `transposed`.
    gathered: by the parameter's name, the result of `in_fp8` as FSDP gathered it, or None.
    """

    form: str
    fast: tuple[bool, bool]
    reads_norm: bool
    gathered: dict[str, tuple[Tensor, Tensor, Tensor | None] | None]

    @property
    def multiplies_in_fp8(self) -> bool:
        """Return whether tensor parallelism may gather x in FP8: all products read the same numbers."""
        return self.form == "tensor"

    def forward(self, x: Tensor) -> Tensor:
        # [..., in] -> [..., out]
        return fp8_linears([self], x)[0]

    @staticmethod
    def together(linears: "list[Fp8Linear]", x: Tensor) -> list[Tensor] | None:
        """Return the outputs [..., out] for x [..., in], rounded and transposed once for all.

        None if they are not all in FP8, or some have adapters: see `project` in layers.py.
        """
        if all(type(linear) is Fp8Linear for linear in linears):
            return fp8_linears(linears, x)
        return None


class Fp8Experts(Experts):
    """Experts whose products are in FP8; in the form `tensor` only one. See `Fp8Linear`."""

    def _product(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        # x: [rows, in], sorted by expert
        weight = getattr(self, name)
        if self.form != "tensor":
            return GroupedProducts.apply(x, weight, offsets, self.form, *self.fast)
        outputs = Fp8Products.apply(
            x,
            self.form,
            *self.fast,
            # rows_known
            False,
            # reads_norm: the kernel that made x copied rows, and cannot transpose them on the way
            True,
            weight.squeeze(0),
            *in_fp8(self, name),
        )
        return outputs[0]


def fp8_linears(linears: list[Fp8Linear], x: Tensor) -> list[Tensor]:
    """Return the outputs [..., out] of Linears for the same x [..., in]."""
    first = linears[0]
    weights = [(linear.weight, *in_fp8(linear, "weight")) for linear in linears]
    outputs = Fp8Products.apply(
        x.flatten(0, -2), first.form, *first.fast, True, first.reads_norm, *chain(*weights)
    )
    outputs = [y.unflatten(0, x.shape[:-1]) for y in outputs]
    for i, linear in enumerate(linears):
        if linear.bias is not None:
            outputs[i] = outputs[i] + linear.bias
    return outputs


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
    form: of FORMS.
    fast_forward, fast_backward: accumulate faster.
    rows_known: the compiler knows the number of tokens; it does not if a router decides it.
    reads_norm: x is the output of a norm, see `transposed`.
    Then the four of an `Fp8Weight` for each weight.
    """

    @staticmethod
    # *inputs alone: the compiler miscounts where some have names
    def forward(ctx, *inputs):
        x, ctx.form, fast_forward, ctx.fast, ctx.rows_known, ctx.reads_norm, *given = inputs
        weights = in_tuples(Fp8Weight, given)
        form = FORMS[ctx.form]
        ctx.needs_x, *_ = ctx.needs_input_grad
        ctx.need_weights = [
            needed.parameter
            for needed in in_tuples(Fp8Weight, ctx.needs_input_grad[-len(given) :])
        ]
        ctx.dtypes = [x.dtype, *(weight.parameter.dtype for weight in weights)]
        x8, x_inverse = quantize(x, E4M3, form.block, ctx.rows_known)
        kept = (None, None)
        if any(ctx.need_weights):
            kept = (x8, x_inverse) if one_scale(form) else quantize_transposed(x, E4M3, form)
        # the backward pass takes column-major weights: save the copies where there are any
        later = [w.weight8 if w.copy8 is None else w.copy8 for w in weights]
        if not form.square_blocks:
            later = [w.parameter for w in weights]
        ctx.save_for_backward(*kept, *later, *(w.inverse for w in weights))
        multiply = choose_scaled_mm(x, ctx.rows_known, ctx.form)
        # [tokens, out] each
        outputs = [
            multiply(x8, w.weight8.t(), x_inverse, w.inverse, x.dtype, fast_forward)
            for w in weights
        ]
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        form = FORMS[ctx.form]
        x8, x_inverse, *weights = ctx.saved_tensors
        multiply = choose_scaled_mm(grads[0], ctx.rows_known, ctx.form)
        dx = None
        dws = [Fp8Weight()] * len(grads)
        # pairs of a gradient in FP8, [tokens, out], and its inverse scales
        grads8 = [quantize(grad, form.gradient, form.block, ctx.rows_known) for grad in grads]
        if ctx.needs_x:
            later = weights[: len(grads)]
            inverses = weights[len(grads) :]
            for (grad8, grad_inverse), weight, inverse in zip(
                grads8, later, inverses, strict=True
            ):
                # [out, in], and inverse scales of its transpose
                weight8, inverse = transposed_weight(weight, inverse, form, grad_inverse)
                # [tokens, in]
                term = multiply(grad8, weight8, grad_inverse, inverse, ctx.dtypes[0], ctx.fast)
                dx = term if dx is None else dx + term
        if any(ctx.need_weights):
            if one_scale(form):
                # [in, tokens]
                x8 = transposed_input(ctx, x8, grads8[0][1])
            for n, grad in enumerate(grads):
                if ctx.need_weights[n]:
                    # [out, tokens]
                    grad8, grad_inverse = transposed_gradient(ctx, grad, *grads8[n])
                    dw = multiply(
                        grad8, x8.t(), grad_inverse, x_inverse, ctx.dtypes[1 + n], ctx.fast
                    )
                    dws[n] = Fp8Weight(parameter=dw)
        return dx, None, None, None, None, None, *chain(*dws)


def one_scale(form: Form) -> bool:
    """Return whether a tensor has one scale, whatever is summed."""
    return form.block == WHOLE


def transposed_input(ctx, x8: Tensor, grad_inverse: Tensor) -> Tensor:
    """Return x8 [tokens, in] of one scale as [in, tokens], padded with zeros to whole blocks.

    ctx: of `Fp8Products`. grad_inverse: see `wait_for_gradient`.
    """
    padded = pad_rows(x8, padded_tokens(ctx, x8), ctx.rows_known)
    x8 = wait_for_gradient(grad_inverse, padded)
    return transposed(x8) if ctx.reads_norm else x8.t().contiguous()


def transposed_gradient(
    ctx, grad: Tensor, grad8: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a gradient in FP8 as [out, tokens], padded with zeros, and its inverse scales.

    ctx: of `Fp8Products`. grad, grad8: [tokens, out]; inverse: of grad8.
    """
    form = FORMS[ctx.form]
    if not one_scale(form):
        return quantize_transposed(grad, form.gradient, form)
    padded = pad_rows(grad8, padded_tokens(ctx, grad8), ctx.rows_known)
    return padded.t().contiguous(), inverse


def padded_tokens(ctx, x8: Tensor) -> int:
    """Return the number of tokens, rounded up: FP8 units sum over multiples of 16."""
    return len(x8) + -len(x8) % FORMS[ctx.form].multiple


def transposed_weight(
    weight: Tensor, inverse: Tensor, form: Form, grad_inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a weight in FP8 [out, in], column-major, and inverse scales of its transpose.

    weight: FP8 if the form's blocks are square, else the parameter. inverse: of the FP8 weight.
    grad_inverse: see `wait_for_gradient`.
    """
    if form.square_blocks:
        return column_major(weight, grad_inverse), inverse.t()
    weight8, inverse = quantize(
        wait_for_gradient(grad_inverse, weight.detach()).t(), E4M3, form.weight_block
    )
    return weight8.contiguous().t(), inverse


class GroupedProducts(torch.autograd.Function):
    """x W_e^T for each row of x and its expert e: [rows, in] -> [rows, out].

    Inputs: x; the stack W [experts, out, in]; offsets, int32 [experts], the end of each expert's
    rows; form, of FORMS but `tensor`; and whether to accumulate faster, forward and backward.
    """

    @staticmethod
    def forward(ctx, x, stack, offsets, form, fast_forward, fast_backward):
        ctx.form = form
        ctx.fast = fast_backward
        ctx.dtypes = x.dtype, stack.dtype
        row = FORMS[form]
        factors = quantize(x, E4M3, row.block), quantize(stack, E4M3, row.weight_block)
        kept = [None, None, None]
        if ctx.needs_input_grad[1]:
            kept = quantize_groups(x, offsets, form, E4M3)
        ctx.save_for_backward(stack, offsets, *kept)
        return grouped(*factors, offsets, form, x.dtype, fast_forward)

    @staticmethod
    def backward(ctx, grad):
        # x8: [in, places]
        stack, offsets, x8, x_inverse, ends = ctx.saved_tensors
        row = FORMS[ctx.form]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            grad8 = quantize(grad, row.gradient, row.block)
            waiting = wait_for_gradient(grad8[1], stack.detach())
            weight8, inverse = quantize(waiting.transpose(-2, -1), E4M3, row.weight_block)
            weights = weight8.contiguous(), inverse
            dx = grouped(grad8, weights, offsets, ctx.form, ctx.dtypes[0], ctx.fast)
        if ctx.needs_input_grad[1]:
            # [out, places]
            grad8, grad_inverse, _ = quantize_groups(grad, offsets, ctx.form, row.gradient)
            factors = (grad8, grad_inverse), (x8, x_inverse)
            dw = grouped(*factors, ends, ctx.form, ctx.dtypes[1], ctx.fast)
        return dx, dw, None, None, None, None


def grouped(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], *rest) -> Tensor:
    """Call `scaled_grouped_mm` with pairs of a factor and its inverse scales."""
    return scaled_grouped_mm(a[0], b[0], a[1], b[1], *rest)


def choose_scaled_mm(x: Tensor, rows_known: bool = True, form: str = "tensor") -> Callable:
    """Return `scaled_mm` of a form, or `opaque_scaled_mm` where the compiler cannot trace that.

    x: any factor [rows, ...], for its device. rows_known: see `Fp8Products`.
    """
    if form != "tensor":
        return partial(opaque_scaled_mm, form=form)
    return scaled_mm if rows_known and x.is_cuda else opaque_scaled_mm


def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_inverse: Tensor,
    b_inverse: Tensor,
    dtype: torch.dtype,
    fast: bool,
    form: str = "tensor",
) -> Tensor:
    """Return a b a_inverse b_inverse, [m, n] of `dtype`.

    a: FP8 [m, k], row-major; b: FP8 [k, n], column-major: the layouts that Hopper takes.
    a_inverse, b_inverse: fp32 [], the inverse scales; in other forms see `multiply_in_form`.
    fast: accumulate faster, with about 14 bits.
    """
    if form != "tensor":
        return multiply_in_form(a, b, a_inverse, b_inverse, form, dtype, fast)
    if a.is_cuda:
        # F.scaled_mm calls another operator, which nobody has measured here
        return torch._scaled_mm(a, b, a_inverse, b_inverse, out_dtype=dtype, use_fast_accum=fast)
    # not torch's own, which takes 1,000 times as long on CPUs with AMX (see cpu.py)
    return (a.float() @ b.float() * (a_inverse * b_inverse)).to(dtype)


@torch.library.custom_op("minitrain::scaled_mm", mutates_args=())
def opaque_scaled_mm(
    a: Tensor,
    b: Tensor,
    a_inverse: Tensor,
    b_inverse: Tensor,
    dtype: torch.dtype,
    fast: bool,
    form: str = "tensor",
) -> Tensor:
    """Compute `scaled_mm` as one operator of the compiler's graph; a: [m, k], where m may be 0.

    The compiler takes torch's own operator only with known sizes.
    """
    if not a.numel():
        return a.new_zeros(a.shape[0], b.shape[1], dtype=dtype)
    return scaled_mm(a, b, a_inverse, b_inverse, dtype, fast, form)


@opaque_scaled_mm.register_fake
def _(
    a: Tensor,
    b: Tensor,
    a_inverse: Tensor,
    b_inverse: Tensor,
    dtype: torch.dtype,
    fast: bool,
    form: str = "tensor",
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
