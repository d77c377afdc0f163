"""The trainer's weights as the sampler uses them: without what training puts around them.

While `in_use`, blocks run as they are, or as compiled.py compiles them: the trainer's compiled ones
would recompile for the sampler's shapes. Linears with the same input are one product:

    CPU, fp32   Their matrices are packed once per set of weights (cpu.py). It costs a second copy
                of the weights, which `refresh` drops
    CUDA        Their matrices are moved side by side, once and for good, and read as one: fewer and
                larger products, and no copies

Both are variants of a module's class (models/variants.py). Training goes on with the classes that it
had: they are put back when sampling ends.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from minitrain.models.variants import base_class, set_variant
from minitrain.parallel.parts import use_local_tensors
from minitrain.rollout.cpu import PLAIN_LINEARS, can_pack, pack, packed_linear

# stands for the owner of the head's matrix, which may be the embedding
HEAD = "head"


class Joined(NamedTuple):
    """Matrices side by side, [sum of rows, in], their biases, and how many rows each has.

    packed: the matrices are in the layout of cpu.py.
    """

    weight: Tensor
    bias: Tensor | None
    rows: list[int]
    packed: bool = False


def multiply(joined: Joined, x: Tensor) -> Sequence[Tensor]:
    """Return F.linear of x [..., in] with each of the matrices side by side, each [..., out]."""
    linear = packed_linear if joined.packed else F.linear
    return linear(x, joined.weight, joined.bias).split(joined.rows, dim=-1)


class JoinedLinear(nn.Linear):
    """A Linear whose matrix is joined to those of all `linears`, which have the same input.

    They are multiplied at once by `project`. x: [..., in]; returns [..., out].
    """

    linears: tuple[nn.Linear, ...]
    joined: Joined

    def forward(self, x: Tensor) -> Tensor:
        # called alone because it has a hook: compute only this Linear
        return multiply(self.joined, x)[0] if len(self.linears) == 1 else super().forward(x)

    @staticmethod
    def together(linears: Sequence[nn.Linear], x: Tensor) -> Sequence[Tensor] | None:
        """Return the outputs [..., out] for x [..., in]; None if adapters add to some of them."""
        plain = all(type(linear) is JoinedLinear for linear in linears)
        return JoinedLinear.products(linears, x) if plain else None

    @staticmethod
    def products(linears: Sequence[nn.Linear], x: Tensor) -> Sequence[Tensor] | None:
        """Return what the matrices make of x [..., in], each [..., out]; None if others are joined.

        Adapters (models/lora.py) are added to it.
        """
        first = linears[0]
        if len(linears) == len(first.linears) and all(map(is_same, linears, first.linears)):
            return multiply(first.joined, x)
        return None


def is_same(a: object, b: object) -> bool:
    return a is b


@cache
def uncompiled(kind: type) -> type:
    """Return the variant of a block's class that runs eagerly, although the trainer compiled it."""
    # torch has no public switch for the compiled call of one module (2.13): its `__call__` asks for
    # one, and then calls this
    return type(kind.__name__, (kind,), {"__call__": nn.Module._call_impl})


class SamplerWeights:
    """The weights of `model`, a decoder. draft: those of the one that drafts, in use together."""

    def __init__(self, model: nn.Module, draft: "SamplerWeights | None" = None):
        self.model = model
        self.draft = draft
        device = model.head_weight.device
        # FSDP gathers a layer's weights and frees them
        whole = not isinstance(model, FSDPModule)
        self.packs = whole and can_pack(device)
        self.joins = whole and can_join(device)
        # by the tuple of Linears, or HEAD; None: better one by one
        self.packed: dict[object, Joined | None] = {}
        # each changed module, with its class before `in_use`
        self.classes: list[tuple[nn.Module, type]] = []
        self.entered = False

    def refresh(self) -> None:
        """Drop packed copies, after the weights have changed."""
        if self.draft:
            self.draft.refresh()
        self.packed.clear()
        if self.entered:
            self._leave()
            self._enter()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Prepare the model for sampling. Re-entrant: nested use is free."""
        if self.entered:
            yield
            return
        self.entered = True
        try:
            self._enter()
            with self.draft.in_use() if self.draft else nullcontext():
                yield
        finally:
            self._leave()
            self.entered = False

    # what is created in inference mode cannot be trained, and `join` moves parameters
    @torch.inference_mode(False)
    @torch.no_grad()
    def _enter(self) -> None:
        for block in self.model.blocks:
            self.classes.append((block, type(block)))
            block.__class__ = uncompiled(type(block))
            for linears in linears_by_input(block) if self.packs or self.joins else []:
                if self.joins:
                    self.packed[linears] = join(linears)
                elif linears not in self.packed:
                    for linear in linears:
                        # tensor-parallel ones multiply by these
                        use_local_tensors(linear, ())
                    weights = [linear.weight for linear in linears]
                    biases = [linear.bias for linear in linears]
                    self.packed[linears] = join_packed(weights, biases)
                joined = self.packed[linears]
                for linear in linears if joined is not None else ():
                    self.classes.append((linear, type(linear)))
                    set_variant(linear, JoinedLinear)
                    linear.linears = linears
                    linear.joined = joined

    def _leave(self) -> None:
        for module, kind in reversed(self.classes):
            module.__class__ = kind
            for name in ("linears", "joined"):
                module.__dict__.pop(name, None)
        self.classes.clear()

    def multiply_head(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return logits [rows, vocab] of hidden [rows, hidden]. weight: the head's, on this rank."""
        if self.packs and HEAD not in self.packed:
            self.packed[HEAD] = join_packed([weight], [None])
        joined = self.packed.get(HEAD)
        return F.linear(hidden, weight) if joined is None else multiply(joined, hidden)[0]


def linears_by_input(block: nn.Module) -> list[tuple[nn.Linear, ...]]:
    """Return all Linears of `block` that only multiply, those with the same input together.

    These are what a module names in `same_input`, and passes to `project` in this order.
    """
    # a dict keeps their order
    plain = {
        module: None
        for module in block.modules()
        if base_class(module) in PLAIN_LINEARS and "forward" not in module.__dict__
    }
    groups = []
    for module in block.modules():
        linears = tuple(getattr(module, name, None) for name in getattr(module, "same_input", ()))
        if linears and all(linear in plain for linear in linears):
            groups.append(linears)
            for linear in linears:
                del plain[linear]
    return groups + [(linear,) for linear in plain]


def join_packed(weights: list[Tensor], biases: list[Tensor | None]) -> Joined | None:
    """Pack matrices [out, in] with the biases [out] that all or none of them have."""
    packed = pack(weights)
    if packed is None:
        return None
    bias = None if biases[0] is None else torch.cat(biases)
    return Joined(packed, bias, [len(weight) for weight in weights], packed=True)


# --- matrices side by side, on CUDA


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
    return Joined(side_by_side(weights), bias, [len(weight) for weight in weights])


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
