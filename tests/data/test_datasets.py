"""Datasets against brute force: every row is rebuilt token by token from the documents."""

import bz2
import gzip
import json
import lzma
import os
import pickle
import re
import shutil
import sqlite3
import subprocess
import sys
import sysconfig
import tarfile
import wave
from collections import Counter
from functools import partial
from itertools import chain, pairwise, permutations
from math import factorial
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.orc
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from datasets.data_files import resolve_pattern
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoTokenizer

from minitrain.data.files import find_files
from minitrain.data.held_out import hold_out
from minitrain.data.text.text_rows import open_data
from minitrain.data.tokenizer import ByteTokenizer
from minitrain.errors import InputError
from minitrain.formats.magic import kind_of_tokens, masked_crc
from minitrain.hashing import shuffled
from minitrain.settings import Data
from minitrain.training.packing import rows
from tests.helpers.datasets import EOS, brute_force_rows, epoch_of, multiset, tokens_of


def open_texts(folder: Path, texts: list[str], seq_len: int, seed=0, **fields):
    """A dataset of one file per text."""
    for i, text in enumerate(texts):
        (folder / f"{i:04}.txt").write_bytes(text.encode())
    return open_data(Data(kind="text", path=str(folder), **fields), seq_len, 258, seed)


def documents_of(texts: list[str]) -> list[list[int]]:
    return [[*text.encode(), EOS] for text in texts if text]


# --------------------------------------------------------------------------------------------------------- documents


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


def word_tokenizer(folder: Path, words: int) -> str:
    """A vocabulary of w0, w1, ... without eos, split at spaces."""
    model = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(words)}, "unk_token": "w0"}
    tree = {"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return str(folder)


def test_an_eos_far_beyond_the_words_stays_whole(tmp_path_factory):
    tokenizer, folder = tmp_path_factory.mktemp("tokenizer"), tmp_path_factory.mktemp("texts")
    word_tokenizer(tokenizer, 300)
    (tokenizer / "config.json").write_text('{"eos_token_id": 70000}')
    (folder / "a.txt").write_text("w1 w2")
    settings = Data(kind="text", path=str(folder), tokenizer=str(tokenizer))
    data, _ = open_data(settings, 3, 70_001, 0)
    assert data.row(0)["tokens"].tolist() == [1, 2, 70_000]
    with pytest.raises(InputError, match="has eos=70000, outside model.vocab_size=70000"):
        open_data(settings, 3, 70_000, 0)


def test_documents_begin_as_transformers_begins_a_text(tmp_path_factory):
    """With bos, where the tokenizer puts one: a model that never saw it would be asked to continue it."""
    tokenizer, folder = tmp_path_factory.mktemp("tokenizer"), tmp_path_factory.mktemp("texts")
    word_tokenizer(tokenizer, 300)
    tree, single = (
        json.loads((tokenizer / "tokenizer.json").read_text()),
        [{"Sequence": {"id": "A", "type_id": 0}}],
    )
    single.insert(0, {"SpecialToken": {"id": "w7", "type_id": 0}})
    pair, special = (
        [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        {"id": "w7", "ids": [7], "tokens": ["w7"]},
    )
    processor = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {"w7": special},
    }
    (tokenizer / "tokenizer.json").write_text(
        json.dumps(tree | {"post_processor": processor, "added_tokens": []})
    )
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w7", "eos_token": "w8"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(about))
    texts = ["w1 w2 w3", "w4", "   ", "w5 w6"]
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(
            "w7 " * (i == 0) + text
        )  # which is not doubled where it is written
    data, _ = open_data(Data(kind="text", path=str(folder), tokenizer=str(tokenizer)), 4, 300, 0)
    theirs = AutoTokenizer.from_pretrained(tokenizer)
    documents = [[*theirs(text).input_ids, theirs.eos_token_id] for text in texts if text.strip()]
    assert documents == [[7, 1, 2, 3, 8], [7, 4, 8], [7, 5, 6, 8]]
    assert multiset(epoch_of(data)) == multiset(brute_force_rows(documents, 4))
    assert data.bytes_per_token == (
        len("w7 ") + sum(len(text) for text in texts if text.strip())
    ) / (4 + 2 + 3)


@pytest.mark.parametrize("words", [300, 70_000])
def test_without_eos_a_document_still_ends(tmp_path_factory, words):
    """And with 70,000 words, ids above 16 bits stay whole."""
    documents = [[1, 2, words - 1], [words - 2], [5, 6, 7, 8, 9]]
    texts = [" ".join(f"w{i}" for i in document) for document in documents]
    tokenizer = word_tokenizer(tmp_path_factory.mktemp("tokenizer"), words)
    folder = tmp_path_factory.mktemp("texts")
    for i, text in enumerate([*texts, "   "]):  # the last holds no token at all
        (folder / f"{i}.txt").write_text(text)
    data, _ = open_data(Data(kind="text", path=str(folder), tokenizer=tokenizer), 3, words, 0)
    assert data.about.endswith(
        "names no eos: no token will end a document, nor what is generated"
    )
    assert multiset(epoch_of(data)) == multiset(brute_force_rows(documents, 3))
    predicted = sum(len(document) - 1 for document in documents)
    assert data.bytes_per_token == sum(len(text) for text in texts) / predicted


def test_bytes_per_token_counts_what_an_epoch_predicts(tmp_path):
    """Four documents fill the rows exactly, so the labels of an epoch can be counted."""
    texts = ["abc", "ä€", "🙂de", "0123456789"]
    stream = sum(len(document) for document in documents_of(texts))
    data, _ = open_texts(tmp_path, texts, seq_len=stream // 2)
    assert stream % 2 == 0
    labels = sum(label != -100 for row in epoch_of(data) for label in row["labels"])
    assert data.bytes_per_token * labels == sum(len(text.encode()) for text in texts)


# ------------------------------------------------------------------------------------------------------------- order


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
    """Chi-square over 200 draws an order; 60 is beyond p = 1e-4 for 23 degrees of freedom, and the fewer the rarer."""
    draws = 200 * factorial(length)
    counts = Counter(
        tuple(shuffled(i, length, 7, epoch) for i in range(length)) for epoch in range(draws)
    )
    assert sum((counts[order] - 200) ** 2 / 200 for order in permutations(range(length))) < 60


def test_shuffled_spreads_neighbors():
    """Over many epochs each index goes everywhere, and where one goes says nothing of where the next goes."""
    places = np.array([[shuffled(i, 1000, 0, epoch) for i in range(10)] for epoch in range(500)])
    assert abs(places.mean() - 499.5) < 5 * 1000 / 12**0.5 / places.size**0.5
    correlation = np.corrcoef(places.T) - np.eye(10)
    assert abs(correlation).max() < 5 / 500**0.5


# --------------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize("share, held_out", [(0.25, 5), (0.001, 1), (0.999, 19)])
def test_validation_holds_out_whole_documents(tmp_path, share, held_out):
    texts = [chr(65 + i) * 3 for i in range(20)]
    train, held = open_texts(tmp_path, texts, 4, validation=share)
    assert (len(train), len(held)) == (20 - held_out, held_out)
    assert multiset(epoch_of(train) + epoch_of(held)) == multiset(
        brute_force_rows(documents_of(texts), 4)
    )


def test_a_lone_document_holds_out_its_tail(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(100))
    (tmp_path / "only.txt").write_text(text)
    (tmp_path / "__init__.py").touch()
    train, held = open_data(Data(kind="text", path=str(tmp_path), validation=0.2), 7, 258, seed=0)
    eos = Counter([ByteTokenizer.eos_id])
    for side, part in ((train, text[:80]), (held, text[80:])):
        assert (
            tokens_of(side) <= Counter(part.encode()) + eos and len(side) == (len(part) + 1) // 7
        )


@pytest.mark.parametrize("share, cut", [(0.2, 81), (0.001, 99), (0.999, 2)])
def test_a_lone_document_of_a_cache_holds_out_its_last_tokens(tmp_path, share, cut):
    text = "".join(chr(97 + i % 26) for i in range(100))
    (tmp_path / "only.txt").write_text(text)
    data = Data("text", str(tmp_path / "only.txt"), validation=share, packing="whole")
    data.cache = str(tmp_path / "cache")
    for _ in range(2):  # made, and found
        train, held = open_data(data, 128, 258, seed=0)
        tokens = [*text.encode(), ByteTokenizer.eos_id]
        for side, part in ((train, tokens[:cut]), (held, tokens[cut:])):
            read, _ = side.corpus.read(0, len(side.corpus))
            assert read.tolist() == part
            assert side.corpus.sizes.tolist() == [sum(token < 256 for token in part)]


def test_validation_depends_on_the_seed_alone(tmp_path):
    texts = [chr(65 + i) * 3 for i in range(20)]
    choices = [
        tokens_of(open_texts(tmp_path, texts, 4, seed, validation=0.3)[1])
        for seed in (0, 0, 1, 2)
    ]
    assert choices[0] == choices[1]
    assert len({tuple(sorted(choice)) for choice in choices}) == 3


def test_bytes_per_token_is_of_each_split(tmp_path_factory):
    tokenizer = word_tokenizer(tmp_path_factory.mktemp("tokenizer"), 300)
    data = Data(
        kind="text",
        path=str(tmp_path_factory.mktemp("texts")),
        tokenizer=tokenizer,
        validation=0.5,
    )
    (Path(data.path) / "short.txt").write_text("w1 w2 w3")  # 8 bytes, 2 predicted
    (Path(data.path) / "long.txt").write_text("w111 w222 w211 w222 w112")  # 24 bytes, 4 predicted
    sides = open_data(data, 2, 300, 0)
    assert {side.bytes_per_token: min(tokens_of(side)) > 100 for side in sides} == {
        4.0: False,
        6.0: True,
    }


# ------------------------------------------------------------------------------------------------------------- mock


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


# -------------------------------------------------------------------------------------------------------- token files


def open_tokens(path, seq_len, vocab_size=1000, **fields):
    return open_data(Data(kind="tokens", path=str(path), **fields), seq_len, vocab_size, 0)


@pytest.mark.parametrize("dtype", ["uint8", "int16", ">u2", "int32", "uint32", "int64", "uint64"])
def test_npy_files_are_one_document_each(tmp_path, dtype):
    files = [list(range(1, 12)), [50, 51], [60, 61, 62, 63]]
    for i, tokens in enumerate(files):
        np.save(tmp_path / f"{i}.npy", np.array(tokens, dtype))
    data, held = open_tokens(tmp_path, 4)
    assert held is None and data.bytes_per_token is None
    assert multiset(epoch_of(data)) == multiset(brute_force_rows(files, 4))


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=9), min_size=1, max_size=8),
    st.integers(1, 12),
    st.sampled_from([None, 9]),
    st.sampled_from([("uint16",), ("uint8", "int64"), ("uint64", "int8")]),
)
def test_rows_cross_files_as_they_cross_documents(tmp_path_factory, files, seq_len, end, dtypes):
    """A file ends a document, whether its last token is data.document_end or not."""
    folder, documents = tmp_path_factory.mktemp("tokens"), []
    for i, tokens in enumerate(files):
        np.save(folder / f"{i}.npy", np.array(tokens, dtypes[i % len(dtypes)]))
        cuts = [0, *(j + 1 for j, token in enumerate(tokens) if token == end), len(tokens)]
        documents += [tokens[a:b] for a, b in pairwise(cuts) if a < b]
    expected = brute_force_rows(documents, seq_len)
    if not expected:
        with pytest.raises(InputError, match="tokens to train on, no row of batch.seq_len"):
            open_tokens(folder, seq_len, document_end=end)
        return
    data, _ = open_tokens(folder, seq_len, document_end=end)
    assert multiset(epoch_of(data)) == multiset(expected)
    if len(data) * seq_len == sum(map(len, files)):
        assert tokens_of(data) == Counter(chain(*files))


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.integers(0, 98), max_size=6).map(lambda ids: [*ids, 99]),
        min_size=1,
        max_size=10,
    ),
    st.integers(1, 12),
    st.sampled_from(["uint16", "uint32"]),
)
def test_raw_files_are_split_at_document_end(tmp_path_factory, documents, seq_len, dtype):
    file = tmp_path_factory.mktemp("tokens") / "all.bin"
    np.array(list(chain(*documents)), np.dtype(dtype).newbyteorder("<")).tofile(file)
    expected = brute_force_rows(documents, seq_len)
    if not expected:
        with pytest.raises(InputError, match="tokens to train on, no row of batch.seq_len"):
            open_tokens(file, seq_len, token_dtype=dtype, document_end=99)
        return
    data, _ = open_tokens(file, seq_len, token_dtype=dtype, document_end=99)
    assert multiset(epoch_of(data)) == multiset(expected)


def test_files_of_less_than_a_row_are_used(tmp_path):
    """127 documents of 100 tokens, in rows of 64: all but what is left at the very end."""
    for n in range(127):
        np.save(tmp_path / f"{n:03}.npy", np.full(100, n))
    train, _ = open_tokens(tmp_path, 64)
    assert len(train) == 12_700 // 64 and train.about == ""
    assert train.origin(5).count(".npy tokens ") in (1, 2)
    train, held = open_tokens(tmp_path, 64, validation=0.1)
    assert (len(train), len(held)) == (90 * 127 // 64, 10 * 127 // 64)
    (tmp_path / "e.npy").write_text("no array")
    train, _ = open_tokens(tmp_path, 64, on_error="skip")
    assert train.about.startswith("1 skipped, the first: ") and len(train) == 12_700 // 64


@pytest.mark.parametrize(
    "stored, read, better",
    [
        (
            "uint32",
            "uint16",
            "holds tokens of 4 bytes each, not uint16 (use data.token_dtype=uint32)",
        ),
        (
            "int64",
            "uint16",
            "holds tokens of 4 bytes each, not uint16 (use data.token_dtype=uint32)",
        ),
        ("int64", "uint32", "holds tokens of 8 bytes each, not uint32 (use uint32 or .npy)"),
        ("uint16", "uint16", None),
        ("uint32", "uint32", None),
    ],
)
@pytest.mark.parametrize("vocab_size", [1000, 50_000, 128_256])
def test_raw_tokens_that_are_read_as_halves_of_others(tmp_path, stored, read, better, vocab_size):
    """With every other one 0 or 1 they are in the vocabulary, and only the loss would show it."""
    file = tmp_path / "a.bin"
    np.random.default_rng(0).integers(min(vocab_size, 1 << 16), size=301).astype(stored).tofile(
        file
    )
    if better:
        with pytest.raises(InputError, match=re.escape(f"{file} {better}")):
            open_tokens(file, 4, vocab_size, token_dtype=read)
    else:
        open_tokens(file, 4, vocab_size, token_dtype=read)
        for few in (np.zeros(301), np.ones(301), np.random.default_rng(0).integers(2, size=301)):
            few.astype(stored).tofile(file)
            open_tokens(
                file, 4, vocab_size, token_dtype=read
            )  # a large vocabulary has them also as pairs


def test_token_validation_is_the_end_of_each_file(tmp_path):
    files = [np.arange(0, 43), np.arange(100, 120), np.arange(200, 203)]  # 10, 5 and 0 rows of 4
    for i, tokens in enumerate(files):
        np.save(tmp_path / f"{i}.npy", tokens)
    train, held = open_tokens(tmp_path, 4, validation=0.2)
    ends = [list(range(35, 43)), list(range(116, 120)), [202]]
    assert multiset(epoch_of(held)) == multiset(brute_force_rows(ends, 4))
    rest = [list(range(35)), list(range(100, 116)), [200, 201]]
    assert multiset(epoch_of(train)) == multiset(brute_force_rows(rest, 4))


def bytes_read() -> int:
    """By this process so far: by calls, and by way of mapped files, whose pages are resident."""
    calls = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    mapped = re.findall(r"Rss(?:File|Shmem):\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(calls[1]) + sum(map(int, mapped)) * 1024


@pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="reads what was read from Linux's /proc"
)
def test_token_files_are_not_read_to_open_them(tmp_path):
    """A sparse gigabyte, with ones in its last row."""
    file, length = tmp_path / "huge.bin", 1 << 29
    with open(file, "wb") as out:
        out.truncate(2 * length)
        out.seek(2 * (length - 1024))
        out.write(np.ones(1024, "<u2").tobytes())
    before = bytes_read()
    data, held = open_tokens(file, 1024, document_end=0, validation=1024 / length)
    assert bytes_read() - before < 32 << 20
    assert len(data) + len(held) == length // 1024
    assert held.row(0)["tokens"].sum() == 1024 and rows(data, range(20))["tokens"].sum() == 0
    assert bytes_read() - before < 32 << 20


@pytest.mark.parametrize("wrong", [1000, -1])
def test_a_token_outside_the_vocabulary_is_found_before_training_or_when_met(
    tmp_path, monkeypatch, wrong
):
    tokens = np.zeros(20, np.int32)
    tokens[17] = wrong
    np.save(tmp_path / "a.npy", tokens)
    found = rf"a.npy holds {wrong} at token 17, outside .* model.vocab_size=1000$"
    with pytest.raises(InputError, match=found):
        open_tokens(tmp_path, 4, validation=0.5)
    monkeypatch.setattr(
        "minitrain.data.text.text_rows.CHECKED", 4
    )  # that is, one row of each side
    train, held = open_tokens(tmp_path, 4, validation=0.5)
    assert tokens_of(train) == Counter({0: 12})
    with pytest.raises(InputError, match=found):
        epoch_of(held)


# ---------------------------------------------------------------------------------------------------------------- files


def texts_found(data: Data) -> Counter:
    """How often each letter stands in the training rows: one letter a file, in the tests below."""
    train, _ = open_data(data, 1, 258, 0)
    return Counter(chr(token) for token in tokens_of(train).elements() if token != EOS)


@pytest.fixture
def tree(tmp_path):
    """a.txt, sub/b.py, sub/test/c.py, sub/test/deep/d.txt: each holds its own letter."""
    for name in ("a.txt", "sub/b.py", "sub/test/c.py", "sub/test/deep/d.txt"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(file.stem)
    return tmp_path


@pytest.mark.parametrize(
    "paths, exclude, letters",
    [
        ("", [], "abcd"),
        ("a.txt", [], "a"),
        ("**/*.py", [], "bc"),
        ("sub/*", [], "b"),
        (["sub/test", "**/*.txt", "a.txt"], [], "acd"),
        ("", ["*/test/*"], "ab"),
        ("", ["*.py", "*/a.*"], "d"),
        ("", ["a.txt", "test/c.py"], "bd"),
    ],
)
def test_path_may_be_file_folder_glob_or_list(tree, paths, exclude, letters):
    paths = str(tree / paths) if isinstance(paths, str) else [str(tree / path) for path in paths]
    assert texts_found(Data(kind="text", path=paths, exclude=exclude)) == Counter(letters)


def test_exclude_sees_the_full_path_of_relative_files(tree, monkeypatch):
    monkeypatch.chdir(tree / "sub" / "test")
    assert texts_found(
        Data(kind="text", path=["c.py", "../b.py"], exclude=["*/sub/test/*"])
    ) == Counter("b")
    assert texts_found(
        Data(kind="text", path=["c.py", "../b.py"], exclude=["../b.py"])
    ) == Counter("c")


def test_a_file_of_many_names_is_one_document(tree, monkeypatch):
    monkeypatch.chdir(tree / "sub")
    paths = ["b.py", "./b.py", "test/../*.py", str(tree / "sub/b.py")]
    assert texts_found(Data(kind="text", path=paths)) == Counter("b")


def test_folders_are_read_through_links_each_once(tree, tmp_path_factory):
    """By their own names, whatever leads back to them."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "e.txt").write_text("e")
    (elsewhere / "back").symlink_to(tree)
    for name, target in (
        ("0", "sub"),
        ("sub/loop", "."),
        ("sub/test/up", "../.."),
        ("out", elsewhere),
        ("out2", "out"),
    ):
        (tree / name).symlink_to(target)
    data = Data(kind="text", path=str(tree))
    found = [str(file.relative_to(tree)) for file in find_files(data)]
    assert found == ["a.txt", "out/e.txt", "sub/b.py", "sub/test/c.py", "sub/test/deep/d.txt"]
    assert texts_found(data) == Counter("abcde")
    assert texts_found(Data(kind="text", path=str(tree / "0"))) == Counter(
        "bcdae"
    )  # itself a link


def test_a_glob_finds_each_file_once_though_links_go_round_in_circles(tree):
    (tree / "sub/loop").symlink_to(".")
    data = Data(
        kind="text", path=[f"{tree}/**/*.py", f"{tree}/sub/loop/*"], exclude=["*/sub/b.py"]
    )
    found = [str(file.relative_to(tree)) for file in find_files(data)]
    assert found == [
        "sub/loop/b.py",
        "sub/test/c.py",
    ]  # the first by the shortest name that is not left out


@pytest.mark.parametrize("kind", ["text", "jsonl", "tokens", "latents"])
def test_what_is_hidden_in_a_folder_is_no_data(tmp_path, kind):
    """The oracle is the package datasets."""
    suffix = {"text": ".txt", "jsonl": ".jsonl", "tokens": ".bin", "latents": ".safetensors"}[
        kind
    ]
    base = tmp_path / ".data"  # which is asked for by name
    for name in (
        "a",
        ".b",
        ".git/c",
        "d/.e/f",
        "d/g",
        "__pycache__/h",
        ".ipynb_checkpoints/i",
        "__j",
        "d/k.l",
        ".m/n",
    ):
        (base / f"{name}{suffix}").parent.mkdir(parents=True, exist_ok=True)
        (base / f"{name}{suffix}").write_text("x")
    theirs = sorted(Path(file) for file in resolve_pattern("**", str(base)))
    assert find_files(Data(kind=kind, path=str(base))) == theirs and len(theirs) == 4
    (base / "out").symlink_to(base / ".git")  # by a name that is not hidden
    assert base / f"out/c{suffix}" in find_files(Data(kind=kind, path=str(base)))


def test_a_folder_without_files_of_the_kind_says_what_it_has(tmp_path):
    for name in ("a.json", "b.json", "c.json.gz"):
        (tmp_path / name).write_text("{}")
    counted = ".jsonl or .jsonl.gz or .parquet or .arrow"
    refused(
        rf"no file matches .*a folder's {counted} files count, it has 2 .json, 1 .gz; a glob",
        tmp_path,
        "jsonl",
    )
    refused(
        r"no file matches .*a folder's .npy or .bin files count, it has 2 .json",
        tmp_path,
        "tokens",
    )
    (tmp_path / "d" / ".git").mkdir(parents=True)
    (tmp_path / "d" / ".git" / "config").write_text("x")
    refused(
        "no file matches .*is empty, or all in it is hidden",
        tmp_path,
        "text",
        path=str(tmp_path / "d"),
    )
    refused(
        r"no file matches 'a,b' \(a list is written data.path='\[a,b\]'\)",
        tmp_path,
        "text",
        path="a,b",
    )


@pytest.mark.parametrize("kind", ["text", "jsonl", "tokens", "latents"])
def test_pipes_in_folders_are_no_data(tmp_path, kind):
    """Nor are links to them: reading one may never end."""
    suffix = {"text": ".txt", "jsonl": ".jsonl", "tokens": ".npy", "latents": ".safetensors"}[
        kind
    ]
    (tmp_path / f"a{suffix}").write_text("a")
    os.mkfifo(tmp_path / f"b{suffix}")
    (tmp_path / f"c{suffix}").symlink_to(tmp_path / f"b{suffix}")
    assert find_files(Data(kind=kind, path=str(tmp_path))) == [tmp_path / f"a{suffix}"]


def test_home_and_standard_library_in_paths(tree, monkeypatch):
    monkeypatch.setenv("HOME", str(tree))
    assert texts_found(Data(kind="text", path="~/sub/b.py")) == Counter("b")
    letters = (Path(sysconfig.get_paths()["stdlib"]) / "this.py").read_text()
    assert texts_found(Data(kind="text", path="{stdlib}/this.py")) == Counter(letters)


def test_documents_come_in_sorted_order(tree):
    data, _ = open_data(
        Data(kind="text", path=[str(tree / "sub"), str(tree / "a.txt")]), 8, 258, 0
    )
    assert bytes(token for token in data.row(0)["tokens"].tolist() if token < 256) == b"abcd"


# ------------------------------------------------------------------------------------------------------- wrong files

ARRAY = np.arange(3000) % 600


def write_npz(file):
    with open(file, "wb") as raw:
        np.savez(raw, ARRAY)


def write_tar(file):
    (file.parent / "member").write_bytes(ARRAY.tobytes())
    with tarfile.open(file, "w") as archive:
        archive.add(file.parent / "member")


def write_stream(file):
    with (
        pyarrow.OSFile(str(file), "wb") as sink,
        pyarrow.ipc.new_stream(sink, TABLE.schema) as writer,
    ):
        writer.write_table(TABLE)


def write_arrow(file):
    with (
        pyarrow.OSFile(str(file), "wb") as sink,
        pyarrow.ipc.new_file(sink, TABLE.schema) as writer,
    ):
        writer.write_table(TABLE)


def write_npy(file):
    with open(file, "wb") as raw:
        np.save(raw, ARRAY.astype(np.uint16))


def write_wav(file):
    with wave.open(str(file), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(9999))


def write_behind(head, file):
    file.write_bytes(head + ARRAY.astype("<u2").tobytes())


# first bytes, as ISO 14496-12, id3.org, RFC 3533, RFC 9639 and RFC 9559 have them
HEADS = {
    "MP4": b"\0\0\0\x20ftypisom\0\0\2\0",
    "MOV": b"\0\0\0\x14ftypqt  ",
    "HEIC": b"\0\0\0\x18ftypheic",
    "MP3": b"ID3\4\0\0",
    "Ogg": b"OggS\0\2",
    "FLAC": b"fLaC\0\0\0\x22",
    "WebM": b"\x1a\x45\xdf\xa3\x9f",
}
TABLE = pyarrow.table({"text": ["some text"] * 100})
LINES = b'{"text": "some text"}\n' * 100
WRONG = {  # how the program that makes such files writes one, and what it is said to be
    "npz": (write_npz, "a zip archive, as numpy.savez"),
    "torch": (
        lambda file: torch.save(torch.arange(3000), file),
        "a zip archive, as numpy.savez and torch.save",
    ),
    "old torch": (
        lambda file: torch.save(torch.arange(3000), file, _use_new_zipfile_serialization=False),
        "pickled by torch",
    ),
    "npy": (write_npy, "a .npy file by another name"),
    "gzip": (lambda file: file.write_bytes(gzip.compress(LINES)), r"packed by gzip .gzip -d."),
    "bzip2": (lambda file: file.write_bytes(bz2.compress(LINES)), "packed by bzip2"),
    "xz": (lambda file: file.write_bytes(lzma.compress(LINES)), "packed by xz"),
    "lzma": (
        lambda file: file.write_bytes(lzma.compress(LINES, lzma.FORMAT_ALONE)),
        "packed by lzma",
    ),
    "snappy": (
        lambda file: file.write_bytes(b"\xff\x06\0\0sNaPpY" + bytes(99)),
        "packed by snappy",
    ),
    "rar": (lambda file: file.write_bytes(b"Rar!\x1a\7\1\0" + bytes(98)), "a rar archive"),
    "zstd": (
        lambda file: file.write_bytes(pyarrow.compress(LINES, "zstd", asbytes=True)),
        "packed by zstd",
    ),
    "pickle": (lambda file: file.write_bytes(pickle.dumps(ARRAY)), "pickled by Python"),
    "parquet": (lambda file: pyarrow.parquet.write_table(TABLE, file), "a parquet file"),
    "arrow": (write_arrow, "an arrow file"),
    "arrow stream": (write_stream, "an arrow stream"),
    "orc": (lambda file: pyarrow.orc.write_table(TABLE, file), "an ORC file"),
    "safetensors": (
        lambda file: save_file({"a": torch.arange(3000)}, file),
        "a safetensors file",
    ),
    "tar": (write_tar, "a tar archive"),
    "sqlite": (
        lambda file: sqlite3.connect(file).execute("create table a (b)"),
        "an SQLite database",
    ),
    "lfs": (
        lambda file: file.write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
        ),
        "a pointer of git-lfs",
    ),
    "llm.c's evaluation": (
        lambda file: file.write_bytes(np.array([20240522, 1, 5], "<i4").tobytes() * 100),
        "an evaluation set of llm.c",
    ),
    "GIF": (lambda file: Image.new("L", (99, 99)).save(file, "gif"), "a picture"),
    "JPEG": (lambda file: Image.new("L", (99, 99)).save(file, "jpeg"), "a picture"),
    "WebP": (
        lambda file: Image.new("L", (99, 99)).save(file, "webp"),
        "a picture, a sound or a video",
    ),
    "WAV": (write_wav, "a picture, a sound or a video"),
    **{
        name: (partial(write_behind, head), "a picture, a sound or a video")
        for name, head in HEADS.items()
    },
    "program": (
        lambda file: shutil.copyfile(os.path.realpath(sys.executable), file),
        "a program",
    ),
    "Megatron's older index": (
        lambda file: file.write_bytes(b"TNTIDX\0\0" + bytes(98)),
        "the index of an older",
    ),
    "Megatron's index": (
        lambda file: file.write_bytes(b"MMIDIDX\0\0" + bytes(99)),
        "Megatron's index",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_are_something_else_are_told_as_what_they_are(tmp_path, name):
    """With a vocabulary that any two bytes are an id of."""
    write, what = WRONG[name]
    for kind, suffix in (("tokens", "bin"), ("text", "txt"), ("jsonl", "jsonl")):
        if kind == "jsonl" and name in ("gzip", "parquet", "arrow", "arrow stream"):
            continue  # which it reads: see test_records.py
        file = tmp_path / kind / f"a.{suffix}"
        file.parent.mkdir()
        write(file)
        refused(rf"a.{suffix} is {what}", tmp_path, kind, path=str(file), vocab_size=1 << 17)


@pytest.mark.parametrize(
    "magic, version, dtype, vocab",
    [(20240520, 1, np.uint16, 50257), (20240801, 7, np.uint32, 128256)],
)
def test_the_files_of_llm_c_are_read_as_their_headers_say(tmp_path, magic, version, dtype, vocab):
    """As write_datafile of llm.c/dev/data/data_common.py writes them, whatever data.token_dtype is."""
    tokens = np.random.default_rng(0).integers(vocab, size=1000)
    header = np.zeros(256, dtype=np.int32)
    header[0], header[1], header[2] = magic, version, len(tokens)
    whole = header.tobytes() + tokens.astype(dtype).tobytes()
    (tmp_path / "a.bin").write_bytes(whole)
    for stated in ("uint16", "uint32"):
        data, _ = open_tokens(tmp_path, 8, vocab, token_dtype=stated)
        assert multiset(epoch_of(data)) == multiset(brute_force_rows([tokens.tolist()], 8))
    header[1] += 1  # a version whose tokens may be of another width
    others = (
        whole[:-1],
        whole[:1500],
        whole + b"ab",
        header.tobytes() + tokens.astype("i8").tobytes(),
    )
    for cut in others:
        (tmp_path / "a.bin").write_bytes(cut)
        refused(
            r"a.bin has llm.c's header for 1,000 <u. tokens, but .* bytes",
            tmp_path,
            "tokens",
            vocab_size=vocab,
        )


def test_chunks_of_litdata_are_no_tokens(tmp_path):
    """As _create_chunk of its BinaryWriter writes them, with items of tokens."""
    for lengths in ([4096] * 7, range(1, 3000)):
        items = [np.arange(length, dtype=np.uint16).tobytes() for length in lengths]
        offsets = np.array([0, *map(len, items)]).cumsum().astype(np.uint32)
        offsets += 4 + offsets.nbytes
        (tmp_path / "chunk-0-0.bin").write_bytes(
            np.uint32(len(items)).tobytes() + offsets.tobytes() + b"".join(items)
        )
        refused("chunk-0-0.bin is a chunk of litdata", tmp_path, "tokens", vocab_size=1 << 17)


@pytest.mark.parametrize("count", [1, 3, 7, 3000])
def test_shards_of_streaming_are_no_tokens(tmp_path, count):
    """As encode_joint_shard of MosaicML's MDSWriter writes them; any number of samples."""
    items = [np.arange(n % 97 + 1, dtype=np.uint16).tobytes() for n in range(count)]
    about = json.dumps({"column_encodings": ["ndarray:uint16"], "column_names": ["tokens"]})
    offsets = np.array([0, *map(len, items)]).cumsum().astype(np.uint32)
    offsets += 4 + offsets.nbytes + len(about)
    raw = np.uint32(count).tobytes() + offsets.tobytes() + about.encode() + b"".join(items)
    (tmp_path / "shard.00000.mds.bin").write_bytes(raw)
    refused("mds.bin is a chunk of litdata or Mosaic", tmp_path, "tokens", vocab_size=1 << 17)


def test_records_of_tensorflow_are_no_tokens(tmp_path):
    """Each begins with its length and that number's checksum, CRC-32C, of which the standard has one."""
    crc = 0xE3069283
    wanted = ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF
    assert masked_crc(b"123456789") == wanted
    random = np.random.default_rng(0)
    for size in (60, 1000, 1 << 17):
        length = np.uint64(size).tobytes()
        head = length + np.uint32(masked_crc(length)).tobytes()
        (tmp_path / "a.bin").write_bytes(head + random.bytes(size) + bytes(4))
        for kind in ("tokens", "text", "jsonl"):
            refused("a.bin is a TFRecord file", tmp_path, kind, path=f"{tmp_path}/a.bin")


def test_text_and_unfinished_downloads_are_no_tokens(tmp_path):
    (tmp_path / "a.bin").write_bytes(LINES)
    refused("a.bin is text .data.kind=text, or jsonl.", tmp_path, "tokens", vocab_size=1 << 17)
    for text, code in (
        ("größer €", "utf-8"),
        ("größer €\n", "utf-16"),
        ("a b ", "utf-16"),
        ("漢字かな", "utf-16"),
    ):
        (tmp_path / "a.bin").write_bytes((text * 999).encode(code))
        refused("a.bin is text", tmp_path, "tokens", vocab_size=1 << 17)
    ids = np.random.default_rng(0).integers(1 << 16, size=3000).astype("<u2")
    for first in (0xFEFF, 0xFFFE):  # ids that would be the mark of UTF-16's byte order
        ids[0] = first
        (tmp_path / "a.bin").write_bytes(ids.tobytes())
        assert len(open_tokens(tmp_path, 8, 1 << 16)[0])
    for kind in ("text", "jsonl", "tokens"):
        file = tmp_path / f"{kind}.jsonl.incomplete"
        file.write_bytes(LINES[:50])
        refused(
            "incomplete is an unfinished download",
            tmp_path,
            kind,
            path=str(file),
            vocab_size=1 << 17,
        )
    (tmp_path / "b.npy").write_bytes(ARRAY.astype(np.uint16).tobytes())  # as Dolma writes them
    refused(
        "b.npy .* it is without a header .raw tokens",
        tmp_path,
        "tokens",
        path=str(tmp_path / "b.npy"),
    )


def test_tables_web_pages_and_addresses_are_no_json_lines(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,response\nq,a\n")
    Dataset.from_csv(str(tmp_path / "a.csv"), cache_dir=str(tmp_path / "c")).to_json(
        tmp_path / "b.jsonl"
    )  # as is said
    assert json.loads((tmp_path / "b.jsonl").read_text()) == {"prompt": "q", "response": "a"}
    refused("a.csv is a table in text", tmp_path, "jsonl", path=str(tmp_path / "a.csv"))
    for head in ("<!DOCTYPE html>", "<!doctype html>", "<html lang='en'>"):
        (tmp_path / "a.jsonl").write_text(head + "Not found" * 20)
        refused("a.jsonl is a web page", tmp_path, "jsonl", path=str(tmp_path / "a.jsonl"))
    for address in ("https://a.b/c.jsonl", "s3://a/b.jsonl", "hf://datasets/a/b"):
        refused(
            "only files on this machine are read: download it", tmp_path, "jsonl", path=address
        )


def test_json_that_is_no_lines_and_chats_that_are_no_documents(tmp_path):
    rows = [{"instruction": "q", "output": "a"}, {"instruction": "p", "output": "b"}]
    for indent in (None, 2):
        (tmp_path / "a.jsonl").write_text(json.dumps(rows, indent=indent))
        refused(r"a.jsonl\[0\]: no key 'text' \(it has instruction, output:", tmp_path, "jsonl")
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0], indent=2))
    refused("a.jsonl is JSON over several lines", tmp_path, "jsonl")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [], "id": 3}))
    refused(
        r"a.jsonl:1: no key 'text' \(it has messages, id: .*chats need task=sft or lora",
        tmp_path,
        "jsonl",
    )


def test_random_tokens_are_not_taken_for_something_else(tmp_path):
    """What begins a file by chance: 2,000 files of random tokens, common ones among them."""
    random = np.random.default_rng(0)
    for n in range(2000):
        tokens = random.integers(1 << 16, size=300) if n % 2 else random.zipf(1.2, 300) % 50257
        head = tokens.astype("<u2" if n % 4 < 2 else "<u4").tobytes()
        assert kind_of_tokens(tmp_path / "a.bin", head) == ""


# -------------------------------------------------------------------------------------------------------------- errors


def refused(message: str, folder: Path, kind: str, seq_len=2, vocab_size=258, **fields):
    with pytest.raises(InputError, match=message) as error:
        open_data(
            Data(kind=kind, path=fields.pop("path", str(folder)), **fields),
            seq_len,
            vocab_size,
            0,
        )
    assert "\n" not in str(error.value)


def test_file_errors(tree):
    refused(
        r"data.path: no file matches '.*none\*'",
        tree,
        "text",
        path=[str(tree), str(tree / "none*")],
    )
    refused(r"data.path: no file matches", tree, "jsonl")  # a folder without any .jsonl
    refused(r"data.exclude=\['\*'\] leaves no file", tree, "text", exclude=["*"])
    (tree / "bad.txt").write_bytes(b"abc\xff")
    refused(r"bad.txt is not UTF-8 at byte 3", tree, "text")
    (tree / "empty").mkdir()
    refused("data.path: no file matches", tree / "empty", "text")


@pytest.mark.parametrize(
    "name, kind",
    [("a.txt", "text"), ("a.jsonl", "jsonl"), ("a.npy", "tokens"), ("a.bin", "tokens")],
)
def test_an_unreadable_file_is_named(tmp_path, name, kind):
    (tmp_path / name).symlink_to(tmp_path / "gone")
    refused(f"{name} cannot be read: No such file", tmp_path, kind)


def test_the_tokenizer_of_token_files_is_looked_at_before_training(tmp_path):
    """It is saved at the end."""
    np.save(tmp_path / "a.npy", np.arange(300))
    refused("tokenizer 'nope' is not", tmp_path, "tokens", tokenizer="nope")
    refused(
        "is smaller than the tokenizer's 300",
        tmp_path,
        "tokens",
        tokenizer=word_tokenizer(tmp_path, 300),
        vocab_size=299,
    )


def test_corpus_errors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("")
    refused("data.path=.* holds no token to predict", folder, "text")
    (folder / "a.txt").write_text("abc")
    refused("holds 4 tokens, less than one row of batch.seq_len=5", folder, "text", seq_len=5)
    refused(
        "model.vocab_size=257 is smaller than the tokenizer's 258", folder, "text", vocab_size=257
    )
    with pytest.raises(
        InputError,
        match="data.validation=0.5 needs 2 documents, one for each side, but there is 1",
    ):
        hold_out(1, 0.5, seed=0)
    refused("tokenizer 'nope' is not", folder, "text", tokenizer="nope")
    for i in range(4):
        (folder / f"{i}.txt").write_text("abc")
    refused(
        "data.validation=0.2 holds 4 tokens, less than one",
        folder,
        "text",
        seq_len=8,
        validation=0.2,
    )
    refused(
        "without validation holds 4 tokens, less than one",
        folder,
        "text",
        seq_len=8,
        validation=0.8,
    )
    single_words = tmp_path_factory.mktemp("single")
    (single_words / "a.txt").write_text("w1")
    words = word_tokenizer(tmp_path_factory.mktemp("tokenizer"), 9)
    refused("holds no token to predict", single_words, "text", seq_len=1, tokenizer=words)


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
    refused(message, tmp_path, "jsonl")


def test_token_file_errors(tmp_path):
    file = tmp_path / "a.bin"
    file.write_bytes(b"abc")
    refused("a.bin does not hold tokens as .bin", tmp_path, "tokens")
    file.write_bytes(b"")
    refused("a.bin does not hold tokens as .bin", tmp_path, "tokens")
    file.write_bytes(b"a\0b\0")
    refused(
        "leaves 2 tokens to train on, no row of batch.seq_len=3", tmp_path, "tokens", seq_len=3
    )
    refused(
        "data.validation=0.1 holds out 0 tokens, no row of batch.seq_len=2",
        tmp_path,
        "tokens",
        validation=0.1,
    )
    refused(
        "leaves 0 tokens to train on, no row of batch.seq_len=2",
        tmp_path,
        "tokens",
        validation=0.9,
    )
    for wrong in (-1, 258):
        refused(
            f"data.document_end={wrong} is outside .* of model.vocab_size=258",
            tmp_path,
            "tokens",
            document_end=wrong,
        )


@pytest.mark.parametrize(
    "array, message",
    [
        (np.zeros((4, 4), np.int64), r"a.npy must hold integers \[n\], not int64 \[4, 4\]"),
        (np.zeros(4, np.float32), r"a.npy must hold integers \[n\], not float32 \[4\]"),
        (np.array([None] * 4), "a.npy does not hold tokens as .npy"),
    ],
)
def test_npy_errors(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array)
    refused(message, tmp_path, "tokens")
    (tmp_path / "a.npy").write_text("no array")
    refused("a.npy does not hold tokens as .npy", tmp_path, "tokens")
