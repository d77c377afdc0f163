"""First-fit decreasing against the rule carried out literally, and packed rows by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minitrain.training.packing import first_fit_decreasing, pack_row

cases = st.integers(1, 30).flatmap(
    lambda top: st.tuples(st.lists(st.integers(0, top), max_size=40), st.just(top))
)


def literally(lengths: list[int], capacity: int) -> list[list[int]]:
    rows = []
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for row in rows:
            if sum(lengths[i] for i in row) + lengths[sample] <= capacity:
                row.append(sample)
                break
        else:
            rows.append([sample])
    return rows


@given(cases)
def test_it_is_the_rule_carried_out_literally(case):
    lengths, capacity = case
    assert first_fit_decreasing(lengths, capacity) == literally(lengths, capacity)


def test_by_hand():
    assert first_fit_decreasing([3, 9, 2, 7, 6, 3], 10) == [[1], [3, 0], [4, 5], [2]]
    assert first_fit_decreasing([], 10) == []


def test_short_samples_leave_hardly_a_slot_empty():
    lengths = np.random.default_rng(0).integers(20, 600, 20_000)
    rows = first_fit_decreasing(lengths, 4096)
    assert len(rows) == -(-lengths.sum() // 4096)  # not one row more than all tokens fill
    assert sorted(i for row in rows for i in row) == list(range(20_000))


def test_a_sample_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="a length of 11 does not fit a capacity of 10"):
        first_fit_decreasing([3, 11], 10)


def test_a_packed_row_by_hand():
    samples = [
        {"tokens": np.array([5, 6, 7]), "weights": np.array([0.5, 1, 2], np.float32)},
        {"tokens": np.array([8]), "weights": np.array([4], np.float32)},
    ]
    row = pack_row(samples, 6, {"tokens": 0, "weights": -1})
    assert row["weights"].dtype == torch.float32
    assert {key: value.tolist() for key, value in row.items()} == {
        "tokens": [5, 6, 7, 8, 0, 0],
        "weights": [0.5, 1, 2, 4, -1, -1],
        "positions": [0, 1, 2, 0, 0, 1],
        "document_ids": [0, 0, 0, 1, -1, -1],
    }
    assert pack_row(samples, 4, {"tokens": 0})["document_ids"].tolist() == [0, 0, 0, 1]
    assert pack_row([{"tokens": np.array([], int)}], 3, {"tokens": 0})[
        "document_ids"
    ].tolist() == [-1, -1, -1]
