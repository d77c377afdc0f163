"""A decoder block as decoding steps run it on CUDA: compiled, but for what it asks of its cache.

There a step of few tokens takes as long as its kernels are many: some 45 in a block of Llama that is not compiled, 13
and those of attention in one that is. A cache stays what it is, with a kernel of its own: so the compiler makes graphs
of what comes before (norm, projections, rotation) and of what comes after. All layers of a kind share them, since
weights are arguments of a graph; a second number of rows makes them anew for any number, a single row once more.
Importing this file takes seconds. Left out: prompts, whose products are large, Mamba's scan, which belongs to its
cache here, models that several ranks share, and steps that are not captured, as each part's call costs the host time.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch._dynamo import config

from minitrain.models.decoder import Block
from minitrain.rollout.caches import Keys, States

LIMIT = 64  # graphs for one place in the code: kinds of layers, times three for the numbers of rows, times models


class Apart:
    """A layer's cache, at which the compiler stops."""

    step_ends_here = False  # decoding needs every layer's output

    def __init__(self, layer: Keys | States):
        self.layer = layer

    def once(self, make: Callable):
        return self.layer.once(make)

    @torch.compiler.disable
    def attend(self, *args) -> Tensor:
        return self.layer.attend(*args)

    @torch.compiler.disable
    def mix(self, *args) -> Tensor:
        return self.layer.mix(*args)


@cache
def compiled_forward() -> Callable:
    return config.patch(recompile_limit=LIMIT)(torch.compile(Block.forward))


def run(block: Block, x: Tensor, rotary, mask, documents, window_mask, layer: Keys | States | None) -> Tensor:
    """What `block` returns. Its own hooks and whatever else replaces its forward, to save memory, are left out."""
    return compiled_forward()(block, x, rotary, mask, documents, window_mask, layer and Apart(layer))
