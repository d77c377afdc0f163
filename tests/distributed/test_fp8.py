"""FP8 under every layout: the gradients of one process, weights rounded once a step and to the same bits."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minitrain.config import from_dict
from minitrain.models import fp8
from minitrain.models.decoder import Decoder
from minitrain.parallel import fp8 as gathering
from minitrain.parallel.mesh import start, whole
from minitrain.training.data import Mock
from minitrain.training.loop import Trainer
from tests.oracle import check_against_one_process, train

TREE = {
    "model": {"name": "llama3-8b-tiny", "vocab_size": 128, "num_layers": 2, "initializer_range": 0.05},
    "batch": {"global": 12, "micro": 2, "seq_len": 16},
    "optim": {"name": "sgd", "lr": 0.1},
    "precision": "fp8",
    "device": "cpu",
}


def train_otherwise_in_fp32(*args):
    """`train` with fp32 wherever there is bf16, and graphs handed to autograd instead of to a C++ compiler."""
    compiler = mock.patch("torch.compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    with mock.patch.object(torch, "bfloat16", torch.float32), compiler:
        return train(*args)


def fp8_decoder(config):
    model = Decoder(config)
    fp8.to_fp8(model.blocks, "forward")
    return model


@pytest.mark.parametrize("world_size, changes", [
    (3, {}),  # shards of 22, 22 and 20 rows
    (4, {"parallel": {"dp_replicate": 2, "reshard_after_forward": False}, "recompute": "full"}),
    (4, {"parallel": {"tp": 2}, "recompute": "selective", "compile": True}),
    (4, {"parallel": {"pp": 2, "tp": 2}}),
    (2, {"parallel": {"cp": 2}}),
], ids=str)  # fmt: skip
def test_layouts(pool, world_size, changes):
    """The tolerance is for the few elements that lie between two FP8 numbers, where fp32's rounding decides: one more
    or less of e5m2's steps is an eighth. A wrong scale would be wrong by a factor of 2."""
    with mock.patch("tests.oracle.Decoder", fp8_decoder):
        tree = TREE | {"batch": TREE["batch"] | {"global": 12 if world_size == 3 else 8}} | changes
        check_against_one_process(pool, world_size, tree, tolerance=0.05, run=train_otherwise_in_fp32)


# ----------------------------------------------------------------------------------------------------- what is gathered


def new_trainer(tree):
    config = from_dict(tree)
    return Trainer(config, start(config)), Mock(16, 128, seed=0, split=0)


def check_gathered_after_changes(tree):
    """After steps of optimizers and writes to weights, Linears must get what one process rounds whole weights to."""
    trainer, dataset = new_trainer(tree)
    model, tp, batch = trainer.model, trainer.meshes.tp, trainer.micro_batches(dataset, 0)[0]
    linears = {name: module for name, module in model.named_modules() if isinstance(module, fp8.Fp8Linear)}
    seen = {}
    for name, linear in linears.items():
        linear.register_forward_pre_hook(lambda linear, x, name=name: seen.update({name: linear.gathered[0].clone()}))
    weights = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    for change in (
        lambda: None,
        torch.optim.SGD(weights.values(), lr=0.1, foreach=True).step,
        torch.optim.AdamW(weights.values(), lr=0.1, fused=True).step,
        lambda: [p.mul_(3) for p in weights.values()],
        lambda: [p.to_local().div_(5) for p in weights.values()],
    ):
        with torch.no_grad():
            change()
        trainer.objective.loss(model, batch).backward()
        for name, linear in linears.items():
            rounded, inverse = fp8.quantize(whole(weights[name + ".weight"]), fp8.E4M3)
            by = 1 if name.endswith(("o_proj", "down_proj")) else 0
            part = rounded.view(torch.uint8)
            part = (
                part[linear.own_rows] if hasattr(linear, "own_rows") else part.chunk(tp.size(), by)[tp.get_local_rank()]
            )
            assert torch.equal(seen[name].view(torch.uint8), part) and linear.gathered[1] == inverse, name


@pytest.mark.parametrize("world_size, tp, heads", [(3, 1, 4), (4, 2, 4), (4, 4, 2)])
def test_gathered_weights_are_those_of_one_process_after_every_change(pool, world_size, tp, heads):
    """Of a head that two ranks have, too."""
    model = TREE["model"] | {"num_key_value_heads": heads, "head_dim": 32}
    pool.run(world_size, check_gathered_after_changes, TREE | {"parallel": {"tp": tp}, "model": model})


def count_work(tree, steps):
    """Of some steps: weights rounded, matrix products in FP8, and bytes that this rank has gathered."""
    trainer, dataset = new_trainer(tree)
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    with (
        mock.patch.object(gathering, "cast", wraps=fp8.cast) as cast,
        mock.patch("torch._scaled_mm", wraps=torch._scaled_mm) as product,
        mock.patch.object(dist, name, wraps=getattr(dist, name)) as gather,
    ):
        for step in range(steps):
            trainer.step(dataset, step)
    return cast.call_count, product.call_count, sum(call.args[0].nbytes for call in gather.call_args_list)


def test_weights_are_rounded_once_per_step_and_gathered_as_bytes(pool):
    steps, batches = 2, 3
    (rounded, products, fp8_bytes), (_, _, bf16_bytes) = (
        pool.run(2, count_work, TREE | {"precision": precision, "recompute": "full"}, steps)[0]
        for precision in ("fp8", "bf16")
    )
    linears = [p.numel() for name, p in Decoder(from_dict(TREE).model.config).named_parameters() if "proj" in name]
    assert rounded == steps * len(linears)
    assert products == steps * batches * (1 + 1 + 2) * len(linears)
    assert bf16_bytes - fp8_bytes == steps * batches * 2 * sum(linears)  # gathered forward and backward


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_frozen_base_of_adapters_is_rounded_once_for_ever(pool, world_size):
    tree = TREE | {"task": "lora", "lora": {"rank": 4}, "batch": {"global": 4, "micro": 2, "seq_len": 16}}
    steps, batches, linears = 3, 2 // world_size, 14
    rounded, products, _ = pool.run(world_size, count_work, tree, steps)[0]
    assert rounded == linears
    assert products == steps * batches * 2 * linears  # outputs and gradients of inputs, none of weights
