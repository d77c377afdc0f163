"""A decoder block as decoding steps run it: compiled.

A step of few tokens takes as long as its kernels are many: some 45 in a block of Llama that is not
compiled.

    CUDA     a cache stays what it is, with a kernel of its own: the compiler makes graphs of what comes before (norm,
             projections, rotation) and of what comes after (`Apart`): 10 kernels, and those of
             attention
    CPU      each graph's call costs the host 0.1 ms, so one has all of a block, its attention too (`Inside`): four
             products and five loops. Where samples share what they read, and where states are kept,
             it is as on CUDA

All layers of a kind share graphs, since weights are arguments; a second number of rows makes them
anew for any number, a single row once more. Where several ranks share a model, their collectives
are part of the graphs. Importing this file takes seconds. Left out: prompts, whose products are
large, Mamba's scan, which belongs to its cache here, steps that send tokens to experts on other
ranks or gather weights, and on CUDA those that are not captured.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch._dynamo import config, maybe_mark_dynamic

from minitrain.models.decoder import Block
from minitrain.rollout.caches import Keys, States, attend, write, write_and_attend

# graphs for one place in the code: kinds of layers, times three for the numbers of rows, times
# models
LIMIT = 64
# queries per key, up to which sums of products are faster than the kernel for attention, on the CPU
FEW = 8


class Apart:
    """A layer's cache, at which the compiler stops; on CUDA once the new keys and values are in
    their pages, since the loops that compute them can write them there."""

    # decoding needs every layer's output
    output_unused = False

    def __init__(self, layer: Keys | States):
        self.layer = layer
        self.once = layer.once
        if isinstance(layer, Keys):
            self.pools = layer.pools
            self.places = layer.caches.step.places

    def attend(self, q: Tensor, k: Tensor, v: Tensor | int, sinks: Tensor | None = None) -> Tensor:
        if not (q.is_cuda and self.pools):
            return self.attend_and_write(q, k, v, sinks)
        write(self.pools, self.places, [k[0]] if isinstance(v, int) else [k[0], v[0]])
        return self.attend_to_pool(q, v if isinstance(v, int) else None, sinks)

    @torch.compiler.disable
    def attend_and_write(self, *args) -> Tensor:
        return self.layer.attend(*args)

    @torch.compiler.disable
    def attend_to_pool(self, *args) -> Tensor:
        return self.layer.attend_to_pool(*args)

    @torch.compiler.disable
    def mix(self, *args) -> Tensor:
        return self.layer.mix(*args)


class Inside:
    """A layer's cache of keys in this step, as tensors, which the compiler follows."""

    output_unused = False

    def __init__(self, layer: Keys):
        step = layer.caches.step
        self.once = layer.once
        self.pools = layer.pools
        self.places = step.places
        self.buffers = layer.gather()
        self.positions = step.positions
        self.bias = step.bias(layer.window, self.pools[0].dtype)
        # it grows with every step
        maybe_mark_dynamic(self.bias, 3)

    def attend(self, q: Tensor, k: Tensor, v: Tensor | int, sinks: Tensor | None = None) -> Tensor:
        new = [k[0]] if isinstance(v, int) else [k[0], v[0]]
        write(self.pools, self.places, new)
        return write_and_attend(self.buffers, self.positions, q, new, v, sinks, self.attend_to_rows)

    def attend_to_rows(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (x[:, :, : self.bias.shape[3]] for x in (keys, values))
        return (attend_by_sums if q.shape[2] <= FEW else attend)(q, keys, values, self.bias)


def attend_by_sums(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """As `attend` of caches.py, for the compiler: with few queries its loops are up to twice as
    fast as the kernel.
    """
    scores = (q.float()[..., None, :] * keys[:, :, None]).sum(-1) * q.shape[-1] ** -0.5 + bias
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum[..., None]).exp()
    return (weights[..., None] * values[:, :, None]).sum(3).to(q.dtype), log_sum


def for_compiler(layer: Keys | States | None) -> Apart | Inside | None:
    if layer is None:
        return None
    on_cpu = isinstance(layer, Keys) and layer.pools and layer.pools[0].device.type == "cpu"
    # which rows share a beginning changes from step to step, and a graph would hold just for those
    return Inside(layer) if on_cpu and not layer.caches.step.shared else Apart(layer)


@cache
def compiled_forward() -> Callable:
    return config.patch(recompile_limit=LIMIT)(torch.compile(Block.forward))


def run(block: Block, groups: list, *inputs) -> Tensor:
    """What `block` returns for the inputs of its forward, the last of which is its layer's cache.
    What replaces that to save memory is left out. groups: its Linears', see weights.py.

    Hooks of ranks that share the model give them plain tensors, this rank's parts, that hide the
    parameters.
    """
    for hook in block._forward_pre_hooks.values():
        hook(block, ())
    for group in groups:
        group.pack()
    return compiled_forward()(block, *inputs[:-1], for_compiler(inputs[-1]))
