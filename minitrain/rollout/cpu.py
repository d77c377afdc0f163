"""Decoding attention on the CPU: each row has a contiguous buffer of its keys and values.

A sample's pages are gathered once, when it gets a row, into a buffer that then grows with it, so
that one batched matrix product serves all rows. Samples of one prompt share its pages; this common
prefix, most of what there is to read when prompts are long, is read once for all of them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from minitrain.models.attention import apply_sinks
from minitrain.rollout.scheduler import Sample
from minitrain.rollout.steps import DecodingStep, write

# tokens a group must save from being read again: with fewer, the second product costs more
MIN_SHARED_TOKENS = 512

# scaled_dot_product_attention with equal numbers of heads, which also returns the log-sum-exp;
# nothing public returns both
attend_with_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class RowContents(NamedTuple):
    """The contents of a row's buffer: a sample's tokens from `begin` to before `end`."""

    sample: Sample
    begin: int
    end: int


def prepare_rows(caches, step: DecodingStep, samples: list[Sample], steps: int) -> None:
    """Find what rows share and what their buffers lack, before `steps` decoding steps."""
    step.longest = max(sample.cached for sample in samples) + 1
    rows = len(step.positions)
    height, width = caches.buffer_shape
    if rows > height or step.longest + steps > width:
        caches.buffer_shape = max(height, rows), max(width, 2 * (step.longest + steps))
        caches.row_contents = {}
    step.shared, groups = shared_prefixes(samples, caches.page_size)
    step.groups = [(group[0], row_index(group)) for group in groups]
    # only these hold what their group shares
    first_rows = {group[0] for group in groups}
    # (begin, end) of the missing tokens -> rows that miss them
    missing: dict[tuple[int, int], list[int]] = {}
    for row, sample in enumerate(samples):
        begin = 0 if row in first_rows or caches.windowed else step.shared
        held = caches.row_contents.get(row)
        if (
            held is None
            or held.sample is not sample
            or held.begin > begin
            or held.end != sample.cached
        ):
            held = RowContents(sample, begin, sample.cached)
            if begin < sample.cached:
                missing.setdefault((begin, sample.cached), []).append(row)
        caches.row_contents[row] = held._replace(end=sample.cached + steps)
    for row in range(len(samples), rows):
        # padding rows write there
        caches.row_contents.pop(row, None)
    step.to_gather = []
    for (begin, end), lacking in missing.items():
        columns = slice(begin // caches.page_size, -(-end // caches.page_size))
        pages = torch.tensor([samples[row].pages[columns] for row in lacking])
        step.to_gather.append((torch.tensor(lacking), pages, begin, end))


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


def write_and_attend(
    buffers: list[Tensor],
    positions: Tensor,
    q: Tensor,
    new: list[Tensor],
    width: int,
    sinks: Tensor | None,
    attend_rows: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Write new keys and values to the row buffers and attend to them.

    buffers: keys, and values unless they are the keys' first channels, each [rows, kv_heads,
    capacity, head_dim]. positions: int64 [rows]. q: [1, heads, rows, head_dim].
    new: for each buffer [kv_heads, rows, head_dim]. width: channels of a value.
    attend_rows: maps q, keys and values to outputs and log-sum-exps, see `attend_to_rows`.
    Returns [1, heads, rows, width].
    """
    rows = q.shape[2]
    kv_heads = new[0].shape[0]
    index = torch.arange(rows)[:, None], torch.arange(kv_heads), positions[:, None]
    write(buffers, index, new)
    # [rows, kv_heads, queries, head_dim]: heads that share keys are one row's queries
    q = q[0].transpose(0, 1).reshape(rows, kv_heads, -1, q.shape[3])
    out, log_sum = attend_rows(q, buffers[0][:rows], buffers[-1][:rows])
    if sinks is not None:
        out = apply_sinks(out, log_sum, sinks.view(kv_heads, -1))
    return out[..., :width].flatten(1, 2).transpose(0, 1)[None]


def attend_to_rows(
    q: Tensor, keys: Tensor, values: Tensor, step: DecodingStep, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attend to each row's own keys, and to a group's shared prefix for all its rows at once.

    q: [rows, kv_heads, queries, head_dim]; keys, values: [rows, kv_heads, capacity, head_dim].
    Returns the output, shaped as q, and its log-sum-exp, fp32 and without head_dim.
    The outputs of the two parts are weighted by their sums of exponentials.
    """
    shared = 0 if window else step.shared
    own = slice(shared, step.longest)
    bias = step.bias(window, q.dtype)[..., own]
    out, log_sum = attend_with_lse(q, keys[:, :, own], values[:, :, own], attn_mask=bias)
    if not shared:
        return out, log_sum
    common = torch.zeros_like(out)
    sums = torch.full_like(log_sum, -torch.inf)
    for first, rows in step.groups:
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
