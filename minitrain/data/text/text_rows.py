"""Datasets of text: row n is a pure function of (seed, n), so a resumed run needs no saved iterator.

Documents are tokenized. They begin as prompts do (with bos, if the tokenizer adds one) and end with
eos. They are laid end to end and cut into rows of seq_len tokens. A row has document ids, so that
attention stays within documents, and positions that restart in each. An epoch visits every row once,
in an order that is computed row by row (`shuffled`) and not stored. Files of tokens are read row by
row, so files of any size open quickly. With data.packing=whole, documents that fit into a row are not
cut. Streaming from a network is not supported.

Unusable data is an error; with data.on_error=skip it is left out and counted. Text and JSONL are read
and checked in full before the first step. Rows of token files are checked when they are read. Before
the first step, a sample of rows from all files is checked: at most CHECKED tokens to train on, and as
many held-out ones. To skip bad rows, all rows are read once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minitrain.data.faults.skips import Skips
from minitrain.data.files import find_files
from minitrain.data.held_out import hold_out
from minitrain.data.records import JSON, LINES, holds_records
from minitrain.data.text.corpus import Corpus, join_files
from minitrain.data.text.documents import read_corpus
from minitrain.data.text.token_files import open_tokens
from minitrain.data.tokenizer import Tokenizer, fitting_tokenizer
from minitrain.errors import InputError
from minitrain.hashing import nth
from minitrain.settings import Config, Data
from minitrain.training.loss import IGNORE
from minitrain.training.packing import ENDLESS, PADDING, Dataset, first_fit_decreasing, pack_row

Row = dict[str, Tensor]
# number of tokens in token files that are checked before training
CHECKED = 1 << 21


def open_texts(config: Config) -> tuple[Dataset, Dataset | None]:
    """Return what `open_data` does, by a whole config."""
    vocab_size = config.model.config.vocab_size
    return open_data(config.data, config.batch.seq_len, vocab_size, config.seed)


def open_data(
    data: Data, seq_len: int, vocab_size: int, seed: int
) -> tuple[Dataset, Dataset | None]:
    """Return the training dataset, and the held-out one; the latter is None if data.validation is 0.

    A dataset has `row(n)` for n = 0, 1, 2, ... without end: a dict of int64 [seq_len] tensors. They
    are `tokens`, `labels` (the next token, or IGNORE), and, except for mock data, `positions` and
    `document_ids`, both counted from 0 in each row. len(dataset) is the number of rows per epoch.
    Optional: `origin(n)`, a text on where row n comes from; `about`, a note for the log; and
    `bytes_per_token`, UTF-8 bytes of the text per predicted token. Mock data always has a held-out
    dataset.
    """
    if data.kind == "mock":
        return Mock(seq_len, vocab_size, seed, split=0), Mock(seq_len, vocab_size, seed, split=1)
    opened = open_token_files if data.kind == "tokens" else open_documents
    return opened(data, seq_len, vocab_size, seed)


def open_documents(
    data: Data, seq_len: int, vocab_size: int, seed: int
) -> "tuple[Packed, Packed | None]":
    """Open texts or JSONL, and hold out a share of the documents."""
    files = find_files(data)
    tokenizer = fitting_tokenizer(data.tokenizer, vocab_size)
    skips = Skips(data.on_error == "skip")
    corpus, lone = read_corpus(files, data, tokenizer, skips)

    def in_rows(corpus: Corpus, what: str) -> Packed:
        check_filled(corpus, data, seq_len, f"{what} holds", skips)
        return packed(data)(corpus, seq_len, seed, skips.note)

    source = f"data.path={data.path}"
    held = None
    if data.validation:
        chosen = hold_out(len(corpus.lengths), data.validation, seed, lone)
        train = in_rows(corpus.select(~chosen), f"{source} without validation")
        held = in_rows(corpus.select(chosen), f"data.validation={data.validation}")
    else:
        train = in_rows(corpus, source)
    train.notes += notes_on(files, data, tokenizer)
    return train, held


def open_token_files(
    data: Data, seq_len: int, vocab_size: int, seed: int
) -> "tuple[Packed, Packed | None]":
    """Open token files and hold out the end of each: whole rows, or less than one if the share is."""
    end = document_end(data, vocab_size)
    # checked now, because it will be saved with the model
    if data.tokenizer != "bytes":
        fitting_tokenizer(data.tokenizer, vocab_size)
    skips = Skips(data.on_error == "skip")
    parts = [], []
    for file in find_files(data):
        tokens = skips.read(open_tokens, file, data.token_dtype, vocab_size)
        if tokens is None:
            continue
        if data.packing == "whole" and end >= 0:
            tokens.find_documents(end)
        size = len(tokens)
        rows = seq_len * round(data.validation * (size // seq_len))
        cut = size - (rows or round(data.validation * size))
        parts[0].append((tokens, 0, cut))
        parts[1].append((tokens, cut, size))
    train, held = (packed(data)(join_files(side, end), seq_len, seed) for side in parts)
    for rows in (train, held):
        leave_out_bad(rows, skips)
    check_has_rows(train, held, data, skips)
    train.notes.insert(0, skips.note)
    return train, held if data.validation else None


# --- rows


@dataclass
class Mock:
    """Uniformly random tokens for benchmarks, without document boundaries. split: 0 and 1 differ."""

    seq_len: int
    vocab_size: int
    seed: int
    split: int

    def __len__(self) -> int:
        return ENDLESS

    def random(self, n: int) -> np.random.Generator:
        """Return the generator of row n."""
        return np.random.default_rng((self.seed, self.split, int(n)))

    def row(self, n: int) -> Row:
        window = torch.from_numpy(self.random(n).integers(self.vocab_size, size=self.seq_len + 1))
        return {"tokens": window[:-1], "labels": window[1:]}


class Packed:
    """Rows of a corpus: its documents end to end, cut every seq_len tokens, without an incomplete row.

    usable: the places in the corpus of the rows that are not left out, counted in rows.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int, *notes: str):
        self.corpus = corpus
        self.seq_len = seq_len
        self.seed = seed
        self.notes = list(notes)
        self.bytes_per_token = None
        if corpus.sizes is not None:
            self.bytes_per_token = corpus.sizes.sum().item() / corpus.predicted
        self.usable: Sequence[int] = range(len(corpus) // seq_len)

    @property
    def about(self) -> str:
        return "; ".join(filter(None, self.notes))

    def __len__(self) -> int:
        return len(self.usable)

    def row(self, n: int) -> Row:
        return self.load(self.number(n))

    def origin(self, n: int) -> str:
        return ", ".join(self.corpus.origin(*part) for part in self.parts(self.number(n)))

    def number(self, n: int) -> int:
        """Return the place in the corpus of row n: each epoch visits all rows in another order."""
        return int(self.usable[nth(n, len(self), self.seed)[1]])

    def load(self, number: int) -> Row:
        """Return a row by its place in the corpus."""
        (part,) = self.parts(number)
        columns = pack(*self.corpus.read(*part))
        return {key: torch.from_numpy(column) for key, column in columns.items()}

    def parts(self, number: int) -> list[tuple[int, int]]:
        """Return where each piece of a row begins in the corpus, and its length."""
        return [(number * self.seq_len, self.seq_len)]


class PackedWhole(Packed):
    """Rows filled with whole documents, by first-fit decreasing, and padded.

    Only documents that are longer than a row are cut.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int, *notes: str):
        super().__init__(corpus, seq_len, seed, *notes)
        # the place in the corpus of each piece of at most seq_len tokens
        pieces = (range(*document, seq_len) for document in pairwise(corpus.firsts.tolist()))
        self.starts = np.fromiter(chain.from_iterable(pieces), np.int64)
        self.lengths = np.diff(self.starts, append=len(corpus))
        self.rows = first_fit_decreasing(self.lengths.tolist(), seq_len)
        self.usable = range(len(self.rows))
        filled = len(corpus) / max(1, len(self.rows) * seq_len)
        self.notes.append(f"rows are {filled:.1%} filled")

    def load(self, number: int) -> Row:
        pieces = [pack(*self.corpus.read(*part)) for part in self.parts(number)]
        return pack_row(pieces, self.seq_len, PADDING)

    def parts(self, number: int) -> list[tuple[int, int]]:
        return [(int(self.starts[i]), int(self.lengths[i])) for i in self.rows[number]]


def packed(data: Data) -> type[Packed]:
    """Return the class of rows that data.packing names."""
    return PackedWhole if data.packing == "whole" else Packed


def pack(window: np.ndarray, ends: np.ndarray) -> dict[str, np.ndarray]:
    """Return a row, or a piece of one, of int64 [n] arrays.

    window: its tokens, and the one after them if there is one, [n + 1] or [n]. ends: bool [n], true at
    the last tokens of documents.
    """
    index = np.arange(len(ends))
    begins = np.concatenate(([True], ends[:-1]))
    labels = np.full(len(ends), IGNORE, np.int64)
    labels[: len(window) - 1] = window[1:]
    labels[ends] = IGNORE
    return {
        "tokens": window[: len(ends)].astype(np.int64),
        "labels": labels,
        "positions": index - np.maximum.accumulate(np.where(begins, index, 0)),
        "document_ids": np.cumsum(begins) - 1,
    }


# --- checks


def check_filled(corpus: Corpus, data: Data, seq_len: int, what: str, skips: Skips) -> None:
    """Raise InputError for a corpus that does not fill a row, or has nothing to predict."""
    if not corpus.predicted:
        raise InputError(f"{what} no token to predict{skips.aside}")
    if len(corpus) < seq_len and data.packing != "whole":
        size = f"{len(corpus)} tokens, less than one row of batch.seq_len={seq_len}"
        raise InputError(f"{what} {size}{skips.aside}")


def check_has_rows(train: Packed, held: Packed, data: Data, skips: Skips) -> None:
    """Raise InputError for files of tokens that leave one of the sides without a row."""
    none = f"no row of batch.seq_len={train.seq_len}"
    if not len(train):
        size = f"{len(train.corpus):,} tokens to train on, {none}"
        raise InputError(f"data.path={data.path} leaves {size}{skips.aside}")
    if data.validation and not len(held):
        size = f"{len(held.corpus):,} tokens, {none}"
        raise InputError(f"data.validation={data.validation} holds out {size}")


def leave_out_bad(rows: Packed, skips: Skips) -> None:
    """Check a sample of the rows; where bad ones are to be skipped, check all and leave those out."""
    step = 1 if skips.allowed else 1 + len(rows) * rows.seq_len // CHECKED
    good = [n for n in rows.usable[::step] if skips.read(rows.load, n) is not None]
    if skips.allowed:
        rows.usable = np.array(good, np.int64)


def document_end(data: Data, vocab_size: int) -> int:
    """Return the id that ends documents in files of tokens, -1 for none."""
    end = data.document_end
    if end is None:
        return -1
    if not 0 <= end < vocab_size:
        raise InputError(
            f"data.document_end={end} is outside the vocabulary of model.vocab_size={vocab_size}"
        )
    return end


def notes_on(files: list[Path], data: Data, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield remarks on texts that are learned otherwise than the user may think."""
    if data.kind == "text":
        # by their names first, because a folder of texts may have many files
        named = (file for file in files if file.name.endswith((*LINES, *JSON)))
        records = next((file for file in named if holds_records(file, [data.field])), None)
        if records:
            yield (
                f"{records} is learned with its braces and keys (data.kind=jsonl takes the key {data.field!r})"
            )
    if tokenizer.eos_id is None:
        yield (
            f"data.tokenizer={data.tokenizer} names no eos: no token will end a document, nor what is generated"
        )
