"""Test rows of files of tokens: every row is rebuilt token by token from the files."""

import re
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitrain.errors import InputError
from minitrain.training.packing import rows
from tests.helpers.datasets import (
    brute_force_rows,
    data_refused,
    epoch_of,
    multiset,
    open_tokens,
    tokens_of,
    word_tokenizer,
)


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
            # a large vocabulary has them also as pairs
            open_tokens(file, 4, vocab_size, token_dtype=read)


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
    # that is, one row of each side
    monkeypatch.setattr("minitrain.data.text.text_rows.CHECKED", 4)
    train, held = open_tokens(tmp_path, 4, validation=0.5)
    assert tokens_of(train) == Counter({0: 12})
    with pytest.raises(InputError, match=found):
        epoch_of(held)


def test_the_tokenizer_of_token_files_is_looked_at_before_training(tmp_path):
    """It is saved at the end."""
    np.save(tmp_path / "a.npy", np.arange(300))
    data_refused("tokenizer 'nope' is not", tmp_path, "tokens", tokenizer="nope")
    data_refused(
        "is smaller than the tokenizer's 300",
        tmp_path,
        "tokens",
        tokenizer=word_tokenizer(tmp_path, 300),
        vocab_size=299,
    )


def test_token_file_errors(tmp_path):
    file = tmp_path / "a.bin"
    file.write_bytes(b"abc")
    data_refused("a.bin does not hold tokens as .bin", tmp_path, "tokens")
    file.write_bytes(b"")
    data_refused("a.bin does not hold tokens as .bin", tmp_path, "tokens")
    file.write_bytes(b"a\0b\0")
    data_refused(
        "leaves 2 tokens to train on, no row of batch.seq_len=3", tmp_path, "tokens", seq_len=3
    )
    data_refused(
        "data.validation=0.1 holds out 0 tokens, no row of batch.seq_len=2",
        tmp_path,
        "tokens",
        validation=0.1,
    )
    data_refused(
        "leaves 0 tokens to train on, no row of batch.seq_len=2",
        tmp_path,
        "tokens",
        validation=0.9,
    )
    for wrong in (-1, 258):
        data_refused(
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
    data_refused(message, tmp_path, "tokens")
    (tmp_path / "a.npy").write_text("no array")
    data_refused("a.npy does not hold tokens as .npy", tmp_path, "tokens")
