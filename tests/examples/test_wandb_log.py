"""The logger for Weights & Biases, with a stand-in for the package."""

import importlib
import sys
from types import SimpleNamespace

import pytest

from minitrain.errors import InputError
from minitrain.run.config.load import from_dict
from minitrain.run.tasks.train_model import train

TREE = {
    "model": {"name": "llama3-8b-tiny", "num_layers": 1, "vocab_size": 258},
    "batch": {"global": 2, "micro": 2, "seq_len": 16},
    "metrics": {"logger": "minitrain.examples.wandb_log:log"},
    "device": "cpu",
}


@pytest.fixture
def calls(monkeypatch) -> list:
    """What the package is asked for, in order."""
    found = []
    run = SimpleNamespace(
        log=lambda numbers, step: found.append((step, numbers)),
        finish=lambda: found.append("finish"),
    )
    module = SimpleNamespace(init=lambda **words: found.append(words) or run)
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delitem(sys.modules, "minitrain.examples.wandb_log", raising=False)
    return found


def test_each_step_is_logged_once_and_the_run_is_finished(calls, tmp_path):
    train(from_dict(TREE | {"steps": 2, "out_dir": str(tmp_path / "out")}))
    begin, first, second, end = calls
    assert begin == {"resume": "allow"} and end == "finish"
    assert [step for step, _ in (first, second)] == [1, 2]
    assert {"loss", "lr", "tokens_per_sec", "mfu"} <= first[1].keys()


def test_a_run_without_steps_begins_none(calls, tmp_path):
    tree = TREE | {"steps": 1, "out_dir": str(tmp_path / "out")}
    train(from_dict(tree))
    calls.clear()
    sys.modules.pop("minitrain.examples.wandb_log")
    train(from_dict(tree))
    assert calls == []


def test_the_package_is_asked_for_before_the_first_step(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "minitrain.examples.wandb_log", raising=False)
    with pytest.raises(
        InputError, match=r"^metrics.logger='minitrain.*needs the package wandb: pip"
    ):
        train(from_dict(TREE | {"steps": 1, "out_dir": str(tmp_path / "out")}))
    assert not (tmp_path / "out").exists()
