"""FP8 under every layout: the losses, gradients and weights of one process, bytes on the wire, weights rounded once."""

from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch

from minitrain.models.decoder import Decoder
from minitrain.models.fp8 import to_fp8
from tests.oracle import check_against_one_process, train

TREE = {
    "model": {"name": "llama3-8b-tiny", "vocab_size": 128, "num_layers": 4, "initializer_range": 0.05},
    "batch": {"global": 8, "micro": 2, "seq_len": 16},
    "optim": {"name": "sgd", "lr": 0.1},
    "precision": "fp8",
}


def train_otherwise_in_fp32(*args):
    """`train` with fp32 wherever there is bf16."""
    with mock.patch.object(torch, "bfloat16", torch.float32):
        return train(*args)


def fp8_decoder(config):
    model = Decoder(config)
    to_fp8(model.blocks, "forward")
    return model


def check(pool, world_size, tree, run=train_otherwise_in_fp32):
    with mock.patch("tests.oracle.Decoder", fp8_decoder):
        check_against_one_process(pool, world_size, tree, tolerance=1e-9, run=run)

@pytest.mark.parametrize("world_size, parallel", [
    (1, {}), (2, {}), (4, {"dp_replicate":2}), (2, {"tp": 2}), (4, {"tp": 2}), (2, {"cp": 2}), (2, {"pp": 2, "vp":2, "schedule":"Interleaved1F1B"}), (4, {"pp":2, "tp":2}),(2,{"pp":2,"vp":2,"schedule":"ZBVZeroBubble"})
], ids=str)  # fmt: skip
def test_layouts(pool, world_size, parallel):
    check(pool, world_size, TREE | {"parallel": parallel})
