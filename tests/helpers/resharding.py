"""Train in one layout, save, and continue in another."""

import torch

from minitrain.run.checkpoint.checkpointer import Checkpointer
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.training.build import build_model
from minitrain.training.language_modeling import LanguageModeling
from minitrain.training.loop import forward_backward
from minitrain.training.optim import make_optimizer
from tests.helpers.oracle import micro_batches, ragged_batch, snapshot

TREE = {
    "model": {"name": "qwen3-32b-tiny", "vocab_size": 126, "num_layers": 2},
    "batch": {"global": 4, "micro": 1, "seq_len": 16},
    "optim": {"name": "adamw", "lr": 0.01},
    "device": "cpu",
}


def make(tree):
    config = configs.from_dict(tree)
    meshes = start(config)
    model = build_model(config, meshes)
    return config, meshes, model, make_optimizer(model, config.optim)


def train(tree, folder, until, asynchronous=False):
    """Resume from `folder`, train to step `until`, save; return the losses by step and the full final state."""
    config, meshes, model, optimizer = make(tree)
    checkpointer = Checkpointer(folder, keep=2, asynchronous=asynchronous)
    first = (checkpointer.load(model, optimizer) or {"step": 0})["step"]
    losses = {}
    for step in range(first, until):
        rows = micro_batches(ragged_batch(config, step), config, meshes.batch)
        losses[step] = forward_backward(
            model, LanguageModeling(), rows, meshes, torch.device("cpu")
        ).item()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in (until - 1, until):
            checkpointer.save(step + 1, model, optimizer, {"step": step + 1})
    checkpointer.wait()
    return losses, full_state(model, optimizer)


def full_state(model, optimizer):
    state = snapshot(model.state_dict().items())
    for name, parameter in model.named_parameters():
        state |= snapshot(
            (f"{name}/{key}", value) for key, value in optimizer.state[parameter].items()
        )
    return state


def load(tree, folder):
    _, _, model, optimizer = make(tree)
    Checkpointer(folder, keep=2).load(model, optimizer)
    return full_state(model, optimizer)


def assert_equal(left, right):
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]
