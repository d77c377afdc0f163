"""FSDP2 and HSDP: the losses, gradients and weights of one process, whatever the layout."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.oracle import check_against_one_process, train

MODEL = {"name": "llama3-8b-tiny", "vocab_size": 128, "num_layers": 3, "initializer_range": 0.05}
TREE = {
    "model": MODEL,
    "batch": {"global": 8, "micro": 2, "seq_len": 16},
    "optim": {"name": "sgd", "lr": 0.1},
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_fsdp(pool, world_size):
    check_against_one_process(pool, world_size, TREE, steps=3)


@pytest.mark.parametrize("model", ["qwen2.5-7b-tiny", "nemotron4-15b-tiny"])
def test_other_families(pool, model):
    check_against_one_process(pool, 4, TREE | {"model": MODEL | {"name": model}})


@pytest.mark.parametrize("model", ["gpt-oss-20b-tiny", "deepseek-v3-tiny", "nemotron3-nano-30b-a3b-tiny"])
def test_experts_and_hybrids(pool, model):
    check_against_one_process(pool, 2, TREE | {"model": model}, steps=2)


def test_uneven_shards(pool):
    check_against_one_process(pool, 4, TREE | {"model": MODEL | {"vocab_size": 126, "intermediate_size": 50}})


def test_tied_embeddings(pool):
    check_against_one_process(pool, 2, TREE | {"model": MODEL | {"tie_word_embeddings": True}})


@pytest.mark.parametrize("parallel", [
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 4},
    {"reshard_after_forward": False},
    {"prefetch": 0},
    {"prefetch": 2},
    {"dp_replicate": 2, "reshard_after_forward": False, "prefetch": 2},
], ids=str)  # fmt: skip
def test_layouts(pool, parallel):
    check_against_one_process(pool, 4, TREE | {"parallel": parallel})


@pytest.mark.parametrize("world_size", [1, 2])
def test_recompute(pool, world_size):
    check_against_one_process(pool, world_size, TREE | {"recompute": "full"})


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_accumulation(pool, micro):
    check_against_one_process(pool, 2, TREE | {"batch": TREE["batch"] | {"micro": micro}})


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_blocks(pool, recompute):
    check_against_one_process(pool, 2, TREE | {"compile": True, "recompute": recompute}, run=train_compiled)


def train_compiled(*args):
    """`train` with block.compile() handing its graphs to autograd instead of to a C++ compiler."""
    with mock.patch("torch.compile", partial(torch.compile, backend="aot_eager")):
        return train(*args)


def count_reductions(tree):
    """How many reduce-scatters a training step takes, by the name they have in this version of torch."""
    names = [name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)]
    with mock.patch.object(dist, names[0], wraps=getattr(dist, names[0])) as reduce_scatter:
        train(tree, steps=1)
    return reduce_scatter.call_count


def test_gradients_are_reduced_once_per_step(pool):
    tree = TREE | {"batch": TREE["batch"] | {"micro": 1}}  # four micro-batches on each of two ranks
    units = MODEL["num_layers"] + 1
    assert pool.run(2, count_reductions, tree) == [units] * 2
