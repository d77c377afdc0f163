"""A run on text that a test may poison."""

from pathlib import Path

import pytest

from minitrain.run.config import load as configs
from minitrain.run.tasks import train_model
from minitrain.training.loop import Trainer
from tests.helpers.poison import TINY, Poisoned


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(poisoned, key=value...) trains on text, where the steps with these numbers go wrong; returns out_dir."""
    (tmp_path / "text.txt").write_text("".join(f"line {i * i} of text\n" for i in range(100)))
    update = Trainer.update
    bad = set()

    def update_or_poison(trainer, batches, step):
        objective = trainer.objective
        trainer.objective = (
            Poisoned(trainer, "loss and gradient") if step + 1 in bad else objective
        )
        try:
            return update(trainer, batches, step)
        finally:
            trainer.objective = objective

    def run(poisoned, **changes):
        bad.clear()
        bad.update(poisoned)
        data = {"kind": "text", "path": str(tmp_path / "text.txt")}
        tree = (
            TINY
            | {"data": data, "out_dir": str(tmp_path / "out"), "checkpoint": {"every": 2}}
            | changes
        )
        train_model.train(configs.from_dict(tree))
        return Path(tree["out_dir"])

    monkeypatch.setattr(Trainer, "update", update_or_poison)
    return run
