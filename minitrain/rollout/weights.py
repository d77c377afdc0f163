"""The trainer's modules, as the sampler runs them: the same weights, without what training has put around them.

While `in_use`, blocks run uncompiled, since the compiler would build them anew for the sampler's shapes. On the CPU in
fp32, matrices are also repacked, once per set of weights, into the order in which oneDNN reads them: products with the
few rows of a decoding step then run at the speed of memory, 2 to 3 times as fast. That costs a second copy of the
weights, which `refresh` renews.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Weights:
    """Those of `model`, a decoder."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.packed: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the weight: it and its copy

    def refresh(self) -> None:
        """The weights have changed."""
        self.packed.clear()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        compiled = {block: block._compiled_call_impl for block in self.model.blocks}  # there is no public switch
        linears = [module for module in self.model.modules() if type(module) is nn.Linear and can_pack(module)]
        try:
            for block in compiled:
                block._compiled_call_impl = None
            for linear in linears:
                linear.forward = partial(self.product, weight=linear.weight, bias=linear.bias)
            yield
        finally:
            for block, call in compiled.items():
                block._compiled_call_impl = call
            for linear in linears:
                del linear.forward

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """F.linear, from the packed copy if there can be one."""
        found = self.packed.get(id(weight))
        if found is None:
            if not is_packable(weight):
                return F.linear(x, weight, bias)
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())  # there is no public name
            found = self.packed[id(weight)] = weight, packed
        return torch.ops.mkldnn._linear_pointwise(x, found[1], bias, "none", [], "")


def can_pack(linear: nn.Linear) -> bool:
    return "forward" not in linear.__dict__ and is_packable(linear.weight)


def is_packable(weight: Tensor) -> bool:
    plain = not isinstance(weight, DTensor) and weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and torch.backends.mkldnn.is_available()
