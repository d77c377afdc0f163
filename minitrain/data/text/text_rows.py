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

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minitrain.data.faults.wording import OPTIONS, SETTINGS, Wording
from minitrain.data.files import find_files, stamp_of
from minitrain.data.held_out import hold_out, split_lone
from minitrain.data.records import (
    JSON,
    LINES,
    Skips,
    holds_records,
    read_records,
    read_texts,
    text_of,
)
from minitrain.data.sample import Sample
from minitrain.data.text.corpus import Corpus, join_files, keep_tokens, tokenize
from minitrain.data.text.token_files import open_tokens
from minitrain.data.tokenizer import Tokenizer, fitting_tokenizer, tokenizer_file, with_companions
from minitrain.errors import InputError
from minitrain.hashing import nth
from minitrain.settings import Data
from minitrain.training.loss import IGNORE
from minitrain.training.packing import ENDLESS, PADDING, Dataset, first_fit_decreasing, pack_row

Row = dict[str, Tensor]
# number of tokens in token files that are checked before training
CHECKED = 1 << 21


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
    opened = _open_token_files if data.kind == "tokens" else _open_documents
    return opened(data, seq_len, vocab_size, seed)


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

    whole: fill rows with whole documents instead, by first-fit decreasing, and pad them; only documents
    that are longer than a row are cut. usable: the numbers of the rows that are not skipped.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int, *notes: str, whole: bool = False):
        self.corpus = corpus
        self.seq_len = seq_len
        self.seed = seed
        self.notes = list(notes)
        self.bytes_per_token = None
        if corpus.sizes is not None:
            self.bytes_per_token = corpus.sizes.sum().item() / corpus.predicted
        self.whole = whole
        self.usable: Sequence[int] = range(len(corpus) // seq_len)
        if whole:
            # the place in the corpus of each piece of at most seq_len tokens
            pieces = (range(*document, seq_len) for document in pairwise(corpus.firsts.tolist()))
            self.starts = np.fromiter(chain.from_iterable(pieces), np.int64)
            self.lengths = np.diff(self.starts, append=len(corpus))
            self.rows = first_fit_decreasing(self.lengths.tolist(), seq_len)
            self.usable = range(len(self.rows))
            filled = len(corpus) / max(1, len(self.rows) * seq_len)
            self.notes.append(f"rows are {filled:.1%} filled")

    @property
    def about(self) -> str:
        return "; ".join(filter(None, self.notes))

    def __len__(self) -> int:
        return len(self.usable)

    def row(self, n: int) -> Row:
        return self.load(self.number(n))

    def load(self, number: int) -> Row:
        """Return a row by its place in the corpus."""
        parts = [pack(*self.corpus.read(*part)) for part in self.parts(number)]
        if self.whole:
            return pack_row(parts, self.seq_len, PADDING)
        return {key: torch.from_numpy(column) for key, column in parts[0].items()}

    def origin(self, n: int) -> str:
        return ", ".join(self.corpus.origin(*part) for part in self.parts(self.number(n)))

    def number(self, n: int) -> int:
        """Return the place in the corpus of row n."""
        return int(self.usable[nth(n, len(self), self.seed)[1]])

    def parts(self, number: int) -> list[tuple[int, int]]:
        """Return where each piece of a row begins in the corpus, and its length."""
        if self.whole:
            return [(int(self.starts[i]), int(self.lengths[i])) for i in self.rows[number]]
        return [(number * self.seq_len, self.seq_len)]


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


# --- documents


def find_documents(
    paths: list[str], field: str, kind: str, words: Wording = OPTIONS
) -> tuple[list[Path], str]:
    """Return the files of paths, and a note on those that are left out.

    kind: text, jsonl, or auto, which decides for each file (see `read_documents`). With auto, only
    files with objects are taken from a folder that has some, because datasets on the hub also hold a
    README and the like.
    """
    if kind != "auto":
        return find_files(Data(kind, paths, field=field), words), ""
    found = []
    left = 0
    for path in paths:
        files = find_files(Data("text", path), words)
        if os.path.isdir(os.path.expanduser(path)):
            records = [file for file in files if holds_records(file, [field])]
            left += len(files) - len(records) if records else 0
            files = records or files
        found += files
    note = f" (without {left:,} other files beside them: --kind text takes all)" if left else ""
    return find_files(Data("text", list(map(str, found))), words), note


def read_documents(
    files: list[Path], field: str, kind: str = "auto", words: Wording = OPTIONS
) -> Iterator[str]:
    """Yield the documents of files: the text of each object under the key `field`, or each file."""
    skips = Skips()
    for file in files:
        if kind == "jsonl" or (kind == "auto" and holds_records(file, [field])):
            yield from read_records([file], partial(_document, field, words), skips, words)
        else:
            yield from read_texts([file], skips, words=words)


def _document(field: str, words: Wording, record: dict) -> str:
    keys = ", ".join(list(record)[:5])
    hint = f"it has {keys}: {words.field} names the key that holds the text"
    return text_of(record, field, f" ({hint}; {words.chats})")


def cut_documents(corpus: Corpus, length: int) -> list[Sample]:
    """Return pieces of at most `length` tokens whose labels are all tokens but the first of a document."""
    pieces = []
    for first, size in zip(corpus.firsts, corpus.lengths, strict=False):
        document, _ = corpus.read(first, size)
        for start in range(0, len(document) - 1, length):
            stop = min(start + length, len(document) - 1)
            pieces.append(Sample(document[start:stop], document[start + 1 : stop + 1]))
    return pieces


def _open_documents(
    data: Data, seq_len: int, vocab_size: int, seed: int
) -> tuple[Packed, Packed | None]:
    """Open texts or JSONL, and hold out a share of the documents."""
    files = find_files(data)
    tokenizer = fitting_tokenizer(data.tokenizer, vocab_size)
    skips = Skips(data.on_error == "skip")
    corpus, lone = _tokenize_files(files, data, tokenizer, skips)

    def in_rows(corpus: Corpus, what: str) -> Packed:
        check_filled(corpus, data, seq_len, f"{what} holds", skips)
        return Packed(corpus, seq_len, seed, skips.note, whole=data.packing == "whole")

    source = f"data.path={data.path}"
    if data.validation:
        chosen = hold_out(len(corpus.lengths), data.validation, seed, lone)
        train = in_rows(corpus.select(~chosen), f"{source} without validation")
        held = in_rows(corpus.select(chosen), f"data.validation={data.validation}")
    else:
        train = in_rows(corpus, source)
        held = None
    if data.kind == "text":
        # by their names first, because a folder of texts may have many files
        named = (file for file in files if file.name.endswith((*LINES, *JSON)))
        records = next((file for file in named if holds_records(file, [data.field])), None)
        if records:
            train.notes.append(
                f"{records} is learned with its braces and keys (data.kind=jsonl takes the key {data.field!r})"
            )
    if tokenizer.eos_id is None:
        train.notes.append(
            f"data.tokenizer={data.tokenizer} names no eos: no token will end a document, nor what is generated"
        )
    return train, held


def stamps_of(files: list[Path], tokenizer: str) -> list[tuple]:
    """Return paths, sizes and times of files of texts, and of those of a tokenizer, by its name."""
    own = tokenizer_file(tokenizer)
    seen = [*files, *(with_companions(own) if own else [])]
    return [(str(file.resolve()), stamp_of(file)) for file in seen]


def _tokenize_files(
    files: list[Path], data: Data, tokenizer: Tokenizer, skips: Skips
) -> tuple[Corpus, bool]:
    """Return the corpus of all files (in data.cache, if set), and whether it is a single document.

    With validation, a single document is split into two, of which the second is held out. A cache does
    not depend on the validation, so there the document's tokens are split, otherwise its text.
    """
    if data.kind == "text":
        documents = read_texts(files, skips, in_pieces=bool(data.cache))
    else:
        documents = read_records(files, partial(_document, data.field, SETTINGS), skips)
    if data.cache:
        stamps = stamps_of(files, data.tokenizer)
        made_of = data.kind, data.field, data.on_error, tokenizer.below, stamps
        corpus = keep_tokens(documents, tokenizer, data.cache, made_of, skips)
        lone = len(corpus.lengths) == 1 and len(corpus) > 3 and data.validation > 0
        return cut_lone(corpus, data.validation, tokenizer) if lone else corpus, lone
    lone = False
    if data.validation:
        documents, lone = split_lone(documents, data.validation)
    return tokenize(documents, tokenizer), lone


def cut_lone(corpus: Corpus, share: float, tokenizer: Tokenizer) -> Corpus:
    """Split a corpus of one document into two spans; the second has a `share` of the tokens."""
    # each side needs two tokens to have one to predict
    cut = min(max(2, round(len(corpus) * (1 - share))), len(corpus) - 2)
    tail, _ = corpus.read(cut, len(corpus) - cut)
    size = len(tokenizer.decode(tail.tolist()).encode())
    return Corpus(
        corpus.stores,
        np.repeat(corpus.which, 2),
        corpus.starts + np.array([0, cut]),
        np.array([cut, len(corpus) - cut]),
        np.array([int(corpus.sizes[0]) - size, size]),
    )


def check_filled(corpus: Corpus, data: Data, seq_len: int, what: str, skips: Skips) -> None:
    """Raise InputError for a corpus that does not fill a row, or has nothing to predict."""
    if not corpus.predicted:
        raise InputError(f"{what} no token to predict{skips.aside}")
    if len(corpus) < seq_len and data.packing != "whole":
        size = f"{len(corpus)} tokens, less than one row of batch.seq_len={seq_len}"
        raise InputError(f"{what} {size}{skips.aside}")


# --- token files


def _open_token_files(
    data: Data, seq_len: int, vocab_size: int, seed: int
) -> tuple[Packed, Packed | None]:
    """Open token files and hold out the end of each: whole rows, or less than one if the share is."""
    end = -1
    if data.document_end is not None:
        end = data.document_end
        if not 0 <= end < vocab_size:
            raise InputError(
                f"data.document_end={end} is outside the vocabulary of model.vocab_size={vocab_size}"
            )
    # checked now, because it will be saved with the model
    if data.tokenizer != "bytes":
        fitting_tokenizer(data.tokenizer, vocab_size)
    skips = Skips(data.on_error == "skip")
    whole = data.packing == "whole"
    train = []
    held = []
    for file in find_files(data):
        tokens = skips.read(open_tokens, file, data.token_dtype, vocab_size)
        if tokens is not None:
            if whole and end >= 0:
                tokens.find_documents(end)
            size = len(tokens)
            rows = seq_len * round(data.validation * (size // seq_len))
            cut = size - (rows or round(data.validation * size))
            train.append((tokens, 0, cut))
            held.append((tokens, cut, size))
    train, held = (
        _usable_rows(Packed(join_files(parts, end), seq_len, seed, whole=whole), skips)
        for parts in (train, held)
    )
    none = f"no row of batch.seq_len={seq_len}"
    if not len(train):
        size = f"{len(train.corpus):,} tokens to train on, {none}"
        raise InputError(f"data.path={data.path} leaves {size}{skips.aside}")
    if data.validation and not len(held):
        size = f"{len(held.corpus):,} tokens, {none}"
        raise InputError(f"data.validation={data.validation} holds out {size}")
    train.notes.insert(0, skips.note)
    return train, held if data.validation else None


def _usable_rows(rows: Packed, skips: Skips) -> Packed:
    """Return all rows, some of them checked; or if bad ones are to be skipped, the good rows."""
    step = 1 if skips.allowed else 1 + len(rows) * rows.seq_len // CHECKED
    good = [n for n in rows.usable[::step] if skips.read(rows.load, n) is not None]
    if skips.allowed:
        rows.usable = np.array(good, np.int64)
    return rows
