"""What each layer keeps of earlier tokens: pages of keys and values, pages of latents, or a state
per sample.

A forward pass of the sampler is one row of tokens, [1, tokens], of several sequences: chunks of
some prompts (`PromptStep`), or one token of each decoding sample (`DecodingStep`). It is the same
for all layers, and the model's modules ask their layer's cache in place of a mask.

    Keys     attention of any kind: `attend` writes the new keys and values to their places in the pool, and attends to
             all that the sequence has there; latent attention has one "head", whose first channels
             are the values
    States   Mamba-2: `mix` runs the module's own scan from each sequence's state, and stores what it leaves

Prompts are attended to one by one with scaled_dot_product_attention. For decoding samples there are
two ways:

    CUDA     FlexAttention on the pool itself: each sample's block list names its pages (`PageMask`). The lists are
             tensors that change in place, so nothing is compiled or built again as samples grow,
             come and go
    CPU      each sample's pages are gathered once, when it gets a row, into a buffer that then grows with it, and one
             batched matrix product serves all rows; what the samples of a long prompt have in
             common, which is most of what there is to read, is read once for all of them

Pools are allocated when the first keys come, in their type and with this rank's heads.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from minitrain.models.attention import (
    Mask,
    apply_sinks,
    attention,
    compiled_flex_attention,
    dense_mask,
)
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.layers import rotary_frequencies
from minitrain.rollout.scheduler import Sample

# cuDNN, which is faster, makes a plan for every new length of a prompt: half a second for a few
# milliseconds' work.
FOR_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Latents have 576 channels, which the kernel pads to 1024: its usual tiles would not fit into
# shared memory.
SMALL_TILES = {"BLOCK_M": 16, "BLOCK_N": 16, "num_stages": 1, "num_warps": 4}
# Loads that run ahead of the products, on GPUs with room for them: torch means to do so, but
# overwrites it (2.11-2.13).
LOADS_AHEAD = {"num_stages": 3}
HAVE_ROOM = [(9, 0), (10, 0), (10, 3)]
# Smaller tiles let four thread blocks share a multiprocessor of an H200: with 64 rows, 8 kv heads
# and 1,152 tokens 4.1 TB/s in place of 3.2; with 192 rows as before.
MANY_BLOCKS = LOADS_AHEAD | {"BLOCK_N": 32}


@dataclass
class Chunk:
    """A chunk of a prompt: `count` tokens, in the row from `first` on, of a sequence with `earlier`
    ones in `pages`.
    """

    first: int
    count: int
    earlier: int
    pages: Tensor
    slot: int

    @property
    def tokens(self) -> slice:
        """Where its tokens are in the row."""
        return slice(self.first, self.first + self.count)

    @property
    def end(self) -> int:
        """How many tokens of the sequence there are with it."""
        return self.earlier + self.count


class PromptStep:
    """A forward pass over chunks of prompts. places: two of int64 [tokens], the page in which each
    token's keys go, and where in it."""

    def __init__(self, places: tuple[Tensor, ...], chunks: list[Chunk]):
        self.places = places
        self.chunks = chunks
        self.masks: dict[tuple, Mask] = {}

    def mask(self, chunk: Chunk, window: int | None, plain: bool) -> Mask:
        """What the chunk's tokens see of their sequence, theirs included. plain: causal may stay
        without pairs.
        """
        if plain and not chunk.earlier and not window:
            return Mask(causal=True)
        key = chunk.first, window
        if key not in self.masks:
            query = torch.arange(chunk.earlier, chunk.end, device=chunk.pages.device)

            def allows(row, head, i, j):
                return (j <= query[i]) & (j > query[i] - (window or chunk.end))

            pairs = dense_mask(allows, 1, chunk.count, chunk.end, chunk.pages.device)
            self.masks[key] = Mask(True, pairs)
        return self.masks[key]


class DecodingStep:
    """A forward pass over one token of each of `rows` samples, in buffers that stay where they are.

    positions: int64 [rows], of the tokens. table: int64 [rows, width], each sample's pages. slots:
    int64 [rows]. On the CPU only, gathered: pages to be copied into its buffers, as (rows, int64
    [rows, pages], first token, end).
    longest: tokens of the longest sample, known on the host. groups: rows whose first `shared`
    tokens are the same, as (the first row, what indexes them all); a sample that shares nothing is
    a group of its own.
    """

    def __init__(
        self, positions: Tensor, table: Tensor, slots: Tensor, page_size: int, pool_pages: int
    ):
        self.positions = positions
        self.table = table
        self.slots = slots
        self.page_size = page_size
        self.pool_pages = pool_pages
        self.masks: dict[tuple, PageMask] = {}
        self.gathered: list[tuple[Tensor, Tensor, int, int]] = []
        self.longest = self.shared = 0
        self.groups: list[tuple[int, slice | Tensor]] = []

    def begin(self) -> None:
        """From the positions, where everything is. To be called before each forward pass; runs on
        the device alone.
        """
        self.column = self.positions // self.page_size
        self.page = self.table.gather(1, self.column[:, None])[:, 0]
        self.places = self.page, self.positions % self.page_size
        for mask in self.masks.values():
            mask.update(self)
        self.biases: dict[int | None, Tensor] = {}

    def page_mask(self, window: int | None, queries: int = 1) -> BlockMask:
        key = window, queries
        if key not in self.masks:
            self.masks[key] = PageMask(self, *key)
            self.masks[key].update(self)
        return self.masks[key].blocks

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[rows, 1, 1, longest]: 0 where a sample's token sees one of its own, else minus
        infinity.
        """
        if window not in self.biases:
            place = torch.arange(self.longest, device=self.positions.device)
            own = self.positions[:, None]
            hidden = place > own if window is None else (place > own) | (place <= own - window)
            bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
            self.biases[window] = bias[:, None, None]
        return self.biases[window]


class PageMask:
    """A BlockMask over the pool whose list is a sample's pages, from where its window begins to its
    own token.

    All pages are listed as partial blocks, though most are full: given both kinds, the kernel
    divides the pool's length among a sample's thread blocks, and not the sample's own, so that one
    of them would do all the work.
    queries: of each sample, which all see the same.
    """

    def __init__(self, step: DecodingStep, window: int | None, queries: int):
        self.window = window
        rows = len(step.positions)
        device = step.positions.device
        # torch's kernel for the CPU wants a list as long as the pool
        width = step.pool_pages if device.type == "cpu" else step.table.shape[1]

        def numbers(*shape):
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.count = numbers(rows, 1, 1)
        self.pages = numbers(rows, 1, 1, width)
        self.bounds = tail, end, head, start = [numbers(rows) for _ in range(4)]
        size = step.page_size

        def allows(row, _, query, key):
            page = key // size
            offset = key % size
            return ((page != tail[row]) | (offset < end[row])) & (
                (page != head[row]) | (offset >= start[row])
            )

        self.blocks = BlockMask.from_kv_blocks(
            self.count,
            self.pages,
            BLOCK_SIZE=(size, size),
            mask_mod=allows,
            seq_lengths=(queries, step.pool_pages * size),
            compute_q_blocks=False,
        )

    def update(self, step: DecodingStep) -> None:
        """In few operations: each is a kernel of every step, which starts longer than it runs."""
        size = step.page_size
        width = step.table.shape[1]
        count = step.column + 1
        tail, end, head, start = self.bounds
        tail.copy_(step.page)
        end.copy_(step.places[1] + 1)
        # head and start stay 0: no key comes before the first
        if self.window is None:
            table = step.table
        else:
            begin = (step.positions - self.window + 1).clamp(min=0)
            first = begin // size
            head.copy_(step.table.gather(1, first[:, None])[:, 0])
            start.copy_(begin % size)
            columns = (torch.arange(width, device=begin.device) + first[:, None]).clamp(
                max=width - 1
            )
            table = step.table.gather(1, columns)
            count = count - first
        self.pages[:, 0, 0, :width].copy_(table)
        self.count[:, 0, 0].copy_(count)


class Layer:
    """What all kinds of layers have: constants computed from the weights, which are kept until the
    weights change.
    """

    def __init__(self, caches: "Caches", last: bool):
        # in a cycle, pools would outlive `Sampler.free`
        self.caches = weakref.proxy(caches)
        self.last = last
        self.constants = None

    @property
    def output_unused(self) -> bool:
        """A prompt's step only fills the caches: once the last layer has filled its own, its MLP
        would feed nothing.
        """
        return self.last and isinstance(self.caches.step, PromptStep)

    def once(self, make: Callable):
        if self.constants is None:
            self.constants = make()
        return self.constants


class Keys(Layer):
    """Pages of keys and values: [pages, page_size, kv_heads, head_dim]."""

    def __init__(self, caches: "Caches", last: bool, window: int | None):
        super().__init__(caches, last)
        self.window = window
        # keys, and values if they are not part of the keys
        self.pools: list[Tensor] = []
        # the same, gathered: [rows, kv_heads, capacity, head_dim]
        self.rows: list[Tensor] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor | int, sinks: Tensor | None = None) -> Tensor:
        """As models/attention.py's, of tokens as the running step says: [1, heads, tokens,
        head_dim].

        v: the values, or how many of the keys' first channels they are.
        """
        step = self.caches.step
        new = [k[0]] if isinstance(v, int) else [k[0], v[0]]
        if not self.pools:
            shape = self.caches.pages, self.caches.page_size
            self.pools = [zeros((*shape, x.shape[0], x.shape[2]), x.dtype, x.device) for x in new]
        write(self.pools, step.places, new)
        if isinstance(step, PromptStep):
            outs = [self._attend_to_prompt(chunk, q, new, v, sinks) for chunk in step.chunks]
            return padded(outs, 2, q.shape[2])
        if q.is_cuda:
            return self.attend_to_pool(q, v, sinks)
        attend = partial(attend_to_rows, step=step, window=self.window)
        return write_and_attend(self.gather(), step.positions, q, new, v, sinks, attend)

    def _attend_to_prompt(
        self, chunk: Chunk, q: Tensor, new: list[Tensor], v: Tensor | int, sinks
    ) -> Tensor:
        if chunk.earlier:
            seen = [
                pool[chunk.pages].flatten(0, 1)[: chunk.end].transpose(0, 1) for pool in self.pools
            ]
        else:
            seen = [x[:, chunk.tokens] for x in new]
        keys = seen[0][None]
        values = keys[..., :v] if isinstance(v, int) else seen[1][None]
        # with sinks always pairs: the kernel for plain masks would be compiled for every length
        mask = self.caches.step.mask(chunk, self.window, plain=sinks is None)
        with sdpa_kernel(FOR_ANY_LENGTH) if q.is_cuda else nullcontext():
            return attention(q[:, :, chunk.tokens], keys, values, mask, sinks)

    def attend_to_pool(self, q: Tensor, v: Tensor | int | None, sinks: Tensor | None) -> Tensor:
        """As `attend` in a step of decoding on CUDA, once the new keys and values are in the
        pool.
        """
        # [1, kv_heads, pool, head_dim]
        keys = self.pools[0].flatten(0, 1).transpose(0, 1)[None]
        values = (
            keys[..., :v]
            if isinstance(v, int)
            else self.pools[1].flatten(0, 1).transpose(0, 1)[None]
        )
        # heads that share keys as queries of one: of shared ones the decoding kernel takes 1, 2, 4,
        # 8, ... alone [rows, kv_heads, queries, head_dim]
        q = q[0].transpose(0, 1).unflatten(1, (keys.shape[1], -1))
        blocks = self.caches.step.page_mask(self.window, q.shape[2])
        out, aux = compiled_flex_attention()(
            q,
            keys,
            values,
            block_mask=blocks,
            return_aux=AuxRequest(lse=sinks is not None),
            kernel_options=decoding_options(keys, values.shape[3], len(q)),
        )
        if sinks is not None:
            out = apply_sinks(out, aux.lse, sinks.view(keys.shape[1], -1))
        return out.flatten(1, 2).transpose(0, 1)[None]

    def gather(self) -> list[Tensor]:
        """The buffers, brought up to date: larger if they must be, with the pages of samples that
        are new in a row.
        """
        step = self.caches.step
        shape = self.caches.buffer_shape
        if not self.rows or self.rows[0].shape[0] != shape[0] or self.rows[0].shape[2] != shape[1]:
            self.rows = [
                zeros((shape[0], p.shape[2], shape[1], p.shape[3]), p.dtype, p.device)
                for p in self.pools
            ]
        for fresh, pages, first, end in step.gathered:
            for buffer, pool in zip(self.rows, self.pools, strict=True):
                buffer[fresh, :, first:end] = (
                    pool[pages].flatten(1, 2)[:, : end - first].transpose(1, 2)
                )
        return self.rows


def padded(outs: list[Tensor], dim: int, length: int) -> Tensor:
    """Join the outputs of chunks, with zeros for padding tokens behind them. A single one is not
    copied.
    """
    missing = length - sum(out.shape[dim] for out in outs)
    if missing:
        shape = list(outs[0].shape)
        shape[dim] = missing
        outs = [*outs, outs[0].new_zeros(shape)]
    return torch.cat(outs, dim) if len(outs) > 1 else outs[0]


def decoding_options(keys: Tensor, width: int, rows: int) -> dict | None:
    """Return the options of FlexAttention's decoding kernel.

    keys: [1, kv_heads, pool, head_dim]; width: channels of a value; rows: samples.
    """
    if width > 256:
        return SMALL_TILES
    if not keys.is_cuda or width * keys.itemsize > 256:
        return None
    capability = torch.cuda.get_device_capability(keys.device)
    if capability == (9, 0) and width * keys.itemsize == 256 and rows * keys.shape[1] >= 128:
        return MANY_BLOCKS
    return LOADS_AHEAD if capability in HAVE_ROOM else None


def write(pools: list[Tensor], places: tuple[Tensor, ...], new: list[Tensor]) -> None:
    """Put the tokens of each x [kv_heads, tokens, head_dim] where `places` say: in a pool, or a
    row's buffer.

    By several indices, not by one into a view: compiled, torch 2.11 changes in place what it is
    given, but of a view of that it copies all, changes the copy, and copies it back.
    """
    for pool, x in zip(pools, new, strict=True):
        pool[places] = x.transpose(0, 1)


def write_and_attend(
    buffers: list[Tensor],
    positions: Tensor,
    q: Tensor,
    new: list[Tensor],
    v: Tensor | int,
    sinks: Tensor | None,
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """`Keys.attend` in the CPU's buffers, on tensors alone. attend: see `attend_to_rows`."""
    rows = q.shape[2]
    heads = new[0].shape[0]
    write(buffers, (torch.arange(rows)[:, None], torch.arange(heads), positions[:, None]), new)
    keys = buffers[0][:rows]
    values = keys if isinstance(v, int) else buffers[1][:rows]
    # heads that share keys are a row's queries
    q = q[0].transpose(0, 1).reshape(rows, heads, -1, q.shape[3])
    out, log_sum = attend(q, keys, values)
    if sinks is not None:
        out = apply_sinks(out, log_sum, sinks.view(heads, -1))
    width = v if isinstance(v, int) else v.shape[3]
    return out[..., :width].flatten(1, 2).transpose(0, 1)[None]


def attend_to_rows(
    q: Tensor, keys: Tensor, values: Tensor, step: DecodingStep, window: int | None
) -> tuple[Tensor, Tensor]:
    """What each row gets from its own tokens, and the logarithm of the sum of its exponentials.

    q: [rows, kv_heads, queries, head_dim]; keys, values: [rows, kv_heads, capacity, head_dim].
    Returns the shapes of q and, in fp32, of q without head_dim. What the rows of a group have in
    common is attended to apart, all of their queries at once; the two parts are then weighted by
    their sums.
    """
    shared = 0 if window else step.shared
    own = slice(shared, step.longest)
    out, log_sum = attend(
        q, keys[:, :, own], values[:, :, own], step.bias(window, q.dtype)[..., own]
    )
    if not shared:
        return out, log_sum
    common = torch.zeros_like(out)
    sums = torch.full_like(log_sum, -torch.inf)
    for first, rows in step.groups:
        queries = q[rows].transpose(0, 1).flatten(1, 2)[None]
        parts = attend(queries, keys[first, :, :shared][None], values[first, :, :shared][None])
        common[rows], sums[rows] = (
            part[0].unflatten(1, (-1, q.shape[2])).transpose(0, 1) for part in parts
        )
    share = torch.sigmoid(sums - log_sum)[..., None]
    return out.lerp(common, share.to(out.dtype)), torch.logaddexp(log_sum, sums)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """scaled_dot_product_attention with equal heads, and its logarithm of the sum of exponentials,
    on the CPU.
    """
    # nothing public returns both
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, keys, values, attn_mask=bias
    )


class States(Layer):
    """Mamba-2's: the convolution's last inputs [slots, taps - 1, groups, channels], the scan's
    [slots, groups, ...].
    """

    def __init__(self, caches: "Caches", last: bool, shape):
        super().__init__(caches, last)
        self.shape = shape
        self.states: list[Tensor] = []

    def mix(self, mix: Callable, mixed: Tensor, dt: Tensor) -> Tensor:
        """mix(mixed, dt, state=), see models/mamba.py, of tokens [1, tokens, groups, ...] as the
        running step says.
        """
        if not self.states:
            self._allocate(mixed, dt)
        step = self.caches.step
        if isinstance(step, DecodingStep):
            mixed = mixed.transpose(0, 1)
            dt = dt.transpose(0, 1)
            begins = step.positions == 0
            return self._run(mix, mixed, dt, step.slots, begins).transpose(0, 1)
        outs = [self._run_chunk(mix, mixed, dt, chunk) for chunk in step.chunks]
        return padded(outs, 1, mixed.shape[1])

    def _run_chunk(self, mix: Callable, mixed: Tensor, dt: Tensor, chunk: Chunk) -> Tensor:
        slot, begins = on_device([[chunk.slot], [chunk.earlier == 0]], mixed.device)
        return self._run(mix, mixed[:, chunk.tokens], dt[:, chunk.tokens], slot, begins.bool())

    def _run(
        self, mix: Callable, mixed: Tensor, dt: Tensor, slots: Tensor, begins: Tensor
    ) -> Tensor:
        """Sequences in rows, from the states in their slots; from nothing where they begin, bool
        [rows].
        """
        current = tuple(
            s[slots].masked_fill_(begins.view(-1, *[1] * (s.ndim - 1)), 0) for s in self.states
        )
        out = mix(mixed, dt, state=current)
        for state, new in zip(self.states, current, strict=True):
            state[slots] = new
        return out

    def _allocate(self, mixed: Tensor, dt: Tensor) -> None:
        shape, (groups, heads), slots = self.shape, dt.shape[2:], self.caches.slots
        conv = zeros((slots, shape.conv - 1, *mixed.shape[2:]), mixed.dtype, mixed.device)
        scan = zeros(
            (slots, groups, heads, shape.head_dim, shape.state), torch.float32, mixed.device
        )
        self.states = [conv, scan]


class Held(NamedTuple):
    """What a row of the CPU's buffers holds: the sample's tokens from `begin` to before `end`."""

    sample: Sample
    begin: int
    end: int


class Caches:
    """By layer. Besides `pages` and `slots` there are a null page and a null slot, to which padding
    rows and tokens write, and which nobody reads."""

    def __init__(self, config: DecoderConfig, pages: int, page_size: int, slots: int):
        self.null_page = pages
        self.null_slot = slots
        self.pages = pages + 1
        self.page_size = page_size
        self.slots = slots + 1
        self.step: PromptStep | DecodingStep | None = None
        # rows and tokens of the CPU's buffers
        self.buffer_shape = (0, 0)
        self.rows_held: dict[int, Held] = {}
        self.computed_frequencies: Tensor | None = None
        self.layers = [self._layer(config, layer) for layer in range(config.num_layers)]

    def _layer(self, config: DecoderConfig, layer: int) -> Layer | None:
        mixer = config.parts(layer)[0]
        last = layer == config.num_layers - 1
        if mixer == "attention":
            return Keys(self, last, config.sliding_window if config.windowed(layer) else None)
        return States(self, last, config.mamba) if mixer == "mamba" else None

    def __getitem__(self, layer: int) -> Layer | None:
        return self.layers[layer]

    def frequencies(self, *shape) -> Tensor:
        """`rotary_frequencies` of the model, computed once: in each step they would be up to 15
        kernels.
        """
        if self.computed_frequencies is None:
            self.computed_frequencies = rotary_frequencies(*shape)
        return self.computed_frequencies

    def copy(
        self, pages: list[tuple[int, int]], slots: list[tuple[int, int]], device: torch.device
    ) -> None:
        """Copy pages and states, each (from, to), in all layers."""
        pools = [pool for layer in self.layers if isinstance(layer, Keys) for pool in layer.pools]
        states = [
            state for layer in self.layers if isinstance(layer, States) for state in layer.states
        ]
        for pairs, tensors in ((pages, pools), (slots, states)):
            if pairs:
                source, target = on_device(pairs, device).unbind(1)
                for tensor in tensors:
                    tensor[target] = tensor[source]

    def refresh(self) -> bool:
        """The weights have changed. Returns whether any layer had constants made of them."""
        stale = [
            layer for layer in self.layers if layer is not None and layer.constants is not None
        ]
        for layer in stale:
            layer.constants = None
        return bool(stale)


def on_device(numbers: list, device: torch.device) -> Tensor:
    """int64, without waiting for the device, which may still be busy with what was asked of it
    before.
    """
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda").to(
        device, non_blocking=True
    )


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros, whose memory on the CPU is not touched, and so not taken, before it is used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
