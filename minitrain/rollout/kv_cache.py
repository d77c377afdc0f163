"""A layer's cache of keys and values, or of latents, in pages.

In a prefill scaled_dot_product_attention runs once per prompt. In decoding FlexAttention runs on the
pool itself: each sample's block list names its pages (`PageMask`). The lists are tensors that change
in place, so nothing is compiled or built again as samples grow, come and go. (On the CPU a
`RowsCache` of cpu.py takes this class's place.)
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest

from minitrain.models.attention import apply_sinks, attention
from minitrain.models.flex import compiled_flex_attention
from minitrain.rollout.steps import (
    Chunk,
    PromptStep,
    by_head,
    by_row,
    sinks_of_queries,
    split_kv,
    write,
)

if TYPE_CHECKING:
    from minitrain.rollout.caches import Caches

# cuDNN is faster, but plans for half a second for every new length of a prompt
PREFILL_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# For latents: their 576 channels are padded to 1024, and the default tiles exceed shared memory.
SMALL_TILES = {"BLOCK_M": 16, "BLOCK_N": 16, "num_stages": 1, "num_warps": 4}
# Prefetch loads in three stages where shared memory has room. torch's own choice for these GPUs is
# the same, but its code then overwrites the number (2.11-2.13).
PREFETCH = {"num_stages": 3}
PREFETCH_CAPABILITIES = [(9, 0), (10, 0), (10, 3)]
# Smaller tiles let four thread blocks share a multiprocessor of an H200. With 64 samples, 8 kv
# heads and 1,152 tokens they read 4.1 TB/s instead of 3.2; with 192 samples they change nothing.
SMALL_PREFETCHED_TILES = PREFETCH | {"BLOCK_N": 32}


class LayerCache:
    """The base of a layer's cache: keeps constants computed from the weights until these change.

    last: this is the model's last layer.
    """

    def __init__(self, caches: "Caches", last: bool):
        # a strong reference would make a cycle, which keeps pools alive after `Sampler.free`
        self.caches = weakref.proxy(caches)
        self.last = last
        self.constants = None
        # int16 [pages, page_size, top_k], if `caches` record: the experts of each token
        self.routes: list[Tensor] = []

    @property
    def output_unused(self) -> bool:
        """Return whether nothing reads the layer's output, so that its MLP can be skipped."""
        # prefill only fills the caches: after the last of them nothing need be computed
        skips = self.last and not self.caches.records
        return skips and isinstance(self.caches.step, PromptStep)

    def record(self, indices: Tensor) -> None:
        """Store the experts of the step's tokens, int64 [tokens, top_k], where they are asked for."""
        if not self.caches.records:
            return
        if not self.routes:
            shape = self.caches.pages, self.caches.page_size, indices.shape[1]
            self.routes = [zeros(shape, torch.int16, indices.device)]
        self.routes[0][self.caches.step.kv_index] = indices.to(torch.int16)

    def once(self, make: Callable):
        """Return make(), computed once per set of weights."""
        if self.constants is None:
            self.constants = make()
        return self.constants


class PagedKVCache(LayerCache):
    """Keys and values in two pools, or latents in one.

    pools: each [pages, page_size, kv_heads, head_dim], kv_heads being those of this rank.
    window: how many keys a query sees; None: all.
    """

    def __init__(self, caches: "Caches", last: bool, window: int | None):
        super().__init__(caches, last)
        self.window = window
        self.pools: list[Tensor] = []

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor | int, sinks: Tensor | None = None
    ) -> Tensor:
        """Cache the step's keys and values, and attend to all keys of each token's sequence.

        q: [1, heads, tokens, head_dim]; k: [1, kv_heads, tokens, head_dim].
        v: as k; for latents an int, the number of the keys' first channels that are the values.
        sinks: [heads], see `attention_with_sinks`.
        Returns [1, heads, tokens, v's head_dim].
        """
        step = self.caches.step
        # new: what each pool gets, [kv_heads, tokens, head_dim]; channels: of a value
        new, channels = split_kv(k, v)
        if not self.pools:
            shape = self.caches.pages, self.caches.page_size
            self.pools = [zeros((*shape, x.shape[0], x.shape[2]), x.dtype, x.device) for x in new]
        self.write(new)
        if isinstance(step, PromptStep):
            outs = [self._attend_to_prompt(chunk, q, channels, sinks) for chunk in step.chunks]
            # padding tokens at the row's end belong to no chunk
            return join_chunks(outs, 2, q.shape[2])
        return self.attend_to_samples(q, new, channels, sinks)

    def write(self, new: list[Tensor]) -> None:
        """Write the step's keys and values to the pools. new: [kv_heads, tokens, head_dim] for each."""
        write(self.pools, self.caches.step.kv_index, new)

    def _attend_to_prompt(
        self, chunk: Chunk, q: Tensor, channels: int, sinks: Tensor | None
    ) -> Tensor:
        """Attend to the sequence up to the chunk's end; the pools hold the chunk already.

        q: [1, heads, tokens of the step, head_dim]. Returns [1, heads, tokens of the chunk, channels].
        """
        # each [1, kv_heads, end, head_dim], from [pages, page_size, kv_heads, head_dim]
        seen = [
            pool[chunk.pages].flatten(0, 1)[None, : chunk.end].transpose(1, 2)
            for pool in self.pools
        ]
        # with sinks, FlexAttention would run a mask without a tensor: a kernel for every length
        mask = self.caches.step.mask(chunk, self.window, plain=sinks is None)
        with sdpa_kernel(PREFILL_BACKENDS) if q.is_cuda else nullcontext():
            queries = q[:, :, chunk.tokens]
            values = seen[-1][..., :channels]
            return attention(queries, seen[0], values, mask, sinks)

    def attend_to_samples(
        self, q: Tensor, new: list[Tensor], channels: int, sinks: Tensor | None
    ) -> Tensor:
        """Attend to each row's own sequence in a decoding step; the pools hold `new` already."""
        return self.attend_to_pool(q, channels, sinks)

    def attend_to_pool(self, q: Tensor, channels: int, sinks: Tensor | None) -> Tensor:
        """Attend to the pool in a decoding step. It holds the new keys and values already.

        q: [1, heads, tokens, head_dim]. channels: of a value.
        Returns [1, heads, tokens, channels].
        """
        step = self.caches.step
        # [1, kv_heads, pages * page_size, head_dim]: views, and the batch of 1 is broadcast to rows
        keys = self.pools[0].flatten(0, 1).transpose(0, 1)[None]
        values = self.pools[-1].flatten(0, 1).transpose(0, 1)[None, ..., :channels]
        # [rows, kv_heads, queries, head_dim]: heads that share keys become queries of one head,
        # since the decoding kernel takes only 1, 2, 4, 8, ... heads per key
        q = by_row(q, keys.shape[1], step.width)
        out, aux = compiled_flex_attention()(
            q,
            keys,
            values,
            block_mask=step.page_mask(self.window, q.shape[2]),
            return_aux=AuxRequest(lse=sinks is not None),
            kernel_options=kernel_options(keys, channels, len(q)),
        )
        if sinks is not None:
            out = apply_sinks(out, aux.lse, sinks_of_queries(sinks, keys.shape[1], step.width))
        return by_head(out, step.width)


def join_chunks(outs: list[Tensor], dim: int, length: int) -> Tensor:
    """Join outputs [1, ..., tokens, ...] of chunks along `dim`, padded with zeros to `length`."""
    # torch.cat would copy a single chunk, too
    out = torch.cat(outs, dim) if len(outs) > 1 else outs[0]
    missing = length - out.shape[dim]
    # F.pad counts dimensions from the last
    later = (0, 0) * (out.ndim - 1 - dim)
    return F.pad(out, (*later, 0, missing)) if missing else out


def kernel_options(keys: Tensor, channels: int, rows: int) -> dict | None:
    """Return the options of FlexAttention's decoding kernel; None: torch's own choice.

    keys: [1, kv_heads, pages * page_size, head_dim]; channels: of a value; rows: samples.
    """
    # latents
    if channels > 256:
        return SMALL_TILES
    value_bytes = channels * keys.itemsize
    capability = torch.cuda.get_device_capability(keys.device) if keys.is_cuda else None
    if capability not in PREFETCH_CAPABILITIES or value_bytes > 256:
        return None
    # about one pair of sample and kv head for each of an H200's 132 multiprocessors
    crowded = value_bytes == 256 and rows * keys.shape[1] >= 128
    return SMALL_PREFETCHED_TILES if crowded and capability == (9, 0) else PREFETCH


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return torch.zeros of `shape`, such as [pages, page_size, kv_heads, head_dim].

    On the CPU by np.zeros, which writes nothing: the operating system provides memory at its first
    use. So a large pool takes only what its used pages take.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy has no bf16: make bytes, and view them
    memory = np.zeros((*shape, dtype.itemsize), np.uint8)
    return torch.from_numpy(memory).view(dtype)[..., 0]
