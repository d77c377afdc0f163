"""Every task of the table takes a step: its objective, its data, and one that a fork would add."""

from typing import get_args, get_type_hints

import pytest
import torch

from minitrain.data.datasets import open_dataset
from minitrain.data.text.text_rows import Mock
from minitrain.run.config import load as configs
from minitrain.run.config.checks import validate
from minitrain.run.launch.start import start
from minitrain.settings import Config
from minitrain.tasks import TASKS, TaskKind
from minitrain.training.build import build_model
from minitrain.training.loop import Trainer
from minitrain.training.mtp_loss import knows_mtp
from minitrain.training.objectives import make_objective
from minitrain.training.packing import rows

LANGUAGE = {"model": {"name": "llama3-8b-tiny", "num_layers": 1, "vocab_size": 64}}
VIDEO = {
    "model": {"name": "wan2.1-1.3b-tiny", "num_layers": 1},
    "data": {"kind": "mock", "size": [2, 8, 8], "text_tokens": 4},
}


def config_of(task: str) -> Config:
    tree = {
        "task": task,
        "batch": {"global": 2, "micro": 2, "seq_len": 32},
        "optim": {"name": "sgd", "clip": None},
        "device": "cpu",
    }
    return configs.from_dict(tree | (VIDEO if task == "diffusion" else LANGUAGE))


def check_step(config: Config) -> None:
    """Compare the loss of a step with that of its rows, by hand."""
    meshes = start(config)
    data, _ = open_dataset(config)
    objective = make_objective(config)
    batch = rows(data, range(2))
    with torch.no_grad():
        loss = objective.loss(build_model(config, meshes), batch) / objective.count(batch)
    found = Trainer(config, meshes).step(data, 0)["loss"]
    torch.testing.assert_close(found, loss.to(found.dtype), atol=1e-5, rtol=1e-5)


def test_settings_have_the_tasks_of_the_table():
    assert get_args(get_type_hints(Config)["task"]) == tuple(TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_each_task_takes_a_step(task):
    check_step(config_of(task))


class OfOnes:
    """The sum of a model's outputs: an objective of one's own."""

    def count(self, batch):
        return batch["tokens"].numel()

    def loss(self, model, batch):
        return model(batch["tokens"], head=lambda hidden, *_: hidden.float().sum())


def of_ones(config):
    return OfOnes()


def own_data(config):
    return Mock(8, 64, config.seed, split=0), None


def test_a_line_of_the_table_is_all_that_a_task_of_ones_own_needs(monkeypatch):
    monkeypatch.setitem(
        TASKS, "mine", TaskKind(f"{__name__}:of_ones", f"{__name__}:own_data", chats=True)
    )
    config = config_of("pretrain")
    # the type of the setting was made from the table before
    config.task = "mine"
    validate(config)
    assert isinstance(make_objective(config), OfOnes) and not knows_mtp(config)
    check_step(config)
