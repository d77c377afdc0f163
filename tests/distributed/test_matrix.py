"""The parity matrix: every pair of techniques, and the large combinations, against one process.

Rows are packed documents with very different numbers of valid labels; gradients are clipped, which takes a norm over
parameters on different meshes. A technique alone, its options and its errors are for its own test file.
"""

from itertools import combinations

import pytest
import torch

from minitrain.run.config.load import from_dict
from tests.helpers.layouts import TECHNIQUES, TREE, combine, ranks
from tests.helpers.oracle import (
    check_against_one_process,
    initial_weights,
    packed_batch,
    plain_step,
)

EXCLUSIVE = [{"cp", "ulysses"}, {"recompute", "selective"}]
PAIRS = [pair for pair in combinations(TECHNIQUES, 2) if set(pair) not in EXCLUSIVE]
MANY = [
    ("fsdp", "tp", "pp"),
    ("fsdp", "tp", "cp"),
    ("fsdp", "cp", "pp"),
    ("hsdp", "ulysses", "pp", "selective"),
    ("fsdp", "tp", "cp", "pp", "recompute", "tied"),
    ("fsdp", "tp", "ulysses", "pp", "mtp"),
]


@pytest.mark.parametrize("names", PAIRS, ids=" x ".join)
def test_pairs(pool, names):
    tree = combine(*names)
    check_against_one_process(pool, ranks(tree), tree, batch=packed_batch, double=True)


@pytest.mark.parametrize("names", MANY, ids=" x ".join)
def test_many(pool, names):
    tree = combine(*names)
    check_against_one_process(pool, ranks(tree), tree, batch=packed_batch, double=True)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("gpt-oss-20b-tiny", ("cp", "fsdp")),
        ("gpt-oss-20b-tiny", ("ulysses", "pp")),
        ("deepseek-v3-tiny", ("cp", "pp")),
        ("mixtral-8x7b-tiny", ("fsdp", "pp")),
        ("nemotron3-nano-30b-a3b-tiny", ("fsdp", "pp")),
        ("nemotron3-super-120b-a12b-tiny", ("cp", "fsdp")),
        ("nemotron3-super-120b-a12b-tiny", ("ulysses", "tp")),
        ("qwen3-next-80b-a3b-tiny", ("cp", "fsdp")),
        ("qwen3.5-35b-a3b-tiny", ("ulysses", "tp")),
    ],
    ids=str,
)
def test_experts_and_hybrids(pool, model, names):
    """In fp32, since grouped products know no fp64: rounding alone is above 1e-6 where sums are split otherwise."""
    tree = combine(*names) | {"model": model}
    check_against_one_process(pool, ranks(tree), tree, batch=packed_batch, tolerance=1e-5)


def test_gradients_are_clipped():
    config = from_dict(TREE)
    for step in range(3):
        _, gradients = plain_step(config, initial_weights(config), packed_batch(config, step))
        assert torch.stack([g.norm() for g in gradients.values()]).norm() > 2 * config.optim.clip
