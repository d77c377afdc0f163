"""The trainer's modules, as the sampler runs them: the same weights, without what training has put around them.

While `in_use`, blocks run uncompiled, since the compiler would build them anew for the sampler's shapes, or `compiled`
in the sampler's own way. On the CPU in fp32, matrices are also repacked, once per set of weights, into the order in
which oneDNN reads them, and those that get the same input side by side: products with the few rows of a decoding step
are then 1.3 to 2.5 times as fast. That costs a second copy of the weights, which `refresh` renews. Small matrices stay
as they are: each call of oneDNN costs more than their product.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

LEAST = 1 << 18  # elements of what is repacked: 1 MiB
SAME_INPUT = ("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")


class Weights:
    """Those of `model`, a decoder."""

    def __init__(self, model: nn.Module):
        self.model = model
        on_cpu = model.head_weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        # FSDP gathers a layer's weights and frees them: a copy of each would undo that
        self.packs = on_cpu and not isinstance(model, FSDPModule)
        self.packed: dict[object, tuple[Tensor, Tensor | None, list[int]]] = {}  # see `products`

    def refresh(self) -> None:
        """The weights have changed."""
        self.packed.clear()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        compiled = {block: block._compiled_call_impl for block in self.model.blocks}  # there is no public switch
        groups = [Group(self, linears) for linears in linears_by_input(self.model)] if self.packs else []
        try:
            for block in compiled:
                block._compiled_call_impl = None
            for group in groups:
                for number, linear in enumerate(group.linears):
                    linear.forward = partial(group, number)
            yield
        finally:
            for block, call in compiled.items():
                block._compiled_call_impl = call
            for group in groups:
                for linear in group.linears:
                    del linear.forward

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Only while `in_use`: blocks run as rollout/compiled.py says."""
        from minitrain.rollout.compiled import run  # takes seconds to import

        try:
            for block in self.model.blocks:
                block._compiled_call_impl = partial(run, block)
            yield
        finally:
            for block in self.model.blocks:
                block._compiled_call_impl = None

    def products(self, owner: object, x: Tensor, parameters: Callable) -> Sequence[Tensor]:
        """F.linear of x with each of `owner`'s matrices, from their packed copy if there can be one.

        parameters: gives their (weight, bias), all with biases or none.
        """
        if owner not in self.packed:
            weights, biases = zip(*parameters(), strict=True)
            if not (self.packs and can_be_packed(weights)):
                return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
            bias = None if biases[0] is None else torch.cat(biases)
            # neither operation has a public name
            weight = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights))
            self.packed[owner] = weight, bias, [len(weight) for weight in weights]
        weight, bias, rows = self.packed[owner]
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "").split(rows, dim=-1)


def can_be_packed(weights: Sequence[Tensor]) -> bool:
    kinds = {(weight.device.type, weight.dtype) for weight in weights}
    return kinds == {("cpu", torch.float32)} and sum(weight.numel() for weight in weights) >= LEAST


class Group:
    """Linears that get the same input, in this order: the first computes for all. Called in place of their forwards."""

    def __init__(self, weights: Weights, linears: tuple[nn.Linear, ...]):
        self.weights, self.linears = weights, linears
        self.x = self.outs = None

    def __call__(self, number: int, x: Tensor) -> Tensor:
        if x is not self.x:
            self.x, self.outs = x, self.weights.products(self.linears, x, self.parameters)
        out = self.outs[number]
        if number == len(self.linears) - 1:
            self.x = self.outs = None
        return out

    def parameters(self) -> list[tuple[Tensor, Tensor | None]]:
        """As they are now: tensor parallelism makes them anew."""
        return [(linear.weight, linear.bias) for linear in self.linears]


def linears_by_input(model: nn.Module) -> list[tuple[nn.Linear, ...]]:
    """All Linears of `model` whose forward is nn.Linear's own, those with the same input together."""
    plain = {m: None for m in model.modules() if type(m) is nn.Linear and "forward" not in m.__dict__}
    groups = []
    for module in model.modules():
        for names in SAME_INPUT:
            linears = tuple(getattr(module, name, None) for name in names)
            if all(linear in plain for linear in linears):
                groups.append(linears)
    together = {linear for linears in groups for linear in linears}
    return groups + [(linear,) for linear in plain if linear not in together]
