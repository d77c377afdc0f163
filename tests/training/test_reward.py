"""Reward models and classifiers against transformers, TRL and PEFT; layouts against one process; as GRPO's reward."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.reward_trainer import RewardTrainer

from minitrain import InputError, Sampler, load_pretrained, save_pretrained, train
from minitrain.commands import merge
from minitrain.data.chat.preferences import Pairs
from minitrain.data.datasets import open_dataset
from minitrain.formats.config_hf import export_fault, exportable
from minitrain.formats.layouts_hf import all_to_stored
from minitrain.run.config import load as configs
from minitrain.run.tasks.reward_model import reward_model
from minitrain.settings import DPO
from minitrain.training.packing import rows
from minitrain.training.reward import Scores, linear_scores
from tests.helpers.hf_models import (
    CONFIGS,
    HYBRID_CONFIGS,
    MOE_CONFIGS,
    assert_same,
    build,
    call_refused,
    compare_and_differentiate,
    edit_json,
    edit_weights,
    random_tokens,
)
from tests.helpers.oracle import check_close
from tests.helpers.preferences import TREE as DPO_TREE
from tests.helpers.preferences import as_samples, compare, learn, made_up_pairs, refuse_cp

TREE = DPO_TREE | {"task": "reward"}
NAMES = {0: "bad", 1: "fair", 2: "good"}
ALL = CONFIGS | MOE_CONFIGS | HYBRID_CONFIGS
# those of which transformers has a classifier
FAMILIES = [
    family
    for family in ["llama3-tied", "qwen2.5", "qwen3", "nemotron", *MOE_CONFIGS, "gpt2"]
    if type(ALL[family]()) in AutoModelForSequenceClassification._model_mapping
]


def classifier(family: str, seed: int = 0, **changes):
    """Return transformers' classifier of a family in fp32, with random parameters."""
    return build(family, seed, AutoModelForSequenceClassification, **changes)


# -------------------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_gradients_and_files_are_those_of_transformers(tmp_path, family):
    theirs = classifier(family, id2label=NAMES, label2id={name: n for n, name in NAMES.items()})
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs")
    tokens = random_tokens(1, 40)
    if family == "gpt2":
        compare_and_differentiate(ours(tokens)[:, -1], theirs(tokens).logits)
        gradients = ((name, p.grad) for name, p in ours.named_parameters())
        found = dict(all_to_stored(gradients, ours.config))
        expected = {name: p.grad for name, p in theirs.named_parameters()}
        check_close([found], expected, 1e-3, "gradients")
    else:
        assert_same(ours(tokens)[:, -1], theirs(tokens).logits, ours, theirs)
    save_pretrained(ours, tmp_path / "ours")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours", dtype="auto")
    assert type(again) is type(theirs) and again.config.id2label == NAMES
    assert again.config.label2id == theirs.config.label2id
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_two_labels_without_names_are_read_and_the_names_of_others_are_counted(tmp_path):
    """transformers leaves out `id2label` of two, its default."""
    for labels in (1, 2, 5):
        theirs = classifier("llama3", num_labels=labels)
        theirs.save_pretrained(tmp_path)
        if labels == 2:
            edit_json(tmp_path / "config.json", id2label=None, label2id=None)
        ours = load_pretrained(tmp_path)
        assert ours.config.num_labels == labels == len(ours.head_weight)
        save_pretrained(ours, tmp_path / "ours")
        again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
        assert again.config.num_labels == labels


def test_a_file_without_its_score_or_with_other_labels_is_refused(tmp_path):
    classifier("qwen3", num_labels=1).save_pretrained(tmp_path)
    edit_weights(tmp_path, **{"score.weight": torch.zeros(2, 48)})
    call_refused(lambda: load_pretrained(tmp_path), "score.weight", "[2, 48]", "[1, 48]")
    edit_weights(tmp_path, **{"score.weight": None})
    call_refused(lambda: load_pretrained(tmp_path), "score.weight")


def test_families_of_which_transformers_has_no_classifier_are_saved_for_us_alone(tmp_path):
    tree = TREE | {"model": {"name": "nemotron3-nano-30b-a3b-tiny"}, "data": {"kind": "mock"}}
    config = configs.from_dict(tree).model.config
    assert "num_labels=1 cannot be saved as NemotronHForCausalLM" in export_fault(config)
    assert exportable(config).family == "minitrain"


# ----------------------------------------------------------------------------------------------------------------- TRL


def test_losses_and_gradients_are_those_of_trl(tmp_path):
    """Pairs packed into rows here, padded there."""
    theirs = classifier("llama3", num_labels=1, pad_token_id=0)
    theirs.save_pretrained(tmp_path)
    pairs = made_up_pairs(7)
    # transformers takes the last token that is no padding
    pairs = [{key: [1 + n % 95 for n in ids] for key, ids in pair.items()} for pair in pairs]
    texts = [
        pair["prompt_ids"] + pair[key] for key in ("chosen_ids", "rejected_ids") for pair in pairs
    ]
    longest = max(map(len, texts))
    padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    alike = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    metrics = {
        "train": {
            key: [] for key in ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")
        }
    }
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=None),
        accelerator=alike,
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"input_ids": padded, "attention_mask": (padded != 0).long()}
    expected = RewardTrainer.compute_loss(trainer, theirs, inputs)
    expected.backward()

    ours = load_pretrained(tmp_path)
    data = Pairs(
        as_samples(pairs, scored=True),
        configs.from_dict(TREE | {"batch": TREE["batch"] | {"seq_len": 48}}),
    )
    batch = rows(data, range(len(data)))
    assert 2 < len(data) < 6
    objective = Scores(DPO(beta=1.0))
    assert objective.count(batch) == len(pairs)
    loss = objective.loss(ours, batch) / len(pairs)
    loss.backward()
    torch.testing.assert_close(loss, expected.detach(), atol=1e-5, rtol=1e-5)
    found = objective.metrics(objective.sums().tolist())
    assert found["reward_accuracy"] == pytest.approx(metrics["train"]["accuracy"][0])
    assert found["reward_margin"] == pytest.approx(metrics["train"]["margin"][0], abs=1e-5)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    check_close(
        [{name: p.grad for name, p in ours.named_parameters()}], gradients, 1e-4, "gradients"
    )


# ------------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    "parallel",
    [{"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "pp": 2}],
    ids=str,
)
def test_every_layout_learns_as_one_process(pool, one_process, parallel):
    compare(pool, one_process, TREE | {"parallel": parallel})


@pytest.fixture(scope="module")
def one_process(pool):
    return pool.run(1, learn, TREE)[0]


def test_context_parallelism_is_refused(pool):
    for line in pool.run(2, refuse_cp, TREE | {"parallel": {"cp": 2}}):
        assert line.startswith("parallel.cp=2: Scores does not name cp")


# ----------------------------------------------------------------------------------------------------------------- run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that has learned to prefer `yes`, with a stop in between, from a language model's folder."""
    path = tmp_path_factory.mktemp("reward")
    pairs = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(40)]
    (path / "x.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (path / "x.yaml").write_text(json.dumps(TREE))
    base = ["--config", str(path / "x.yaml"), "task=pretrain", "data={kind: mock}", "steps=1"]
    train.main([*base, "optim.lr=0", f"out_dir={path}/base"])
    return path


def run(folder, name: str, *words: str) -> list[dict]:
    given = f"data.path={folder}/x.jsonl data.validation=0.2 validation.every=4 batch.seq_len=128"
    given += f" optim.name=adamw optim.lr=0.003 checkpoint.every=4 out_dir={folder}/{name}"
    tree = json.dumps(TREE | {"model": str(folder / "base")})
    (folder / f"{name}.yaml").write_text(tree)
    train.main(["--config", str(folder / f"{name}.yaml"), *given.split(), *words])
    return [
        json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def learned(folder):
    run(folder, "stopped", "steps=4")
    stopped, whole = run(folder, "stopped", "steps=8"), run(folder, "whole", "steps=8")
    assert [line["loss"] for line in stopped] == [line["loss"] for line in whole]
    assert whole[0]["loss"] > 0.5 and whole[-1]["val_loss"] < 0.3
    assert whole[-1]["val_reward_accuracy"] == 1.0
    return folder / "whole"


def their_score(model, tokenizer, asked: str, reply: str) -> float:
    chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
    tokens = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    with torch.no_grad():
        return model(tokens).logits.item()


def test_a_run_makes_a_model_of_transformers_and_a_reward(learned):
    """The score is that of the chat's last token, as in transformers."""
    theirs = AutoModelForSequenceClassification.from_pretrained(learned)
    tokenizer = AutoTokenizer.from_pretrained(learned)
    assert type(theirs).__name__ == "LlamaForSequenceClassification"
    ours = reward_model(str(learned))
    for reply in ("yes 7", "no 7", ""):
        found = ours(reply, "", {"prompt": "7?", "answer": ""})
        assert found == pytest.approx(their_score(theirs, tokenizer, "7?", reply), abs=1e-4)
    assert ours("yes 7", "", {"question": "7?"}) > ours("no 7", "", {"question": "7?"})
    begun = [{"role": "user", "content": "7?"}, {"role": "assistant", "content": "ye"}]
    assert ours("s 7", "", {"prompt": begun}) == ours("yes 7", "", {"prompt": "7?"})
    with pytest.raises(InputError, match="a chat of .* tokens is longer than the reward model's"):
        ours("yes" * 9999, "", {"prompt": "7?"})
    with pytest.raises(InputError, match="says nothing"):
        Sampler(load_pretrained(learned))


def test_grpo_takes_the_folder(learned, folder):
    problems = [{"prompt": f"{n}?", "answer": "-"} for n in range(8)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(each) + "\n" for each in problems))
    tree = {
        "model": str(folder / "base"),
        "task": "grpo",
        "steps": 1,
        "data": {"kind": "jsonl", "path": str(folder / "problems.jsonl"), "template": "plain"},
        "batch": {"global": 4, "micro": 2, "seq_len": 64},
        "grpo": {"prompts": 2, "group": 2, "reward": str(learned)},
        "rollout": {"max_tokens": 6},
        "optim": {"name": "sgd", "lr": 0.0},
        "device": "cpu",
        "out_dir": str(folder / "policy"),
    }
    (folder / "grpo.yaml").write_text(json.dumps(tree))
    train.main(["--config", str(folder / "grpo.yaml")])
    reward = reward_model(str(learned))
    lines = (folder / "policy/rollouts/step-00000001.jsonl").read_text().splitlines()
    assert len(lines) == 4
    for line in map(json.loads, lines):
        asked = {"prompt": bytes(line["prompt"]).decode().strip()}
        assert line["reward"] == pytest.approx(reward(line["text"], "", asked), abs=1e-5)
    tree["grpo"]["reward"] = str(folder / "base")
    (folder / "grpo.yaml").write_text(json.dumps(tree))
    with pytest.raises(InputError, match="is no reward model"):
        train.main(["--config", str(folder / "grpo.yaml")])


def test_adapters_and_the_score_beside_them_are_pefts(folder):
    """The score is trained as a whole, and is in the adapters' file."""
    lines = run(folder, "adapters", "steps=4", "lora={rank: 4}")
    assert lines[-1]["loss"] < lines[0]["loss"]
    base = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
    theirs = PeftModel.from_pretrained(base, folder / "adapters").eval()
    merge.main(
        [
            "--model",
            f"{folder}/base",
            "--adapter",
            f"{folder}/adapters",
            "--out",
            f"{folder}/merged",
        ]
    )
    ours = load_pretrained(folder / "merged")
    tokens = random_tokens(1, 30)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens)[:, -1], theirs(tokens).logits, atol=1e-4, rtol=0)
    stored = load_file(folder / "adapters/adapter_model.safetensors")
    assert torch.equal(ours.score.weight, stored["base_model.model.score.weight"])
    # training goes on from both
    again = run(folder, "again", "steps=1", f"lora={{path: {folder}/adapters}}", "optim.lr=0")
    found = load_file(folder / "again/adapter_model.safetensors")
    assert found.keys() == stored.keys() and all(
        torch.equal(found[key], stored[key]) for key in stored
    )
    assert again[0]["loss"] < lines[0]["loss"]


# ---------------------------------------------------------------------------------------------------------------- data


def test_a_pair_has_all_tokens_of_both_chats_and_a_label_at_the_last(tmp_path):
    file = tmp_path / "x.jsonl"
    lines = [
        {"prompt": "?", "chosen": "good", "rejected": "bad"},
        {"prompt": "?", "chosen": "a" * 40, "rejected": "b"},
        {"prompt": "?", "chosen": "good", "rejected": "bad", "train": False},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    data, _ = open_dataset(configs.from_dict(TREE | {"data": TREE["data"] | {"path": str(file)}}))
    # one is longer than half a row, which would cut its last token; one is not to be learned
    assert len(data.pairs) == 1 and "2 dropped" in data.about
    chosen, rejected = data.pairs[0]
    # 257 ends a text of bytes
    assert chosen.tokens.tolist() == [*b"?\ngood", 257] and rejected.tokens.tolist() == [
        *b"?\nbad",
        257,
    ]
    assert np.flatnonzero(chosen.labels >= 0).tolist() == [len(chosen.tokens) - 1]


def test_scores_in_bf16_are_computed_in_fp32():
    hidden, weight = torch.randn(2, 5, 64).bfloat16(), torch.randn(1, 64).bfloat16()
    expected = F.linear(hidden.double(), weight.double())
    torch.testing.assert_close(
        linear_scores(hidden, weight).double(), expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    "changes, told",
    [
        (
            {"task": "sft", "model": TREE["model"] | {"num_labels": 2}},
            "model.num_labels=2: a model with a score",
        ),
        ({"model": TREE["model"] | {"num_labels": -1}}, "model.num_labels"),
        (
            {"validation": {"exact_match": 5}, "data": TREE["data"] | {"validation": 0.1}},
            "validation.exact_match=5",
        ),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused(changes, told):
    with pytest.raises(InputError) as error:
        configs.from_dict(TREE | changes)
    assert str(error.value).startswith(told)
