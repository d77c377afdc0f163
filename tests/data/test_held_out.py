"""Test which documents, or tokens, are held out for validation."""

from collections import Counter
from pathlib import Path

import pytest

from minitrain.data.text.text_rows import open_data
from minitrain.data.tokenizer import ByteTokenizer
from minitrain.settings import Data
from tests.helpers.datasets import (
    brute_force_rows,
    documents_of,
    epoch_of,
    multiset,
    open_texts,
    tokens_of,
    word_tokenizer,
)


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
    # the first time makes the cache, the second finds it
    for _ in range(2):
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
    # 8 bytes, 2 predicted tokens; 24 bytes, 4 predicted tokens
    (Path(data.path) / "short.txt").write_text("w1 w2 w3")
    (Path(data.path) / "long.txt").write_text("w111 w222 w211 w222 w112")
    sides = open_data(data, 2, 300, 0)
    assert {side.bytes_per_token: min(tokens_of(side)) > 100 for side in sides} == {
        4.0: False,
        6.0: True,
    }
