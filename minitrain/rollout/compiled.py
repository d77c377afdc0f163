"""Compiled decoder blocks for decoding steps, and for prefills on CUDA.

With few tokens a step's time is the number of its kernels: some 45 in an eager block of Llama.

    CUDA   graph break at the cache, which has a kernel of its own (`OpaqueCache`): one graph before
           it (norm, projections, rotation) and one after; 10 kernels and those of attention
    CPU    calling a graph costs the host 0.1 ms, so one graph has the whole block with its attention
           (`TracedCache`): four products and five loops. Where samples share a prefix, and in
           recurrent layers, there is a graph break as on CUDA

Layers of one kind share graphs, since weights are inputs. A graph is compiled for the first number
of rows, again for any number when a second one comes, and once more for a single row. Where several
ranks share a model, their collectives are part of the graphs. Importing this file takes seconds.

A prefill on CUDA is compiled like a decoding step: 7 kernels per block, not 24, save a tenth of its
time.

Left out: prefill on the CPU, whose products are large; recurrent scans, which the cache runs; steps
that send tokens to other ranks' experts or gather weights; on CUDA, decoding without a CUDA graph.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic  # has no public name (torch 2.13)
from torch.compiler import config

from minitrain.rollout.caches import StateCache
from minitrain.rollout.cpu import (
    RowsCache,
    attend_to_buffers,
    attend_with_lse,
    of_queries,
    row_places,
)
from minitrain.rollout.kv_cache import LayerCache, PagedKVCache
from minitrain.rollout.steps import PromptStep, split_kv, write

# graphs of one function: kinds of layers x 3 numbers of rows x models
RECOMPILE_LIMIT = 64
# queries per key up to which Inductor's loops beat the attention kernel, on the CPU
MAX_LOOP_QUERIES = 8


class WrappedCache:
    """What compiled blocks see of any layer's cache."""

    def __init__(self, layer: LayerCache):
        self.layer = layer
        self.once = layer.once
        self.records = layer.caches.records

    def record(self, indices: Tensor) -> None:
        # where nothing is recorded there is no graph break either
        if self.records:
            self.record_experts(indices)

    @torch.compiler.disable
    def record_experts(self, indices: Tensor) -> None:
        # int64 [tokens, top_k]
        self.layer.record(indices)


class OpaqueCache(WrappedCache):
    """A layer's cache as a graph break. Arguments are those of the cache's own methods.

    In decoding on CUDA the new keys and values are written before the break, by the kernels that
    compute them.
    """

    def __init__(self, layer: LayerCache):
        super().__init__(layer)
        step = layer.caches.step
        self.output_unused = layer.output_unused
        # the compiler keeps graphs of many tokens and those of few rows apart by it
        self.is_prefill = isinstance(step, PromptStep)
        if isinstance(layer, PagedKVCache):
            self.pools = layer.pools
            self.kv_index = step.kv_index

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor | int, sinks: Tensor | None = None
    ) -> Tensor:
        # q: [1, heads, tokens, head_dim]; k, v: [1, kv_heads, tokens, head_dim]; returned as q
        if self.is_prefill or not (q.is_cuda and self.pools):
            return self.attend_and_write(q, k, v, sinks)
        new, channels = split_kv(k, v)
        write(self.pools, self.kv_index, new)
        return self.attend_to_pool(q, channels, sinks)

    @torch.compiler.disable
    def attend_and_write(self, *args) -> Tensor:
        # [1, heads, tokens, head_dim]
        return self.layer.attend(*args)

    @torch.compiler.disable
    def attend_to_pool(self, *args) -> Tensor:
        # [1, heads, tokens, channels]
        return self.layer.attend_to_pool(*args)

    @torch.compiler.disable
    def mix(self, *args) -> Tensor:
        # [1, tokens, groups, heads, head_dim]
        return self.layer.mix(*args)


class TracedCache(WrappedCache):
    """A layer's RowsCache in this step as plain tensors, which the compiler traces.

    Methods are those of RowsCache.
    """

    # decoding needs every layer's output
    output_unused = False

    def __init__(self, layer: RowsCache):
        super().__init__(layer)
        step = layer.caches.step
        self.pools = layer.pools
        self.kv_index = step.kv_index
        self.buffers = layer.gather()
        self.positions = step.positions
        self.width = step.width
        self.bias = layer.bias(step.width)
        # [rows, 1, width, longest]: the last dimension grows with every step
        maybe_mark_dynamic(self.bias, 3)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor | int, sinks: Tensor | None = None
    ) -> Tensor:
        # q: [1, heads, tokens, head_dim]; k, v: [1, kv_heads, tokens, head_dim]; returned as q
        new, channels = split_kv(k, v)
        write(self.pools, self.kv_index, new)
        write(self.buffers, row_places(self.positions, len(new[0]), self.width), new)
        return attend_to_buffers(
            self.buffers, q, channels, self.width, sinks, self.attend_to_rows
        )

    def attend_to_rows(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        # q: [rows, kv_heads, queries, head_dim]; keys, values: [rows, kv_heads, capacity, head_dim]
        keys = keys[:, :, : self.bias.shape[3]]
        values = values[:, :, : self.bias.shape[3]]
        bias = of_queries(self.bias, q.shape[2])
        if q.shape[2] <= MAX_LOOP_QUERIES:
            return attend_in_loops(q, keys, values, bias)
        return attend_with_lse(q, keys, values, attn_mask=bias)


def attend_in_loops(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute attention and its log-sum-exp by elementwise operations, which Inductor fuses.

    With few queries this is up to twice as fast as the kernel.
    q: [rows, kv_heads, queries, head_dim]; keys, values: [rows, kv_heads, keys, head_dim].
    bias: [rows, 1, 1 or queries, keys]. Returns the output, as q, and the log-sum-exp, without head_dim.
    """
    scale = q.shape[-1] ** -0.5
    # [rows, kv_heads, queries, keys]
    products = (q.float()[..., None, :] * keys[:, :, None]).sum(-1)
    scores = products * scale + bias
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum[..., None]).exp()
    out = (weights[..., None] * values[:, :, None]).sum(3)
    return out.to(q.dtype), log_sum


def cache_for_compiler(layer: LayerCache) -> OpaqueCache | TracedCache:
    """Wrap a layer's cache for use in a compiled block."""
    step = layer.caches.step
    if isinstance(step, PromptStep) or isinstance(layer, StateCache):
        return OpaqueCache(layer)
    on_cpu = isinstance(layer, RowsCache) and layer.pools
    # which rows share a prefix changes from step to step, and a graph would hold only for those
    return TracedCache(layer) if on_cpu and not step.rows.shared else OpaqueCache(layer)


@contextmanager
def compiled(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Run `blocks` compiled, as variants of their classes."""
    kinds = [type(block) for block in blocks]
    try:
        for block in blocks:
            block.__class__ = compiled_variant(type(block))
        yield
    finally:
        for block, kind in zip(blocks, kinds, strict=True):
            block.__class__ = kind


@cache
def compiled_variant(kind: type) -> type:
    """Return the variant of a block's class whose forward is compiled."""

    class Compiled(kind):
        def forward(self, *inputs, **named) -> Tensor:
            # [1, tokens, hidden]; one of the inputs is the layer's cache
            inputs = [wrapped(x) for x in inputs]
            named = {name: wrapped(x) for name, x in named.items()}
            return compiled_forward(kind)(self, *inputs, **named)

    return Compiled


def wrapped(argument: object) -> object:
    return cache_for_compiler(argument) if isinstance(argument, LayerCache) else argument


@cache
def compiled_forward(kind: type) -> Callable:
    return config.patch(recompile_limit=RECOMPILE_LIMIT)(torch.compile(kind.forward))
