"""The moving average of the weights against torch's and diffusers', in every layout, in checkpoints, and exported."""

import json

import pytest
import torch
from diffusers.training_utils import EMAModel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from minitrain import load_pretrained, train
from minitrain.commands import export as export_step
from minitrain.run.checkpoint.checkpointer import Checkpointer
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.run.tasks.initial_weights import make_trainer
from minitrain.training.ema import averaged_weights
from tests.helpers.oracle import Batches, check_close, copies

TREE = {
    "model": {
        "name": "llama3-8b-tiny",
        "vocab_size": 128,
        "num_layers": 2,
        "initializer_range": 0.05,
    },
    "batch": {"global": 4, "micro": 1, "seq_len": 16},
    "optim": {"lr": 0.01, "ema": 0.8},
    "steps": 6,
    "device": "cpu",
}
STEPS = 4


def make(tree: dict):
    config = configs.from_dict(tree)
    return make_trainer(config, start(config)), Batches(config, STEPS)


def averages(trainer) -> dict[str, torch.Tensor]:
    return copies(
        (name, trainer.optimizer.state[p]["ema"]) for name, p in trainer.model.named_parameters()
    )


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("warmup", [False, True])
def test_averages_are_those_of_torch_and_diffusers(optimizer, warmup):
    """A constant decay is torch's, a growing one diffusers'."""
    optim = TREE["optim"] | {"name": optimizer, "ema_warmup": warmup}
    trainer, data = make(TREE | {"optim": optim})
    model = trainer.model
    theirs = EMAModel(model.parameters(), decay=0.8) if warmup else None
    theirs = theirs or AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for step in range(STEPS):
        trainer.step(data, step)
        if warmup:
            theirs.step(model.parameters())
        else:
            theirs.update_parameters(model)
    expected = theirs.shadow_params if warmup else list(theirs.module.parameters())
    names = [name for name, _ in model.named_parameters()]
    check_close([averages(trainer)], dict(zip(names, expected, strict=True)), 1e-6, "averages")
    assert not any(
        torch.equal(p, each) for p, each in zip(model.parameters(), expected, strict=True)
    )


def test_a_skipped_step_changes_nothing():
    trainer, data = make(TREE)
    trainer.step(data, 0)
    trainer.step(data, 1)
    before = averages(trainer)
    next(trainer.model.parameters()).register_hook(lambda grad: grad * float("nan"))
    assert not trainer.step(data, 2)["grad_norm"].isfinite()
    check_close([averages(trainer)], before, 0, "averages")


def learn(tree: dict, folder, resume: bool = False) -> tuple:
    """Train, save, validate with the averages in place, and train on: averages, weights, losses."""
    trainer, data = make(tree)
    checkpointer = Checkpointer(folder, keep=1)
    if resume:
        checkpointer.load(trainer.model, trainer.optimizer)
    else:
        for step in range(2):
            trainer.step(data, step)
        checkpointer.save(2, trainer.model, trainer.optimizer, {})
    types = {trainer.optimizer.state[p]["ema"].dtype for p in trainer.model.parameters()}
    assert types == {torch.float32}
    saved = averages(trainer)
    losses = [trainer.evaluate(data)]
    with averaged_weights(trainer.model, trainer.optimizer):
        inside = copies(trainer.model.named_parameters())
        losses.append(trainer.evaluate(data))
    losses.append(trainer.evaluate(data))
    losses.append(trainer.step(data, 2)["loss"].item())
    return saved, inside, copies(trainer.model.named_parameters()), losses


@pytest.mark.parametrize(
    "parallel",
    [
        {"dp_shard": 2, "tp": 2},
        {"dp_shard": 2, "pp": 2},
        {"dp_shard": 2, "reshard_after_forward": False},
    ],
    ids=str,
)
def test_every_layout_and_checkpoints_between_them(pool, tmp_path, parallel):
    tree = TREE | {"parallel": parallel}
    # Adam's first steps would enlarge rounding where gradients vanish
    tree["optim"] = tree["optim"] | {"name": "sgd", "lr": 1.0}
    ranks = parallel.get("dp_shard", 1) * parallel.get("tp", 1) * parallel.get("pp", 1)
    results = pool.run(ranks, learn, tree, tmp_path / "many")
    saved, _, weights, losses = pool.run(1, learn, tree | {"parallel": {}}, tmp_path / "one")[0]
    check_close([result[0] for result in results], saved, 1e-6, "averages")
    check_close([result[1] for result in results], saved, 1e-6, "weights inside")
    check_close([result[2] for result in results], weights, 1e-6, "weights after")
    for result in results:
        assert result[3] == pytest.approx(losses, rel=1e-6)
        assert result[3][0] == result[3][2] != result[3][1]
    again = pool.run(1, learn, tree | {"parallel": {}}, tmp_path / "many", True)[0]
    check_close([again[0]], saved, 1e-6, "averages from the checkpoint")
    check_close([again[2]], weights, 1e-6, "weights that go on from it")


def test_averages_are_fp32_beside_bf16_weights(pool, tmp_path):
    tree = TREE | {"precision": "bf16-pure", "optim": TREE["optim"] | {"states": "bf16"}}
    first, second = (pool.run(1, learn, tree, tmp_path, resume)[0] for resume in (False, True))
    check_close([second[0]], first[0], 0, "averages")
    check_close(
        [first[1]], {name: x.bfloat16() for name, x in first[0].items()}, 0, "weights inside"
    )
    assert first[3] == second[3] and first[3][0] == first[3][2]


@pytest.fixture
def run(tmp_path):
    """run(name, ema, steps, ...) trains to each number of steps in turn; it returns the log's lines and the export."""
    words = ["data.kind=mock", "validation.every=2", "optim.warmup=0", "checkpoint.every=3"]
    file = tmp_path / "x.yaml"
    file.write_text(json.dumps(TREE))

    def train_to(name, ema, *steps):
        words_of_run = [*words, f"optim.ema={ema}", f"out_dir={tmp_path / name}"]
        for count in steps:
            train.main(["--config", str(file), *words_of_run, f"steps={count}"])
        lines = [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        return lines, dict(load_pretrained(tmp_path / name).named_parameters())

    return train_to


def test_a_run_validates_and_exports_the_average(run, tmp_path):
    """And trains as without: its losses are the same to the bit."""
    plain, weights = run("plain", 0, 6)
    lines, average = run("average", 0.8, 6)
    stopped, resumed = run("stopped", 0.8, 3, 6)
    assert [line["loss"] for line in lines] == [line["loss"] for line in plain]
    assert [line.get("val_loss") for line in lines][3:] == [
        line.get("val_loss") for line in stopped
    ][3:]
    assert all(
        a["val_loss"] != b["val_loss"]
        for a, b in zip(lines, plain, strict=True)
        if "val_loss" in a
    )
    check_close([resumed], average, 0, "exported after a stop")
    export_step.main(["--run", str(tmp_path / "average"), "--out", str(tmp_path / "exported")])
    check_close(
        [dict(load_pretrained(tmp_path / "exported").named_parameters())],
        average,
        0,
        "exported by command",
    )
    assert not any(torch.equal(average[name], weights[name]) for name in weights)


def test_a_run_that_goes_on_drops_averages_or_begins_them(run, capsys):
    """Once begun, they are torch's of the weights from then on."""
    (_, fourth), (_, fifth), (_, sixth) = (run("plain", 0, steps) for steps in (4, 5, 6))
    run("changed", 0.8, 2)
    _, without = run("changed", 0, 4)
    assert (
        "note: optim.ema=0: the checkpoint's averages of the weights are dropped"
        in capsys.readouterr().out
    )
    check_close([without], fourth, 0, "exported without averages")
    _, average = run("changed", 0.8, 6)
    assert "note: optim.ema begins with the weights after step 5" in capsys.readouterr().out
    theirs = {name: fifth[name].lerp(sixth[name], 1 - 0.8) for name in fifth}
    check_close([average], theirs, 1e-6, "averages that began late")
