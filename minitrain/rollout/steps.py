"""Describe one forward pass of the sampler: chunks of prompts, or one token of each sample.

Both are one row of tokens, [1, tokens], of several sequences. The layers' caches (caches.py) read
from the step which token belongs to which sequence. `kv_index` says where a token's keys and values
go: its page and its offset there, each int64 [tokens].
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from minitrain.models.attention import Mask, dense_mask


@dataclass
class Chunk:
    """`count` tokens of a prompt, which start at `first` in the row.

    cached: tokens of the sequence before them. pages: int64, those that hold all of these tokens.
    """

    first: int
    count: int
    cached: int
    pages: Tensor
    slot: int

    @property
    def tokens(self) -> slice:
        """Return where the tokens are in the row."""
        return slice(self.first, self.first + self.count)

    @property
    def end(self) -> int:
        """Return the length of the sequence up to the chunk's end."""
        return self.cached + self.count


class PromptStep:
    """Prefill: a forward pass over chunks of prompts."""

    def __init__(self, kv_index: tuple[Tensor, ...], chunks: list[Chunk]):
        self.kv_index = kv_index
        self.chunks = chunks
        self.masks: dict[tuple, Mask] = {}

    def mask(self, chunk: Chunk, window: int | None, plain: bool) -> Mask:
        """Return the mask of a chunk's queries over the keys of its sequence so far.

        plain: a causal mask needs no tensor.
        """
        if plain and not chunk.cached and not window:
            return Mask(causal=True)
        key = chunk.first, window
        if key not in self.masks:
            query = torch.arange(chunk.cached, chunk.end, device=chunk.pages.device)

            def allows(row, head, i, j):
                return (j <= query[i]) & (j > query[i] - (window or chunk.end))

            attn_mask = dense_mask(allows, 1, chunk.count, chunk.end, chunk.pages.device)
            self.masks[key] = Mask(True, attn_mask)
        return self.masks[key]


class DecodingStep:
    """Decoding: a forward pass over one token of each row, in buffers whose addresses stay fixed.

    positions: int64 [rows], of the tokens. block_table: int64 [rows, width], each sample's pages.
    slots: int64 [rows]. pool_pages: pages of the whole pool.
    On the CPU only (see cpu_attention.py), longest: tokens of the longest sample. groups: rows
    whose first `shared` tokens are the same, as (first row, index of all). to_gather: pages to copy
    into row buffers, as (rows, int64 [rows, pages], first token, end).
    """

    def __init__(
        self, positions: Tensor, block_table: Tensor, slots: Tensor, page_size: int, pool_pages: int
    ):
        self.positions = positions
        self.block_table = block_table
        self.slots = slots
        self.page_size = page_size
        self.pool_pages = pool_pages
        self.masks: dict[tuple, PageMask] = {}
        self.biases: dict[int | None, Tensor] = {}
        self.to_gather: list[tuple[Tensor, Tensor, int, int]] = []
        self.longest = 0
        self.shared = 0
        self.groups: list[tuple[int, slice | Tensor]] = []

    def begin(self) -> None:
        """Derive everything from the positions, before each forward pass, on the device alone."""
        self.column = self.positions // self.page_size
        self.page = self.block_table.gather(1, self.column[:, None])[:, 0]
        self.kv_index = self.page, self.positions % self.page_size
        for mask in self.masks.values():
            mask.update(self)
        self.biases = {}

    def page_mask(self, window: int | None, queries: int = 1) -> BlockMask:
        """Return the BlockMask over the pool, for `queries` queries of each row."""
        key = window, queries
        if key not in self.masks:
            self.masks[key] = PageMask(self, *key)
            self.masks[key].update(self)
        return self.masks[key].blocks

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the mask over row buffers, [rows, 1, 1, longest]: 0 for visible keys, else -inf."""
        if window not in self.biases:
            key = torch.arange(self.longest, device=self.positions.device)
            query = self.positions[:, None]
            hidden = key > query
            if window is not None:
                hidden = hidden | (key <= query - window)
            bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
            self.biases[window] = bias[:, None, None]
        return self.biases[window]


class PageMask:
    """A BlockMask over the pool that lists each sample's pages, from its window's start to its own
    token.

    All pages are listed as partial blocks, though most are full. Given both kinds, the kernel would
    divide the pool's length among a sample's thread blocks, and one of them would do all the work.
    queries: of each sample, which all see the same keys.
    """

    def __init__(self, step: DecodingStep, window: int | None, queries: int):
        self.window = window
        rows = len(step.positions)
        device = step.positions.device
        # torch's kernel for the CPU needs a list as long as the pool
        width = step.pool_pages if device.type == "cpu" else step.block_table.shape[1]

        def numbers(*shape):
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.count = numbers(rows, 1, 1)
        self.pages = numbers(rows, 1, 1, width)
        self.bounds = tail, end, head, start = [numbers(rows) for _ in range(4)]
        size = step.page_size

        def allows(row, _, query, key):
            page = key // size
            offset = key % size
            before_end = (page != tail[row]) | (offset < end[row])
            return before_end & ((page != head[row]) | (offset >= start[row]))

        self.blocks = BlockMask.from_kv_blocks(
            self.count,
            self.pages,
            BLOCK_SIZE=(size, size),
            mask_mod=allows,
            seq_lengths=(queries, step.pool_pages * size),
            compute_q_blocks=False,
        )

    def update(self, step: DecodingStep) -> None:
        """Bring the lists up to date in place, in few kernels: each takes longer to start than to
        run."""
        size = step.page_size
        width = step.block_table.shape[1]
        count = step.column + 1
        tail, end, head, start = self.bounds
        tail.copy_(step.page)
        end.copy_(step.kv_index[1] + 1)
        # without a window head and start stay 0: no key comes before the first
        if self.window is None:
            pages = step.block_table
        else:
            begin = (step.positions - self.window + 1).clamp(min=0)
            first = begin // size
            head.copy_(step.block_table.gather(1, first[:, None])[:, 0])
            start.copy_(begin % size)
            columns = torch.arange(width, device=begin.device) + first[:, None]
            pages = step.block_table.gather(1, columns.clamp(max=width - 1))
            count = count - first
        self.pages[:, 0, 0, :width].copy_(pages)
        self.count[:, 0, 0].copy_(count)


def split_kv(k: Tensor, v: Tensor | int) -> tuple[list[Tensor], int]:
    """Return what pools store of k and v [1, kv_heads, tokens, head_dim], and the width of a value.

    v: or the number of the keys' first channels that are the values; only keys are stored then.
    """
    if isinstance(v, int):
        return [k[0]], v
    return [k[0], v[0]], v.shape[3]


def write(pools: list[Tensor], index: tuple[Tensor, ...], new: list[Tensor]) -> None:
    """Write each x [kv_heads, tokens, head_dim] of `new` to its pool (or row buffers) at `index`.

    With several indices, not one into a view: compiled, torch 2.11 updates its inputs in place, but
    copies a view of one entirely, changes the copy, and copies it back.
    """
    for pool, x in zip(pools, new, strict=True):
        pool[index] = x.transpose(0, 1)


def on_device(numbers: list, device: torch.device) -> Tensor:
    """Return nested lists as int64 of the same shape, without waiting for the device."""
    tensor = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
