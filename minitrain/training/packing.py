"""Pack samples into rows by first-fit decreasing, and stack rows to batches.

Samples are taken from the longest to the shortest; each goes to the first row that has room for it.
That takes at most 11/9 of the fewest possible rows, plus one (Johnson 1973; Dósa 2007). If most
samples are much shorter than a row, hardly any slot stays empty.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minitrain.training.loss import IGNORE

# tensors by name: of a row [seq, ...], of several [rows, seq, ...]
Batch = dict[str, Tensor]
# the length of made-up data, whose epoch does not end
ENDLESS = 1 << 40


class Dataset(Protocol):
    """Rows by number, the same whenever they are read.

    May have: about, a line on the data; origin(number), the files and places that a row is from;
    bytes_per_token, of text; asks, what a chat's replies follow; questions(count), pairs of prompt
    and reply.
    """

    def __len__(self) -> int:
        """Return the number of rows in an epoch."""

    def row(self, number: int) -> Batch:
        """Return a row, [seq] tensors by name. A number beyond the last is a later epoch's."""


# values with which `pack_row` fills the end of rows of text
PADDING = {"tokens": 0, "labels": IGNORE}


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of sample numbers whose lengths sum to at most `capacity`.

    The result depends only on the input: samples of one length are taken in order. Rows are the
    leaves of a binary tree whose nodes hold the largest free room below them, so n samples take
    O(n log n) steps. Raises ValueError for a length above capacity.
    """
    if max(lengths, default=0) > capacity:
        raise ValueError(f"a length of {max(lengths)} does not fit a capacity of {capacity}")
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    # node k has children 2k and 2k + 1; the root is 1
    room = [capacity] * (2 * leaves)
    rows: list[list[int]] = [[] for _ in lengths]
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        node = 1
        while node < leaves:
            # the left child if the sample fits there
            node *= 2
            if room[node] < lengths[sample]:
                node += 1
        rows[node - leaves].append(sample)
        room[node] -= lengths[sample]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [row for row in rows if row]


def pack_row(
    samples: list[dict[str, np.ndarray]], length: int, padding: dict[str, float]
) -> Batch:
    """Concatenate samples to one row and fill it up to `length`.

    samples: each value is [n], n the length of the sample.
    padding: the value that fills the row, by key of the samples.
    Returns [length] tensors by key, and int64 `positions`, which restart with every sample, and
    `document_ids`, the number of the sample, -1 in the padding.
    """
    sizes = [len(next(iter(sample.values()))) for sample in samples]
    sizes.append(length - sum(sizes))
    columns = {}
    for key, value in padding.items():
        parts = [sample[key] for sample in samples]
        parts.append(np.full(sizes[-1], value, parts[0].dtype))
        columns[key] = np.concatenate(parts)
    # both [length], the last size being that of the padding
    columns["positions"] = np.concatenate([np.arange(size) for size in sizes])
    columns["document_ids"] = np.repeat([*range(len(samples)), -1], sizes)
    return {key: torch.from_numpy(column) for key, column in columns.items()}


def rows(dataset: Dataset, numbers: Iterable[int]) -> Batch:
    """Stack rows `numbers` of a dataset: each value is [len(numbers), ...]."""
    return stack([dataset.row(n) for n in numbers])


def stack(each: list[Batch]) -> Batch:
    # [...] of each row -> [rows, ...]
    return {key: torch.stack([row[key] for row in each]) for key in each[0]}
