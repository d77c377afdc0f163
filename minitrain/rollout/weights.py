"""The trainer's modules, as the sampler runs them: the same weights, without what training has put around them.

While `in_use`, blocks run uncompiled, since the compiler would build them anew for the sampler's shapes. On the CPU in
fp32, matrices are also repacked, once per set of weights, into the order in which oneDNN reads them: products with the
few rows of a decoding step are then 1.3 to 2.5 times as fast. That costs a second copy of the weights, which `refresh`
renews. Small matrices stay as they are: each call of oneDNN costs more than their product.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

LEAST = 1 << 18  # elements of a matrix that is repacked: 1 MiB


class Weights:
    """Those of `model`, a decoder."""

    def __init__(self, model: nn.Module):
        self.model = model
        # FSDP gathers a layer's weights and frees them: a copy of each would undo that
        self.packs = torch.backends.mkldnn.is_available() and not isinstance(model, FSDPModule)
        self.packed: dict[nn.Module, Tensor] = {}  # by whose weight it is a copy of

    def refresh(self) -> None:
        """The weights have changed."""
        self.packed.clear()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        compiled = {block: block._compiled_call_impl for block in self.model.blocks}  # there is no public switch
        linears = [module for module in self.model.modules() if type(module) is nn.Linear and is_plain(module)]
        try:
            for block in compiled:
                block._compiled_call_impl = None
            for linear in linears:
                linear.forward = partial(self.linear, linear)
            yield
        finally:
            for block, call in compiled.items():
                block._compiled_call_impl = call
            for linear in linears:
                del linear.forward

    def linear(self, module: nn.Linear, x: Tensor) -> Tensor:
        """In place of the module's forward. Its parameters are asked for now: tensor parallelism makes them anew."""
        return self.product(module, x, module.weight, module.bias)

    def product(self, owner: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """F.linear with `owner`'s weight, from the packed copy if there can be one."""
        if not self.packs or weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.numel() < LEAST:
            return F.linear(x, weight, bias)
        if owner not in self.packed:
            self.packed[owner] = torch.ops.mkldnn._reorder_linear_weight(weight.detach())  # there is no public name
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed[owner], bias, "none", [], "")


def is_plain(linear: nn.Linear) -> bool:
    """Is its forward nn.Linear's own? Adapters have another."""
    return "forward" not in linear.__dict__
