"""Distillation against closed forms, TRL's loss and plain autograd; every layout against one process; runs."""

import json
import math
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from trl.experimental.gkd import GKDTrainer

from minitrain import load_pretrained, save_pretrained, train
from minitrain.errors import InputError
from minitrain.grpo.policy_trainer import PolicyTrainer
from minitrain.models.zoo import empty_model, model_config
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.run.tasks.initial_weights import make_teachers, make_trainer
from minitrain.run.tasks.train_model import check_teacher
from minitrain.settings import Config, Distill
from minitrain.training import loss as losses
from minitrain.training.build import initialize
from minitrain.training.distillation import BASE, Distillation, divergence_and_grad
from minitrain.training.loop import forward_backward
from minitrain.training.loss import IGNORE, VocabShard
from minitrain.training.objectives import make_objective
from tests.helpers.grpo import TREE as POLICY
from tests.helpers.grpo import made_up_groups
from tests.helpers.oracle import (
    Batches,
    check_close,
    copies,
    packed_batch,
    ragged_batch,
    snapshot,
)
from tests.helpers.training import logged

KINDS = [("forward", 0.5), ("reverse", 0.5), ("js", 0.5), ("js", 0.1)]
TREE = {
    "model": {
        "name": "llama3-8b-tiny",
        "vocab_size": 96,
        "num_layers": 2,
        "initializer_range": 0.1,
    },
    "batch": {"global": 8, "micro": 2, "seq_len": 32},
    "optim": {"name": "sgd", "lr": 1.0, "weight_decay": 0.0, "clip": None},
    "device": "cpu",
}


def save_teacher(folder, name: str, seed: int, blind: bool = False, **fields) -> str:
    """Save a model of sharp distributions, so that divergences are far from 0. blind: to its tokens."""
    shape = model_config(
        name, initializer_range=0.2, **{"vocab_size": 96, "num_layers": 2} | fields
    )
    model = empty_model(shape).to_empty(device="cpu")
    initialize(model, seed)
    if blind:
        weight = model.model.embed_tokens.weight
        weight.data.copy_(weight[:1].expand_as(weight))
    save_pretrained(model, folder)
    return str(folder)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> list[str]:
    """Teachers of another depth than the student's, and of another family, with experts."""
    folder = tmp_path_factory.mktemp("teachers")
    return [
        save_teacher(folder / "deep", "llama3-8b-tiny", 1, num_layers=3),
        save_teacher(folder / "experts", "mixtral-8x7b-tiny", 2),
    ]


# ------------------------------------------------------------------------------------------------------------- formulas


def test_closed_forms_on_a_vocabulary_of_three():
    """By hand: p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2), m = (3/8, 1/4, 3/8) at beta = 1/2; a masked token."""
    temperature = 2.0
    p, q = torch.tensor([[0.5, 0.25, 0.25]] * 2), torch.tensor([[0.25, 0.25, 0.5]] * 2)
    kl = 0.25 * math.log(2)
    js = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)
    log = [math.log(2 / 3), 0.0, math.log(4 / 3)]
    mean = 0.25 * log[0] + 0.5 * log[2]
    gradients = {
        "forward": [-0.25, 0.0, 0.25],
        "reverse": [-0.25 * (math.log(2) + kl), -0.25 * kl, 0.5 * (math.log(2) - kl)],
        "js": [
            0.5 * share * (each - mean) for share, each in zip(q[0].tolist(), log, strict=True)
        ],
    }
    valid = torch.tensor([True, False])
    for kind, expected in (("forward", kl), ("reverse", kl), ("js", js)):
        settings = Distill("x", kind, 0.5, temperature)
        # any shift of the logits is the same distribution
        losses_, grad = divergence_and_grad(
            settings, temperature * q.log() + 3, temperature * p.log() - 5, valid, VocabShard()
        )
        torch.testing.assert_close(losses_, torch.tensor([expected, 0.0]))
        torch.testing.assert_close(grad[0], torch.tensor(gradients[kind]) / temperature)
        assert not grad[1].any()


@pytest.mark.parametrize("kind, beta", KINDS)
def test_losses_and_gradients_are_those_of_trl(teachers, kind, beta):
    """Batches of packed documents with masked labels, two teachers by source, chunks that do not fit."""
    tree = TREE | {"distill": {"divergence": kind, "beta": beta, "temperature": 1.7}}
    config = configs.from_dict(tree)
    batch = packed_batch(config, 0)
    batch["sources"] = (torch.arange(8) % 3 > 0).long()[:, None].expand(8, 32).contiguous()
    student = plain_student(config)
    models = [load_pretrained(folder) for folder in teachers]
    objective = Distillation(config.distill, teachers, ["a", "b"])
    objective.teachers = dict(zip(teachers, models, strict=True))
    with mock.patch.object(losses, "CHUNK", 40):
        loss = objective.loss(student, batch)
        loss.backward()
        with torch.no_grad():
            assert objective.loss(student, batch) == loss
    assert all(p.grad is None for model in models for p in model.parameters())
    numbers = logged(objective)
    found = copies((name, p.grad) for name, p in student.named_parameters())
    student.zero_grad()

    inputs = {key: batch[key] for key in ("positions", "document_ids")}
    logits = student(batch["tokens"], **inputs)
    parts = {}
    for number, name in enumerate("ab"):
        own = (batch["sources"] == number) & (batch["labels"] != IGNORE)
        with torch.no_grad():
            theirs = models[number](batch["tokens"], **inputs)
        parts[name] = GKDTrainer.generalized_jsd_loss(
            logits,
            theirs,
            batch["labels"].where(own, IGNORE),
            beta={"forward": 0, "reverse": 1}.get(kind, beta),
            temperature=1.7,
            reduction="sum",
        )
        mean = parts[name].item() / own.sum().item()
        assert numbers[f"loss/{name}"] == pytest.approx(mean, rel=1e-5) and mean > 0.01
    expected = sum(parts.values())
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    gradients = {name: p.grad for name, p in student.named_parameters()}
    check_close([found], gradients, 1e-4, "gradients")


def plain_student(config: Config):
    model = empty_model(config.model.config).to_empty(device="cpu")
    initialize(model, config.seed)
    return model


def test_chunks_compile_to_one_graph():
    """As on a GPU, where this runs compiled."""
    logits = torch.randn(2, 6, 96, generator=torch.Generator().manual_seed(0))
    valid = torch.arange(6) > 0
    compiled = torch.compile(divergence_and_grad, fullgraph=True, backend="aot_eager")
    for kind, beta in KINDS:
        arguments = Distill("x", kind, beta, 1.3), *logits, valid, VocabShard()
        for found, expected in zip(
            compiled(*arguments), divergence_and_grad(*arguments), strict=True
        ):
            torch.testing.assert_close(found, expected)


# -------------------------------------------------------------------------------------------------------------- layouts


def learn(tree: dict) -> tuple:
    """Whole gradients of a global batch whose rows come from the teachers in turn, and the log."""
    config = configs.from_dict(tree)
    meshes = start(config)
    trainer = make_trainer(config, meshes)
    if config.lora:
        with torch.no_grad():
            # adapters that have learned something: the model is not its own base
            for name, parameter in trainer.model.named_parameters():
                parameter.copy_(parameter + 0.1) if "lora_B" in name else None

    def batch(config: Config, step: int) -> dict:
        whole = ragged_batch(config, step)
        number = torch.arange(len(whole["tokens"])) % max(1, len(config.data.sources))
        return whole | {"sources": number[:, None].expand_as(whole["tokens"]).contiguous()}

    data = Batches(config, 1, batch)
    trainer.prepare(data, 1)
    micro_batches = trainer.micro_batches(data, 0)
    loss = forward_backward(
        trainer.model, trainer.objective, micro_batches, meshes, meshes.device
    )
    gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.requires_grad}
    return copies(gradients.items()), loss.item(), logged(trainer.objective, trainer.total)


@pytest.mark.parametrize(
    "kind, parallel, several",
    [
        ("forward", {"dp_shard": 2, "tp": 2}, True),
        ("reverse", {"tp": 4}, False),
        ("js", {"dp_shard": 2, "cp": 2, "reshard_after_forward": False}, True),
        ("js", {"dp_shard": 2, "tp": 2, "ep": 4}, True),
        ("reverse", {"dp_shard": 2, "tp": 2}, BASE),
    ],
    ids=str,
)
def test_every_layout_learns_as_one_process(pool, teachers, kind, parallel, several):
    tree = TREE | {"distill": {"teacher": teachers[1], "divergence": kind, "temperature": 1.3}}
    if several == BASE:
        tree["distill"] = tree["distill"] | {"teacher": BASE}
        tree |= {"task": "lora", "lora": {"rank": 4}}
    elif several:
        sources = [{"path": name, "name": name, "kind": "text"} for name in "ab"]
        sources[0]["teacher"] = teachers[0]
        tree["data"] = {"sources": sources, "kind": "text"}
    if "ep" in parallel:
        tree["model"] = tree["model"] | {"name": "mixtral-8x7b-tiny", "num_experts": 4}
    gradients, loss, numbers = pool.run(1, learn, tree)[0]
    results = pool.run(4, learn, tree | {"parallel": parallel})
    check_close([result[0] for result in results], gradients, 5e-5, "gradients")
    assert loss > 0.01 and len(numbers) == 2 * (several is True)
    for _, other, told in results:
        assert other == pytest.approx(loss, rel=1e-5)
        assert told == pytest.approx(numbers, rel=1e-4)


# ------------------------------------------------------------------------------------------------------------ on policy


def update(tree: dict) -> tuple:
    """The change of the weights by a step of two updates, and its numbers."""
    config = configs.from_dict(tree)
    meshes = start(config)
    policy = PolicyTrainer(config, meshes, lambda name: nullcontext())
    policy.teacher = make_teachers(config, meshes).get(config.distill.teacher)
    before = snapshot(policy.model.named_parameters())
    numbers = policy.learn(made_up_groups(), step=0)
    after = snapshot(policy.model.named_parameters())
    return {name: after[name] - before[name] for name in before}, numbers


def policy_tree(teacher: str, **more) -> dict:
    grpo = POLICY["grpo"] | {"surrogate": "reinforce", "importance": "none", "kl": 0.0}
    optim = POLICY["optim"] | {"clip": None, "lr": 0.1}
    distill = {"teacher": teacher, "temperature": 0.7}
    return POLICY | {"grpo": grpo, "optim": optim, "distill": distill} | more


def test_on_policy_gradients_are_those_of_reverse_kl_per_token(tmp_path, pool):
    """Against autograd on unpacked sequences; rewards count nothing. Then layouts against one process."""
    teacher = save_teacher(
        tmp_path / "teacher", "llama3-8b-tiny", 3, vocab_size=258, num_layers=3
    )
    tree = policy_tree(teacher, batch=POLICY["batch"] | {"global": 16})
    changes, numbers = pool.run(1, update, tree)[0]
    policy, known = plain_student(configs.from_dict(tree)), load_pretrained(teacher)
    total, count, divergence = 0.0, 0, 0.0
    for response in (response for group in made_up_groups() for response in group):
        tokens = torch.tensor([response.prompt + response.response])
        own, theirs = (
            (model(tokens[:, :-1]) / temperature)
            .log_softmax(-1)
            .gather(-1, tokens[:, 1:, None])[0, -len(response.response) :, 0]
            for model, temperature in ((policy, 1.0), (known, 0.7))
        )
        advantage = (theirs - own).detach()
        total = total - (advantage * own).sum()
        divergence += (advantage.exp() - 1 - advantage).sum().item()
        count += len(advantage)
    (total / count).backward()
    expected = {name: -0.1 * p.grad for name, p in policy.named_parameters()}
    check_close([changes], expected, 1e-4, "weights after an update")
    assert numbers["kl"] == pytest.approx(divergence / count, rel=1e-4)
    # two updates, with the first weights' log-probabilities
    clipped = tree | {"grpo": POLICY["grpo"] | {"kl": 0.0}, "batch": POLICY["batch"]}
    changes, numbers = pool.run(1, update, clipped)[0]
    for parallel in ({"dp_shard": 2, "tp": 2}, {"pp": 2, "cp": 2}):
        results = pool.run(4, update, clipped | {"parallel": parallel})
        check_close([result[0] for result in results], changes, 5e-5, "weights")
        for _, told in results:
            assert told == pytest.approx(numbers, rel=1e-4, abs=1e-6)
    # adapters that have learned nothing: the policy is its own teacher at another temperature
    tree = policy_tree(BASE, lora={"rank": 4})
    tree["distill"] = tree["distill"] | {"temperature": 1.0}
    assert pool.run(1, update, tree)[0][1]["kl"] == 0


# ----------------------------------------------------------------------------------------------------------------- runs


def run(folder, tree: dict, *words: str) -> list[dict]:
    (folder / "x.yaml").write_text(json.dumps(tree))
    train.main(["--config", str(folder / "x.yaml"), f"out_dir={folder}/out", *words])
    return [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


def test_runs_learn_their_teacher(tmp_path):
    """Off policy on texts; then its result, on policy, from another teacher, with groups of one sample."""
    teacher = save_teacher(tmp_path / "teacher", "llama3-8b-tiny", 1, vocab_size=258)
    optim = {"name": "adamw", "lr": 3e-3}
    (tmp_path / "x.txt").write_text("abcd " * 400)
    data = {
        "kind": "text",
        "path": str(tmp_path / "x.txt"),
        "validation_path": str(tmp_path / "x.txt"),
    }
    tree = TREE | {"model": POLICY["model"], "optim": optim, "distill": {"teacher": teacher}}
    lines = run(tmp_path, tree | {"data": data}, "steps=40", "validation.every=40")
    assert lines[-1]["val_loss"] < 0.2 * lines[0]["loss"]
    tree = policy_tree(
        teacher,
        optim=optim | {"lr": 1e-2},
        grpo={"prompts": 32, "group": 1, "mock_digits": 2},
        batch={"global": 32, "micro": 4, "seq_len": 32},
    )
    teacher = save_teacher(tmp_path / "blind", "llama3-8b-tiny", 1, blind=True, vocab_size=258)
    tree["distill"] = {"teacher": teacher}
    (tmp_path / "policy").mkdir()
    lines = run(tmp_path / "policy", tree, "steps=20")
    divergences = [line["kl"] for line in lines]
    assert sum(divergences[-3:]) < 0.5 * sum(divergences[:3])


@pytest.mark.parametrize(
    "words, told",
    [
        (["distill.teacher=nowhere"], "distill.teacher=nowhere: "),
        (
            ["distill.teacher={other}"],
            "the teacher knows 97 tokens, and the model 96 (use a teacher of",
        ),
        (
            ["distill.teacher={short}"],
            "batch.seq_len=32 exceeds the model's max_position_embeddings=16",
        ),
        (
            ["distill.teacher={deep}", "task=dpo"],
            "is for task=pretrain, sft, lora and grpo, not dpo",
        ),
        (["distill.teacher=base"], "there are none (use a folder, or lora)"),
        (
            ["distill.teacher={deep}", "distill.beta=1"],
            "distill.beta=1.0 must be between 0.001 and 0.999",
        ),
        (
            ["distill.teacher={deep}", "distill.temperature=0"],
            "distill.temperature=0.0 must be between 0.01 and 1,000",
        ),
        (
            ["data.sources=[{path: a, kind: text, teacher: {deep}}, {path: b, kind: text}]"],
            "some have a",
        ),
    ],
    ids=str,
)
def test_mistakes_are_one_line(tmp_path, teachers, words, told):
    folders = {"deep": teachers[0], "other": tmp_path / "other", "short": tmp_path / "short"}
    if "{other}" in words[0]:
        save_teacher(tmp_path / "other", "llama3-8b-tiny", 0, vocab_size=97)
    if "{short}" in words[0]:
        save_teacher(tmp_path / "short", "llama3-8b-tiny", 0, max_position_embeddings=16)
    for name, folder in folders.items():
        words = [word.replace(f"{{{name}}}", str(folder)) for word in words]
    with pytest.raises(InputError) as error:
        run(tmp_path, TREE, *words)
    assert told in str(error.value) and len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_pipelines_are_refused_and_labels_of_files_are_not_needed(teachers):
    tree = TREE | {"distill": {"teacher": teachers[0]}, "parallel": {"pp": 2}}
    with pytest.raises(InputError, match="pp=2: Distillation does not name pp"):
        config = configs.from_dict(tree)
        make_trainer(config, mock.Mock())
    check_teacher(configs.from_dict(TREE), BASE)
    assert isinstance(
        make_objective(configs.from_dict(TREE | {"distill": tree["distill"]})), Distillation
    )
