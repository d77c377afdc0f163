"""Open small datasets, and compute the rows that they must hold, one token at a time."""

import json
from collections import Counter
from pathlib import Path

import pytest

from minitrain.data.text.text_rows import open_data
from minitrain.data.tokenizer import ByteTokenizer
from minitrain.errors import InputError
from minitrain.settings import Data

EOS = ByteTokenizer.eos_id


def brute_force_rows(documents: list[list[int]], seq_len: int) -> list[dict[str, list[int]]]:
    """Return all rows of an epoch in the order of the documents, built one token at a time."""
    stream = [(d, i) for d, document in enumerate(documents) for i in range(len(document))]
    result = []
    for start in range(0, len(stream) - seq_len + 1, seq_len):
        row = {"tokens": [], "labels": [], "positions": [], "document_ids": []}
        seen = []
        for d, i in stream[start : start + seq_len]:
            row["tokens"].append(documents[d][i])
            row["labels"].append(documents[d][i + 1] if i + 1 < len(documents[d]) else -100)
            row["positions"].append(seen.count(d))
            seen.append(d)
            row["document_ids"].append(len(set(seen)) - 1)
        result.append(row)
    return result


def epoch_of(dataset, epoch=0) -> list[dict[str, list[int]]]:
    """Return all rows of one epoch of a dataset."""
    numbers = range(epoch * len(dataset), (epoch + 1) * len(dataset))
    return [{key: value.tolist() for key, value in dataset.row(n).items()} for n in numbers]


def multiset(some_rows) -> Counter:
    """Return rows in a form that can be compared whatever their order."""
    return Counter(json.dumps(row, sort_keys=True) for row in some_rows)


def tokens_of(dataset) -> Counter:
    """Return how often each token occurs in an epoch."""
    return Counter(token for row in epoch_of(dataset) for token in row["tokens"])


def open_texts(folder: Path, texts: list[str], seq_len: int, seed=0, **fields):
    """Write one file per text, and open them as a dataset."""
    for i, text in enumerate(texts):
        (folder / f"{i:04}.txt").write_bytes(text.encode())
    return open_data(Data(kind="text", path=str(folder), **fields), seq_len, 258, seed)


def documents_of(texts: list[str]) -> list[list[int]]:
    """Return the tokens of each text that is not empty."""
    return [[*text.encode(), EOS] for text in texts if text]


def word_tokenizer(folder: Path, words: int) -> str:
    """Write a tokenizer of the words w0, w1, ... without eos, and return its folder."""
    model = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(words)}, "unk_token": "w0"}
    tree = {"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return str(folder)


def open_tokens(path, seq_len, vocab_size=1000, **fields):
    return open_data(Data(kind="tokens", path=str(path), **fields), seq_len, vocab_size, 0)


def data_refused(message: str, folder: Path, kind: str, seq_len=2, vocab_size=258, **fields):
    """Check that data is refused in one line that matches `message`. fields: of settings.Data."""
    with pytest.raises(InputError, match=message) as error:
        open_data(
            Data(kind=kind, path=fields.pop("path", str(folder)), **fields),
            seq_len,
            vocab_size,
            0,
        )
    assert "\n" not in str(error.value)
