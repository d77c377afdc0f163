"""Training steps that go wrong: losses and gradients that are no numbers."""

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
    """A trainer's objective that goes wrong on one rank alone, or on those that share its rows: the last ones."""

    def __init__(self, trainer: Trainer, kind: str):
        self.objective, self.kind = trainer.objective, kind
        self.count = self.objective.count
        meshes = trainer.meshes.loss, trainer.meshes.pp
        self.here = all(mesh.get_local_rank() == mesh.size() - 1 for mesh in meshes)

    def loss(self, model, batch):
        loss = self.objective.loss(model, batch)
        return POISONS[self.kind](loss) if self.here else loss


def lines(folder) -> list[dict]:
    """Read as strictly as JSON is: it has no NaN."""
    return [
        json.loads(line, parse_constant=pytest.fail) for line in (folder / "metrics.jsonl").open()
    ]
