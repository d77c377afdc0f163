"""Sources mixed by weight: their order against a greedy loop in fractions, their losses against a plain model."""

import json
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from minitrain.data.datasets import BLOCK, Mixed, open_dataset, with_steps
from minitrain.data.sources import has_tokenizer
from minitrain.errors import InputError
from minitrain.run.checkpoint.fingerprint import data_files
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import start
from minitrain.run.tasks.initial_weights import make_trainer
from minitrain.settings import Config
from minitrain.training.loop import training_steps
from minitrain.training.loss import IGNORE
from tests.helpers.commands import command
from tests.helpers.oracle import plain_model
from tests.helpers.training import logged


class Counting:
    """Row n of dataset d is d and n."""

    def __init__(self, number: int, length: int):
        self.number, self.length = number, length

    def __len__(self) -> int:
        return self.length

    def row(self, n: int) -> dict:
        return {"tokens": torch.tensor([self.number, n])}


def greedy(weights: list[float], rows: int) -> list[tuple[int, int]]:
    """The source of each row, that which lacks most of its share, and which of its rows it is; in exact numbers."""
    shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    order, counts = [], [0] * len(weights)
    for n in range(rows):
        lacking = [share * (n + 1) - count for share, count in zip(shares, counts, strict=True)]
        source = lacking.index(max(lacking))
        order.append((source, counts[source]))
        counts[source] += 1
    return order


@pytest.mark.parametrize(
    "weights",
    [[1], [1, 1], [3, 1], [5, 0.5, 2, 2.5], [0.3, 0.3, 0.4], [1e-3, 1], [7, 11, 13, 17]],
)
def test_the_source_that_lacks_most_is_next(weights):
    """Where rounding decides between equals, either is right: what each source has by then is what counts."""
    mixed = Mixed(
        [Counting(i, 100) for i in range(len(weights))], list("abcd")[: len(weights)], weights
    )
    found = [tuple(mixed.row(n)["tokens"].tolist()) for n in range(BLOCK)]
    counts = np.zeros(len(weights))
    shares = np.array(weights) / sum(weights)
    for n, (source, number) in enumerate(found):
        assert (
            number == counts[source]
            and max(shares * (n + 1) - counts) <= (shares * (n + 1) - counts)[source] + 1e-9
        )
        counts[source] += 1
        assert abs(shares * (n + 1) - counts).max() < 1 + 1e-9
    if weights in ([1], [1, 1], [3, 1], [5, 0.5, 2, 2.5]):  # which floats hold exactly
        assert found == greedy(weights, BLOCK)
    # the same order again, each source going on
    for n in (BLOCK, 3 * BLOCK + 17, 10**12 * BLOCK + 5):
        block, place = divmod(n, BLOCK)
        source, number = found[place]
        assert mixed.row(n)["tokens"].tolist() == [source, number + block * int(counts[source])]
        assert mixed.row(np.int64(n))["sources"].tolist() == [source, source]


@pytest.mark.parametrize(
    "lengths, weights",
    [([5, 100], [1, 1]), ([10, 10], [3, 1]), ([1, 7, 50], [1, 2, 3]), ([30_000, 90_000], [1, 2])],
)
def test_its_length_ends_before_any_row_comes_again(lengths, weights):
    mixed = Mixed(
        [Counting(i, length) for i, length in enumerate(lengths)], "abc"[: len(lengths)], weights
    )
    places = [mixed.place(n) for n in range(len(mixed) + 1)]
    assert all(number < lengths[source] for source, number in places[:-1])
    source, number = places[-1]
    assert number == lengths[source]


def test_a_share_below_a_row_in_a_block_is_refused():
    with pytest.raises(
        InputError,
        match=r"data.sources: 'b' has 1e-06 of all weights, which is less than a row in",
    ):
        Mixed([Counting(0, 9), Counting(1, 9)], "ab", [1, 1e-6])


# ----------------------------------------------------------------------------------------------------------------- runs

MODEL = {"name": "llama3-8b-tiny", "vocab_size": 258, "initializer_range": 0.2}


@pytest.fixture
def texts(tmp_path):
    """Three sources of different kinds, each with its own letters."""
    for name, letters in (("a", "abc"), ("b", "xyz")):
        lines = [
            json.dumps({"body": "".join(letters[(n * k) % 3] for k in range(n % 9 + 3))})
            for n in range(60)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    np.save(tmp_path / "c.npy", np.arange(500) % 7)
    return tmp_path


def tree(folder, task="pretrain", **more):
    sources = [
        {"path": str(folder / "a.jsonl"), "weight": 5, "name": "one"},
        {"path": str(folder / "b.jsonl"), "weight": 2},
        {"path": str(folder / "c.npy"), "kind": "tokens", "weight": 1, "name": "three"},
    ]
    data = {"kind": "jsonl", "field": "body", "sources": sources}
    return {
        "model": MODEL,
        "task": task,
        "data": data,
        "batch": {"global": 8, "micro": 2, "seq_len": 16},
        "steps": 3,
        "optim": {"name": "sgd", "lr": 0.5},
        "device": "cpu",
    } | more


def test_each_source_is_read_and_shuffled_as_if_alone(texts):
    config = from_dict(tree(texts))
    mixed, held = open_dataset(config)
    assert held is None and mixed.about.startswith("one: 62.50% of the rows, ")
    alone = [
        open_dataset(
            from_dict(
                tree(
                    texts,
                    data={"path": source.path, "kind": source.kind or "jsonl", "field": "body"},
                )
            )
        )[0]
        for source in config.data.sources
    ]
    seen = Counter()
    for n in range(400):
        source, number = mixed.place(n)
        row = mixed.row(n)
        assert (row.pop("sources") == source).all()
        expected = alone[source].row(number)
        assert row.keys() == expected.keys() and all(
            torch.equal(row[key], expected[key]) for key in row
        )
        assert mixed.origin(n).startswith(
            ("one: document", f"{texts}/b.jsonl: document", "three: ")[source]
        )
        seen[source] += 1
    assert seen == {0: 250, 1: 100, 2: 50} and 3 * len(alone[0]) < 250  # epochs of its own
    files = [file.name for file in data_files(config.data)]
    assert sorted(set(files)) == ["a.jsonl", "b.jsonl", "c.npy"]
    config = from_dict(tree(texts, data=tree(texts)["data"] | {"validation": 0.3}))
    train, held = open_dataset(config)
    assert (
        held.row(0)["sources"].tolist() == [0] * 16
        and len(held) >= 1
        and len(held.datasets[0]) < len(alone[0]) / 2
    )
    assert sum(len(side.datasets[0].corpus) for side in (train, held)) == len(alone[0].corpus)


def run(settings: dict) -> list[dict]:
    """The numbers of a run's steps; metrics that are not of the model are left out."""
    config = from_dict(settings)
    trainer = make_trainer(config, start(config))
    data, _ = open_dataset(config)
    steps = list(training_steps(trainer, data, 0, 0))
    trainer.evaluate(data)
    assert logged(trainer.objective, trainer.total) == {}  # a validation adds nothing
    return [{key: step[key] for key in step if key.startswith("loss")} for step in steps]


def first_losses(settings: dict) -> dict[str, float]:
    """The first step's losses by a plain model, a source at a time."""
    config = from_dict(settings)
    model, (data, _) = plain_model(config), open_dataset(config)
    sums, counts = Counter(), Counter()
    for n in range(config.batch.global_):
        row = {key: value[None] for key, value in data.row(n).items()}
        name = "loss/" + config.data.sources[int(row.pop("sources")[0, 0])].label
        labels = row.pop("labels").flatten()
        logits = model(row.pop("tokens"), **row).flatten(0, 1).float()
        for key in ("loss", name):
            sums[key] += F.cross_entropy(
                logits, labels, ignore_index=IGNORE, reduction="sum"
            ).item()
            counts[key] += int((labels != IGNORE).sum())
    return {key: sums[key] / counts[key] for key in sums}


LAYOUTS = [
    (2, {}),
    (2, {"cp": 2}),
    (2, {"tp": 2}),
    (4, {"pp": 2, "tp": 2}),
    (4, {"cp": 2, "dp_replicate": 2}),
    (4, {"pp": 2, "cp": 2}),
]


@pytest.mark.parametrize("ranks, layout", LAYOUTS, ids=str)
def test_losses_by_source_are_those_of_one_process(pool, texts, ranks, layout):
    expected = pool.run(1, run, tree(texts))[0]
    plain = first_losses(tree(texts))
    assert (
        plain.keys()
        == expected[0].keys()
        == {"loss", "loss/one", f"loss/{texts}/b.jsonl", "loss/three"}
    )
    assert expected[0] == pytest.approx(plain, rel=1e-5)
    assert expected[1]["loss"] < expected[0]["loss"]
    for steps in pool.run(ranks, run, tree(texts, parallel=layout)):
        for ours, theirs in zip(steps, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_run_goes_on_exactly_and_says_what_it_mixes(texts):
    for name, letter in (("chats", "a"), ("more", "b")):
        lines = [
            json.dumps({"prompt": f"{n}{letter}?", "response": letter * n}) for n in range(1, 9)
        ]
        (texts / f"{name}.jsonl").write_text("\n".join(lines))
    weights = {"chats": 3, "more": 1}
    sources = [
        {"path": str(texts / f"{name}.jsonl"), "weight": w, "name": name}
        for name, w in weights.items()
    ]
    words = [
        f"data.sources={json.dumps(sources)}",
        "task=sft",
        "data.kind=jsonl",
        "data.template=plain",
        "device=cpu",
        "model=llama3-8b-tiny",
        "model.vocab_size=258",
        "batch.global=8",
        "batch.micro=4",
        "batch.seq_len=32",
    ]
    (texts / "empty.yaml").write_text("{}")

    def steps_of(out, *more):
        done = command(
            "-m",
            "minitrain.train",
            "--config",
            texts / "empty.yaml",
            *words,
            f"out_dir={texts / out}",
            *more,
        )
        assert done.returncode == 0, done.stderr
        lines = [
            json.loads(line) for line in (texts / out / "metrics.jsonl").read_text().splitlines()
        ]
        return [
            {key: line[key] for key in line if key.startswith("loss")} for line in lines
        ], done.stdout + done.stderr

    whole, told = steps_of("whole", "steps=4")
    assert (
        "chats: 75.00% of the rows" in told
        and "more: 25.00% of the rows" in told
        and ", chats " in told
    )
    assert all({"loss", "loss/chats", "loss/more"} == line.keys() for line in whole)
    steps_of("cut", "steps=2")
    again, _ = steps_of("cut", "steps=4")
    assert again == whole


@pytest.mark.parametrize(
    "change, message",
    [
        ({"sources": [{"path": "a", "weight": 0}]}, "data.sources: weight=0.0 must be above 0"),
        ({"sources": [{"path": "a", "weight": -1}]}, "data.sources: weight=-1.0 must be above 0"),
        (
            {"sources": [{"path": "a", "weight": float("nan")}]},
            r"data.sources\[0\].weight must be a finite number",
        ),
        ({"sources": [{"path": "a", "wait": 1}]}, r"unknown key data.sources\[0\].wait"),
        ({"sources": [{"path": "a"}, {"path": "a"}]}, "data.sources has two of the name 'a'"),
        (
            {"sources": [{"path": "a"}], "path": "b"},
            "data.path and data.sources: give one of them",
        ),
        ({"sources": [{"name": "x"}]}, "data.sources 'x': data.kind=jsonl needs data.path"),
        (
            {"sources": [{"path": "a"}], "kind": "mock"},
            "data.sources 'a': data.kind=mock must be text or jsonl or tokens",
        ),
        (
            {"sources": [{"path": "a", "kind": "tokens"}], "cache": "x"},
            "data.cache=x is for task=pretrain and",
        ),
        ({"task": "grpo"}, "data.sources are for task=pretrain, sft and lora, not for task=grpo"),
        (
            {"task": "sft", "sources": [{"path": "a", "kind": "text"}]},
            "data.sources 'a': data.kind=text holds no chats",
        ),
        ({"epochs": 1.0}, "epochs and validation.exact_match are not for data.sources"),
    ],
)
def test_settings_that_contradict_each_other(change, message):
    data = {"kind": "jsonl", "sources": [{"path": "a"}, {"path": "b"}]}
    top = {key: change.pop(key) for key in ("task", "epochs") if key in change}
    with pytest.raises(InputError, match=message):
        from_dict({"model": MODEL, "data": data | change} | top)


@pytest.mark.parametrize("kind, field", [("text", "text"), ("jsonl", "body"), ("tokens", "text")])
def test_held_out_files_are_read_as_the_sources_are(tmp_path, kind, field):
    """Not as the default kind, which is made up: the rows are those of the held-out files alone."""
    words = " ".join(map(str, range(90)))
    for name in ("a", "b", "held"):
        file = tmp_path / f"{name}.{'npy' if kind == 'tokens' else 'txt'}"
        text = name + words
        if kind == "tokens":
            np.save(file, np.frombuffer(text.encode(), np.uint8).astype(np.uint16))
        elif kind == "jsonl":
            file.write_text(json.dumps({"body": text, "text": "no"}))
        else:
            file.write_text(text)
    suffix = file.suffix
    sources = [{"path": f"{tmp_path}/{name}{suffix}", "kind": kind} for name in "ab"]
    if kind == "jsonl":
        sources = [source | {"field": field} for source in sources]
    held = f"{tmp_path}/held{suffix}"
    tree = {"model": MODEL, "batch": {"global": 2, "micro": 2, "seq_len": 32}}
    data = {"sources": sources, "validation_path": held}
    config = from_dict(tree | {"data": data, "validation": {"every": 1}})
    _, found = open_dataset(config)
    alone = {"kind": kind, "path": held, "field": field}
    expected, _ = open_dataset(from_dict(tree | {"data": alone}))
    assert len(found) == len(expected) > 4
    for n in range(len(expected)):
        assert torch.equal(found.row(n)["tokens"], expected.row(n)["tokens"])
    # what was given counts
    assert from_dict(tree | {"data": data | {"kind": "jsonl"}}).data.kind == "jsonl"


@pytest.mark.parametrize("task", ["pretrain", "sft"])
def test_nothing_is_validated_on_data_of_no_kind(task):
    """Which would be random tokens, or none at all after the first step."""
    kinds = ("jsonl", "jsonl") if task == "sft" else ("text", "jsonl")
    sources = [{"path": name, "kind": kind} for name, kind in zip("ab", kinds, strict=True)]
    tree = {"task": task, "model": MODEL, "validation": {"every": 1}}
    with pytest.raises(InputError, match="validation.every=1 needs data.validation above 0"):
        from_dict(tree | {"data": {"sources": sources}})
    mixed = [{"path": "a", "kind": "text"}, {"path": "b", "kind": "tokens"}]
    for data in ({"sources": mixed}, {}, {"kind": "mock"}, {"kind": "mock", "sources": sources}):
        with pytest.raises(InputError, match="data.validation_path needs data.kind, that of its"):
            from_dict({"model": MODEL, "data": data | {"validation_path": "v"}})


def test_epochs_are_counted_as_they_are_written():
    """1.1 of 50 rows are 55: in whole numbers, for all tenths and hundredths to 3."""
    for hundredths in range(1, 301):
        for rows, per_step in ((50, 1), (7, 2), (100, 4), (330, 3)):
            config = with_steps(Config(epochs=hundredths / 100), rows, per_step)
            assert config.steps == -(-hundredths * rows // (100 * per_step))


@pytest.mark.parametrize(
    "first, second, saved",
    [("tokens", "tokens", False), ("tokens", "jsonl", True), ("text", "tokens", True)],
)
def test_the_tokenizer_is_saved_if_it_made_any_source(first, second, saved):
    sources = [{"path": "a"}, {"path": "b", "kind": second}]
    assert (
        has_tokenizer(from_dict({"model": MODEL, "data": {"kind": first, "sources": sources}}))
        == saved
    )
