"""The trainer's modules, as the sampler runs them: the same weights, without what training has put
around them.

While `in_use`, blocks run uncompiled, since the compiler would build them anew for the sampler's
shapes, or `compiled` in the sampler's own way. On the CPU in fp32, matrices are also repacked, once
per set of weights, into the order in which oneDNN reads them, and those that get the same input
side by side: products with the few rows of a decoding step are then 1.3 to 2.5 times as fast. That
costs a second copy of the weights, which `refresh` renews. Small matrices stay as they are: each
call of oneDNN costs more than their product. On CUDA, matrices that get the same input are moved to
lie side by side, once and for good, and are read as one: a decoding step has fewer and larger
products, and no copies.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from minitrain.models.onednn import OnednnLinear

# elements of what is repacked: 1 MiB
LEAST = 1 << 18
# matrices side by side as oneDNN reads them, biases, rows of each
Packed = tuple[Tensor, Tensor | None, list[int]]


class Weights:
    """Those of `model`, a decoder."""

    def __init__(self, model: nn.Module):
        self.model = model
        device = model.head_weight.device
        # which gathers a layer's weights and frees them
        whole = not isinstance(model, FSDPModule)
        self.packs = whole and device.type == "cpu" and torch.backends.mkldnn.is_available()
        self.joins = whole and can_join(device)
        # by owner, see `products`; None: better as they are
        self.packed: dict[object, Packed | None] = {}
        # by block
        self.groups: dict[nn.Module, list[Group]] = {}
        self.entered = False

    def refresh(self) -> None:
        """The weights have changed."""
        self.packed.clear()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within itself it does nothing, so that many steps can share what it costs."""
        if self.entered:
            yield
            return
        # there is no public switch
        compiled = {block: block._compiled_call_impl for block in self.model.blocks}
        recomputed = {
            block: block.__dict__["forward"] for block in compiled if "forward" in block.__dict__
        }
        if self.packs:
            self.groups = {
                block: [Group(self, linears) for linears in linears_by_input(block)]
                for block in compiled
            }
        # parameters must stay what can be trained
        with torch.inference_mode(False):
            joined = (
                [module for module in self.model.modules() if join(module)] if self.joins else []
            )
        self.entered = True
        try:
            for block in compiled:
                block._compiled_call_impl = None
            for block in recomputed:
                del block.forward
            for group in chain(*self.groups.values()):
                for number, linear in enumerate(group.linears):
                    # not a closure: the compiler, which follows, would make a graph for each
                    linear.group = group
                    linear.number = number
                    setattr(linear, forward_of(linear), MethodType(forward_in_group, linear))
            yield
        finally:
            self.entered = False
            for block, call in compiled.items():
                block._compiled_call_impl = call
            for block, forward in recomputed.items():
                block.forward = forward
            for group in chain(*self.groups.values()):
                for linear in group.linears:
                    del linear.group, linear.number
                    delattr(linear, forward_of(linear))
            # they hold packed copies
            self.groups = {}
            for module in joined:
                del module.joint, module.project

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Only while `in_use`: blocks run as rollout/compiled.py says."""
        from minitrain.rollout.compiled import run  # takes seconds to import

        try:
            for block in self.model.blocks:
                block._compiled_call_impl = partial(run, block, self.groups.get(block, []))
            yield
        finally:
            for block in self.model.blocks:
                block._compiled_call_impl = None

    def products(self, owner: object, x: Tensor, parameters: Callable) -> Sequence[Tensor]:
        """F.linear of x with each of `owner`'s matrices, from their packed copy if there can be
        one.

        parameters: gives their (weight, bias), all with biases or none.
        """
        return multiply(self.pack(owner, parameters), x, parameters)

    def pack(self, owner: object, parameters: Callable) -> Packed | None:
        """The packed copy for `products`, made if there is none yet."""
        if self.packs and owner not in self.packed:
            weights, biases = zip(*parameters(), strict=True)
            small = sum(weight.numel() for weight in weights) < LEAST
            if small or any(
                (weight.device.type, weight.dtype) != ("cpu", torch.float32) for weight in weights
            ):
                self.packed[owner] = None
            else:
                packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights))
                bias = None if biases[0] is None else torch.cat(biases)
                self.packed[owner] = packed, bias, [len(weight) for weight in weights]
        return self.packed.get(owner)


def multiply(packed: Packed | None, x: Tensor, parameters: Callable) -> Sequence[Tensor]:
    if packed is None:
        return [F.linear(x, weight, bias) for weight, bias in parameters()]
    weight, bias, rows = packed
    return torch.ops.minitrain.onednn_linear(x, weight, bias).split(rows, dim=-1)


class Group:
    """Linears that get the same input, in this order: the first computes for all."""

    def __init__(self, weights: Weights, linears: tuple[nn.Linear, ...]):
        self.weights = weights
        self.linears = linears
        self.x = self.outs = self.packed = None

    def pack(self) -> None:
        self.packed = self.weights.pack(self.linears, self.parameters)

    def product(self, number: int, x: Tensor) -> Tensor:
        if x is not self.x:
            compiling = torch.compiler.is_compiling()
            if not compiling:
                self.pack()
            # too few weights to pack: each as it trains
            if self.packed is None and not compiling:
                self.outs = [type(linear).forward(linear, x) for linear in self.linears]
            else:
                self.outs = multiply(self.packed, x, self.parameters)
            self.x = x
        out = self.outs[number]
        if number == len(self.linears) - 1:
            self.x = self.outs = None
        return out

    def parameters(self) -> list[tuple[Tensor, Tensor | None]]:
        """As they are now: tensor parallelism makes them anew."""
        return [(linear.weight, linear.bias) for linear in self.linears]


def forward_in_group(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear.group.product(linear.number, x)


def forward_of(linear: nn.Linear) -> str:
    """The name of what multiplies by the Linear's matrix: adapters have a `forward` of their own,
    around `product`.
    """
    return "product" if hasattr(linear, "lora_A") else "forward"


def linears_by_input(block: nn.Module) -> list[tuple[nn.Linear, ...]]:
    """All Linears of `block` that just multiply, those with the same input together."""
    linears = (module for module in block.modules() if type(module) in (nn.Linear, OnednnLinear))
    plain = {m: None for m in linears if "forward" not in m.__dict__ or hasattr(m, "lora_A")}
    groups = []
    for module in block.modules():
        linears = tuple(getattr(module, name, None) for name in getattr(module, "same_input", ()))
        if linears and all(linear in plain for linear in linears):
            groups.append(linears)
    together = {linear for linears in groups for linear in linears}
    return groups + [(linear,) for linear in plain if linear not in together]


# ---------------------------------------------------------------------------------------------------------------- CUDA


def can_join(device: torch.device) -> bool:
    return device.type == "cuda"


def join(module: nn.Module) -> bool:
    """Make one product of those of `module.project`, if they are of plain Linears, and say
    whether.
    """
    if not hasattr(module, "project"):
        return False
    linears = [getattr(module, name) for name in module.same_input]
    if not all(map(is_plain, linears)):
        return False
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else side_by_side(biases)
    module.joint = (
        side_by_side([linear.weight for linear in linears]),
        bias,
        [len(linear.weight) for linear in linears],
    )
    # not a closure, as above
    module.project = MethodType(project_at_once, module)
    return True


def is_plain(linear: nn.Module) -> bool:
    """Is it just a Linear, with matrices of its own: no adapters, no FP8, no tensor parallelism?"""
    changed = (
        linear._forward_hooks
        or linear._forward_pre_hooks
        or {"forward", "weight"} & linear.__dict__.keys()
    )
    return type(linear) is nn.Linear and not changed and not isinstance(linear.weight, DTensor)


def project_at_once(module: nn.Module, x: Tensor) -> Sequence[Tensor]:
    weight, bias, rows = module.joint
    return F.linear(x, weight, bias).split(rows, dim=-1)


def side_by_side(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor of which the parameters are the rows, in this order. If they are not yet, they are
    moved there.
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
