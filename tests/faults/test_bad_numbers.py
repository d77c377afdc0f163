"""Losses and gradients that are not finite, losses that spike, and runs that are the same to the bit."""

import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._inductor import config as compiler

from minitrain.data.chat.problems import open_problems
from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.grpo.policy_trainer import PolicyTrainer
from minitrain.parallel.shards import local_shard
from minitrain.run.checkpoint.checkpoint_index import Writer
from minitrain.run.checkpoint.checkpointer import Checkpointer
from minitrain.run.config import load as configs
from minitrain.run.launch.failures import recorded
from minitrain.run.launch.start import be_deterministic, start
from minitrain.run.monitor.health import Health, batch_origin
from minitrain.run.monitor.metrics import MetricsLog
from minitrain.run.tasks import train_model
from minitrain.settings import Config
from minitrain.training.language_modeling import LanguageModeling
from minitrain.training.loop import Trainer, is_finite
from tests.helpers.grpo import TREE as GRPO
from tests.helpers.grpo import made_up_groups
from tests.helpers.kill import MEASURED
from tests.helpers.poison import POISONS, TINY, Poisoned, lines

MOE = {"model": {"name": "deepseek-v3-tiny", "num_layers": 2, "bias_update_speed": 0.1}}
IN_BF16 = {"precision": "bf16-pure", "optim": {"states": "bf16", "stochastic_rounding": True}}


def everything(trainer: Trainer) -> list[Tensor]:
    """This rank's parts of weights, buffers (the selection bias is one) and optimizer states, step counts included."""
    states = [x for state in trainer.optimizer.state.values() for x in state.values()]
    return [
        local_shard(tensor)[0].clone()
        for tensor in [*trainer.model.state_dict().values(), *states]
    ]


def train_with_a_bad_step(tree: dict, kind: str) -> tuple[list[float], bool]:
    """Loss and norm of a bad step between two good ones, and whether all is, to the bit, as without it."""
    results = []
    for bad in (True, False):
        config = configs.from_dict(tree)
        trainer, (dataset, _) = Trainer(config, start(config)), open_dataset(config)
        trainer.step(dataset, 0)
        if bad:
            objective, trainer.objective = trainer.objective, Poisoned(trainer, kind)
            before, numbers = everything(trainer), trainer.step(dataset, 1)
            untouched = all(map(torch.equal, before, everything(trainer)))
            trainer.objective = objective
        trainer.step(dataset, 2)
        results.append(everything(trainer))
    moved = not all(map(torch.equal, before, results[0]))
    return [x.item() for x in numbers.values()], moved and untouched and all(
        map(torch.equal, *results)
    )


@pytest.mark.parametrize("kind", POISONS)
@pytest.mark.parametrize(
    "extra", [{}, {"optim": {"name": "sgd"}}, IN_BF16, MOE], ids=["adamw", "sgd", "bf16", "moe"]
)
def test_a_step_that_is_not_finite_changes_nothing(kind, extra):
    (loss, norm), as_without = train_with_a_bad_step(TINY | extra, kind)
    assert math.isfinite(loss) == (kind == "gradient") and math.isfinite(norm) == (kind == "loss")
    assert as_without and not is_finite({"loss": loss, "grad_norm": norm})


LAYOUTS = [
    {"precision": "fp8"},
    IN_BF16 | {"parallel": {"pp": 2}},
    {"lora": {"rank": 4}, "parallel": {"dp_replicate": 2}},
    MOE | {"parallel": {"tp": 2, "ep": 2}},
]


def train_in_all_layouts() -> list[tuple[list[float], bool]]:
    return [
        train_with_a_bad_step(TINY | extra, ("loss", "gradient")[i % 2])
        for i, extra in enumerate(LAYOUTS)
    ]


def test_all_ranks_skip_what_one_of_them_finds(pool):
    for rank in pool.run(2, train_in_all_layouts):
        for layout, (numbers, as_without) in zip(LAYOUTS, rank, strict=True):
            assert not all(map(math.isfinite, numbers)) and as_without, layout


def test_updates_of_a_policy_are_skipped_and_counted():
    config = configs.from_dict(GRPO | {"grpo": GRPO["grpo"] | {"kl": 0.0}})
    policy = PolicyTrainer(config, start(config), lambda name: nullcontext())
    policy.trainer.objective.loss = poison_once(policy.trainer.objective.loss)
    numbers = policy.learn(made_up_groups(), 0)
    assert numbers["skipped"] == 1 and math.isnan(numbers["loss"])  # of two updates
    assert policy.learn(made_up_groups(), 1)["skipped"] == 0
    policy.trainer.objective.loss = lambda model, batch: next(model.parameters()).sum() * math.nan
    assert policy.learn(made_up_groups(), 2)["skipped"] == 2


@pytest.mark.parametrize("kind", POISONS)
def test_a_bad_step_to_warm_up_changes_nothing(kind):
    config = configs.from_dict(
        GRPO | {"grpo": GRPO["grpo"] | {"warmup_steps": 1, "warmup_lr": 0.1}}
    )
    policy = PolicyTrainer(config, start(config), lambda name: nullcontext())
    before, loss = everything(policy.trainer), LanguageModeling.loss
    with mock.patch.object(
        LanguageModeling, "loss", lambda *arguments: POISONS[kind](loss(*arguments))
    ):
        policy.warm_up(open_problems(config)[0])
    assert all(map(torch.equal, before, everything(policy.trainer)))


def poison_once(loss):
    left = [math.nan]
    return lambda *arguments: loss(*arguments) * (left.pop() if left else 1.0)


# ----------------------------------------------------------------------------------------------------------- whole runs


def test_skipped_steps_are_counted_and_told_with_their_batch(run, capsys):
    found = lines(run([2, 3]))
    assert [line["skipped"] for line in found] == [0, 1, 1, 0, 0, 0]
    assert found[1]["loss"] is found[1]["grad_norm"] is None and math.isfinite(found[-1]["loss"])
    assert (
        found[1]["batch"].startswith("rows 4 to 7 of the data: document 1")
        and "batch" not in found[0]
    )
    assert (
        "step 2: skipped, as loss=nan or grad_norm=nan is not finite; rows 4 to 7"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("ahead", [False, True])
def test_too_many_skipped_steps_end_the_run_with_its_checkpoint(
    ahead, run, tmp_path, capsys, monkeypatch
):
    """Also where step 6 is launched before the host knows of step 5."""
    monkeypatch.setattr(Trainer, "runs_ahead", ahead)
    message = r"^step 5 is number 3 in a row to be skipped .* as after step 2, .* rows 16 to 19"
    with pytest.raises(InputError, match=message):
        run([3, 4, 5, 6], optim={"max_skipped": 3})
    found = lines(tmp_path / "out")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5] and found[-1]["batch"].startswith(
        "rows 16 to 19"
    )
    assert (tmp_path / "out/logs/rank-0.log").read_text().count("Traceback") == 1
    log = tmp_path / "out/metrics.jsonl"
    # as if it had ended before the line of step 4
    log.write_text("".join(log.open().readlines()[:3]))
    resumed = lines(run([]))  # from step 4, whose weights are those of step 2
    assert "lacks" not in capsys.readouterr().out
    assert [line["skipped"] for line in resumed] == [0, 0, 1, 1, 0, 0]
    assert [line["loss"] is None for line in resumed] == [False, False, True, True, False, False]


def run_and_keep_weights(run, *poisoned, **changes) -> tuple[list[dict], dict[int, list[Tensor]]]:
    """A run's lines, without what is measured; and all that each checkpoint was given, by step."""
    kept = {}
    save = Checkpointer.save

    def save_and_keep(checkpointer, step, model, optimizer, extra):
        kept[step] = everything(SimpleNamespace(model=model, optimizer=optimizer))
        save(checkpointer, step, model, optimizer, extra)

    with mock.patch.object(Checkpointer, "save", save_and_keep):
        found = lines(run(poisoned, **changes))
    return [{k: x for k, x in line.items() if not k.endswith(MEASURED)} for line in found], kept


def test_a_run_whose_numbers_come_a_step_late_is_the_same(run, tmp_path, monkeypatch):
    """Its lines, spikes, skipped steps, validations, the state in each checkpoint and what it exports."""
    settings = dict(
        steps=9, checkpoint={"every": 4}, validation={"every": 3}, metrics={"spike": 0.1}
    )
    settings["data"] = {"kind": "text", "path": str(tmp_path / "text.txt"), "validation": 0.3}
    results = []
    for ahead in (False, True):
        monkeypatch.setattr(Trainer, "runs_ahead", ahead)
        found, kept = run_and_keep_weights(
            run, 2, 6, out_dir=str(tmp_path / f"{ahead}"), **settings
        )
        results.append((found, (tmp_path / f"{ahead}/model.safetensors").read_bytes()))
        assert [line["skipped"] for line in found] == [0, 1, 0, 0, 0, 1, 0, 0, 0]
        assert list(kept) == [4, 8, 9]
        for step, tensors in kept.items():
            assert ahead or kept is (plain := kept)
            assert all(map(torch.equal, tensors, plain[step]))
    assert results[0] == results[1]


def test_a_signal_stops_a_run_ahead_of_its_numbers_after_the_step_that_it_saves(
    run, tmp_path, monkeypatch
):
    """The line that is missing is made up for, and the run ends as one that nobody stopped."""
    settings = dict(steps=7, checkpoint={"every": 0})
    whole, _ = run_and_keep_weights(run, 2, out_dir=str(tmp_path / "whole"), **settings)
    monkeypatch.setattr(Trainer, "runs_ahead", True)
    step = Trainer.step

    def signal_in_step_4(trainer, dataset, number):
        if number == 3:
            signal.raise_signal(signal.SIGTERM)
        return step(trainer, dataset, number)

    with mock.patch.object(Trainer, "step", signal_in_step_4):
        first, kept = run_and_keep_weights(run, 2, **settings)
    assert [line["step"] for line in first] == [1, 2, 3] and list(kept) == [4]
    assert run_and_keep_weights(run, 2, **settings)[0] == whole


def test_the_same_command_is_allowed_no_more_skipped_steps(run, tmp_path):
    """Neither where it continues before the step that was one too many, nor behind it."""
    for _ in range(2):
        with pytest.raises(
            InputError, match="^step 5 is number 3 in a row to be skipped .* as after step 2,"
        ):
            run([3, 4, 5, 6], optim={"max_skipped": 3})
    for _ in range(2):
        with pytest.raises(
            InputError, match="^(step 6 is number 4|the last 4 steps were skipped)"
        ):
            run([3, 4, 5, 6], optim={"max_skipped": 4})
    assert not (tmp_path / "out/config.json").exists()
    run([3, 4, 5, 6], optim={"max_skipped": 5})
    assert (tmp_path / "out/config.json").exists()


def test_lines_that_a_log_lost_are_told(run, tmp_path, capsys):
    log = run([]) / "metrics.jsonl"
    run([])
    assert "no step is left to do" in capsys.readouterr().out
    first, second, *_ = log.open().readlines()
    # as a machine without power leaves it, and somebody's editor
    log.write_text(first + second + second)
    found = lines(run([], steps=7))
    assert [line["step"] for line in found] == [1, 2, 2, 6, 7]
    assert "metrics.jsonl lacks 3 of the 6 steps that are done" in capsys.readouterr().out


def test_an_error_waits_for_the_checkpoint_that_is_being_written(run, tmp_path, monkeypatch):
    write, threads = Writer.write_data, []

    def write_slowly(*args):
        threads.append(threading.current_thread())
        time.sleep(0.3)
        return write(*args)

    monkeypatch.setattr(Writer, "write_data", write_slowly)
    with pytest.raises(InputError, match="step 2 is number 1 in a row"):
        run([2], optim={"max_skipped": 1}, checkpoint={"every": 2, "asynchronous": True})
    assert (tmp_path / "out/checkpoints/step-00000002").exists()
    assert threads and threading.main_thread() not in threads


# --------------------------------------------------------------------------------------------------------------- spikes


def watched(health: Health, steps: Iterable[dict]) -> list[dict]:
    """The steps' numbers, as a run goes through them."""
    found = []
    for numbers in steps:
        found.append(numbers | health.check(numbers))
        health.stop_if_stuck(found[-1])
    return found


def watch(losses: list[float], spike: float = 6.0) -> list[int]:
    """The steps at which a loss is told."""
    config = Config()
    config.metrics.spike = spike
    health = Health(config, lambda text: None, lambda step: "a batch")
    steps = (
        {"step": i, "loss": loss, "grad_norm": 1.0, "skipped": 0} for i, loss in enumerate(losses)
    )
    return [numbers["step"] for numbers in watched(health, steps) if "batch" in numbers]


def test_spikes_stand_out_of_noise_and_trends_do_not():
    noise = random.Random(0)
    falling = [3 + 7 * math.exp(-i / 50) + noise.gauss(0, 0.05) for i in range(1000)]
    assert watch(falling) == []
    spiking = [loss + 1.0 * (i in (15, 300, 301, 302, 600)) for i, loss in enumerate(falling)]
    # the first one comes before there is anything to compare with
    assert watch(spiking) == [300, 301, 302, 600]
    assert watch(spiking, spike=0) == []
    assert watch([2.0] * 100 + [2.01, 2.03]) == [101]  # without any noise, 1 % is the least
    assert watch([-2.0] * 100 + [-1.99, -1.97]) == [101]
    assert watch([2.0] * 19 + [9.0]) == [] and watch([2.0] * 20 + [9.0]) == [20]
    assert watch([2.0] * 20 + [math.nan] * 30 + [9.0]) == [50]
    # 2 + 6 x 1.4826
    assert watch([1.0, 3.0] * 10 + [10.89]) == [] and watch([1.0, 3.0] * 10 + [10.9]) == [20]


def test_a_step_is_skipped_if_none_of_its_updates_changed_the_weights():
    config = Config()
    config.optim.max_skipped = 2
    steps = [
        {"step": i, "loss": math.nan, "grad_norm": 1.0, "skipped": i % 2 + 1} for i in range(6)
    ]
    health = Health(config, lambda text: None, lambda step: "a batch", updates=2)
    assert len(watched(health, steps)) == 6
    health.updates = 1
    with pytest.raises(InputError, match="number 2 in a row"):
        watched(health, ({**numbers, "skipped": 1} for numbers in steps))


def test_only_steps_without_any_update_count_as_skipped(tmp_path):
    start(configs.from_dict(TINY))
    file = tmp_path / "metrics.jsonl"
    numbers = [{"step": i + 1, "loss": 1.0, "skipped": n} for i, n in enumerate([2, 1, 2, 2])]
    file.write_text("".join(json.dumps(line) + "\n" for line in numbers))
    log = MetricsLog(file, steps=10, start=4)
    assert (log.skipped_steps(2), log.skipped_steps(1)) == (2, 0)
    log.step({"step": 5, "loss": 2.0, "skipped": 2, "tokens_per_sec": 1.0})
    assert (list(log.losses), log.skipped_steps(2)) == ([1.0] * 4 + [2.0], 3)
    log.close()


def noisy_run(out, steps: int) -> dict[int, str]:
    """The batches of its spikes, by step: mock rows are of different difficulty, and the weights stay."""
    model, batch = (
        TINY["model"] | {"initializer_range": 0.2},
        {"global": 1, "micro": 1, "seq_len": 16},
    )
    settings = {"model": model, "batch": batch, "optim": {"lr": 0.0}, "metrics": {"spike": 0.1}}
    train_model.train(configs.from_dict(TINY | settings | {"steps": steps, "out_dir": str(out)}))
    return {line["step"]: line["batch"] for line in lines(out) if "batch" in line}


def run_with_and_without_a_break(folder):
    noisy_run(folder / "parts", 25)
    log = folder / "parts/metrics.jsonl"
    # killed before the last line
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    return noisy_run(folder / "whole", 40), noisy_run(folder / "parts", 40)


def test_a_run_that_continues_remembers_what_its_losses_were(pool, tmp_path):
    whole, parts = pool.run(1, run_with_and_without_a_break, tmp_path)[0]
    assert whole == parts and max(whole) > 25


@pytest.mark.parametrize("kind", ["tokens", "mock"])
def test_batches_are_identified_by_file_and_place(kind, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(64, dtype=np.uint16))
    data = {"kind": kind, "path": str(tmp_path / "a.npy") if kind == "tokens" else ""}
    dataset, _ = open_dataset(configs.from_dict(TINY | {"data": data}))
    text = batch_origin(dataset, 2, step=2)
    assert text.startswith("rows 2 to 3 of the data")
    if kind == "tokens":
        first = dataset.row(2)["tokens"]
        assert f"{tmp_path / 'a.npy'} tokens {first[0]} to {first[-1]}, " in text


@pytest.mark.parametrize(
    "rows, shown", [(4, "document 4, document 5"), (5, "document 5, document 6, ...")]
)
def test_the_first_rows_of_a_batch_stand_for_it(rows, shown):
    """Where documents fill two rows each; of five rows the last is not shown."""
    dataset = SimpleNamespace(origin=lambda number: f"document {number // 2}")
    assert (
        batch_origin(dataset, rows, step=3)
        == f"rows {2 * rows} to {3 * rows - 1} of the data: {shown}"
    )


# ---------------------------------------------------------------------------------------------------------- determinism


def deterministic_run(tree: dict) -> list[Tensor]:
    torch.use_deterministic_algorithms(False)
    config = configs.from_dict(tree | {"deterministic": True})
    with (
        compiler.patch(deterministic=False),
        mock.patch.dict(os.environ),
    ):  # both as before for the tests after this
        try:
            trainer, (dataset, _) = Trainer(config, start(config)), open_dataset(config)
            assert torch.are_deterministic_algorithms_enabled() and compiler.deterministic
            for step in range(3):
                trainer.step(dataset, step)
            return everything(trainer)
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_deterministic_run_is_the_same_to_the_bit(pool, ranks):
    tree = TINY | {"lora": {"rank": 4, "dropout": 0.5}}
    first, second = (pool.run(ranks, deterministic_run, tree) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "extra",
    [
        {},
        MOE,
        {"model": {"name": "nemotron3-nano-30b-a3b-tiny"}},
        {"precision": "bf16", "compile": True},
    ],
    ids=["plain", "moe", "mamba", "compiled"],
)
def test_a_deterministic_run_on_cuda(extra):
    tree = TINY | {"device": "cuda"} | extra
    first, second = deterministic_run(tree), deterministic_run(tree)
    assert all(map(torch.equal, first, second))


def test_an_operation_without_a_deterministic_form_is_one_line(tmp_path, monkeypatch):
    # as before a group has started
    monkeypatch.setattr(os, "environ", os.environ | {"RANK": "3", "WORLD_SIZE": "4"})
    be_deterministic()
    expected = r"^deterministic=true: \S+ does not have a deterministic implementation \(use deterministic=false\)$"
    try:
        for times in (1, 2):
            with pytest.raises(InputError, match=expected), recorded(tmp_path):
                torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
            assert (tmp_path / "logs/rank-3.log").read_text().count("Traceback") == times
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_runs_keep_the_users_algorithms(monkeypatch):
    own = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "^NVLS,NVLSTree,CollnetDirect,CollnetChain",
    }
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    for given in ({}, dict.fromkeys(own, "the user's")):
        monkeypatch.setattr(os, "environ", dict(given))
        be_deterministic()
        assert os.environ == own | given


def test_a_log_that_cannot_be_written_does_not_hide_the_failure(tmp_path):
    (tmp_path / "logs").touch()
    with pytest.raises(ValueError, match="^the failure$"), recorded(tmp_path):
        raise ValueError("the failure")
