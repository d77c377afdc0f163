"""Describe one forward pass of the sampler: chunks of prompts, or the newest tokens of samples.

    PromptStep     prefill: chunks of several prompts, one after the other
    DecodingStep   decoding: the newest token of each sample, and the drafts of those after it

The model sees both as one row of tokens, [1, tokens]. The layers' caches (caches.py) read from the
step which token belongs to which sequence. `kv_index` says where each token's keys and values are
written: the page in the pool, and the offset in that page, each int64 [tokens].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from minitrain.models.attention import Mask, dense_mask

if TYPE_CHECKING:
    from minitrain.rollout.cpu import Rows


@dataclass
class Chunk:
    """Consecutive tokens of a prompt that are computed in one forward pass.

    first, count: where they start in the row of tokens, and how many they are.
    cached: how many tokens of the sequence come before them; the caches hold these already.
    pages: int64 [pages], the sequence's pages up to the chunk's end.
    slot: where the sequence's recurrent states are.
    """

    first: int
    count: int
    cached: int
    pages: Tensor
    slot: int

    @property
    def tokens(self) -> slice:
        """Return the slice of the row that holds the tokens."""
        return slice(self.first, self.first + self.count)

    @property
    def end(self) -> int:
        """Return the length of the sequence up to the chunk's end."""
        return self.cached + self.count


class PromptStep:
    """Prefill: a forward pass over chunks of prompts.

    kv_index: (pages, offsets in them) of all tokens, each int64 [tokens].
    """

    def __init__(self, kv_index: tuple[Tensor, ...], chunks: list[Chunk]):
        self.kv_index = kv_index
        self.chunks = chunks
        # layers with the same window share a mask
        self.masks: dict[tuple, Mask] = {}

    def mask(self, chunk: Chunk, window: int | None, plain: bool) -> Mask:
        """Return the mask of a chunk's queries over its sequence's keys, [1, 1, count, end].

        plain: return no mask tensor where the kernel's own causal mask suffices.
        """
        # a first chunk without a window: query i sees keys 0 to i
        if plain and not chunk.cached and not window:
            return Mask(causal=True)
        key = chunk.first, window
        if key not in self.masks:
            # [count]: positions of the queries in their sequence
            query = torch.arange(chunk.cached, chunk.end, device=chunk.pages.device)

            def allows(row, head, i, j):
                # without a window the second condition always holds
                return (j <= query[i]) & (j > query[i] - (window or chunk.end))

            attn_mask = dense_mask(allows, 1, chunk.count, chunk.end, chunk.pages.device)
            self.masks[key] = Mask(True, attn_mask)
        return self.masks[key]


class DecodingStep:
    """What a decoding step reads: `width` tokens of each row. A row is a sample, or padding.

    A `DecodingBatch` keeps its own; `begin` renews it for every forward pass.

    The tensors are buffers whose addresses stay fixed, so that CUDA graphs can be replayed.
    positions: int64 [rows x width], each token's index in its sequence; a row's are consecutive.
    block_table: int64 [rows, columns], each sample's pages in order; beyond them, the null page.
    slots: int64 [rows], where each sample's recurrent states are.
    pool_pages: the number of pages of the whole pool.
    rows: on the CPU, what its caches read of row buffers (cpu.py).
    derived: what layers of one kind have computed for this step, for the others.
    """

    def __init__(
        self,
        positions: Tensor,
        block_table: Tensor,
        slots: Tensor,
        page_size: int,
        pool_pages: int,
    ):
        self.positions = positions
        self.block_table = block_table
        self.slots = slots
        self.width = len(positions) // len(slots)
        self.page_size = page_size
        self.pool_pages = pool_pages
        # (window, queries) -> mask; made once, then updated in place
        self.masks: dict[tuple, PageMask] = {}
        self.derived: dict[tuple, Tensor] = {}
        self.rows: Rows | None = None

    def begin(self) -> None:
        """Derive pages, offsets and masks from the positions, before each forward pass.

        The host reads nothing, so a CUDA graph can hold this.
        """
        # [tokens]: the column of the block table, and there the page, that a new token goes to
        self.column = self.positions // self.page_size
        self.page = self.block_table.gather(1, self.column.view(-1, self.width)).flatten()
        self.kv_index = self.page, self.positions % self.page_size
        for mask in self.masks.values():
            mask.update(self)
        self.derived = {}

    def page_mask(self, window: int | None, queries: int = 1) -> BlockMask:
        """Return the BlockMask over the pool.

        queries: of each row; on CUDA its tokens' query heads that share a key head (kv_cache.py).
        """
        key = window, queries
        if key not in self.masks:
            self.masks[key] = (PageMask if self.width == 1 else DraftMask)(self, *key)
            self.masks[key].update(self)
        return self.masks[key].blocks


class PageMask:
    """A BlockMask over the pool: the list of each sample's pages that its token attends to.

    They are those from the window's start to the token itself. All are listed as partial blocks,
    though most are full. Then the kernel divides a sample's list evenly among its thread blocks.
    With a second list, of full blocks, each would take a share of the pool's length instead (torch
    2.13): far more than one sample has, so the first thread block would do all the work.
    queries: how many each sample has, of one token: all of them see the same keys.
    """

    def __init__(self, step: DecodingStep, window: int | None, queries: int):
        self.window = window
        rows = len(step.slots)
        device = step.positions.device
        # torch's kernel for the CPU needs a list as long as the pool
        columns = step.pool_pages if device.type == "cpu" else step.block_table.shape[1]

        def zeros(*shape):
            return torch.zeros(shape, dtype=torch.int32, device=device)

        # how many pages each sample attends to, and which
        self.count = zeros(rows, 1, 1)
        self.pages = zeros(rows, 1, 1, columns)
        size = step.page_size
        self.blocks = BlockMask.from_kv_blocks(
            self.count,
            self.pages,
            BLOCK_SIZE=(size, size),
            mask_mod=self.rule(step, zeros),
            seq_lengths=(queries, step.pool_pages * size),
            compute_q_blocks=False,
        )

    def rule(self, step: DecodingStep, zeros: Callable[..., Tensor]) -> Callable:
        """Return which keys of the listed pages a query sees, from tensors that `zeros` makes."""
        # each [rows]: the last page and where its keys end, the first page and where its keys start
        self.bounds = tail, end, head, start = [zeros(len(step.slots)) for _ in range(4)]
        size = step.page_size

        def allows(row, _, query, key):
            # `key` counts over the whole pool; the list of pages has left out other samples'
            page = key // size
            offset = key % size
            before_end = (page != tail[row]) | (offset < end[row])
            return before_end & ((page != head[row]) | (offset >= start[row]))

        return allows

    def update(self, step: DecodingStep) -> None:
        """Update the lists in place, by few kernels: each takes longer to launch than to run."""
        size = step.page_size
        columns = step.block_table.shape[1]
        # [rows]: pages up to the last token's own
        count = step.column[step.width - 1 :: step.width] + 1
        # without a window all pages are listed: no key comes before the first
        pages = step.block_table
        begin = None
        if self.window is not None:
            # [rows]: the first visible key, and its page's column in the block table
            begin = (step.positions[:: step.width] - self.window + 1).clamp(min=0)
            first = begin // size
            # move the block table left, so that the list begins with the first visible page
            shifted = torch.arange(columns, device=begin.device) + first[:, None]
            pages = step.block_table.gather(1, shifted.clamp(max=columns - 1))
            count = count - first
        self.pages[:, 0, 0, :columns].copy_(pages)
        self.count[:, 0, 0].copy_(count)
        self.update_rule(step, begin)

    def update_rule(self, step: DecodingStep, begin: Tensor | None) -> None:
        """Update what `rule` reads. begin: int64 [rows], the first visible key; None: of no window."""
        tail, end, head, start = self.bounds
        tail.copy_(step.page)
        end.copy_(step.kv_index[1] + 1)
        # head and start stay 0 without a window
        if begin is not None:
            head.copy_(self.pages[:, 0, 0, 0])
            start.copy_(begin % step.page_size)


class DraftMask(PageMask):
    """A BlockMask for rows of several tokens, of which later ones see more keys.

    All samples that share a page have it in the same column of their block tables: it tells the
    positions of the page's keys.
    queries: how many each sample has; the token is their number modulo the step's width.
    """

    def rule(self, step: DecodingStep, zeros: Callable[..., Tensor]) -> Callable:
        # [pages of the pool]
        self.columns = columns = zeros(step.pool_pages)
        positions = step.positions.view(-1, step.width)
        size = step.page_size
        width = step.width
        window = self.window or step.pool_pages * size

        def allows(row, _, query, key):
            position = columns[key // size] * size + key % size
            own = positions[row, query % width]
            return (position <= own) & (position > own - window)

        return allows

    def update_rule(self, step: DecodingStep, begin: Tensor | None) -> None:
        table = step.block_table
        columns = torch.arange(table.shape[1], dtype=torch.int32, device=table.device)
        self.columns[table] = columns.expand_as(table)


def split_kv(k: Tensor, v: Tensor | int) -> tuple[list[Tensor], int]:
    """Return the tensors that pools store, [kv_heads, tokens, head_dim], and a value's channels.

    k, v: [1, kv_heads, tokens, head_dim]. For latent attention v is an int instead: the number of
    the keys' first channels that are the values; only keys are stored.
    """
    if isinstance(v, int):
        return [k[0]], v
    return [k[0], v[0]], v.shape[3]


def by_row(q: Tensor, kv_heads: int, width: int) -> Tensor:
    """Return q [1, heads, rows x width, head_dim] as [rows, kv_heads, queries, head_dim].

    Heads that share keys, and the tokens of a row, are queries of one head.
    """
    tokens = q.reshape(kv_heads, -1, q.shape[2] // width, width, q.shape[3])
    return tokens.permute(2, 0, 1, 3, 4).flatten(2, 3)


def by_head(out: Tensor, width: int) -> Tensor:
    """Undo `by_row`, of out [rows, kv_heads, queries, channels]."""
    tokens = out.unflatten(2, (-1, width)).permute(1, 2, 0, 3, 4)
    return tokens.reshape(1, -1, len(out) * width, out.shape[3])


def sinks_of_queries(sinks: Tensor, kv_heads: int, width: int) -> Tensor:
    """Return the sinks [heads] of `by_row`'s queries, [kv_heads, queries]."""
    return sinks.view(kv_heads, -1).repeat_interleave(width, 1)


def write(pools: list[Tensor], index: tuple[Tensor, ...], new: list[Tensor]) -> None:
    """Write new keys and values to pools, or to row buffers.

    pools: [pages, page_size, kv_heads, head_dim] with index (pages, offsets), each [tokens].
    new: for each pool [kv_heads, tokens, head_dim].
    The index is two tensors, not one into pool.flatten(0, 1): torch 2.11's compiler writes to an
    input in place, but it copies a view of one entirely, changes the copy, and copies it back.
    """
    for pool, x in zip(pools, new, strict=True):
        pool[index] = x.transpose(0, 1)


def on_device(numbers: list, device: torch.device) -> Tensor:
    """Return `numbers` [...], nested lists, as int64 [...]; the host does not wait for the copy."""
    # only from pinned memory is the copy asynchronous
    tensor = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
