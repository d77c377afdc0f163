"""Test rows of documents: every row is rebuilt token by token from the documents."""

import json
import subprocess
import sys
from collections import Counter
from itertools import permutations
from math import factorial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from minitrain.data.held_out import hold_out
from minitrain.data.text.text_rows import open_data
from minitrain.errors import InputError
from minitrain.hashing import shuffled
from minitrain.settings import Data
from minitrain.training.packing import rows
from tests.helpers.datasets import (
    EOS,
    brute_force_rows,
    data_refused,
    documents_of,
    epoch_of,
    multiset,
    open_texts,
    word_tokenizer,
)


def test_rows_by_hand(tmp_path):
    data, held = open_texts(tmp_path, ["ab", "", "cde"], seq_len=7)
    assert held is None
    assert epoch_of(data) == [
        {
            "tokens": [97, 98, EOS, 99, 100, 101, EOS],
            "labels": [98, EOS, -100, 100, 101, EOS, -100],
            "positions": [0, 1, 2, 0, 1, 2, 3],
            "document_ids": [0, 0, 0, 1, 1, 1, 1],
        }
    ]


@settings(max_examples=60)
@given(
    st.lists(st.text(max_size=12), min_size=1, max_size=12),
    st.integers(1, 20),
    st.integers(0, 1 << 70),
)
def test_every_epoch_is_the_corpus_cut_into_rows(tmp_path_factory, texts, seq_len, seed):
    documents = documents_of(texts)
    folder = tmp_path_factory.mktemp("texts")
    expected = brute_force_rows(documents, seq_len)
    if not expected:
        with pytest.raises(InputError, match="holds"):
            open_texts(folder, texts, seq_len, seed)
        return
    data, _ = open_texts(folder, texts, seq_len, seed)
    assert len(data) == len(expected)
    for epoch in (0, 1, 5):
        assert multiset(epoch_of(data, epoch)) == multiset(expected)


def test_rows_stacks_int64(tmp_path):
    data, _ = open_texts(tmp_path, ["some text that fills rows"], seq_len=4)
    batch = rows(data, [3, 0, 3])
    assert {key: (value.dtype, value.shape) for key, value in batch.items()} == {
        key: (torch.int64, (3, 4)) for key in ("tokens", "labels", "positions", "document_ids")
    }
    for key, value in batch.items():
        assert torch.equal(value, torch.stack([data.row(n)[key] for n in (3, 0, 3)]))


def test_jsonl_gives_the_same_rows_as_text(tmp_path):
    texts = ["first\nline", "zweite Zeile: ä", "", "the 🙂 third"]
    lines = [json.dumps({"id": i, "body": text}) for i, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:2]) + "\n\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[2:]), encoding="utf-8")
    data, _ = open_data(Data(kind="jsonl", path=str(tmp_path), field="body"), 5, 258, 0)
    assert multiset(epoch_of(data)) == multiset(brute_force_rows(documents_of(texts), 5))


def test_an_eos_far_beyond_the_words_stays_whole(tmp_path_factory):
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    folder = tmp_path_factory.mktemp("texts")
    word_tokenizer(tokenizer, 300)
    (tokenizer / "config.json").write_text('{"eos_token_id": 70000}')
    (folder / "a.txt").write_text("w1 w2")
    settings = Data(kind="text", path=str(folder), tokenizer=str(tokenizer))
    data, _ = open_data(settings, 3, 70_001, 0)
    assert data.row(0)["tokens"].tolist() == [1, 2, 70_000]
    with pytest.raises(InputError, match="has eos=70000, outside model.vocab_size=70000"):
        open_data(settings, 3, 70_000, 0)


def test_documents_begin_as_transformers_begins_a_text(tmp_path_factory):
    """With bos, if the tokenizer adds one: prompts begin with it, so the model must have seen it."""
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    folder = tmp_path_factory.mktemp("texts")
    word_tokenizer(tokenizer, 300)
    tree = json.loads((tokenizer / "tokenizer.json").read_text())
    single = [
        {"SpecialToken": {"id": "w7", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    processor = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"w7": {"id": "w7", "ids": [7], "tokens": ["w7"]}},
    }
    (tokenizer / "tokenizer.json").write_text(
        json.dumps(tree | {"post_processor": processor, "added_tokens": []})
    )
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w7", "eos_token": "w8"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(about))
    texts = ["w1 w2 w3", "w4", "   ", "w5 w6"]
    # the first text has bos already, which must not be doubled
    written = [f"w7 {texts[0]}", *texts[1:]]
    for i, text in enumerate(written):
        (folder / f"{i}.txt").write_text(text)
    data, _ = open_data(Data(kind="text", path=str(folder), tokenizer=str(tokenizer)), 4, 300, 0)
    theirs = AutoTokenizer.from_pretrained(tokenizer)
    documents = [[*theirs(text).input_ids, theirs.eos_token_id] for text in texts if text.strip()]
    assert documents == [[7, 1, 2, 3, 8], [7, 4, 8], [7, 5, 6, 8]]
    assert multiset(epoch_of(data)) == multiset(brute_force_rows(documents, 4))
    size = sum(len(text) for text in written if text.strip())
    assert data.bytes_per_token == size / (4 + 2 + 3)


@pytest.mark.parametrize("words", [300, 70_000])
def test_without_eos_a_document_still_ends(tmp_path_factory, words):
    """With 70,000 words, ids also exceed 16 bits."""
    documents = [[1, 2, words - 1], [words - 2], [5, 6, 7, 8, 9]]
    texts = [" ".join(f"w{i}" for i in document) for document in documents]
    tokenizer = word_tokenizer(tmp_path_factory.mktemp("tokenizer"), words)
    folder = tmp_path_factory.mktemp("texts")
    # the last file holds no token
    for i, text in enumerate([*texts, "   "]):
        (folder / f"{i}.txt").write_text(text)
    data, _ = open_data(Data(kind="text", path=str(folder), tokenizer=tokenizer), 3, words, 0)
    assert data.about.endswith(
        "names no eos: no token will end a document, nor what is generated"
    )
    assert multiset(epoch_of(data)) == multiset(brute_force_rows(documents, 3))
    predicted = sum(len(document) - 1 for document in documents)
    assert data.bytes_per_token == sum(len(text) for text in texts) / predicted


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_records_that_are_learned_as_text_are_noted(tmp_path, kind):
    """Settings of a program and texts are no records."""
    (tmp_path / "b.json").write_text('[{"text": "one two three"}, {"text": "four"}]')
    (tmp_path / "c.json").write_text('{"indent": 4}')
    (tmp_path / "d.txt").write_text('{"text": "a text"}')
    data, _ = open_data(Data(kind=kind, path=str(tmp_path), tokenizer="bytes"), 4, 258, 0)
    noted = f"{tmp_path / 'b.json'} is learned with its braces and keys (data.kind=jsonl takes the key 'text')"
    assert (noted in data.about) == (kind == "text")
    assert "c.json" not in data.about and "d.txt" not in data.about


def test_bytes_per_token_counts_what_an_epoch_predicts(tmp_path):
    """Four documents fill the rows exactly, so the labels of an epoch can be counted."""
    texts = ["abc", "ä€", "🙂de", "0123456789"]
    stream = sum(len(document) for document in documents_of(texts))
    data, _ = open_texts(tmp_path, texts, seq_len=stream // 2)
    assert stream % 2 == 0
    labels = sum(label != -100 for row in epoch_of(data) for label in row["labels"])
    assert data.bytes_per_token * labels == sum(len(text.encode()) for text in texts)


def test_a_row_does_not_depend_on_what_was_read_before(tmp_path):
    texts = ["the quick brown fox", "jumps over", "the lazy dog"]
    data, _ = open_texts(tmp_path, texts, 4, seed=3)
    again, _ = open_texts(tmp_path, texts, 4, seed=3)
    forwards = [data.row(n) for n in range(30)]
    np.random.seed(1)
    torch.manual_seed(1)
    for n in (29, 7, 7, 0, 15, np.int64(12), torch.tensor(21)):
        for other in (data, again):
            assert all(
                torch.equal(value, forwards[int(n)][key]) for key, value in other.row(n).items()
            )


def test_another_process_sees_the_same_rows(tmp_path):
    data, held = open_texts(
        tmp_path, ["the quick brown fox", "jumps over", "the lazy dog"], 4, 3, validation=0.4
    )
    program = f"""
from minitrain.settings import Data
from minitrain.data.text.text_rows import open_data
for data in open_data(Data(kind="text", path={str(tmp_path)!r}, validation=0.4), 4, 258, 3):
    print([data.row(n)["tokens"].tolist() for n in range(20)])
print([open_data(Data(), 4, 258, 3)[0].row(5)["tokens"].tolist()])
"""
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    mock = open_data(Data(), 4, 258, 3)[0]
    expected = [[side.row(n)["tokens"].tolist() for n in range(20)] for side in (data, held)]
    assert output.splitlines() == [*map(str, expected), str([mock.row(5)["tokens"].tolist()])]


def test_epochs_and_seeds_have_their_own_order(tmp_path):
    text = "".join(chr(33 + i) for i in range(90))
    first, second = (open_texts(tmp_path, [text], 3, seed)[0] for seed in (0, 1))
    orders = [
        [row["tokens"][0] for row in epoch_of(data, epoch)]
        for data in (first, second)
        for epoch in range(3)
    ]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({tuple(order) for order in orders}) == 6
    assert all(order != sorted(order) for order in orders)


@settings(max_examples=60)
@given(st.integers(1, 300), st.integers(0, 1 << 70), st.integers(0, 1 << 40))
def test_shuffled_is_a_permutation(length, seed, epoch):
    assert sorted(shuffled(i, length, seed, epoch) for i in range(length)) == list(range(length))


@pytest.mark.parametrize("length", [2, 3, 4])
def test_shuffled_takes_every_order_equally_often(length):
    """The chi-square statistic of 200 draws per order is below 60, which has p < 1e-4 for 23 degrees of freedom."""
    draws = 200 * factorial(length)
    counts = Counter(
        tuple(shuffled(i, length, 7, epoch) for i in range(length)) for epoch in range(draws)
    )
    assert sum((counts[order] - 200) ** 2 / 200 for order in permutations(range(length))) < 60


def test_shuffled_spreads_neighbors():
    """Over many epochs, places of an index average to the middle, and those of neighbors do not correlate."""
    places = np.array([[shuffled(i, 1000, 0, epoch) for i in range(10)] for epoch in range(500)])
    assert abs(places.mean() - 499.5) < 5 * 1000 / 12**0.5 / places.size**0.5
    correlation = np.corrcoef(places.T) - np.eye(10)
    assert abs(correlation).max() < 5 / 500**0.5


def test_mock_tokens_are_uniform_and_differ_by_row_seed_and_split():
    (data, held), (other, _) = (open_data(Data(), 512, 50, seed) for seed in (0, 1))
    batch = rows(data, range(100))
    assert set(batch) == {"tokens", "labels"}
    assert all(
        value.dtype == torch.int64 and value.shape == (100, 512) for value in batch.values()
    )
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    counts = torch.bincount(batch["labels"].flatten(), minlength=50)
    assert len(counts) == 50 and (counts - 1024).abs().max() < 6 * 1024**0.5
    some = [data.row(0), data.row(1), data.row(1 << 39), held.row(0), other.row(0)]
    assert len({tuple(row["tokens"].tolist()) for row in some}) == 5


def test_corpus_errors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("")
    data_refused("data.path=.* holds no token to predict", folder, "text")
    (folder / "a.txt").write_text("abc")
    data_refused(
        "holds 4 tokens, less than one row of batch.seq_len=5", folder, "text", seq_len=5
    )
    data_refused(
        "model.vocab_size=257 is smaller than the tokenizer's 258", folder, "text", vocab_size=257
    )
    with pytest.raises(
        InputError,
        match="data.validation=0.5 needs 2 documents, one for each side, but there is 1",
    ):
        hold_out(1, 0.5, seed=0)
    data_refused("tokenizer 'nope' is not", folder, "text", tokenizer="nope")
    for i in range(4):
        (folder / f"{i}.txt").write_text("abc")
    data_refused(
        "data.validation=0.2 holds 4 tokens, less than one",
        folder,
        "text",
        seq_len=8,
        validation=0.2,
    )
    data_refused(
        "without validation holds 4 tokens, less than one",
        folder,
        "text",
        seq_len=8,
        validation=0.8,
    )
    single_words = tmp_path_factory.mktemp("single")
    (single_words / "a.txt").write_text("w1")
    words = word_tokenizer(tmp_path_factory.mktemp("tokenizer"), 9)
    data_refused("holds no token to predict", single_words, "text", seq_len=1, tokenizer=words)


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"text": ', "a.jsonl:3: not valid JSON"),
        (b"[" * 100_000, "a.jsonl:3: not valid JSON"),
        (
            b'{"text": "\xff"}',
            "a.jsonl:3: not valid JSON: 'utf-8' codec can't decode byte 0xff in position 10",
        ),
        (b'["text"]', "a.jsonl:3: must be a JSON object, not list"),
        (b'{"body": "b"}', "a.jsonl:3: no key 'text'"),
        (b'{"text": 5}', "a.jsonl:3: 'text' must be text, not int"),
        (b'{"text": null}', "a.jsonl:3: 'text' must be text, not NoneType"),
        (b'{"text": "\\ud83d"}', "a.jsonl:3: 'text' holds half of a surrogate pair"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\\ud83d\\ude42"}\n\n' + line + b"\n")
    data_refused(message, tmp_path, "jsonl")
