"""The sampler's kernels on the CPU: packed matrices, and attention over row buffers.

Packed: oneDNN multiplies few rows by a matrix in its own layout 1.3 to 2.5 times as fast. Small
matrices stay as they are: calling oneDNN costs more than their product.

Row buffers: each row of a decoding batch has a contiguous buffer of its keys and values. A sample's
pages are gathered once, when it gets a row, into a buffer that then grows with it, so that one
batched matrix product serves all rows. Samples of one prompt share its pages; this common prefix,
most of what there is to read when prompts are long, is read once for all of them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minitrain.models import cpu
from minitrain.models.attention import apply_sinks
from minitrain.rollout.kv_cache import PagedKVCache, zeros
from minitrain.rollout.scheduler import Sample
from minitrain.rollout.steps import PromptStep, by_head, by_row, sinks_of_queries

# elements below which matrices are not packed: 1 MiB
MIN_PACKED_ELEMENTS = 1 << 18
# the classes of Linears that only multiply
PLAIN_LINEARS = (nn.Linear, cpu.CpuLinear)
# tokens a group must save from being read again: with fewer, the second product costs more
MIN_SHARED_TOKENS = 512

# scaled_dot_product_attention with equal numbers of heads, which also returns the log-sum-exp;
# nothing public returns both
attend_with_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


# --- products


def can_pack(device: torch.device) -> bool:
    """Return whether matrices on `device` can be packed."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available()


def pack(weights: list[Tensor]) -> Tensor | None:
    """Return matrices [out, in] side by side, packed; None where that does not pay."""
    small = sum(weight.numel() for weight in weights) < MIN_PACKED_ELEMENTS
    if small or any(w.device.type != "cpu" or w.dtype != torch.float32 for w in weights):
        return None
    return cpu.pack(torch.cat(weights))


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear of x [..., in] with packed weights [out, in] and a bias [out]: [..., out]."""
    return torch.ops.minitrain.cpu_linear(x, weight, bias)


# --- row buffers


class Rows(NamedTuple):
    """What a decoding step reads of row buffers.

    longest: how many keys the longest sample sees, with that of the new token.
    shared, groups: in each group of rows the first `shared` tokens are the same. A group is
        (its first row, index of all its rows).
    to_gather: what the buffers lack, as (rows, int64 [rows, pages], first token, end).
    """

    longest: int
    shared: int
    groups: list[tuple[int, slice | Tensor]]
    to_gather: list[tuple[Tensor, Tensor, int, int]]

    def after_a_step(self, tokens: int = 1) -> "Rows":
        """Return what the next step reads: complete buffers, with so many tokens more."""
        return self._replace(longest=self.longest + tokens, to_gather=[])


class Held(NamedTuple):
    """What a row's buffer holds: a sample's tokens from `begin` on.

    cached: how many the sample had when steps last wrote to the row; they added some that count.
    """

    sample: Sample
    begin: int
    cached: int


class RowContents:
    """What the row buffers hold, of all layers alike; the layers have the tensors.

    windowed: some layers see only the last keys, so every row needs all of its tokens.
    shape: (rows, capacity) of the buffers, which grow as samples do.
    """

    def __init__(self, page_size: int, windowed: bool):
        self.page_size = page_size
        self.windowed = windowed
        self.shape = (0, 0)
        self.held: dict[int, Held] = {}

    def prepare(self, samples: list[Sample], rows: int, steps: int, width: int = 1) -> Rows:
        """Return what rows share and what their buffers lack, before `steps` decoding steps.

        rows: of the batch, those of padding included. width: tokens that a step writes to a row.
        """
        longest = max(sample.cached for sample in samples) + width
        height, capacity = self.shape
        needed = longest + steps * width
        if rows > height or needed > capacity:
            # new buffers are empty
            self.shape = max(height, rows), max(capacity, 2 * needed)
            self.held = {}
        shared, groups = shared_prefixes(samples, self.page_size)
        # only these hold what their group shares
        first_rows = {group[0] for group in groups}
        # (begin, end) of the missing tokens -> rows that miss them
        missing: dict[tuple[int, int], list[int]] = {}
        # of no other rows: what they hold, the last steps have not added to
        before = self.held
        self.held = {}
        for row, sample in enumerate(samples):
            begin = 0 if row in first_rows or self.windowed else shared
            held = before.get(row)
            if (
                held is None
                or held.sample is not sample
                or held.begin > begin
                or held.cached >= sample.cached
            ):
                held = Held(sample, begin, 0)
                if begin < sample.cached:
                    missing.setdefault((begin, sample.cached), []).append(row)
            self.held[row] = held._replace(cached=sample.cached)
        to_gather = []
        for (begin, end), lacking in missing.items():
            columns = slice(begin // self.page_size, -(-end // self.page_size))
            pages = torch.tensor([samples[row].pages[columns] for row in lacking])
            to_gather.append((torch.tensor(lacking), pages, begin, end))
        return Rows(
            longest, shared, [(group[0], row_index(group)) for group in groups], to_gather
        )


def shared_prefixes(samples: list[Sample], page_size: int) -> tuple[int, list[list[int]]]:
    """Return how many first tokens are common to each group of samples, and the groups' rows.

    A group is the samples of one prompt. (0, []) where reading shared tokens once gains nothing.
    """
    groups: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.pages[0], []).append(row)
    saved = len(samples) - len(groups)
    if not saved:
        return 0, []
    pages = min(
        common_pages([samples[row] for row in rows], page_size) for rows in groups.values()
    )
    shared = pages * page_size
    if shared * saved < MIN_SHARED_TOKENS * len(groups):
        return 0, []
    return shared, list(groups.values())


def common_pages(samples: list[Sample], page_size: int) -> int:
    """Return the number of full pages with which all samples begin."""
    full = min(sample.cached for sample in samples) // page_size
    for column in range(full):
        if len({sample.pages[column] for sample in samples}) > 1:
            return column
    return full


def row_index(rows: list[int]) -> slice | Tensor:
    """Return an index of these ascending rows: a slice, which copies nothing, or int64 [rows]."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows)


def of_queries(bias: Tensor, queries: int) -> Tensor:
    """Return a bias [rows, 1, width, keys] of tokens as that of `by_row`'s queries."""
    # that of one token is broadcast
    width = bias.shape[2]
    return bias if width == 1 else bias.repeat(1, 1, queries // width, 1)


def row_places(positions: Tensor, kv_heads: int, width: int) -> tuple[Tensor, ...]:
    """Return the index of new tokens in row buffers, which broadcasts to [tokens, kv_heads].

    positions: int64 [tokens], `width` of each row.
    """
    rows = torch.arange(len(positions)) // width
    return rows[:, None], torch.arange(kv_heads), positions[:, None]


def write_by_one_thread(buffers: list[Tensor], places: Tensor, new: list[Tensor]) -> None:
    """Write new keys and values [kv_heads, tokens, head_dim] to buffers [..., head_dim].

    places: int64 [tokens x kv_heads], their numbers among the buffers' vectors.
    `write` does the same. But there torch wakes all threads for more than 3,000 numbers, which takes
    up to twice as long as writing them, and far longer on busy cores.
    """
    for buffer, x in zip(buffers, new, strict=True):
        vectors = x.transpose(0, 1).reshape(-1, x.shape[2])
        buffer.view(-1, x.shape[2]).index_copy_(0, places, vectors)


def attend_to_buffers(
    buffers: list[Tensor],
    q: Tensor,
    channels: int,
    width: int,
    sinks: Tensor | None,
    attend_rows: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Attend to row buffers, which hold the new keys and values.

    buffers: keys, and values unless they are the keys' first channels, each [rows, kv_heads,
    capacity, head_dim]. q: [1, heads, rows x width, head_dim]. channels: of a value.
    width: tokens of a row.
    attend_rows: maps q, keys and values to outputs and log-sum-exps, see `RowsCache.attend_to_rows`.
    Returns [1, heads, rows x width, channels].
    """
    kv_heads = buffers[0].shape[1]
    count = q.shape[2] // width
    out, log_sum = attend_rows(
        by_row(q, kv_heads, width), buffers[0][:count], buffers[-1][:count]
    )
    if sinks is not None:
        out = apply_sinks(out, log_sum, sinks_of_queries(sinks, kv_heads, width))
    return by_head(out[..., :channels], width)


class RowsCache(PagedKVCache):
    """Keys and values in pools, and for decoding steps also in row buffers.

    buffers: a contiguous copy of each sample's keys and values, each [rows, kv_heads, capacity,
        head_dim].
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.buffers: list[Tensor] = []

    def write(self, new: list[Tensor]) -> None:
        if isinstance(self.caches.step, PromptStep):
            super().write(new)
        else:
            page, offset = self.caches.step.kv_index
            index = page[:, None], offset[:, None], torch.arange(len(new[0]))
            write_by_one_thread(self.pools, self.places("pools", self.pools[0], index), new)

    def attend_to_samples(
        self, q: Tensor, new: list[Tensor], channels: int, sinks: Tensor | None
    ) -> Tensor:
        step = self.caches.step
        buffers = self.gather()
        index = row_places(step.positions, len(new[0]), step.width)
        write_by_one_thread(buffers, self.places("rows", buffers[0], index), new)
        # [1, heads, tokens, channels]
        return attend_to_buffers(buffers, q, channels, step.width, sinks, self.attend_to_rows)

    def places(self, kind: str, buffer: Tensor, index: tuple[Tensor, ...]) -> Tensor:
        """Return an index of three dimensions as numbers, int64 [tokens x kv_heads].

        buffer: [..., head_dim], of the three dimensions. Layers with as many heads share it.
        """
        derived = self.caches.step.derived
        key = kind, buffer.shape
        if key not in derived:
            _, second, third, _ = buffer.shape
            first, middle, last = index
            derived[key] = ((first * second + middle) * third + last).flatten()
        return derived[key]

    def attend_to_rows(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to each row's own keys, and to a group's shared prefix for all its rows at once.

        q: [rows, kv_heads, queries, head_dim]; keys, values: [rows, kv_heads, capacity, head_dim].
        Returns the output, shaped as q, and its log-sum-exp, fp32 and without head_dim.
        The outputs of the two parts are weighted by their sums of exponentials.
        """
        seen = self.caches.step.rows
        shared = 0 if self.window else seen.shared
        own = slice(shared, seen.longest)
        bias = self.bias(q.shape[2])[..., own]
        out, log_sum = attend_with_lse(q, keys[:, :, own], values[:, :, own], attn_mask=bias)
        if not shared:
            return out, log_sum
        common = torch.zeros_like(out)
        sums = torch.full_like(log_sum, -torch.inf)
        for first, rows in seen.groups:
            # [1, kv_heads, rows of the group x queries, head_dim]
            queries = q[rows].transpose(0, 1).flatten(1, 2)[None]
            parts = attend_with_lse(
                queries, keys[first, :, :shared][None], values[first, :, :shared][None]
            )
            common[rows], sums[rows] = (
                part[0].unflatten(1, (-1, q.shape[2])).transpose(0, 1) for part in parts
            )
        share = torch.sigmoid(sums - log_sum)[..., None]
        return out.lerp(common, share.to(out.dtype)), torch.logaddexp(log_sum, sums)

    def bias(self, queries: int) -> Tensor:
        """Return the mask over row buffers, [rows, 1, queries, longest]: 0 for visible keys, or -inf.

        Layers with the same window share it. queries: of each row, see `by_row`; or only its tokens.
        """
        step = self.caches.step
        dtype = self.pools[0].dtype
        key = self.window, dtype, queries
        if key not in step.derived:
            # [longest] and [tokens, 1]: positions of keys and tokens
            keys = torch.arange(step.rows.longest)
            own = step.positions[:, None]
            # [tokens, longest]
            hidden = keys > own
            if self.window is not None:
                hidden = hidden | (keys <= own - self.window)
            bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
            step.derived[key] = of_queries(bias.unflatten(0, (-1, 1, step.width)), queries)
        return step.derived[key]

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
