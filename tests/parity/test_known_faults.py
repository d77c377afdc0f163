"""Faults of other trainers that their users reported, held here: each layout once, against one process.

All of them gave a loss that looked right. Whole gradients, their norm before clipping and the clipped update of plain
SGD are those of plain autograd in one process (see tests/helpers/oracle.py), with rows whose numbers of labels differ.
The table of tests/README.md says what went wrong where.
"""

from unittest import mock

import pytest
import torch

from minitrain.models.router import Router
from tests.helpers.commands import ROOT
from tests.helpers.oracle import check_against_one_process, packed_batch, ragged_batch, train

LLAMA = {"name": "llama3-8b-tiny", "vocab_size": 128, "num_layers": 2, "initializer_range": 0.05}
TREE = {
    "model": LLAMA,
    "batch": {"global": 8, "micro": 2, "seq_len": 16},
    "optim": {"name": "sgd", "lr": 0.1, "clip": 0.5},
    "parallel": {"dp_shard": 1},
}
LORA = {"rank": 8, "alpha": 16.0}
# report: ranks, what differs from TREE. Experts' products know no fp64, so their cases are in fp32
DENSE = {
    "torchtitan-2318": (4, {"parallel": {"dp_replicate": 4, "dp_shard": 1}}),
    "torchtitan-2206": (4, {"parallel": {"dp_shard": 4}}),
    "torchtitan-2972": (2, {"parallel": {"pp": 2}}),
    "torchtitan-1732": (
        2,
        {"parallel": {"pp": 2}, "batch": {"global": 16, "micro": 1, "seq_len": 16}},
    ),
    "torchtitan-3029": (
        4,
        {"model": LLAMA | {"name": "qwen3-32b-tiny"}, "parallel": {"tp": 2, "cp": 2}},
    ),
    "transformers-34191": (1, {"batch": {"global": 8, "micro": 1, "seq_len": 16}}),
    "Megatron-LM-673": (4, {"parallel": {"cp": 4, "dp_shard": 1}}),
    "Megatron-LM-906": (4, {"parallel": {"cp": 2, "dp_shard": 2}}),
    "Megatron-LM-1446": (2, {"parallel": {"tp": 2}}),
    "Megatron-LM-1464": (
        2,
        {"parallel": {"cp": 2}, "batch": {"global": 4, "micro": 1, "seq_len": 32}},
    ),
    "Megatron-LM-7186": (
        4,
        {
            "parallel": {"dp_replicate": 2, "dp_shard": 2},
            "batch": {"global": 16, "micro": 1, "seq_len": 16},
        },
    ),
    "NeMo-RL-3788": (2, {"model": LLAMA | {"name": "qwen3-32b-tiny"}, "parallel": {"tp": 2}}),
    "torchtune-2420": (4, {"parallel": {"tp": 2, "dp_shard": 2}}),
}
EXPERTS = {
    "pytorch-160285": (2, {"model": "mixtral-8x7b-tiny", "parallel": {"ep": 2}}),
    "torchtitan-1805": (2, {"model": "mixtral-8x7b-tiny", "parallel": {"tp": 2}}),
    "torchtitan-2387": (4, {"model": "deepseek-v3-tiny", "parallel": {"tp": 2, "dp_shard": 2}}),
    "torchtitan-4245": (2, {"model": "gpt-oss-20b-tiny", "parallel": {"tp": 2}}),
    "Megatron-LM-1628": (4, {"model": "mixtral-8x7b-tiny", "parallel": {"tp": 2, "dp_shard": 2}}),
    "Megatron-LM-5916": (4, {"model": "deepseek-v3-tiny", "parallel": {"tp": 2, "ep": 4}}),
    "Megatron-LM-6660": (
        2,
        {
            "model": "mixtral-8x7b-tiny",
            "parallel": {"ep": 2},
            "batch": {"global": 16, "micro": 1, "seq_len": 16},
        },
    ),
    "Megatron-LM-7452": (
        2,
        {
            "model": {"name": "gpt-oss-20b-tiny", "num_layers": 2},
            "parallel": {"tp": 2},
            "recompute": "full",
        },
    ),
    "AutoModel-3135": (
        4,
        {"model": "mixtral-8x7b-tiny", "parallel": {"ep": 2, "dp_replicate": 2}},
    ),
    "AutoModel-3359": (
        2,
        {
            "model": {"name": "mixtral-8x7b-tiny", "router_aux_loss_coef": 1.0, "seq_aux": True},
            "parallel": {"cp": 2, "ep": 2},
            "batch": {"global": 8, "micro": 1, "seq_len": 16},
        },
    ),
    "TransformerEngine-715": (2, {"model": "deepseek-v3-tiny", "parallel": {"tp": 2}}),
}
ADAPTERS = {
    "mcore-bridge-173": (2, {"lora": LORA, "parallel": {"tp": 2}}),
    "Megatron-Bridge-5634": (
        4,
        {
            "model": "mixtral-8x7b-tiny",
            "lora": LORA | {"targets": ["q_proj", "experts.down_proj"]},
            "parallel": {"dp_shard": 2, "ep": 4, "tp": 2},
        },
    ),
    "Megatron-Bridge-5900": (
        2,
        {
            "model": "deepseek-v3-tiny",
            "lora": LORA | {"targets": ["q_a_proj", "kv_a_proj_with_mqa"]},
            "parallel": {"tp": 2},
        },
    ),
}


@pytest.mark.parametrize("report", DENSE)
def test_layouts(pool, report):
    ranks, changes = DENSE[report]
    check_against_one_process(pool, ranks, TREE | changes, batch=packed_batch, double=True)


@pytest.mark.parametrize("report", EXPERTS)
def test_experts(pool, report):
    ranks, changes = EXPERTS[report]
    batch = ragged_batch if "AutoModel-3359" in report else packed_batch
    check_against_one_process(pool, ranks, TREE | changes, batch=batch, tolerance=1e-5)


def random_adapter(name, tensor, generator):
    """B too: while it is zero, so are the gradients of A, whatever the layout makes of them."""
    tensor.normal_(0, 0.1, generator=generator)


def train_adapters(*args):
    with mock.patch("minitrain.training.build.initialize_adapter", random_adapter):
        return train(*args)


@pytest.mark.parametrize("report", ADAPTERS)
def test_adapters(pool, report):
    ranks, changes = ADAPTERS[report]
    with mock.patch("minitrain.training.build.initialize_adapter", random_adapter):
        check_against_one_process(
            pool, ranks, TREE | changes, batch=packed_batch, run=train_adapters, tolerance=1e-5
        )


def test_adapters_begin_alike_under_every_layout(pool):
    """Megatron-Bridge 5843: the spread of A followed the rank's part of a matrix, not the matrix. No step is taken."""
    for parallel in ({"tp": 4}, {"tp": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}):
        check_against_one_process(pool, 4, TREE | {"lora": LORA, "parallel": parallel}, steps=0)


def shrinking_batch(config, step):
    """Rows of 16 tokens in the first step, of 8 in the second."""
    return {key: value[:, : 16 - 8 * step] for key, value in ragged_batch(config, step).items()}


def test_stages_that_begin_anew_keep_gradients(pool):
    """AutoModel 3530: where the length of rows changed, a pipeline forgot all micro-batches but the last."""
    tree = TREE | {"parallel": {"pp": 2}, "batch": {"global": 8, "micro": 1, "seq_len": 16}}
    check_against_one_process(pool, 2, tree, batch=shrinking_batch, double=True)


def all_to_the_first():
    """Every token goes to the first experts: the other ranks' experts get none."""
    return mock.patch.object(
        Router, "_select", lambda self, scores: torch.arange(self.top_k).expand(len(scores), -1)
    )


def train_with_idle_experts(*args):
    with all_to_the_first():
        return train(*args)


def test_experts_without_tokens_have_gradients_of_zero(pool):
    """AutoModel 2995: they had none, and their momentum and weight decay stood still."""
    tree = TREE | {"model": {"name": "mixtral-8x7b-tiny", "num_layers": 2}, "parallel": {"ep": 4}}
    with all_to_the_first():
        check_against_one_process(pool, 4, tree, run=train_with_idle_experts, tolerance=1e-5)


def test_the_table_names_every_report():
    text = (ROOT / "tests/README.md").read_text()
    for report in DENSE | EXPERTS | ADAPTERS:
        assert report.split("-")[-1] in text, report
