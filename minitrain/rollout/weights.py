"""The trainer's weights as the sampler uses them: without what training puts around them.

While `in_use`, blocks run eagerly, or `compiled` in the sampler's own way: the trainer's compiled
blocks would recompile for the sampler's shapes. Linears with the same input are one product:

    CPU, fp32   Their matrices are packed once per set of weights into oneDNN's own layout. With the
                few rows of a decoding step this makes products 1.3 to 2.5 times as fast. It costs a
                second copy of the weights, which `refresh` drops. Small matrices stay as they are:
                calling oneDNN costs more than their product
    CUDA        Their matrices are moved side by side, once and for good, and read as one: fewer and
                larger products, and no copies
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from minitrain.models.cpu import CpuLinear, pack
from minitrain.models.layers import base_class

# elements below which matrices are not packed: 1 MiB
MIN_PACKED_ELEMENTS = 1 << 18
# matrices side by side, in oneDNN's layout if packed; their biases; the rows of each matrix
Joined = tuple[Tensor, Tensor | None, list[int]]
# stands for an attribute that a module does not have
ABSENT = object()


class SamplerWeights:
    """The weights of `model`, a decoder."""

    def __init__(self, model: nn.Module):
        self.model = model
        device = model.head_weight.device
        # FSDP gathers a layer's weights and frees them
        whole = not isinstance(model, FSDPModule)
        self.packs = whole and device.type == "cpu" and torch.backends.mkldnn.is_available()
        self.joins = whole and can_join(device)
        # by owner, see `pack`; None: better one by one
        self.packed: dict[object, Joined | None] = {}
        self.groups: dict[nn.Module, list[LinearGroup]] = {}
        # (module, attribute, value) before `in_use`
        self.replaced: list[tuple[nn.Module, str, object]] = []
        self.entered = False

    def refresh(self) -> None:
        """Drop packed copies, after the weights have changed."""
        self.packed.clear()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Prepare the model for sampling. Re-entrant: nested use is free."""
        if self.entered:
            yield
            return
        self.entered = True
        try:
            # what is created in inference mode cannot be trained, and `join` moves parameters
            with torch.inference_mode(False):
                self._enter()
            yield
        finally:
            for module, name, value in reversed(self.replaced):
                if value is ABSENT:
                    del module.__dict__[name]
                else:
                    module.__dict__[name] = value
            self.replaced = []
            # they hold packed copies
            self.groups = {}
            self.entered = False

    def _enter(self) -> None:
        for block in self.model.blocks:
            # the trainer's compiled call has no public switch for one module (torch 2.13)
            self._replace(block, "_compiled_call_impl", None)
            grouped = linears_by_input(block) if self.packs or self.joins else []
            if self.joins:
                self.packed |= {linears: join(linears) for linears in grouped}
                grouped = [linears for linears in grouped if self.packed[linears] is not None]
            self.groups[block] = [LinearGroup(self, linears) for linears in grouped]
            for group in self.groups[block]:
                for number, linear in enumerate(group.linears):
                    self._replace(linear, "group", group)
                    self._replace(linear, "number", number)
                    # adapters have a `forward` of their own around `product`
                    name = "product" if hasattr(linear, "lora_A") else "forward"
                    # a method: the compiler would make a graph for each closure
                    self._replace(linear, name, MethodType(forward_in_group, linear))

    def _replace(self, module: nn.Module, name: str, value: object) -> None:
        self.replaced.append((module, name, module.__dict__.get(name, ABSENT)))
        module.__dict__[name] = value

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Run blocks as compiled by rollout/compiled.py. Only while `in_use`."""
        from minitrain.rollout.compiled import run_block  # takes seconds to import

        try:
            for block in self.model.blocks:
                block.forward = partial(run_block, block, self.groups[block])
            yield
        finally:
            for block in self.model.blocks:
                del block.forward

    def pack(self, owner: object, parameters: Callable) -> Joined | None:
        """Return `owner`'s matrices side by side, packed at first use; None if they are not.

        parameters: returns (weight [out, in], bias [out]) of each, all with biases or none.
        """
        if self.packs and owner not in self.packed:
            weights, biases = zip(*parameters(), strict=True)
            small = sum(weight.numel() for weight in weights) < MIN_PACKED_ELEMENTS
            if small or any(w.device.type != "cpu" or w.dtype != torch.float32 for w in weights):
                self.packed[owner] = None
            else:
                bias = None if biases[0] is None else torch.cat(biases)
                self.packed[owner] = (
                    pack(torch.cat(weights)),
                    bias,
                    [len(weight) for weight in weights],
                )
        return self.packed.get(owner)


def multiply(joined: Joined, x: Tensor, packed: bool = True) -> Sequence[Tensor]:
    """Return F.linear of x [..., in] with each of the matrices side by side, each [..., out]."""
    weight, bias, rows = joined
    linear = torch.ops.minitrain.cpu_linear if packed else F.linear
    return linear(x, weight, bias).split(rows, dim=-1)


class LinearGroup:
    """Linears with the same input, called in this order: the first call computes all products."""

    def __init__(self, weights: SamplerWeights, linears: tuple[nn.Linear, ...]):
        self.weights = weights
        self.linears = linears
        # without adapters
        self.forwards = [partial(base_class(linear).forward, linear) for linear in linears]
        self.x = None
        self.outs = None
        self.joined = None

    def parameters(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the current (weight [out, in], bias [out]) of each: tensor parallelism replaces them."""
        return [(linear.weight, linear.bias) for linear in self.linears]


def forward_in_group(linear: nn.Linear, x: Tensor) -> Tensor:
    """Return this Linear's output, [..., out], from its group's products. x: [..., in]."""
    group = linear.group
    if x is not group.x:
        group.x = x
        compiling = torch.compiler.is_compiling()
        if not compiling:
            group.joined = group.weights.pack(group.linears, group.parameters)
        if group.joined is not None:
            group.outs = multiply(group.joined, x, group.weights.packs)
        elif compiling:
            group.outs = [F.linear(x, weight, bias) for weight, bias in group.parameters()]
        else:
            # each as it trains
            group.outs = [forward(x) for forward in group.forwards]
    out = group.outs[linear.number]
    if linear.number == len(group.linears) - 1:
        group.x = None
        group.outs = None
    return out


def linears_by_input(block: nn.Module) -> list[tuple[nn.Linear, ...]]:
    """Return all Linears of `block` that only multiply, those with the same input together."""
    # a dict keeps their order
    plain = {
        module: None
        for module in block.modules()
        if base_class(module) in (nn.Linear, CpuLinear) and "forward" not in module.__dict__
    }
    groups = []
    for module in block.modules():
        linears = tuple(getattr(module, name, None) for name in getattr(module, "same_input", ()))
        if linears and all(linear in plain for linear in linears):
            groups.append(linears)
            for linear in linears:
                del plain[linear]
    return groups + [(linear,) for linear in plain]


# ---------------------------------------------------------------------------------------------------------------- CUDA


def can_join(device: torch.device) -> bool:
    return device.type == "cuda"


def join(linears: tuple[nn.Linear, ...]) -> Joined | None:
    """Move the matrices of several Linears side by side; None if they are adapted or sharded."""
    weights = [linear.weight for linear in linears]
    adapted = any(hasattr(linear, "lora_A") for linear in linears)
    if adapted or len(linears) == 1 or {*map(type, weights)} != {nn.Parameter}:
        return None
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else side_by_side(biases)
    return side_by_side(weights), bias, [len(weight) for weight in weights]


def side_by_side(parameters: list[nn.Parameter]) -> Tensor:
    """Return one tensor that holds the rows of all parameters, [sum of rows, ...].

    The parameters become views of it, unless they lie side by side already.
    """
    places = [(p.untyped_storage().data_ptr(), p.storage_offset()) for p in parameters]
    ends = [
        (storage, offset + p.numel())
        for (storage, offset), p in zip(places, parameters, strict=True)
    ]
    if places[1:] != ends[:-1]:
        rows = torch.cat([p.data for p in parameters]).split([len(p) for p in parameters])
        for parameter, part in zip(parameters, rows, strict=True):
            parameter.data = part
    first = parameters[0].data
    return first.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())
