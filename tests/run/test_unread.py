"""Settings that a run does not read are told, each by turning it on with and without what reads it."""

import dataclasses
import typing

import pytest
import torch

from minitrain.bench.rows import load_row, row_trees
from minitrain.commands import bench
from minitrain.data.datasets import open_dataset
from minitrain.run.config import load as configs
from minitrain.run.config.recipes import CONFIGS
from minitrain.run.config.unread import READERS, unread
from minitrain.run.launch.start import start
from minitrain.run.tasks.initial_weights import fill_weights
from minitrain.settings import Config, Lora, Source
from minitrain.training.loop import Trainer
from tests.helpers.oracle import copies

TINY = {
    "model": {"name": "llama3-8b-tiny", "vocab_size": 128, "num_layers": 1},
    "batch": {"global": 2, "micro": 1, "seq_len": 16},
    "steps": 3,
    "device": "cpu",
}
WAN = {
    "model": "wan2.1-1.3b-tiny",
    "task": "diffusion",
    "data": {"size": [4, 16, 16], "text_tokens": 32},
    "batch": {"global": 2, "micro": 1, "seq_len": 256},
    "steps": 2,
    "device": "cpu",
}
HINTS = typing.get_type_hints(Config)
SECTIONS = [key for key in READERS if dataclasses.is_dataclass(HINTS.get(key))]

JSONL = {"data.kind": "jsonl", "data.path": "x"}
TEXT = {"data.kind": "text", "data.path": "x"}
TOKENS = {"data.kind": "tokens", "data.path": "x"}
CHATS = {"task": "sft"} | JSONL
GRPO = {"task": "grpo"}
MIXED = {"data.sources": [Source("x", kind="jsonl"), Source("y", kind="tokens")]}
WITH_MTP = configs.from_dict(
    {"model": {"name": "deepseek-v3-tiny", "num_nextn_predict_layers": 1}}
).model
# what else a run has that reads a setting, one dict for each way
READ = {
    "steps": [{}],
    "data.size": [{"task": "diffusion"}],
    "data.text_tokens": [{"task": "diffusion"}],
    "data.exclude": [TEXT, JSONL, TOKENS, MIXED, {"data.kind": "latents"}],
    "data.on_error": [TEXT, JSONL, TOKENS, MIXED],
    "data.field": [JSONL, MIXED],
    "data.template": [CHATS, CHATS | {"task": "dpo"}, CHATS | {"task": "lora"}, GRPO],
    "data.over_long": [CHATS, CHATS | {"task": "dpo"}],
    "data.token_dtype": [TOKENS, MIXED],
    "data.document_end": [TOKENS, MIXED],
    "data.validation": [{}, TEXT],
    "data.validation_path": [{"validation.every": 1}, {"validation.exact_match": 1}],
    "validation.batches": [{"validation.every": 1}],
    "parallel.context": [{"parallel.cp": 2}],
    "parallel.schedule": [{"parallel.pp": 2}],
    "optim.betas": [{}, {"optim.name": "muon"}],
    "optim.eps": [{}, {"optim.name": "muon"}],
    "optim.ema_warmup": [{"optim.ema": 0.9}],
    "optim.decay": [{"optim.schedule": "wsd"}],
    "optim.final_lr": [{"optim.schedule": each} for each in ("linear", "cosine", "wsd")],
    "lora.dropout_position": [{"lora.dropout": 0.1}],
    "diffusion.mean": [{"diffusion.sampling": each} for each in ("logit_normal", "mixed")],
    "diffusion.std": [{"diffusion.sampling": each} for each in ("logit_normal", "mixed")],
    "diffusion.mode_scale": [{"diffusion.sampling": "mode"}],
    "diffusion.uniform_share": [{"diffusion.sampling": "mixed"}],
    "grpo.reward": [{}],
    "grpo.turns": [{"grpo.environment": "x:Y"}],
    "grpo.environment_seconds": [{"grpo.environment": "x:Y"}],
    "grpo.environment_failure": [{"grpo.environment": "x:Y"}],
    "grpo.environment_wait": [{"grpo.environment": "x:Y"}],
    "grpo.prompt_key": [JSONL],
    "grpo.answer_key": [JSONL],
    "grpo.mock_digits": [{}],
    "grpo.kl_estimator": [{"grpo.kl": 0.1}],
    "grpo.importance_low": [{"grpo.importance": "mask"}],
    "grpo.importance_high": [{"grpo.importance": "truncate"}],
    "grpo.overlong_penalty": [{"grpo.overlong_buffer": 4}],
    "grpo.warmup_lr": [{"grpo.warmup_steps": 4}],
    "grpo.in_flight_cache": [{"grpo.in_flight": True, "grpo.lag": 1}],
    "grpo.eval_samples": [{"validation.every": 1}],
    "diffusion": [{"task": "diffusion"}],
    "dpo": [{"task": "dpo"}],
    "grpo": [GRPO],
    "rollout": [GRPO],
    "mtp_weight": [{"model": WITH_MTP}, {"model": WITH_MTP, "task": "sft"}],
    "fp8": [{"precision": "fp8"}],
    "distill": [{"distill.teacher": "x"}],
    "distill.divergence": [{}],
    "distill.beta": [{"distill.divergence": "js"}],
}
# the setting of a section that turns the others on is always read
SWITCHES = {"distill.teacher"}
# where a setting is read by default, what takes its reader away
TAKEN = {
    "steps": {"epochs": 1.0},
    "data.validation": TEXT | {"data.validation_path": "y"},
    "optim.betas": {"optim.name": "sgd"},
    "optim.eps": {"optim.name": "sgd"},
    "grpo.reward": {"grpo.environment": "x:Y"},
    "grpo.mock_digits": JSONL,
    "distill.divergence": GRPO,
}


def with_settings(config: Config, values: dict) -> Config:
    """Return the config with settings by name, whatever the checks would say."""
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        if section:
            part = getattr(config, section) or Lora()
            value = dataclasses.replace(part, **{"global_" if key == "global" else key: value})
        config = dataclasses.replace(config, **{section or key: value})
    return config


def other_value(kind: typing.Any, value: typing.Any) -> typing.Any:
    """Return another value than a default, of its type."""
    choices = [each for each in typing.get_args(kind) if each != value]
    if typing.get_origin(kind) is typing.Literal:
        return choices[0]
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "other"
    if isinstance(value, list):
        return [0.5, 0.5]
    if value is None:
        return 3
    return value + (0.25 if isinstance(value, float) else 1)


def others(key: str) -> dict:
    """Return the setting, or those of the section, at other values than their defaults."""
    section, _, name = key.partition(".")
    kind = {"lora": Lora}.get(section) or HINTS[section]
    if not dataclasses.is_dataclass(kind):
        return {key: other_value(kind, getattr(Config(), key))}
    fields = {field.name for field in dataclasses.fields(kind)}
    fields -= {
        switch.partition(".")[2] for switch in SWITCHES if switch.startswith(f"{section}.")
    }
    hints = typing.get_type_hints(kind)
    chosen = {name} if name else fields - {k.partition(".")[2] for k in READERS if "." in k}
    assert chosen <= fields
    return {
        f"{section}.{each}": other_value(hints[each], getattr(kind(), each)) for each in chosen
    }


def told(config: Config) -> set[str]:
    return {line.split("nothing reads ")[1].partition("=")[0] for line in unread(config)}


def test_each_reader_is_tried():
    assert READ.keys() == READERS.keys()


@pytest.mark.parametrize("key", READERS)
def test_a_setting_is_told_unless_something_reads_it(key):
    config = Config()
    section = key.partition(".")[0]
    for reader in READ[key]:
        # of the section that it stands in, too
        around = READ[section][0] if section in SECTIONS and section != key else {}
        for name, value in others(key).items():
            on = with_settings(config, {**around, **reader, name: value})
            assert name not in told(on), reader
            off = with_settings(config, around | TAKEN.get(key, {}) | {name: value})
            assert name in told(off)


def test_settings_at_their_defaults_are_not_told():
    for task in ("pretrain", "sft", "lora", "dpo", "grpo"):
        assert not told(configs.from_dict(TINY | {"task": task}))


def test_a_wrong_value_of_another_task_is_told():
    config = configs.from_dict(TINY | {"diffusion": {"shift": -1}, "optim": {"decay": 0.5}})
    assert list(unread(config)) == [
        "note: nothing reads optim.decay=0.5, which is for optim.schedule=wsd",
        "note: nothing reads diffusion.shift=-1.0, which is for task=diffusion",
    ]


def weights_after(config: Config) -> dict[str, torch.Tensor]:
    trainer = Trainer(config, start(config), fill=fill_weights)
    data = open_dataset(config)[0]
    for step in range(config.steps):
        trainer.step(data, step)
    return copies(trainer.model.state_dict().items())


@pytest.mark.parametrize("tree", [TINY, WAN, TINY | {"optim": {"name": "sgd"}}], ids=str)
def test_what_is_told_changes_nothing(pool, tree):
    """Bit for bit, with all of it turned on at once."""
    config = configs.from_dict(tree)
    changed = config
    for key in READERS:
        for name, value in others(key).items():
            # adapters are there or not; those ranks are refused outside of task=grpo
            if name.startswith("lora") or name in ("steps", "grpo.generation_ranks"):
                continue
            tried = with_settings(config, {name: value})
            if told(tried) == {name}:
                changed = with_settings(changed, {name: value})
    assert len(told(changed)) > 50
    (expected,) = pool.run(1, weights_after, config)
    (found,) = pool.run(1, weights_after, changed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_bench_notes_what_nothing_reads_once(capsys):
    tiny = ["model=llama3-8b-tiny", "batch.seq_len=64", "optim.decay=0.5", "rollout.chunk=64"]
    bench.main(["--dry-run", "--config", "quickstart", "quickstart", *tiny])
    notes = [line for line in capsys.readouterr().err.splitlines() if "nothing reads" in line]
    assert notes == [
        "note: nothing reads optim.decay=0.5, which is for optim.schedule=wsd",
        "note: nothing reads rollout.chunk=64, which is for task=grpo",
    ]


def test_every_setting_of_a_row_is_read():
    for name in row_trees():
        sampled = name.endswith(("decode-8b", "generate-42m"))
        config = load_row(CONFIGS / f"{name}.yaml", [])[1]
        assert not list(unread(config, ("rollout", "grpo") if sampled else ()))
