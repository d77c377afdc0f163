"""Files of tokens, raw or .npy, of any size: a row is read when it is needed.

They are not memory-mapped, because reading a mapped file that has shrunk kills the process; here it
is an error, as is any other change of a file since it was opened. The files read last stay open,
since opening is slow on network file systems; one that is deleted or replaced meanwhile goes on
giving its old bytes. text.py cuts them into rows.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from itertools import accumulate
from pathlib import Path

import numpy as np

from minitrain.errors import InputError, readable
from minitrain.formats.magic import kind_of_binary, kind_of_tokens, read_head

# files that stay open at once; a process may usually have 256 or 1024
OPEN = 128
# in bytes
LLMC_HEADER = 1024
# type by magic number, of GPT-2's and Llama 3's tokens
LLMC = {20240520: "<u2", 20240801: "<u4"}
NPY = b"\x93NUMPY"
# the width of raw tokens is guessed from at most and at least so many
LOOKED_AT = 1 << 13
FEWEST = 1 << 7


@dataclass
class TokenFile:
    """Tokens [n] of a file, from number `first` to before `stop`.

    offset: of the file's first token, in bytes. document_end: the id that ends a document, or -1.
    stamp: the file's, when it was opened.
    """

    file: Path
    dtype: np.dtype
    offset: int
    first: int
    stop: int
    vocab_size: int
    document_end: int
    stamp: tuple[int, int]

    def __len__(self) -> int:
        return self.stop - self.first

    def read(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and document ends, as Corpus.read (text.py).

        Raises InputError for a token outside the vocabulary, and for a changed file.
        """
        place = self.first + start
        window = self._load(place, min(length + 1, self.stop - place))
        wrong = np.flatnonzero((window < 0) | (window >= self.vocab_size))
        if len(wrong):
            where = f"{self.file} holds {window[wrong[0]]} at token {place + wrong[0]}"
            raise InputError(
                f"{where}, outside the vocabulary of model.vocab_size={self.vocab_size}"
            )
        return window, window[:length] == self.document_end

    def origin(self, start: int, length: int) -> str:
        return f"{self.file} tokens {self.first + start} to {self.first + start + length - 1}"

    def _load(self, place: int, count: int) -> np.ndarray:
        size = self.dtype.itemsize
        with readable(self.file):
            file = kept_open(self.file, self.stamp)
            check_unchanged(self.file, file.fileno(), self.stamp)
            raw = os.pread(file.fileno(), count * size, self.offset + place * size)
        if len(raw) < count * size:
            raise InputError(
                f"{self.file} ends before token {place + count}, which it had when the run began"
            )
        return np.frombuffer(raw, self.dtype)


class TokenFiles:
    """Token files laid end to end. A document ends where a file ends. Files may be empty."""

    def __init__(self, files: list[TokenFile]):
        self.files = [file for file in files if len(file)]
        self.firsts = list(accumulate(map(len, self.files), initial=0))

    def __len__(self) -> int:
        return self.firsts[-1]

    def read(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and document ends, as Corpus.read (text.py), from one or more files."""
        windows = []
        ends = []
        for file, place, count in self._parts(start, length):
            window, document_ends = file.read(place, count)
            document_ends[count - 1] |= place + count == len(file)
            windows.append(window[:count].astype(np.int64))
            ends.append(document_ends)
        # the token that follows, if the last file has one
        windows.append(window[count:].astype(np.int64))
        return np.concatenate(windows), np.concatenate(ends)

    def origin(self, start: int, length: int) -> str:
        return ", ".join(
            file.origin(place, count) for file, place, count in self._parts(start, length)
        )

    def _parts(self, start: int, length: int) -> Iterator[tuple[TokenFile, int, int]]:
        """Yield the files that hold these tokens, as (file, first token in it, token count)."""
        number = bisect_right(self.firsts, start) - 1
        while length:
            file = self.files[number]
            place = start - self.firsts[number]
            count = min(length, len(file) - place)
            yield file, place, count
            number += 1
            start += count
            length -= count


def check_width(file: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Raise InputError if raw tokens are halves of wider ones: read so, every other one is 0."""
    even = tokens[: len(tokens) // 2 * 2]
    if len(even) < FEWEST:
        return
    size = 2 * tokens.dtype.itemsize
    pairs = np.unique(even.view(f"<u{size}"))
    # 0 and 1 alone, in any order, make up no more than 4
    if pairs[-1] < vocab_size and len(pairs) > 4:
        better = "data.token_dtype=uint32" if size == 4 else "uint32 or .npy"
        raise InputError(
            f"{file} holds tokens of {size} bytes each, not {tokens.dtype} (use {better})"
        )


@lru_cache(OPEN)
def kept_open(file: Path, stamp: tuple[int, int]) -> FileIO:
    """Return the open file, which is closed once nothing uses it.

    stamp: part of the key, so that a dataset made later gets the file of then.
    """
    return open(file, "rb", buffering=0)


def stamp_of(file: Path | int) -> tuple[int, int]:
    """Return size and time of the last change of a file, or of an open one by its number."""
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns


def check_unchanged(name: Path, file: Path | int, stamp: tuple[int, int]) -> None:
    if stamp_of(file) != stamp:
        raise InputError(
            f"{name} has changed since the run began: its rows are no longer those of the earlier steps"
        )


def open_tokens(file: Path, raw_dtype: str, vocab_size: int, document_end: int) -> TokenFile:
    """Open a .npy file, one with llm.c's header, or raw little-endian tokens of `raw_dtype`."""
    try:
        with readable(file):
            stamp = stamp_of(file)
            head = read_head(file)
            if file.suffix == ".npy":
                tokens = np.lib.format.open_memmap(file, mode="r")
            elif header := read_llmc_header(file, head, stamp[0]):
                tokens = np.memmap(file, header, mode="r", offset=LLMC_HEADER)
            elif what := kind_of_tokens(file, head):
                raise InputError(f"{file} is {what}")
            else:
                tokens = np.memmap(file, np.dtype(raw_dtype).newbyteorder("<"), mode="r")
    except InputError:
        raise
    # NumPy's parser of a damaged header can raise nearly anything
    except Exception as error:
        told = error
        if file.suffix == ".npy" and head and not head.startswith(NPY):
            raw = "without a header (raw tokens, as Dolma's, are read from .bin)"
            told = f"it is {kind_of_binary(file, head) or raw}"
        raise InputError(
            f"{file} does not hold tokens as {file.suffix or raw_dtype}: {told}"
        ) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InputError(f"{file} must hold integers [n], not {tokens.dtype} {list(tokens.shape)}")
    if file.suffix != ".npy" and not tokens.offset:
        check_width(file, tokens[:LOOKED_AT], vocab_size)
    return TokenFile(
        file, tokens.dtype, tokens.offset, 0, len(tokens), vocab_size, document_end, stamp
    )


def read_llmc_header(file: Path, head: bytes, size: int) -> np.dtype | None:
    """Return the dtype of the tokens behind llm.c's header of 256 int32, None without such a header.

    They are a magic number, a version and the number of tokens; llm.c/dev/data/data_common.py.
    size: the file's.
    """
    magic, _, count = np.frombuffer(head[:12].ljust(12), "<i4").tolist()
    if magic not in LLMC:
        return None
    dtype = LLMC[magic]
    if size != LLMC_HEADER + count * np.dtype(dtype).itemsize:
        raise InputError(
            f"{file} has llm.c's header for {count:,} {dtype} tokens, but {size:,} bytes (is it whole?)"
        )
    return np.dtype(dtype)
