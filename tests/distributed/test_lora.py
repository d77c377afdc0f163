"""Adapters under every layout: each one's gradient is that of one process, and what is frozen stays as it is."""

from unittest import mock

import pytest

from minitrain.models.lora import is_adapter
from tests.distributed.test_matrix import combine, ranks
from tests.oracle import check_against_one_process, packed_batch, train

LORA = {"lora": {"rank": 8, "alpha": 16.0}}
EXPERTS = {"lora": {"rank": 8, "targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}}


def random_adapter(name, tensor, generator):
    """B too: while it is zero, so are the gradients of A, whatever the layout makes of them."""
    tensor.normal_(0, 0.1, generator=generator)


def train_adapters(*args):
    with mock.patch("minitrain.training.build.initialize_adapter", random_adapter):
        return train(*args)


@pytest.fixture
def random_adapters():
    with mock.patch("minitrain.training.build.initialize_adapter", random_adapter):
        yield


@pytest.mark.parametrize("names", [
    ("fsdp", "accumulation"), ("hsdp", "recompute"), ("tp", "fsdp"), ("tp", "selective"), ("cp", "tp"), ("pp", "tied"),
    ("ulysses", "pp"), ("fsdp", "tp", "pp", "recompute"),
], ids=" x ".join)  # fmt: skip
def test_layouts(pool, random_adapters, names):
    tree = combine(*names) | LORA
    check_against_one_process(pool, ranks(tree), tree, batch=packed_batch, run=train_adapters, double=True)


@pytest.mark.parametrize("names", [("fsdp", "pp"), ("fsdp", "cp")], ids=" x ".join)
def test_experts(pool, random_adapters, names):
    tree = combine(*names) | EXPERTS | {"model": "mixtral-8x7b-tiny"}
    check_against_one_process(pool, ranks(tree), tree, batch=packed_batch, run=train_adapters, tolerance=1e-5)
