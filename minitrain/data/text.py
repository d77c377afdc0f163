"""Rows of text for training: row n is a pure function of (seed, n).

So a resumed run needs no saved iterator. Documents are tokenized, begun as a prompt is (with bos,
where the tokenizer puts one), ended by eos, laid end to end, and cut into rows of seq_len. A row
numbers its documents, so that attention stays inside each, and positions restart with them. An
epoch visits every row once, in an order that is computed for one row at a time (`shuffled`) and
never stored. Token files are read row by row: any size opens at once. Left out: streaming from a
network, mixing sources by weight, and packing that avoids cutting documents.

Unusable data is an error; with data.on_error=skip it is left out and counted. Text and JSONL are
read, and so checked, in full before the first step. Token files are checked row by row when a row
is read. Before the first step a sample of them is checked, spread evenly over all files: at most
CHECKED tokens to train on, and as many held out. To skip bad rows, all rows are read once.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minitrain.data.chat import Sample
from minitrain.data.files import SUFFIXES, find_files
from minitrain.data.records import Skips, read_records, read_texts, text_of
from minitrain.data.token_files import TokenFiles, open_tokens
from minitrain.data.tokenizer import Tokenizer, load_tokenizer
from minitrain.errors import InputError, located
from minitrain.hashing import nth, shuffled
from minitrain.settings import Data
from minitrain.training.loss import IGNORE

Row = dict[str, Tensor]
# how many tokens of token files are checked before training
CHECKED = 1 << 21


def open_data(data: Data, seq_len: int, vocab_size: int, seed: int) -> tuple:
    """Return the training dataset, and the held-out one.

    The latter is None if data.validation is 0; mock data always has one. A dataset has `row(n)` for
    n = 0, 1, 2, ... without end: a dict of int64 [seq_len] tensors. They are `tokens` and `labels`
    (the next token, or IGNORE); but for mock data also `positions` and `document_ids`, both counted
    from 0 in each row. len(dataset): rows per epoch. Some also have `origin(n)`, where row n comes
    from, for humans; `about`, a note on the data for the log; and `bytes_per_token`, the UTF-8
    bytes of the text per predicted token, if it is known.
    """
    if data.kind == "mock":
        return Mock(seq_len, vocab_size, seed, split=0), Mock(seq_len, vocab_size, seed, split=1)
    opened = _open_token_files if data.kind == "tokens" else _open_documents
    return opened(data, find_files(data), seq_len, vocab_size, seed)


# ---------------------------------------------------------------------------------------------------------------- rows


@dataclass
class Mock:
    """Uniformly random tokens, one endless document per row: for benchmarks.

    `split` 0 and 1 differ.
    """

    seq_len: int
    vocab_size: int
    seed: int
    split: int

    def __len__(self) -> int:
        # so that no epoch ever ends
        return 1 << 40

    def random(self, n: int) -> np.random.Generator:
        """Return the generator of row n."""
        return np.random.default_rng((self.seed, self.split, int(n)))

    def row(self, n: int) -> Row:
        window = torch.from_numpy(self.random(n).integers(self.vocab_size, size=self.seq_len + 1))
        return {"tokens": window[:-1], "labels": window[1:]}


class Packed:
    """Rows cut from a corpus with a length in tokens, `read` and `origin(start, length)`.

    The rest at its end, fewer than seq_len tokens, is not used. usable: the numbers of the rows.
    """

    def __init__(
        self,
        corpus: "Corpus | TokenFiles",
        seq_len: int,
        seed: int,
        bytes_per_token: float | None = None,
        about: str = "",
    ):
        self.corpus = corpus
        self.seq_len = seq_len
        self.seed = seed
        self.bytes_per_token = bytes_per_token
        self.about = about
        self.usable: Sequence[int] = range(len(corpus) // seq_len)

    def __len__(self) -> int:
        return len(self.usable)

    def row(self, n: int) -> Row:
        return pack(*self.corpus.read(self.start(n), self.seq_len))

    def origin(self, n: int) -> str:
        return self.corpus.origin(self.start(n), self.seq_len)

    def start(self, n: int) -> int:
        """Return the index of row n's first token in the corpus."""
        _, number = nth(n, len(self), self.seed)
        return int(self.usable[number]) * self.seq_len


def pack(window: np.ndarray, ends: np.ndarray) -> Row:
    """Return one row from its tokens and the ends of its documents.

    window: integers [seq_len + 1], or [seq_len] if nothing follows; ends: bool [seq_len], the last
    tokens of documents.
    """
    index = np.arange(len(ends))
    begins = np.concatenate(([True], ends[:-1]))
    labels = np.full(len(ends), IGNORE, np.int64)
    labels[: len(window) - 1] = window[1:]
    labels[ends] = IGNORE
    columns = {
        "tokens": window[: len(ends)].astype(np.int64),
        "labels": labels,
        "positions": index - np.maximum.accumulate(np.where(begins, index, 0)),
        "document_ids": np.cumsum(begins) - 1,
    }
    return {key: torch.from_numpy(column) for key, column in columns.items()}


# ----------------------------------------------------------------------------------------------------------- documents


@dataclass
class Corpus:
    """Documents in memory, end to end.

    tokens: [n]. ends: [documents], last indices. sizes: [documents], in bytes.
    """

    tokens: np.ndarray
    ends: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens [length + 1] from `start` on, and bool [length], true at documents' ends.

        At the very end of the corpus the tokens are [length].
        """
        first, last = np.searchsorted(self.ends, (start, start + length))
        ends = np.zeros(length, bool)
        ends[self.ends[first:last] - start] = True
        return self.tokens[start : start + length + 1], ends

    def origin(self, start: int, length: int) -> str:
        """Return the numbers of these tokens' documents, counted as they were kept."""
        first, last = np.searchsorted(self.ends, (start, start + length - 1)) + 1
        return f"document {first}" if first == last else f"documents {first} to {last}"

    def select(self, chosen: np.ndarray) -> "Corpus":
        """Return the documents where bool `chosen` [documents] is true."""
        lengths = np.diff(self.ends, prepend=-1)
        tokens = self.tokens[np.repeat(chosen, lengths)]
        return Corpus(tokens, np.cumsum(lengths[chosen]) - 1, self.sizes[chosen])

    @property
    def predicted(self) -> int:
        # each document's first token is not predicted
        return len(self.tokens) - len(self.ends)


def tokenize(documents: Iterable[str], tokenizer: Tokenizer) -> Corpus:
    """Return all documents, begun and ended as the tokenizer has it, at 2 or 4 bytes a token.

    Empty ones are left out. A model is asked to continue a prompt that begins with bos: if it never
    saw one, that would be an untrained embedding. Texts that have it written at their start, as
    rendered chats do, get no second.
    """
    # config.json may name an eos far beyond the vocabulary
    count = max(tokenizer.vocab_size, 1 + (tokenizer.eos_id or 0))
    dtype = np.dtype(np.uint16 if count <= 1 << 16 else np.uint32)
    beginning = np.array(tokenizer.beginning_ids, dtype)
    eos = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype).tobytes()
    tokens = bytearray()
    ends = array("q")
    sizes = array("q")
    for text in documents:
        ids = tokenizer.encode_array(text)
        if len(ids):
            if not np.array_equal(ids[: len(beginning)], beginning):
                tokens += beginning.tobytes()
            tokens += memoryview(ids.astype(dtype))
            tokens += eos
            ends.append(len(tokens) // dtype.itemsize - 1)
            sizes.append(len(text.encode("utf-8")))
    return Corpus(
        np.frombuffer(tokens, dtype),
        np.array(ends, np.int64),
        np.array(sizes, np.int64),
    )


def read_documents(files: list[Path], field: str) -> Iterator[str]:
    """Yield the documents of files: of JSONL and tables each object's, at a key; else the text."""
    skips = Skips()
    for file in files:
        if file.name.endswith(SUFFIXES["jsonl"]):
            yield from read_records([file], partial(_document, field), skips)
        else:
            yield from read_texts([file], skips)


def _document(field: str, record: dict, where: str) -> str:
    keys = ", ".join(list(record)[:5])
    hint = f" (it has {keys}: data.field names the key that holds the text; chats need task=sft or lora)"
    with located(where):
        return text_of(record, field, hint)


def cut_documents(corpus: Corpus, length: int) -> list[Sample]:
    """Return pieces of at most `length` inputs, which predict all of a document but its first token."""
    pieces = []
    for document in np.split(corpus.tokens.astype(np.int64), corpus.ends[:-1] + 1):
        for start in range(0, len(document) - 1, length):
            stop = min(start + length, len(document) - 1)
            pieces.append(Sample(document[start:stop], document[start + 1 : stop + 1]))
    return pieces


def _open_documents(
    data: Data, files: list[Path], seq_len: int, vocab_size: int, seed: int
) -> tuple[Packed, Packed | None]:
    tokenizer = fitting_tokenizer(data.tokenizer, vocab_size)
    skips = Skips(data.on_error == "skip")

    def cut(corpus: Corpus, what: str) -> Packed:
        problem = ""
        if not corpus.predicted:
            problem = "no token to predict"
        elif len(corpus) < seq_len:
            problem = f"{len(corpus)} tokens, less than one row of batch.seq_len={seq_len}"
        if problem:
            raise InputError(f"{what} holds {problem}{skips.aside}")
        bytes_per_token = corpus.sizes.sum().item() / corpus.predicted
        return Packed(corpus, seq_len, seed, bytes_per_token, about=skips.note)

    source = f"data.path={data.path}"
    if data.kind == "text":
        documents = read_texts(files, skips)
    else:
        documents = read_records(files, partial(_document, data.field), skips)
    held = None
    if data.validation:
        lone, documents = split_lone(documents, data.validation)
        corpus = tokenize(documents, tokenizer)
        count = len(corpus.ends)
        chosen = np.array([False, True])
        if not lone or count != 2:
            chosen = hold_out(count, data.validation, seed)
        train = cut(corpus.select(~chosen), f"{source} without validation")
        held = cut(corpus.select(chosen), f"data.validation={data.validation}")
    else:
        train = cut(tokenize(documents, tokenizer), source)
    if tokenizer.eos_id is None:
        unended = f"data.tokenizer={data.tokenizer} names no eos: no token will end a document, nor what is generated"
        train.about = "; ".join(filter(None, [train.about, unended]))
    return train, held


def fitting_tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """Return the tokenizer `name`. Raises InputError if an id is not below the model's `vocab_size`.

    Its pad may be, which is neither read nor predicted: a text that spells it is refused.
    """
    tokenizer = load_tokenizer(name)
    beyond = {number for number in tokenizer.vocabulary() if number >= vocab_size}
    if beyond and beyond == {tokenizer.named_id("pad")}:
        tokenizer.below = vocab_size
    elif beyond:
        raise InputError(
            f"model.vocab_size={vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}"
        )
    if not 0 <= (tokenizer.eos_id or 0) < vocab_size:
        raise InputError(
            f"data.tokenizer={name} has eos={tokenizer.eos_id}, outside model.vocab_size={vocab_size}"
        )
    return tokenizer


def split_lone(documents: Iterator[str], share: float) -> tuple[bool, Iterator[str]]:
    """Split a lone document before its tail of a `share`. Returns whether it was lone, and all."""
    documents = filter(None, documents)
    first = list(islice(documents, 2))
    if len(first) != 1:
        return False, chain(first, documents)
    text = first[0]
    cut = round(len(text) * (1 - share))
    return True, iter((text[:cut], text[cut:]))


def hold_out(documents: int, share: float, seed: int) -> np.ndarray:
    """Return bool [documents], true for a random `share`, chosen by (seed, index).

    At least one is true and one false.
    """
    if documents < 2:
        raise InputError(
            f"data.validation={share} needs 2 documents, one for each side, but there is {documents}"
        )
    count = min(max(1, round(share * documents)), documents - 1)
    held = np.zeros(documents, bool)
    held[[shuffled(i, documents, seed) for i in range(count)]] = True
    return held


def split_off(items: Sequence, share: float, seed: int) -> tuple[list, list]:
    """Return the items to train on, and those that `hold_out` chooses, each in order."""
    sides = [], []
    for item, held in zip(items, hold_out(len(items), share, seed), strict=True):
        sides[int(held)].append(item)
    return sides


# --------------------------------------------------------------------------------------------------------- token files


def _open_token_files(
    data: Data, files: list[Path], seq_len: int, vocab_size: int, seed: int
) -> tuple[Packed, Packed | None]:
    """Open token files and hold out the end of each: whole rows, or less if that is the share."""
    end = -1
    if data.document_end is not None:
        end = data.document_end
        if not 0 <= end < vocab_size:
            raise InputError(
                f"data.document_end={end} is outside the vocabulary of model.vocab_size={vocab_size}"
            )
    # which is saved with the model
    if data.tokenizer != "bytes":
        fitting_tokenizer(data.tokenizer, vocab_size)
    skips = Skips(data.on_error == "skip")
    train = []
    held = []
    for file in files:
        tokens = skips.read(open_tokens, file, data.token_dtype, vocab_size, end)
        if tokens is not None:
            whole = seq_len * round(data.validation * (len(tokens) // seq_len))
            cut = len(tokens) - (whole or round(data.validation * len(tokens)))
            train.append(replace(tokens, stop=cut))
            held.append(replace(tokens, first=cut))
    train, held = (_usable_rows(TokenFiles(parts), seq_len, seed, skips) for parts in (train, held))
    none = f"no row of batch.seq_len={seq_len}"
    if not len(train):
        size = f"{len(train.corpus):,} tokens to train on, {none}"
        raise InputError(f"data.path={data.path} leaves {size}{skips.aside}")
    if data.validation and not len(held):
        size = f"{len(held.corpus):,} tokens, {none}"
        raise InputError(f"data.validation={data.validation} holds out {size}")
    train.about = skips.note
    return train, held if data.validation else None


def _usable_rows(corpus: TokenFiles, seq_len: int, seed: int, skips: Skips) -> Packed:
    """Return all rows, some of them checked; or if bad ones are to be skipped, the good rows."""
    rows = Packed(corpus, seq_len, seed)
    step = 1 if skips.allowed else 1 + len(rows) * seq_len // CHECKED
    checked = rows.usable[::step]
    good = [n for n in checked if skips.read(corpus.read, n * seq_len, seq_len) is not None]
    if skips.allowed:
        rows.usable = np.array(good, np.int64)
    return rows
