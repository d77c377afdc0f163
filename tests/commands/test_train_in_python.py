"""minitrain.train(config, **settings) does what the command does with the same words."""

import json
from pathlib import Path

import pytest
import torch
import yaml

import minitrain
from minitrain import InputError, train
from minitrain.run.config.config_yaml import as_words
from minitrain.run.config.load import load, to_dict

SETTINGS = {
    "model": {"name": "llama3-8b-tiny", "num_layers": 1, "vocab_size": 258},
    "steps": 2,
    "device": "cpu",
    "precision": "fp32",
    "batch": {"global": 2, "micro": 2, "seq_len": 16},
    "optim": {"lr": 1e-5, "warmup": 0, "betas": (0.9, 0.95)},
    "validation": {"every": 0},
}


def test_a_run_from_python_is_the_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("task: pretrain\nmodel: llama3-8b-tiny\n")
    words = """model.num_layers=1 model.vocab_size=258 steps=2 device=cpu precision=fp32 batch.global=2
    batch.micro=2 batch.seq_len=16 optim.lr=1e-5 optim.warmup=0 optim.betas=[0.9,0.95] validation.every=0"""
    train.main(["--config", "c.yaml", *words.split(), "out_dir=by command"])
    minitrain.train(Path("c.yaml"), out_dir=tmp_path / "in python", **SETTINGS)
    ours, theirs = (minitrain.load_pretrained(name) for name in ("in python", "by command"))
    for (name, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(x, y), name
    lines = [Path(name, "metrics.jsonl").read_text() for name in ("in python", "by command")]
    ours, theirs = ([json.loads(line)["loss"] for line in each.splitlines()] for each in lines)
    assert ours == theirs and len(ours) == 2
    # again: it continues
    minitrain.train("c.yaml", out_dir="in python", **SETTINGS | {"steps": 3})
    assert len(Path("in python", "metrics.jsonl").read_text().splitlines()) == 3
    with pytest.raises(InputError, match="unknown key batch.globl .nearest: global"):
        minitrain.train("c.yaml", batch={"globl": 3})
    with pytest.raises(InputError, match="use optim.lr"):
        minitrain.train("c.yaml", learning_rate=1)
    with pytest.raises(InputError, match="config file none.yaml does not exist"):
        minitrain.train("none.yaml")


def test_values_of_python_are_read_as_those_of_yaml(tmp_path):
    """Text as it stands, numbers that look like text, lists, what is null, sections that are empty."""
    tree = {
        "out_dir": "a b=c",
        "deterministic": True,
        "lora": {"targets": ["q_proj", "k_proj"], "alpha": 1e-07},
        "data": {
            "kind": "jsonl",
            "path": ["010", "x, y.jsonl", "données.txt", 'it"s', "a\\b"],
            "template": "auto",
        },
        "reference": {"note": "1e5", "deep": {"value": [1, None, "x"]}},
    }
    (tmp_path / "tree.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "empty.yaml").write_text("")
    ours = load(tmp_path / "empty.yaml", as_words(tree))
    assert to_dict(ours) == to_dict(load(tmp_path / "tree.yaml"))
    assert load(tmp_path / "empty.yaml", as_words({"lora": {}})).lora
    assert load(tmp_path / "tree.yaml", as_words({"lora": None})).lora is None
