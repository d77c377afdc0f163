"""Store frozen matrices in FP8 or in 4 bits, beside adapters (QLoRA, Dettmers et al. 2023).

    store  a number                     scales                                        bits a weight
    fp8    e4m3                         fp32 for each row and 128 columns             8.25
    nf4    4 bits: an index of NF4,     8 bits for each row and 64 columns,           4.125 + 64 / in
           two in a byte                and 2 x fp32 for each row

A matrix W [out, in] or a stack [experts, out, in] becomes several parameters. The first has W's name
and is bytes; the others have suffixes. Their rows are W's rows, so FSDP and tensor parallelism shard
them as they would W. Only columns that share a scale must stay together (parallel/parts.py).

W is computed from them for each product, in the type of its other factor, and again in the backward
pass. A compiled block does so in one kernel, which writes what the product reads. Gradients of the
input are exact for the stored W, which itself has none.

NF4 has the quantiles of a normal distribution: weights are about normal, so each number is used
about equally often. A row's scales are between its least and its largest, in 255 equal steps
("double quantization"; bitsandbytes has 8-bit floats for 256 scales at a time, less their mean).
Indices are those of bitsandbytes.

FP8 has one scale for 128 x 128, a power of two unless files say otherwise. Those of DeepSeek-V3 are
read as they are, and fp8.form=block multiplies these very numbers.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.models.fp8_forms import wait_for_gradient
from minitrain.models.grouped_mm import grouped_mm
from minitrain.models.moe import Experts
from minitrain.models.quantize import E4M3, quantize
from minitrain.models.variants import base_class, set_variant

# From the table of QLoRA's appendix E. In closed form: with Q the quantiles of a normal
# distribution, -Q(p) of 7 and Q(p) of 8 equal steps from p = 0.9677083 to 1/2, and 0, all divided
# by the largest.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# smaller scales count as this one
SMALLEST = 2.0**-100


class Store(NamedTuple):
    """A way to store a matrix, see the table above."""

    # of the parameters' names
    suffixes: tuple[str, ...]
    # that share a scale
    columns: int
    # W [..., out, in] -> its parts
    quantize: Callable[[Tensor], tuple[Tensor, ...]]
    # dtype, in, parts -> W [..., out, in]
    dequantize: Callable[..., Tensor]


# --- the two stores


def to_fp8_bytes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return bytes [..., out, in], and inverse scales [..., out, in / 128], rounded up.

    The rows of stacks have scales of their own, since those of two matrices take turns in them.
    """
    *_, out, into = weight.shape
    rows = 128 if weight.ndim == 2 else 1
    padded = F.pad(weight.float(), (0, -into % 128, 0, -out % rows))
    numbers, inverse = quantize(padded, E4M3, (rows, 128))
    inverse = inverse.repeat_interleave(rows, -2)[..., :out, :]
    return numbers[..., :out, :into].contiguous().view(torch.uint8), inverse.contiguous()


def from_fp8_bytes(dtype: torch.dtype, into: int, numbers: Tensor, inverse: Tensor) -> Tensor:
    """Return what `to_fp8_bytes` has stored."""
    scales = inverse.repeat_interleave(128, -1)[..., :into]
    return (numbers.view(E4M3).float() * scales).to(dtype)


def to_nf4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return bytes [..., out, in / 2], scales [..., out, in / 64], and least and step of a row's.

    The last are fp32 [..., out, 2]. Numbers of columns are rounded up.
    """
    into = weight.shape[-1]
    # [..., out, blocks, 64]
    parts = F.pad(weight.float(), (0, -into % 64)).unflatten(-1, (-1, 64))
    amax = parts.abs().amax(-1)
    # the nearest number
    between = torch.tensor([(a + b) / 2 for a, b in pairwise(NF4)], device=weight.device)
    ratios = parts / amax.clamp(min=SMALLEST)[..., None]
    numbers = torch.bucketize(ratios, between.float(), out_int32=True).flatten(-2)
    high, low = numbers.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    least = amax.amin(-1, keepdim=True)
    step = (amax.amax(-1, keepdim=True) - least) / 255
    scales = ((amax - least) / step.clamp(min=SMALLEST)).round().to(torch.uint8)
    halves = (high << 4 | low)[..., : -(-into // 2)]
    return halves.contiguous(), scales, torch.cat([least, step], dim=-1)


def from_nf4(
    dtype: torch.dtype, into: int, halves: Tensor, scales: Tensor, ends: Tensor
) -> Tensor:
    """Return what `to_nf4` has stored. scales: uint8; ends: fp32 [..., out, 2]."""
    numbers = torch.stack([halves >> 4, halves & 15], dim=-1).flatten(-2)
    # a choice by each bit: the compiler has no table, and needs none
    values = NF4
    for bit in range(4):
        is_set = (numbers >> bit & 1).bool()
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [torch.where(is_set, second, first) for first, second in pairs]
    least, step = ends.split(1, dim=-1)
    scales = (least + step * scales).repeat_interleave(64, -1)[..., :into]
    return (values[0].float()[..., :into] * scales).to(dtype)


STORES = {
    "fp8": Store(("", "_scale_inv"), 128, to_fp8_bytes, from_fp8_bytes),
    "nf4": Store(("", "_scale", "_ends"), 64, to_nf4, from_nf4),
}


# --- in a model


def freeze(blocks: list[nn.Module], store: str) -> None:
    """Store the matrices of Linears and routed experts in `blocks` so, in place.

    store: of STORES. FP8 Linears (fp8.py) multiply the numbers that `fp8` stores.
    """
    for block in blocks:
        for module in block.modules():
            kind = base_class(module)
            if kind is nn.Linear:
                set_variant(module, FrozenLinear)
            elif kind is Experts:
                set_variant(module, FrozenExperts)
            elif not hasattr(module, "gathered"):
                continue
            names = [module.first, "down_proj"] if isinstance(module, Experts) else ["weight"]
            # FSDP gathers these bytes, and none that fsdp_fp8.py rounds
            module.gathered = {}
            module.store = store
            module.widths = {name: getattr(module, name).shape[-1] for name in names}
            module.columns = STORES[store].columns
            for name in names:
                set_parts(module, name)


def set_parts(module: nn.Module, name: str) -> None:
    """Replace a module's matrix by what stores it."""
    store = STORES[module.store]
    parts = store.quantize(getattr(module, name).detach())
    for suffix, part in zip(store.suffixes, parts, strict=True):
        module.register_parameter(name + suffix, nn.Parameter(part, requires_grad=False))


def parts_of(module: nn.Module, name: str) -> list[Tensor]:
    """Return what stores a module's matrix: `quantize` of its store says what."""
    return [getattr(module, name + suffix) for suffix in STORES[module.store].suffixes]


def widen(module: nn.Module, name: str, dtype: torch.dtype) -> Tensor:
    """Return a module's matrix or stack, [..., out, in]."""
    return STORES[module.store].dequantize(dtype, module.widths[name], *parts_of(module, name))


class Frozen(NamedTuple):
    """A matrix that `freeze` has stored: how, its full shape, and the names of its parts."""

    store: str
    shape: tuple[int, ...]
    names: list[str]

    def parts(self, weight: Tensor) -> dict[str, Tensor]:
        """Return what stores a weight [..., out, in], by name."""
        return dict(zip(self.names, STORES[self.store].quantize(weight), strict=True))


def frozen_weights(model: nn.Module) -> dict[str, Frozen]:
    """Return the matrices that `freeze` has stored, by the names of a model's, or pipeline's, own."""
    own = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for module in model.modules():
        parameters = dict(module.named_parameters(recurse=False))
        for name, width in getattr(module, "widths", {}).items():
            first = own[parameters[name]]
            names = [first + suffix for suffix in STORES[module.store].suffixes]
            found[first] = Frozen(module.store, (*parameters[name].shape[:-1], width), names)
    return found


def further_parts(frozen: dict[str, Frozen]) -> set[str]:
    """Return the names of all parts but the first of each."""
    return {name for each in frozen.values() for name in each.names[1:]}


def thaw(model: nn.Module, dtype: torch.dtype) -> None:
    """Store all matrices as usual, in `dtype`, in place. The model is not sharded."""
    for module in model.modules():
        for name in getattr(module, "widths", {}):
            wide = nn.Parameter(widen(module, name, dtype), requires_grad=False)
            for suffix in STORES[module.store].suffixes:
                delattr(module, name + suffix)
            module.register_parameter(name, wide)
        for name in ("widths", "store", "columns"):
            module.__dict__.pop(name, None)
        kind = base_class(module)
        if kind in (FrozenLinear, FrozenExperts):
            set_variant(module, kind.__base__)


class FrozenLinear(nn.Linear):
    """A Linear that stores its weight as `store`. x: [..., in]; y: [..., out]."""

    store: str
    # the numbers of columns of its matrices by name, and how many share a scale
    widths: dict[str, int]
    columns: int

    def forward(self, x: Tensor) -> Tensor:
        # [..., in] -> [..., out]
        rows = x.flatten(0, -2)
        y = FrozenProduct.apply(rows, None, self.store, *parts_of(self, "weight"))
        y = y.unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


class FrozenExperts(Experts):
    """Experts that store their stacks as `store`."""

    store: str
    widths: dict[str, int]
    columns: int

    def _product(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        # [rows, in] -> [rows, out]
        return FrozenProduct.apply(x, offsets, self.store, *parts_of(self, name))


class FrozenProduct(torch.autograd.Function):
    """x W^T, [rows, out], or for each row that of its expert. It saves W as it is stored.

    Inputs: x [rows, in]; offsets, int32 [experts], the end of each expert's rows, or None; the
    store; and W's parts.
    """

    @staticmethod
    # *inputs alone: the compiler miscounts where some have names
    def forward(ctx, *inputs):
        x, offsets, ctx.store, *parts = inputs
        ctx.width = x.shape[-1]
        ctx.save_for_backward(offsets, *parts)
        weight = STORES[ctx.store].dequantize(x.dtype, ctx.width, *parts)
        return multiply(x, weight.transpose(-2, -1), offsets)

    @staticmethod
    def backward(ctx, grad):
        offsets, first, *parts = ctx.saved_tensors
        # else the compiler could keep the wide matrix of the forward pass
        first = wait_for_gradient(grad[:1, :1].abs(), first)
        weight = STORES[ctx.store].dequantize(grad.dtype, ctx.width, first, *parts)
        unneeded = [None] * (3 + len(parts))
        return multiply(grad.contiguous(), weight, offsets), *unneeded


def multiply(x: Tensor, matrix: Tensor, offsets: Tensor | None) -> Tensor:
    """Return x times a matrix [in, out], or with offsets each row times that of its expert."""
    return x @ matrix if offsets is None else grouped_mm(x, matrix, offsets)
