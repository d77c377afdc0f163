"""Corpora in files: of Megatron, in a cache, and packed whole; each against bytes or documents made by hand."""

import json
import os
import struct
import tracemalloc
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from minitrain.data.faults.wording import SETTINGS
from minitrain.data.text.text_rows import open_data
from minitrain.data.text_files import pieces_of
from minitrain.errors import InputError
from minitrain.run.checkpoint.fingerprint import data_files
from minitrain.run.config.load import from_dict
from minitrain.settings import Data
from tests.helpers.datasets import EOS, brute_force_rows, epoch_of, multiset, tokens_of

# ------------------------------------------------------------------------------------------------------------ Megatron

CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}


def write_megatron(
    prefix: Path, documents: list[list[list[int]]], dtype: str, version=1, magic=b"MMIDIDX\0\0"
) -> None:
    """Write documents of sequences of tokens, byte by byte as IndexedDatasetBuilder of Megatron-LM does."""
    sequences = list(chain(*documents))
    code, size = CODES[dtype], np.dtype(dtype).itemsize
    raw = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    raw += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents) + 1)
    raw += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    raw += b"".join(
        struct.pack("<q", size * sum(map(len, sequences[:n]))) for n in range(len(sequences))
    )
    raw += b"".join(
        struct.pack("<q", sum(map(len, documents[:n]))) for n in range(len(documents) + 1)
    )
    prefix.with_suffix(".idx").write_bytes(raw)
    prefix.with_suffix(".bin").write_bytes(np.array(list(chain(*sequences)), dtype).tobytes())


def open_tokens(path: Path, seq_len: int, vocab_size: int = 100, **fields):
    return open_data(Data("tokens", str(path), **fields), seq_len, vocab_size, 0)


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=3), min_size=1, max_size=6
    ),
    st.integers(1, 9),
    st.sampled_from(["uint8", "int8", "int16", "int32", "int64", "uint16"]),
    st.sampled_from([None, 7]),
)
def test_megatron_files_are_read_by_their_index(tmp_path_factory, documents, seq_len, dtype, end):
    """Whatever data.token_dtype is. A document may also end inside, with a token that data.document_end names."""
    folder = tmp_path_factory.mktemp("megatron")
    write_megatron(folder / "a_text_document", documents, dtype)
    flat = []
    for document in documents:
        tokens = list(chain(*document))
        cuts = [0, *(j + 1 for j, token in enumerate(tokens) if token == end), len(tokens)]
        flat += [tokens[a:b] for a, b in pairwise(cuts) if a < b]
    expected = brute_force_rows(flat, seq_len)
    if not expected:
        with pytest.raises(InputError, match="no row of batch.seq_len|does not hold tokens"):
            open_tokens(folder, seq_len, document_end=end)
        return
    data, _ = open_tokens(folder, seq_len, document_end=end, token_dtype="uint32")
    assert multiset(epoch_of(data)) == multiset(expected)
    assert data.origin(0).startswith(f"{folder}/a_text_document.bin tokens ")


def test_an_index_belongs_to_the_data_of_a_run(tmp_path):
    """As do raw tokens beside it, which have none."""
    write_megatron(tmp_path / "a", [[[1, 2, 3]]], "int32")
    np.arange(9, dtype="<u2").tofile(tmp_path / "b.bin")
    names = [file.name for file in data_files(Data("tokens", str(tmp_path)))]
    assert sorted(names) == ["a.bin", "a.idx", "b.bin"]
    train, held = open_tokens(tmp_path, 3, validation=0.4)
    assert (len(train), len(held)) == (2, 1)


WHOLE = [[[1, 2, 3], [4]], [[5, 6]]]


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda idx, raw: idx[:-1],
            "a.idx has a header for 3 sequences, but 93 bytes (is it whole?)",
        ),
        # with modes of sequences
        (lambda idx, raw: idx + b"\0" * 3, "a.idx has a header for 3 sequences, but 97 bytes"),
        (lambda idx, raw: idx[:17], "a.idx is not version 1"),
        (lambda idx, raw: b"", "a.idx is not version 1 of Megatron"),
        (lambda idx, raw: b"X" + idx[1:], "a.idx is not version 1"),
        (lambda idx, raw: idx[:9] + b"\2" + idx[10:], "a.idx is not version 1"),
        (
            lambda idx, raw: idx[:17] + b"\7" + idx[18:],
            "a.idx is not version 1 of Megatron's index of a file of integers",
        ),
        (
            lambda idx, raw: idx[:17] + b"\4" + idx[18:],
            "a.bin has 12 bytes, its index a.idx tells of 24",
        ),
        (
            lambda idx, raw: idx[:34] + b"\1" + idx[35:],
            "a.bin has 12 bytes, its index a.idx tells of 8",
        ),
        (
            lambda idx, raw: idx[:34] + struct.pack("<iii", 5, -1, 2) + idx[46:],
            "a.bin has 12 bytes, its index",
        ),
        # where a sequence begins
        (lambda idx, raw: idx[:54] + b"\4" + idx[55:], "a.bin has 12 bytes, its index"),
        (
            lambda idx, raw: idx[:70] + struct.pack("<qqq", 0, 2, 2),
            "a.idx does not divide its 3 sequences into documents",
        ),
        (
            lambda idx, raw: idx[:70] + struct.pack("<qqq", 0, 4, 3),
            "a.idx does not divide its 3 sequences",
        ),
        (
            lambda idx, raw: idx[:70] + struct.pack("<qqq", 0, -1, 3),
            "a.idx does not divide its 3 sequences",
        ),
        (
            lambda idx, raw: idx[:26] + bytes(8) + idx[34:70],
            "a.idx does not divide its 3 sequences",
        ),
        (lambda idx, raw: (idx, raw[:-2]), "a.bin has 10 bytes, its index a.idx tells of 12"),
        (lambda idx, raw: (idx, raw + b"ab"), "a.bin has 14 bytes"),
        (lambda idx, raw: (idx, b""), "a.bin has 0 bytes"),
    ],
)
def test_damaged_indices(tmp_path, change, message):
    write_megatron(tmp_path / "a", WHOLE, "uint16")
    idx, raw = ((tmp_path / f"a.{end}").read_bytes() for end in ("idx", "bin"))
    assert len(idx) == 94
    changed = change(idx, raw)
    idx, raw = changed if isinstance(changed, tuple) else (changed, raw)
    (tmp_path / "a.idx").write_bytes(idx)
    (tmp_path / "a.bin").write_bytes(raw)
    with pytest.raises(InputError) as caught:
        open_tokens(tmp_path, 2)
    assert str(caught.value).startswith(f"{tmp_path}/{message}") and "\n" not in str(caught.value)
    write_megatron(tmp_path / "b", WHOLE, "uint16")
    data, _ = open_tokens(tmp_path, 2, on_error="skip")
    assert data.about.startswith(f"1 skipped, the first: {tmp_path}/a.") and len(data) == 3


# -------------------------------------------------------------------------------------------------------- whole packing


def cut_up(documents: list[list[int]], seq_len: int) -> list[list[int]]:
    return [
        document[n : n + seq_len]
        for document in documents
        for n in range(0, len(document), seq_len)
    ]


def unpacked(some_rows: list[dict]) -> list[tuple]:
    """The tokens and labels of each document of rows, checked to be whole and numbered."""
    found = []
    for row in some_rows:
        ids = row["document_ids"]
        count = max(ids) + 1
        padding = [i for i in ids if i < 0]
        assert ids == sorted(ids[: len(ids) - len(padding)]) + padding
        for number in range(count):
            places = [i for i, document in enumerate(ids) if document == number]
            assert [row["positions"][i] for i in places] == list(range(len(places)))
            found.append(
                tuple(tuple(row[key][i] for i in places) for key in ("tokens", "labels"))
            )
        assert all(row["labels"][i] == -100 for i, document in enumerate(ids) if document < 0)
    return found


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.integers(0, 98), max_size=12).map(lambda ids: [*ids, 99]),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 12),
    st.sampled_from(["text", "raw", "npy", "megatron"]),
)
def test_whole_packing_cuts_no_document_that_fits(tmp_path_factory, documents, seq_len, kind):
    folder = tmp_path_factory.mktemp("whole")
    fields = {"packing": "whole"}
    if kind == "text":
        documents = [[*document[:-1], EOS] for document in documents if len(document) > 1]
        for i, document in enumerate(documents):
            (folder / f"{i:02}.txt").write_bytes(bytes(document[:-1]))
    elif kind == "raw":
        np.array(list(chain(*documents)), "<u4").tofile(folder / "a.bin")
        fields |= {"document_end": 99, "token_dtype": "uint32"}
    elif kind == "npy":
        for i, document in enumerate(documents):
            np.save(folder / f"{i:02}.npy", document)
    else:
        write_megatron(folder / "a", [[document] for document in documents], "int32")
    settings = Data("text" if kind == "text" else "tokens", str(folder), **fields)
    if not documents:
        return
    data, _ = open_data(settings, seq_len, 258, 3)
    expected = Counter()
    for document in documents:
        for n in range(0, len(document), seq_len):
            labels = document[n + 1 : n + seq_len + 1] + [-100] * (n + seq_len >= len(document))
            expected[tuple(document[n : n + seq_len]), tuple(labels)] += 1
    for epoch in (0, 3):
        assert Counter(unpacked(epoch_of(data, epoch))) == expected
    fewest = -(-sum(map(len, documents)) // seq_len)
    assert len(data) <= 11 / 9 * fewest + 6 / 9 or any(
        2 * len(p) > seq_len for p in cut_up(documents, seq_len)
    )
    filled = sum(map(len, documents)) / (len(data) * seq_len)
    assert data.about.endswith(f"rows are {filled:.1%} filled")
    first = data.row(5)
    data.row(2)
    again, _ = open_data(settings, seq_len, 258, 3)
    assert all((again.row(5)[key] == first[key]).all() for key in first)


@pytest.mark.parametrize(
    "words, message",
    [
        (
            {"task": "sft", "data": {"packing": "whole"}},
            "data.packing=whole is for task=pretrain and data.kind=text or ",
        ),
        (
            {"data": {"kind": "mock", "path": "", "packing": "whole"}},
            "data.packing=whole is for task=pretrain and",
        ),
        (
            {"data": {"kind": "tokens", "cache": "a"}},
            "data.cache=a is for task=pretrain and data.kind=text or jsonl",
        ),
        ({"task": "grpo", "data": {"cache": "a"}}, "data.cache=a is for task=pretrain"),
    ],
)
def test_settings_that_would_be_lost(words, message):
    model = {"name": "llama3-8b-tiny", "vocab_size": 258}
    with pytest.raises(InputError, match=message):
        from_dict(
            {"model": model} | words | {"data": {"kind": "jsonl", "path": "x"} | words["data"]}
        )


# ---------------------------------------------------------------------------------------------------------------- cache


def same(ours, theirs) -> None:
    assert (
        len(ours) == len(theirs)
        and ours.bytes_per_token == theirs.bytes_per_token
        and ours.about == theirs.about
    )
    assert epoch_of(ours) == epoch_of(theirs) and ours.origin(1) == theirs.origin(1)


@pytest.mark.parametrize("packing", ["cut", "whole"])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_rows_of_a_cache_are_those_of_memory(tmp_path, kind, packing):
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = [f"{n} ä🙂\n" * (n % 7) for n in range(40)]
    if kind == "jsonl":
        (folder / "a.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts) + "{\n"
        )
    else:
        (folder / "bad").write_bytes(b"\xff")
        for n, text in enumerate(texts):
            (folder / f"{n:02}.txt").write_text(text)
    cache = tmp_path / "new" / "cache"
    for more in ({}, {"validation": 0.2}):
        fields = {"on_error": "skip", "packing": packing, **more}
        kept, plain = (
            open_data(Data(kind, str(folder), **fields, cache=where), 16, 258, 5)
            for where in (str(cache), "")
        )
        for _ in range(2):
            for ours, theirs in zip(kept, plain, strict=True):
                assert (ours is None) == (theirs is None)
                if ours:
                    same(ours, theirs)
            kept = open_data(Data(kind, str(folder), **fields, cache=str(cache)), 16, 258, 5)
    # validation chooses documents, and makes no others
    assert len(list(cache.glob("*.tokens"))) == 1


def test_a_cache_is_made_once_and_anew_when_a_file_changed(tmp_path, monkeypatch):
    file, cache = tmp_path / "a.txt", tmp_path / "cache"
    file.write_text("some text " * 9)
    data = Data("text", str(file), cache=str(cache))
    first, _ = open_data(data, 8, 258, 0)
    assert tokens_of(first)[ord("x")] == 9
    # which is called no more
    monkeypatch.setattr("minitrain.data.text.token_cache.write_tokens", None)
    same(open_data(data, 8, 258, 0)[0], first)
    monkeypatch.undo()
    time = file.stat().st_mtime_ns
    file.write_text("some te t " * 9)
    os.utime(file, ns=(time, time + 1))
    assert tokens_of(open_data(data, 8, 258, 0)[0])[ord("x")] == 0
    assert tokens_of(first)[ord("x")] == 9  # a run goes on with what it began with
    for changed in ({"field": "b"}, {"on_error": "skip"}):
        open_data(Data("text", str(file), cache=str(cache), **changed), 8, 258, 0)
    assert len(list(cache.glob("*.npz"))) == 4
    monkeypatch.setattr(
        "minitrain.data.text.token_cache.readers_digest", lambda: "another version's"
    )
    open_data(data, 8, 258, 0)
    assert len(list(cache.glob("*.npz"))) == 5


def test_a_cache_that_was_not_finished_or_cannot_be_written(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "some text"}\n{"text": 5}\n')
    data = Data("jsonl", str(file), cache=str(tmp_path / "cache"))
    for _ in range(2):
        with pytest.raises(InputError, match=r"a.jsonl:2: 'text' must be text"):
            open_data(data, 4, 258, 0)
    assert not list((tmp_path / "cache").glob("*.npz"))
    data.cache = str(file)
    with pytest.raises(InputError, match=rf"data.cache={file} cannot be used: .*exists"):
        open_data(data, 4, 258, 0)


def test_a_cache_that_is_damaged(tmp_path):
    """As after a power cut: told in a line, and made anew where either file is gone."""
    file, cache = tmp_path / "a.txt", tmp_path / "cache"
    file.write_text("some text " * 9)
    data = Data("text", str(file), cache=str(cache))
    plain, _ = open_data(Data("text", str(file)), 8, 258, 0)
    same(open_data(data, 8, 258, 0)[0], plain)
    [index], [tokens] = cache.glob("*.npz"), cache.glob("*.tokens")
    whole = index.read_bytes(), tokens.read_bytes()
    for n in (0, 100, len(whole[0]) - 1):
        index.write_bytes(whole[0][:n])
        with pytest.raises(
            InputError, match=rf"^{index} and the tokens beside it are damaged \(remove them\)$"
        ):
            open_data(data, 8, 258, 0)
    index.write_bytes(whole[0])
    tokens.write_bytes(whole[1][:-2])
    with pytest.raises(InputError, match="are damaged"):
        open_data(data, 8, 258, 0)
    for gone in (index, tokens):
        gone.unlink()
        same(open_data(data, 8, 258, 0)[0], plain)
    assert (index.exists(), tokens.read_bytes()) == (True, whole[1])


def sums(folder: Path, cache: str) -> list[int]:
    data, _ = open_data(Data("text", str(folder / "*.txt"), cache=cache), 64, 258, 0)
    return [data.row(n)["tokens"].sum().item() for n in range(50)]


def test_processes_that_begin_together_make_one_cache(pool, tmp_path):
    for n in range(50):
        (tmp_path / f"{n}.txt").write_text(f"text {n} " * 200)
    assert pool.run(4, sums, tmp_path, str(tmp_path / "cache")) == [sums(tmp_path, "")] * 4
    assert len(list((tmp_path / "cache").iterdir())) == 3


def trained_tokenizer(folder: Path, text: str) -> str:
    """A byte-level BPE with GPT-2's rule of what tokens may reach over, and an eos."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], show_progress=False)
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return str(folder)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(tmp_path, monkeypatch, kind):
    """With words, spaces, indented lines, empty ones and those of other scripts around their ends."""
    random = np.random.default_rng(0)
    parts = [
        "the",
        " quick",
        "\n",
        "\n\n",
        "    if",
        "\t",
        " ",
        "ä",
        "漢字",
        "🙂",
        "'s",
        "1",
        "...",
        "\r\n",
        "\u3000",
    ]
    lines = [
        random.choice([*parts, "the", "quick"], size=n) for n in random.integers(1, 6, size=1000)
    ]
    text = "\n".join("".join(line) for line in lines)
    (tmp_path / "a.txt").write_text(text, newline="")
    tokenizer = "bytes" if kind == "bytes" else trained_tokenizer(tmp_path, text)
    whole, _ = open_data(Data("text", str(tmp_path / "a.txt"), tokenizer=tokenizer), 8, 400, 0)
    for size in (150, 500, 9000):
        monkeypatch.setattr("minitrain.data.text_files.PIECE", size)
        cache = str(tmp_path / f"cache-{size}")
        pieces, _ = open_data(
            Data("text", str(tmp_path / "a.txt"), tokenizer=tokenizer, cache=cache), 8, 400, 0
        )
        same(pieces, whole)
    (tmp_path / "empty.txt").write_text("some\r\n\r\n\u3000 text\r\n\n" * 99, newline="")
    monkeypatch.setattr("minitrain.data.text_files.PIECE", 100)
    pieces = list(pieces_of(tmp_path / "empty.txt", SETTINGS))
    assert "".join(pieces).encode() == (tmp_path / "empty.txt").read_bytes()
    assert len(pieces) > 15 and max(map(len, pieces)) < 200  # whose tokens may differ
    (tmp_path / "empty.txt").unlink()
    monkeypatch.setattr("minitrain.data.text_files.PIECE", 500)
    (tmp_path / "b.txt").write_bytes(text.encode() * 2 + b"\n\xff")
    cached = {"cache": str(tmp_path / "cache"), "tokenizer": tokenizer}
    message = rf"b.txt is not UTF-8 at byte {2 * len(text.encode()) + 1} "
    with pytest.raises(InputError, match=message):
        open_data(Data("text", str(tmp_path / "b.txt"), **cached), 8, 400, 0)
    skipped, _ = open_data(
        Data("text", str(tmp_path / "?.txt"), on_error="skip", **cached), 8, 400, 0
    )
    assert epoch_of(skipped) == epoch_of(whole) and "1 skipped" in skipped.about


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_file_larger_than_the_memory_it_takes(tmp_path, kind):
    """16 MB, which are 32 MB of tokens, and as a text 32 MB more to read it."""
    line = "x" * 200 + "\n"
    lines = line * 200 if kind == "text" else (json.dumps({"text": line * 20}) + "\n") * 10
    (tmp_path / "a").write_text(lines * 400)
    for cache in (str(tmp_path / "cache"), ""):
        tracemalloc.start()
        data, _ = open_data(Data(kind, str(tmp_path / "a"), cache=cache), 2048, 258, 0)
        for n in range(50):
            data.row(n)
        peak = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
        assert peak < 8 if cache else peak > 32
