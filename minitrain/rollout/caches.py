"""The caches of earlier tokens: paged keys and values or latents, or a state per sample.

A module calls its layer's cache in place of attention with a mask. Before each forward pass the
sampler sets `Caches.step`, from which the layers' caches read which token belongs to which sequence.

    PagedKVCache   attention of any kind: `attend` writes the new keys and values to the pool and
                   attends to all keys of the sequence. For latent attention the pool holds latents,
                   as keys of one head; their first channels are the values
    MambaCache     Mamba-2: `mix` runs the module's own scan from each sequence's state, and stores
                   the new state

In a prefill scaled_dot_product_attention runs once per prompt. In decoding there are two ways:

    CUDA   FlexAttention on the pool itself: each sample's block list names its pages (`PageMask`).
           The lists are tensors that change in place, so nothing is compiled or built again as
           samples grow, come and go
    CPU    batched matrix products over row buffers (cpu.py)

Pools are allocated when the first keys come, in their type and with this rank's heads.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest

from minitrain.models.attention import apply_sinks, attention
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.flex import compiled_flex_attention
from minitrain.models.layers import rotary_frequencies
from minitrain.rollout.cpu import RowContents, attend_to_rows, write_and_attend
from minitrain.rollout.steps import (
    Chunk,
    DecodingStep,
    PromptStep,
    by_head,
    by_row,
    on_device,
    sinks_of_queries,
    split_kv,
    write,
)

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
    buffers: on the CPU, a contiguous copy of each sample's keys and values, each [rows, kv_heads,
        capacity, head_dim].
    window: how many keys a query sees; None: all.
    """

    def __init__(self, caches: "Caches", last: bool, window: int | None):
        super().__init__(caches, last)
        self.window = window
        self.pools: list[Tensor] = []
        self.buffers: list[Tensor] = []

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
        write(self.pools, step.kv_index, new)
        if isinstance(step, PromptStep):
            outs = [self._attend_to_prompt(chunk, q, channels, sinks) for chunk in step.chunks]
            # padding tokens at the row's end belong to no chunk
            return join_chunks(outs, 2, q.shape[2])
        if q.is_cuda:
            return self.attend_to_pool(q, channels, sinks)
        attend_rows = partial(attend_to_rows, step=step, window=self.window)
        return write_and_attend(
            self.gather(), step.positions, q, new, channels, step.width, sinks, attend_rows
        )

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

    def attend_to_pool(self, q: Tensor, channels: int, sinks: Tensor | None) -> Tensor:
        """Attend to the pool in a decoding step on CUDA. It holds the new keys and values already.

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

    def gather(self) -> list[Tensor]:
        """Return the row buffers, each [rows, kv_heads, capacity, head_dim].

        The pages that `step.rows.to_gather` names are copied into them first.
        """
        step = self.caches.step
        rows, capacity = self.caches.rows.shape
        # new buffers start empty: all pages are gathered again
        if not self.buffers or self.buffers[0].shape[:3:2] != (rows, capacity):
            self.buffers = [
                zeros((rows, p.shape[2], capacity, p.shape[3]), p.dtype, p.device)
                for p in self.pools
            ]
        for new_rows, pages, begin, end in step.rows.to_gather:
            for buffer, pool in zip(self.buffers, self.pools, strict=True):
                # [rows, tokens, kv_heads, head_dim]
                tokens = pool[pages].flatten(1, 2)[:, : end - begin]
                buffer[new_rows, :, begin:end] = tokens.transpose(1, 2)
        return self.buffers


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


class MambaCache(LayerCache):
    """The states of a Mamba-2 layer, one per slot.

    states: the convolution's last inputs, [slots, taps - 1, groups, channels], and the scan's
        state, fp32 [slots, groups, heads, head_dim, state].
    """

    def __init__(self, caches: "Caches", last: bool, shape):
        super().__init__(caches, last)
        self.shape = shape
        self.states: list[Tensor] = []
        # (mix, mixed, dt) of a step whose tokens may be rejected
        self.unsettled: tuple | None = None

    def mix(self, mix: Callable, mixed: Tensor, dt: Tensor) -> Tensor:
        """Run mix(mixed, dt, state=), the module's `Mamba2.mix`, on the step's tokens.

        mixed: [1, tokens, groups, channels]; dt: [1, tokens, groups, heads].
        Returns [1, tokens, groups, heads, head_dim].
        """
        step = self.caches.step
        if not self.states:
            slots = self.caches.slots
            conv = (slots, self.shape.conv - 1, *mixed.shape[2:])
            scan = (slots, *dt.shape[2:], self.shape.head_dim, self.shape.state)
            self.states = [
                zeros(conv, mixed.dtype, mixed.device),
                zeros(scan, torch.float32, mixed.device),
            ]
        if isinstance(step, DecodingStep):
            # [rows, width, groups, ...]
            mixed = mixed.unflatten(1, (-1, step.width))[0]
            dt = dt.unflatten(1, (-1, step.width))[0]
            starts = step.positions[:: step.width] == 0
            drafts = step.width > 1
            if drafts:
                self.unsettled = mix, mixed, dt
            out = self._run(mix, mixed, dt, step.slots, starts, keep=not drafts)
            return out.flatten(0, 1)[None]
        outs = []
        for chunk in step.chunks:
            # both [1], by one copy to the device
            slot, starts = on_device([[chunk.slot], [chunk.cached == 0]], mixed.device)
            tokens = slice(None), chunk.tokens
            outs.append(self._run(mix, mixed[tokens], dt[tokens], slot, starts.bool()))
        return join_chunks(outs, 1, mixed.shape[1])

    def settle(self, counts: Tensor) -> None:
        """Store the states after the first `counts` [rows] tokens of the step's rows.

        Token by token: their inputs are kept, as states after each of them would take more memory.
        """
        step = self.caches.step
        mix, mixed, dt = self.unsettled
        self.unsettled = None
        positions = step.positions.view(-1, step.width)
        for token in range(step.width):
            slots = step.slots.where(token < counts, self.caches.null_slot)
            one = slice(None), slice(token, token + 1)
            self._run(mix, mixed[one], dt[one], slots, positions[:, token] == 0)

    def _run(
        self,
        mix: Callable,
        mixed: Tensor,
        dt: Tensor,
        slots: Tensor,
        starts: Tensor,
        keep: bool = True,
    ) -> Tensor:
        """Run one sequence per row from the states in `slots`, or from zeros where it `starts`.

        mixed, dt: [rows, tokens, groups, ...]; slots, starts: [rows]. keep: store the new states.
        Returns [rows, tokens, ...].
        """
        current = tuple(
            s[slots].masked_fill_(starts.view(-1, *[1] * (s.ndim - 1)), 0) for s in self.states
        )
        # replaces the contents of `current` by the states after the last token
        out = mix(mixed, dt, state=current)
        for state, new in zip(self.states, current, strict=True) if keep else ():
            state[slots] = new
        return out


class Caches:
    """All layers' caches.

    pages, slots: how many sequences can use. One more of each, the last, is the null page and the
        null slot: padding writes there, and nothing reads them.
    layers: numbers of those that have caches; by default all.
    records: keep the experts that routers select, beside the keys and values.
    step: the forward pass that runs, set by who begins it; None before the first.
    drafts: the caches of what drafts (drafting.py), in the same pages, slots and rows.
    rows: on the CPU, what all layers' row buffers hold.
    """

    def __init__(
        self,
        config: DecoderConfig,
        pages: int,
        page_size: int,
        slots: int,
        layers: range | None = None,
        records: bool = False,
    ):
        self.records = records
        self.null_page = pages
        self.null_slot = slots
        self.pages = pages + 1
        self.page_size = page_size
        self.slots = slots + 1
        self.step: PromptStep | DecodingStep | None = None
        self.rows = RowContents(page_size, windowed=bool(config.sliding_window))
        self.computed_frequencies: dict[str, Tensor] = {}
        self.numbers = range(config.num_layers) if layers is None else layers
        self.layers = [self._layer(config, layer) for layer in self.numbers]
        self.drafts: Caches | None = None

    def add_drafts(self, config: DecoderConfig, layers: range) -> None:
        """Make `drafts` for the layers of another model, or for this one's MTP layer."""
        if layers.start and self.layers[-1]:
            # these read its output, also of a prompt's tokens
            self.layers[-1].last = False
        sizes = self.null_page, self.page_size, self.null_slot
        self.drafts = Caches(config, *sizes, layers)
        self.rows.windowed |= self.drafts.rows.windowed
        self.drafts.rows = self.rows

    def _layer(self, config: DecoderConfig, layer: int) -> LayerCache | None:
        mixer = config.parts(layer)[0]
        last = layer == self.numbers[-1]
        if mixer == "attention":
            window = config.sliding_window if config.windowed(layer) else None
            return PagedKVCache(self, last, window)
        if mixer == "mamba":
            return MambaCache(self, last, config.mamba)
        return LayerCache(self, last) if self.records else None

    def routes(self, pages: list[int], count: int) -> np.ndarray:
        """Return the recorded experts of a sequence's first tokens, int16 [count, layers x top_k]."""
        layers = [layer.routes[0] for layer in self.layers if layer is not None and layer.routes]
        index = on_device(pages[: -(-count // self.page_size)], layers[0].device)
        # [tokens, top_k] each
        parts = [routes[index].flatten(0, 1)[:count] for routes in layers]
        return torch.cat(parts, -1).cpu().numpy()

    def __getitem__(self, layer: int) -> LayerCache | None:
        return self.layers[layer - self.numbers[0]]

    def frequencies(self, *arguments) -> Tensor:
        """Return `rotary_frequencies`, fp32 [dim / 2], computed once: saves up to 15 kernels."""
        # a dict among them has no hash
        key = str(arguments)
        if key not in self.computed_frequencies:
            self.computed_frequencies[key] = rotary_frequencies(*arguments)
        return self.computed_frequencies[key]

    def copy(
        self, pages: list[tuple[int, int]], slots: list[tuple[int, int]], device: torch.device
    ) -> None:
        """Copy pages and states, each (from, to), in all layers."""
        pairs = {"pools": pages, "routes": pages, "states": slots}
        layers = self.layers + (self.drafts.layers if self.drafts else [])
        for name, copies in pairs.items():
            # a layer has one of the two, or no cache at all
            tensors = [x for layer in layers for x in getattr(layer, name, [])]
            if copies and tensors:
                source, target = on_device(copies, device).unbind(1)
                for tensor in tensors:
                    tensor[target] = tensor[source]

    def settle(self, counts: Tensor) -> None:
        """Keep the states after the first `counts` [rows] tokens of each row of the step."""
        for layer in self.layers:
            if isinstance(layer, MambaCache):
                layer.settle(counts)

    def refresh(self) -> bool:
        """Drop constants computed from the weights. Return whether there were any."""
        # the pages may be computed anew, with the same tokens
        self.rows.held = {}
        layers = [layer for layer in self.layers if layer is not None]
        stale = any(layer.constants is not None for layer in layers)
        for layer in layers:
            layer.constants = None
        if self.drafts is not None:
            stale |= self.drafts.refresh()
        return stale


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
