"""An objective of one's own with a second model, which `prepare` makes: in a step, and in the benchmark."""

from dataclasses import replace

import pytest
import torch

from minitrain.bench.measure import measure
from minitrain.data.text.text_rows import Mock
from minitrain.errors import InputError
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.training.build import build_model
from minitrain.training.loop import Trainer
from minitrain.training.packing import rows

TREE = {
    "model": {"name": "llama3-8b-tiny", "num_layers": 1, "vocab_size": 64},
    "batch": {"global": 2, "micro": 2, "seq_len": 16},
    "optim": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "clip": None},
    "device": "cpu",
}


class Distillation:
    """Hidden states as a teacher has them, whose weights come from another seed."""

    def __init__(self):
        self.prepared = []

    def prepare(self, trainer, dataset, batches):
        config = replace(trainer.config, seed=trainer.config.seed + 1)
        self.teacher = build_model(config, trainer.meshes, trainer.fill, trained=False)
        self.prepared.append((dataset, batches))

    def count(self, batch):
        return batch["tokens"].numel()

    def loss(self, model, batch):
        with torch.no_grad():
            expected = self.teacher(batch["tokens"], head=lambda hidden, *_: hidden)
        return model(batch["tokens"], head=lambda hidden, *_: (hidden - expected).square().sum())


def test_numbers_for_the_log_need_the_sums_that_they_are_made_of():
    config = configs.from_dict(TREE)
    objective = Distillation()
    objective.metrics = lambda sum_over: {}
    with pytest.raises(
        InputError, match=r"^Distillation has one of the methods sums\(\) and met"
    ):
        Trainer(config, start(config), objective)


def test_an_objective_makes_its_second_model_before_the_first_step():
    config = configs.from_dict(TREE)
    meshes = start(config)
    trainer, data = Trainer(config, meshes, Distillation()), Mock(16, 64, 0, 0)
    before = build_model(config, meshes)
    teacher = build_model(replace(config, seed=config.seed + 1), meshes)
    trainer.prepare(data, 3)
    assert trainer.objective.prepared == [(data, 3)]
    tokens = rows(data, range(2))["tokens"]
    hidden, expected = (
        model(tokens, head=lambda hidden, *_: hidden) for model in (before, teacher)
    )
    loss = (hidden - expected.detach()).square().sum() / 32
    loss.backward()
    found = trainer.step(data, 0)
    torch.testing.assert_close(found["loss"], loss.detach())
    for after, parameter in zip(trainer.model.parameters(), before.parameters(), strict=True):
        if parameter.grad is not None:
            rate = trainer.optimizer.param_groups[0]["lr"]
            moved = parameter - rate * parameter.grad
            torch.testing.assert_close(after, moved, atol=1e-6, rtol=1e-4)


def test_the_benchmark_prepares_it_too(monkeypatch):
    objective = Distillation()
    monkeypatch.setattr("minitrain.training.loop.make_objective", lambda config: objective)
    config = configs.from_dict(TREE)
    assert measure(config, "row", start(config), steps=1, warmup=1)["step_time_s"] > 0
    assert len(objective.prepared) == 1


def test_an_objective_without_a_second_model_prepares_nothing():
    config = configs.from_dict(TREE)
    Trainer(config, start(config)).prepare(Mock(16, 64, 0, 0), 3)
