"""FP8 matrix products (Micikevicius et al. 2022), with per-tensor current scaling: what wraps a Linear.

A Linear has three products, of its input x [tokens, in], its weight w [out, in] and its output's gradient g:

    output                y  = x w^T     e4m3 x e4m3
    gradient of the input dx = g w       e5m2 x e4m3     gradients need range more than digits
    gradient of the weight dw = g^T x    e5m2 x e4m3

Each factor is multiplied by one scale, so that its largest element just fits into FP8, clamped and rounded; the product
is summed up at higher precision and divided by both scales. A scale is computed from the tensor itself ("current"), in
plain operations, which the compiler can fuse with what made the tensor. It is a power of two: scaling is then exact,
rounding does not depend on the scale, and so other cuts of the same data (micro-batches, ranks), whose largest elements
differ, get the same FP8 numbers but for those 2^14 times smaller than the largest. The price is at most one of e4m3's
18 binades. An infinity or NaN anywhere in a factor makes the whole product NaN.

Of the forward pass the FP8 input is kept, half the bytes of bf16's. A Linear's weight stays a parameter as before; who
gathers it in FP8 already (parallel/fp8.py) hands it in as `gathered`.

FP8 units take sizes that are multiples of 16. A Linear whose sizes are not, on any tensor-parallel rank, stays as it
is; tokens are padded with zeros in the one product that sums over them. Embedding, head, router and experts stay too.
On CPU, torch multiplies what the FP8 numbers stand for, slower than in bf16.

Left out: scales per row or block, delayed scaling, FP8 attention, scaled grouped products for experts, FP8 weights
without a wider copy.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16
EXPONENT = 0x7F800000  # these bits of an fp32
SMALLEST = 2.0**-100  # a largest element below this is taken for this, so that no scale overflows


def to_fp8(blocks: list[nn.Module], fast_accumulation: str, tp: int = 1) -> None:
    """Make the Linears in `blocks` multiply in FP8, in place; parameters, their names, and hooks stay.

    fast_accumulation: which products Hopper may sum up faster, with about 14 bits: `none`, `forward` or `all`.
    tp: into how many parts tensor parallelism will split a weight.
    """
    for block in blocks:
        for module in block.modules():
            if type(module) is nn.Linear and not any(size % (ALIGNMENT * tp) for size in module.weight.shape):
                module.__class__ = Fp8Linear
                module.fast = (fast_accumulation != "none", fast_accumulation == "all")


class Fp8Linear(nn.Linear):
    """What `to_fp8` makes of a Linear. x: [..., in] in any floating type, which y: [..., out] gets.

    fast: whether to sum up faster in the forward pass, and in the backward pass.
    gathered: the weight in FP8 and its inverse scale, as from `quantize`. Counts while `weight` is a `placeholder`.
    """

    fast: tuple[bool, bool] = (False, False)
    gathered: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.gathered if is_placeholder(self.weight) else quantize(self.weight.detach(), E4M3)
        y = Fp8Product.apply(x.flatten(0, -2), self.weight, *weight, *self.fast).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def placeholder(shape: torch.Size, like: Tensor, dtype: torch.dtype) -> Tensor:
    """What stands for a parameter whose values are in FP8 elsewhere, and gets its gradient: one NaN, `shape` times."""
    return torch.full((), float("nan"), dtype=dtype, device=like.device).expand(shape)


def is_placeholder(parameter: Tensor) -> bool:
    return parameter.stride() == (0, 0)


class Fp8Product(torch.autograd.Function):
    """x w^T of x [tokens, in] and a weight that is given in FP8, [out, in]; `weight` itself only gets its gradient.

    fast_forward, fast_backward: whether to sum up faster.
    """

    @staticmethod
    def forward(ctx, x, weight, weight8, weight_inverse, fast_forward, fast_backward):
        x8, x_inverse = quantize(x, E4M3)
        ctx.save_for_backward(*((x8, x_inverse) if ctx.needs_input_grad[1] else (None, None)), weight8, weight_inverse)
        ctx.dtypes, ctx.fast = (x.dtype, weight.dtype), fast_backward
        return scaled_mm(x8, weight8.t(), x_inverse, weight_inverse, x.dtype, fast_forward)

    @staticmethod
    def backward(ctx, grad):
        x8, x_inverse, weight8, weight_inverse = ctx.saved_tensors
        grad8, grad_inverse = quantize(grad, E5M2)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            weight8 = column_major(not_before(grad_inverse, weight8))
            dx = scaled_mm(grad8, weight8, grad_inverse, weight_inverse, ctx.dtypes[0], ctx.fast)
        if ctx.needs_input_grad[1]:
            tokens = len(x8) + -len(x8) % ALIGNMENT
            x8, grad8 = pad_rows(x8, tokens), pad_rows(grad8, tokens)
            dw = scaled_mm(grad8.t().contiguous(), column_major(x8), grad_inverse, x_inverse, ctx.dtypes[1], ctx.fast)
        return dx, dw, None, None, None, None


def scaled_mm(a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """a b x both inverse scales. a: FP8 [m, k], row-major; b: FP8 [k, n], column-major, as Hopper wants them."""
    return torch._scaled_mm(a, b, a_inverse, b_inverse, out_dtype=dtype, use_fast_accum=fast)  # no public name in 2.11


def column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def not_before(grad_inverse: Tensor, x8: Tensor) -> Tensor:
    """x8 as it is, but known only once a gradient's inverse scale is, which is never negative.

    Else the compiler transposes weights in the forward pass and keeps the copies, for every micro-batch.
    """
    return (x8.view(torch.uint8) + (grad_inverse < 0).to(torch.uint8)).view(x8.dtype)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """FP8 [n, m] with zeros below: [rows, m]. Zero is zero as a byte, too, which can be padded."""
    missing = rows - len(x)
    return F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype) if missing else x


# -------------------------------------------------------------------------------------------------------- quantisation


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in FP8, and its inverse scale, an fp32 scalar: x is about x8.float() * inverse."""
    scale = power_of_two_scale(largest(x), dtype)
    return cast(x, scale, dtype), 1 / scale


def largest(x: Tensor) -> Tensor:
    """max |x| as an fp32 scalar; infinite where x has a NaN, which a maximum over ranks could lose; 0 of nothing."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    return x.detach().abs().amax().float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def power_of_two_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two that takes `amax` (fp32, any shape) to at most the largest number of `dtype`.

    Zero for an infinite amax: then everything divided by it is NaN.
    """
    ratio = torch.finfo(dtype).max / amax.clamp(min=SMALLEST)
    return (ratio.view(torch.int32) & EXPONENT).view(torch.float32)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in FP8. Clamped first: of what is larger, some versions of torch make NaN or infinity."""
    bound = torch.finfo(dtype).max
    return (x.detach().float() * scale).clamp(-bound, bound).to(dtype)
