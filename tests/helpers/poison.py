"""Make losses and gradients of training steps infinite or NaN."""

import json
import math

import pytest
import torch

from minitrain.training.loop import Trainer

TINY = {
    "model": {"name": "llama3-8b-tiny", "num_layers": 2, "vocab_size": 258},
    "batch": {"global": 4, "micro": 1, "seq_len": 16},
    "steps": 6,
    "device": "cpu",
}


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


POISONS = {
    "loss and gradient": lambda loss: loss * math.nan,
    "gradient": InfiniteGradient.apply,
    "loss": lambda loss: loss + math.inf,
}


class Poisoned:
    """A trainer's objective that is wrong on the last rank only, or on those that share its rows."""

    def __init__(self, trainer: Trainer, kind: str):
        self.objective, self.kind = trainer.objective, kind
        self.count = self.objective.count
        meshes = trainer.meshes.loss, trainer.meshes.pp
        self.here = all(mesh.get_local_rank() == mesh.size() - 1 for mesh in meshes)

    def loss(self, model, batch):
        loss = self.objective.loss(model, batch)
        return POISONS[self.kind](loss) if self.here else loss


def lines(folder) -> list[dict]:
    """Return a run's metrics. Fails for NaN, which is not JSON."""
    return [
        json.loads(line, parse_constant=pytest.fail) for line in (folder / "metrics.jsonl").open()
    ]
