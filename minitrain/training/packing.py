"""Which samples share a row (bin packing by first-fit decreasing), and the row that they make.

The longest sample first, each goes to the first row that still has room for it. That never takes
more than 11/9 of the fewest possible rows, plus one (Johnson 1973; Dósa 2007); with much shorter
samples hardly a slot stays empty.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from minitrain.training.loss import IGNORE

# what `pack_row` fills rows of text up with
PADDING = {"tokens": 0, "labels": IGNORE}


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of sample numbers, each with a sum of lengths of at most `capacity`; the same input
    gives the same rows.

    Equally long samples come in the order of their numbers. Rows are the leaves of a tree whose
    nodes know the largest room below them, so that all samples together take O(n log n) steps.
    Raises ValueError for a length above capacity.
    """
    if max(lengths, default=0) > capacity:
        raise ValueError(f"a length of {max(lengths)} does not fit a capacity of {capacity}")
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    # node k is above nodes 2k and 2k + 1; the root is 1
    room = [capacity] * (2 * leaves)
    rows: list[list[int]] = [[] for _ in lengths]
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        node = 1
        while node < leaves:
            node *= 2
            node += room[node] < lengths[sample]
        rows[node - leaves].append(sample)
        room[node] -= lengths[sample]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [row for row in rows if row]


def pack_row(
    samples: list[dict[str, np.ndarray]], length: int, padding: dict[str, float]
) -> dict[str, Tensor]:
    """One row of `length` from samples laid end to end, each with the same keys, and filled up with
    `padding`.

    samples: values are [n] for each. Returns [length] tensors for each key, and int64 `positions`,
    which restart with every sample, and `documents`, which number them; the padding is number -1,
    so no sample sees it.
    """
    sizes = [len(next(iter(sample.values()))) for sample in samples]
    sizes.append(length - sum(sizes))
    columns = {
        key: np.concatenate(
            [
                *(sample[key] for sample in samples),
                np.full(sizes[-1], filler, samples[0][key].dtype),
            ]
        )
        for key, filler in padding.items()
    }
    columns["positions"] = np.concatenate([np.arange(size) for size in sizes])
    columns["documents"] = np.repeat([*range(len(samples)), -1], sizes)
    return {key: torch.from_numpy(column) for key, column in columns.items()}


def rows(dataset, numbers: Iterable[int]) -> dict[str, Tensor]:
    """Return rows `numbers` of a dataset, stacked: each value is [len(numbers), ...]."""
    return stack([dataset.row(n) for n in numbers])


def stack(each: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([row[key] for row in each]) for key in each[0]}
