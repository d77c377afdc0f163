"""Training data: row n of a dataset is a pure function of (seed, n), so a resumed run needs no
saved iterator.

Documents are tokenised, each begun as a prompt is (with bos, where the tokenizer puts one) and
ended by eos, laid end to end, and cut into rows of seq_len. A row numbers its documents, so that
attention stays inside each, and positions restart with them. An epoch visits every row once, in an
order that is computed for one row at a time (`shuffled`) and never stored. Token files are read row
by row: any size opens at once. Left out: streaming from a network, mixing sources by weight, and
packing that avoids cutting documents.

What is unusable is an error, or with data.on_error=skip left out and counted. Text and JSONL are
read, and so checked, in full before the first step. Of token files at most CHECKED tokens to train
on, and as many held out, are checked before the first step, spread evenly over all files, and every
row when it is read; to skip bad rows, all are read once.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minitrain.data.files import find_files
from minitrain.data.token_files import TokenFiles, open_tokens
from minitrain.data.tokenizer import Tokenizer, load_tokenizer
from minitrain.errors import InputError, readable
from minitrain.formats.magic import kind_of_binary, kind_of_json, placeholder, read_head
from minitrain.hashing import nth, shuffled
from minitrain.settings import Data
from minitrain.training.loss import IGNORE

CHECKED = 1 << 21  # tokens of token files that are looked at before training


def open_data(
    data: Data, seq_len: int, vocab_size: int, seed: int
) -> tuple["Mock | Packed", "Mock | Packed | None"]:
    """The training dataset, and the held-out one (None if data.validation is 0; mock data always
    has one).

    A dataset has `row(n)` for n = 0, 1, 2, ... without end: a dict of int64 [seq_len] tensors.
    `tokens` and `labels` (the next token, or IGNORE); but for mock data also `positions` and
    `documents`, both counted from 0 in each row. len(dataset): rows per epoch. Some also have
    `origin(n)`, where row n comes from, for humans; `about`, what the log should say of the data;
    and `bytes_per_token`, the UTF-8 bytes of the text per predicted token, if it is known.
    """
    if data.kind == "mock":
        return Mock(seq_len, vocab_size, seed, split=0), Mock(seq_len, vocab_size, seed, split=1)
    files = find_files(data)
    if data.kind == "tokens":
        return _open_token_files(data, files, seq_len, vocab_size, seed)
    return _open_documents(data, files, seq_len, vocab_size, seed)


# ---------------------------------------------------------------------------------------------------------------- rows


@dataclass
class Mock:
    """Uniformly random tokens, one endless document per row: for benchmarks. `split` 0 and 1
    differ.
    """

    seq_len: int
    vocab_size: int
    seed: int
    split: int

    def __len__(self) -> int:
        return 1 << 40  # no epoch ever ends

    def random(self, n: int) -> np.random.Generator:
        """What row n is drawn from."""
        return np.random.default_rng((self.seed, self.split, int(n)))

    def row(self, n: int) -> dict[str, Tensor]:
        window = torch.from_numpy(self.random(n).integers(self.vocab_size, size=self.seq_len + 1))
        return {"tokens": window[:-1], "labels": window[1:]}


class Packed:
    """Rows cut from a corpus with a length in tokens, `read` and `origin(start, length)`.

    What is left at its end, fewer than seq_len tokens, is not used. usable: the numbers of the rows
    to use; None: all.
    """

    def __init__(
        self,
        corpus: "Corpus | TokenFiles",
        seq_len: int,
        seed: int,
        bytes_per_token: float | None = None,
        usable: Sequence[int] | None = None,
        about: str = "",
    ):
        self.corpus = corpus
        self.seq_len = seq_len
        self.seed = seed
        self.bytes_per_token = bytes_per_token
        self.about = about
        self.usable = range(len(corpus) // seq_len) if usable is None else usable

    def __len__(self) -> int:
        return len(self.usable)

    def row(self, n: int) -> dict[str, Tensor]:
        return pack(*self.corpus.read(self.start(n), self.seq_len))

    def origin(self, n: int) -> str:
        return self.corpus.origin(self.start(n), self.seq_len)

    def start(self, n: int) -> int:
        """Return which token of the corpus row n begins with."""
        _, number = nth(n, len(self), self.seed)
        return int(self.usable[number]) * self.seq_len


def pack(window: np.ndarray, ends: np.ndarray) -> dict[str, Tensor]:
    """One row from its tokens and where its documents end.

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
        "documents": np.cumsum(begins) - 1,
    }
    return {key: torch.from_numpy(column) for key, column in columns.items()}


# ----------------------------------------------------------------------------------------------------------- documents


@dataclass
class Corpus:
    """Documents in memory, end to end. tokens: [n]; ends: [documents], last indices; sizes:
    [documents], in bytes.
    """

    tokens: np.ndarray
    ends: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """tokens [length + 1] from `start` on ([length] at the very end), and bool [length]: which
        end a document.
        """
        first, last = np.searchsorted(self.ends, (start, start + length))
        ends = np.zeros(length, bool)
        ends[self.ends[first:last] - start] = True
        return self.tokens[start : start + length + 1], ends

    def origin(self, start: int, length: int) -> str:
        """The documents that these tokens are of, counted as they were kept."""
        first, last = np.searchsorted(self.ends, (start, start + length - 1)) + 1
        return f"document {first}" if first == last else f"documents {first} to {last}"

    def select(self, chosen: np.ndarray) -> "Corpus":
        """The documents where bool `chosen` [documents] is true."""
        lengths = np.diff(self.ends, prepend=-1)
        tokens = self.tokens[np.repeat(chosen, lengths)]
        return Corpus(tokens, np.cumsum(lengths[chosen]) - 1, self.sizes[chosen])

    @property
    def predicted(self) -> int:
        return len(self.tokens) - len(self.ends)  # all but each document's first


def tokenize(documents: Iterable[str], tokenizer: Tokenizer) -> Corpus:
    """All documents, each begun and ended as the tokenizer has it, at 2 or 4 bytes a token. Empty
    ones are left out.

    A model is asked to continue what begins with bos: if it never saw one, that would be an
    untrained embedding. Texts that have it written at their start, as rendered chats do, get no
    second.
    """
    count = max(
        tokenizer.vocab_size, 1 + (tokenizer.eos_id or 0)
    )  # config.json may name an eos far beyond the words
    dtype = np.dtype(np.uint16 if count <= 1 << 16 else np.uint32)
    beginning = np.array(tokenizer.beginning_ids, dtype)
    eos = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype).tobytes()
    tokens = bytearray()
    ends = array("q")
    sizes = array("q")
    for text in documents:
        ids = tokenizer.encode_array(text)
        if len(ids):
            tokens += (
                b"" if np.array_equal(ids[: len(beginning)], beginning) else beginning.tobytes()
            )
            tokens += memoryview(ids.astype(dtype))
            tokens += eos
            ends.append(len(tokens) // dtype.itemsize - 1)
            sizes.append(len(text.encode("utf-8")))
    return Corpus(np.frombuffer(tokens, dtype), np.array(ends, np.int64), np.array(sizes, np.int64))


def _open_documents(
    data: Data, files: list[Path], seq_len: int, vocab_size: int, seed: int
) -> tuple[Packed, Packed | None]:
    tokenizer = fitting_tokenizer(data.tokenizer, vocab_size)
    skips = Skips(data.on_error == "skip")

    def parse(record: dict, where: str) -> str:
        keys = ", ".join(list(record)[:5])
        hint = f" (it has {keys}: data.field names the key that holds the text; chats need task=sft or lora)"
        return text_of(record, data.field, where, hint)

    unended = f"data.tokenizer={data.tokenizer} names no eos: no token will end a document, nor what is generated"
    note = unended if tokenizer.eos_id is None else ""
    documents = read_texts(files, skips) if data.kind == "text" else read_jsonl(files, parse, skips)
    if not data.validation:
        return _cut(
            tokenize(documents, tokenizer), seq_len, seed, f"data.path={data.path}", skips, note
        ), None
    lone, documents = split_lone(documents, data.validation)
    corpus = tokenize(documents, tokenizer)
    count = len(corpus.ends)
    held = (
        np.array([False, True]) if lone and count == 2 else hold_out(count, data.validation, seed)
    )
    train = _cut(
        corpus.select(~held),
        seq_len,
        seed,
        f"data.path={data.path} without validation",
        skips,
        note,
    )
    return train, _cut(
        corpus.select(held), seq_len, seed, f"data.validation={data.validation}", skips
    )


def fitting_tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """The tokenizer `name`; InputError if it has ids that are not below `vocab_size`, the model's.

    But for its pad, which is neither read nor predicted: a text that spells it is refused.
    """
    tokenizer = load_tokenizer(name)
    beyond = {number for number in tokenizer.vocabulary() if number >= vocab_size}
    if beyond and beyond == {tokenizer.named_id("pad")}:
        tokenizer.below = vocab_size
    elif beyond:
        raise InputError(
            f"model.vocab_size={vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}"
        )
    if tokenizer.eos_id is not None and not 0 <= tokenizer.eos_id < vocab_size:
        raise InputError(
            f"data.tokenizer={name} has eos={tokenizer.eos_id}, outside model.vocab_size={vocab_size}"
        )
    return tokenizer


def _cut(
    corpus: Corpus, seq_len: int, seed: int, what: str, skips: "Skips", note: str = ""
) -> Packed:
    if not corpus.predicted:
        raise InputError(f"{what} holds no token to predict{skips.aside}")
    if len(corpus) < seq_len:
        size = f"{len(corpus)} tokens, less than one row of batch.seq_len={seq_len}"
        raise InputError(f"{what} holds {size}{skips.aside}")
    about = "; ".join(filter(None, [skips.note, note]))
    return Packed(corpus, seq_len, seed, corpus.sizes.sum().item() / corpus.predicted, about=about)


def split_lone(documents: Iterator[str], share: float) -> tuple[bool, Iterator[str]]:
    """Whether there is one document only, and the documents; a lone one's tail, a `share` of it,
    becomes a second.
    """
    documents = filter(None, documents)
    first = list(islice(documents, 2))
    if len(first) != 1:
        return False, chain(first, documents)
    text = first[0]
    cut = round(len(first[0]) * (1 - share))
    return True, iter((text[:cut], text[cut:]))


def hold_out(documents: int, share: float, seed: int) -> np.ndarray:
    """bool [documents]: true for a random `share`, chosen by (seed, index); at least one is true
    and one false.
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
    """The items to train on, and those that `hold_out` chooses, each in order."""
    sides = [], []
    for item, held in zip(items, hold_out(len(items), share, seed), strict=True):
        sides[int(held)].append(item)
    return sides


@dataclass
class Skips:
    """Unusable data: an error, or if skipping it is `allowed`, left out and counted.

    Files of text that cannot be opened are errors in any case.
    """

    allowed: bool = False
    count: int = 0
    first: str = ""

    def read(self, function: Callable, *arguments) -> Any:
        """function(*arguments), or None if that raised InputError and was counted."""
        try:
            return function(*arguments)
        except InputError as error:
            self.refuse(error)

    def refuse(self, error: InputError) -> None:
        if not self.allowed:
            raise error
        self.count += 1
        self.first = self.first or str(error)

    @property
    def note(self) -> str:
        return f"{self.count:,} skipped, the first: {self.first}" if self.count else ""

    @property
    def aside(self) -> str:
        """The note as it stands at the end of a line."""
        return f" ({self.note})" if self.count else ""


def read_texts(files: list[Path], skips: Skips) -> Iterator[str]:
    """Each file as one document. Empty ones are usable: trees of source files have many."""
    for file in files:
        with readable(file):
            raw = file.read_bytes()
        text = skips.read(decode, raw, file)
        if text is not None:
            yield text


def decode(raw: bytes, file: Path) -> str:
    look = kind_of_binary if b"\0" in raw[:4096] else placeholder  # zeros are UTF-8, too
    if what := look(file, raw):
        raise InputError(f"{file} is {what}")
    try:
        return raw.decode("utf-8-sig")  # without a byte order mark
    except UnicodeDecodeError as error:
        what = kind_of_binary(file, raw)
        told = f"{what}, no text" if what else f"not UTF-8 at byte {error.start}"
        raise InputError(f"{file} is {told} (data.exclude leaves files out)") from error


class Written(float):
    """A number of a JSON file that keeps how it was written, which Python would write another way:
    0.00005 as 5e-05.
    """

    def __new__(cls, text: str):
        number = super().__new__(cls, text)
        number.text = text
        return number

    def digits(self) -> str:
        """Return the digits as written, with a power of ten written out as far as people would."""
        in_reach = 1e-30 < abs(self) < 1e30
        return f"{Decimal(self.text):f}" if "e" in self.text.lower() and in_reach else self.text


def read_jsonl(files: list[Path], parse: Callable[[dict, str], Any], skips: Skips) -> Iterator[Any]:
    """Yield parse(object, FILE:LINE) for every line that is not blank. A file without any is
    unusable.
    """
    for file in files:
        empty = True
        with readable(file):
            what = kind_of_json(file, read_head(file))
        if what:
            skips.refuse(InputError(f"{file} is {what}"))
            continue
        with readable(file), open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    empty = False
                    value = skips.read(_parse_line, line, f"{file}:{number}", parse)
                    if value is not None:
                        yield value
        if empty:
            skips.refuse(InputError(f"{file} is empty"))


def _parse_line(line: bytes, where: str, parse: Callable[[dict, str], Any]) -> Any:
    try:
        text = line.decode("utf-8-sig")
        tree = json.loads(
            text, parse_constant=_refuse_constant, object_pairs_hook=_object, parse_float=Written
        )
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise InputError(f"{where}: must be a JSON object, not {type(tree).__name__}")
    return parse(tree, where)


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return tree


def text_of(record: dict, key: str, where: str, hint: str = "") -> str:
    """record[key]; an InputError that begins with `where` if that is not text. hint: what to say if
    it is missing.
    """
    if key not in record:
        raise InputError(f"{where}: no key {key!r}{hint}")
    text = record[key]
    if not isinstance(text, str):
        raise InputError(f"{where}: {key!r} must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{where}: {key!r} holds half of a surrogate pair, which is not text"
        ) from None
    return text


# --------------------------------------------------------------------------------------------------------- token files


def _open_token_files(
    data: Data, files: list[Path], seq_len: int, vocab_size: int, seed: int
) -> tuple[Packed, Packed | None]:
    """Open token files and hold out the end of each, in whole rows unless that share is less than
    one.
    """
    end = -1 if data.document_end is None else data.document_end
    if data.document_end is not None and not 0 <= end < vocab_size:
        raise InputError(
            f"data.document_end={end} is outside the vocabulary of model.vocab_size={vocab_size}"
        )
    if data.tokenizer != "bytes":
        fitting_tokenizer(data.tokenizer, vocab_size)  # which is saved with the model
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
    if not len(train):
        size = f"{len(train.corpus):,} tokens to train on, no row of batch.seq_len={seq_len}"
        raise InputError(f"data.path={data.path} leaves {size}{skips.aside}")
    if data.validation and not len(held):
        size = f"{len(held.corpus):,} tokens, no row of batch.seq_len={seq_len}"
        raise InputError(f"data.validation={data.validation} holds out {size}")
    train.about = skips.note
    return train, held if data.validation else None


def _usable_rows(corpus: TokenFiles, seq_len: int, seed: int, skips: Skips) -> Packed:
    """Return all rows, some of them checked; or if unusable ones are to be skipped, the rows that
    pass the check.
    """
    every = Packed(corpus, seq_len, seed)
    step = 1 if skips.allowed else 1 + len(every) * seq_len // CHECKED
    good = [
        n for n in every.usable[::step] if skips.read(corpus.read, n * seq_len, seq_len) is not None
    ]
    return (
        Packed(corpus, seq_len, seed, usable=np.array(good, np.int64)) if skips.allowed else every
    )
