"""Files of tokens, raw, .npy, llm.c's or Megatron's, of any size: a row is read when it is needed.

They are not memory-mapped, because reading a mapped file that has shrunk kills the process; here it
is an error, as is any other change of a file since it was opened. The files read last stay open,
since opening is slow on network file systems; one that is deleted or replaced meanwhile goes on
giving its old bytes. text_rows.py cuts them into rows.
"""

import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from pathlib import Path

import numpy as np

from minitrain.data.files import check_unchanged, stamp_of
from minitrain.errors import InputError, readable
from minitrain.formats.magic import kind_of_binary, kind_of_tokens, read_head

# files that stay open at once; a process may usually have 256 or 1024
OPEN = 128
# in bytes
LLMC_HEADER = 1024
# type by magic number, of GPT-2's and Llama 3's tokens
LLMC = {20240520: "<u2", 20240801: "<u4"}
# magic, version, type, number of sequences and of documents + 1; types of integers by their codes
MEGATRON_HEADER = "<9sQBQQ"
MEGATRON = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
NPY = b"\x93NUMPY"
# the width of raw tokens is guessed from at most and at least so many
LOOKED_AT = 1 << 13
FEWEST = 1 << 7
# tokens that are looked through at once
BLOCK = 1 << 20


@dataclass
class TokenFile:
    """Tokens of a file, read as file[start:stop].

    offset: of the file's first token, in bytes. lengths: int64 [documents], in tokens; one for all
    where nothing tells documents. stamp: the file's, when it was opened.
    """

    file: Path
    dtype: np.dtype
    offset: int
    lengths: np.ndarray
    vocab_size: int
    stamp: tuple[int, int]

    def __len__(self) -> int:
        return int(self.lengths.sum())

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return tokens. Raises InputError for one outside the vocabulary, and a changed file."""
        window = self._load(part.start, part.stop - part.start)
        wrong = np.flatnonzero((window < 0) | (window >= self.vocab_size))
        if len(wrong):
            where = f"{self.file} holds {window[wrong[0]]} at token {part.start + wrong[0]}"
            raise InputError(
                f"{where}, outside the vocabulary of model.vocab_size={self.vocab_size}"
            )
        return window

    def find_documents(self, end: int) -> None:
        """Set the lengths of documents, each of which the token `end` ends: reads all of the file."""
        size = len(self)
        blocks = range(0, size, BLOCK)
        ends = [
            np.flatnonzero(self._load(n, min(BLOCK, size - n)) == end) + n + 1 for n in blocks
        ]
        borders = np.unique(np.concatenate([[0], *ends, [size]]))
        self.lengths = np.diff(borders)

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


def open_tokens(file: Path, raw_dtype: str, vocab_size: int) -> TokenFile:
    """Open a .npy file, one with llm.c's header or Megatron's .idx, or raw tokens of `raw_dtype`.

    Raw ones are little-endian.
    """
    index = file.with_suffix(".idx")
    lengths = None
    try:
        with readable(file):
            stamp = stamp_of(file)
            head = read_head(file)
            if file.suffix == ".npy":
                tokens = np.lib.format.open_memmap(file, mode="r")
            elif file.suffix == ".bin" and index.exists():
                dtype, lengths = read_megatron_index(index, stamp[0])
                tokens = np.memmap(file, dtype, mode="r")
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
        raise InputError(
            f"{file} must hold integers [n], not {tokens.dtype} {list(tokens.shape)}"
        )
    if lengths is None:
        lengths = np.array([len(tokens)])
        if file.suffix != ".npy" and not tokens.offset:
            check_width(file, tokens[:LOOKED_AT], vocab_size)
    return TokenFile(file, tokens.dtype, tokens.offset, lengths, vocab_size, stamp)


def read_megatron_index(index: Path, size: int) -> tuple[np.dtype, np.ndarray]:
    """Return the dtype of a .bin file of `size` bytes, and its documents' lengths in tokens.

    Behind the header are the sequences' lengths (int32) and first bytes (int64), and the numbers of
    the sequences that documents begin with, then that of all sequences (int64);
    Megatron-LM/megatron/core/datasets/indexed_dataset.py.
    """
    with readable(index):
        raw = index.read_bytes()
    begin = struct.calcsize(MEGATRON_HEADER)
    magic, version, code, count, documents = struct.unpack(
        MEGATRON_HEADER, raw[:begin].ljust(begin, b"\0")
    )
    if magic != b"MMIDIDX\0\0" or version != 1 or code not in MEGATRON:
        raise InputError(f"{index} is not version 1 of Megatron's index of a file of integers")
    if len(raw) != begin + 12 * count + 8 * documents:
        told = f"for {count:,} sequences, but {len(raw):,} bytes (is it whole?)"
        raise InputError(f"{index} has a header {told}")
    dtype = np.dtype(MEGATRON[code])
    lengths = np.frombuffer(raw, "<i4", count, begin)
    places = np.frombuffer(raw, "<i8", count, begin + 4 * count)
    firsts = np.frombuffer(raw, "<i8", documents, begin + 12 * count)
    borders = np.cumsum(np.append(0, lengths))
    total = int(borders[-1]) * dtype.itemsize
    if size != total or (lengths < 0).any() or (places != borders[:-1] * dtype.itemsize).any():
        told = f"{size:,} bytes, its index {index.name} tells of {total:,}, one sequence after another"
        raise InputError(f"{index.with_suffix('.bin')} has {told}")
    if [*firsts[:1], *firsts[-1:]] != [0, count] or (np.diff(firsts) < 0).any():
        raise InputError(f"{index} does not divide its {count:,} sequences into documents")
    return dtype, np.diff(borders[firsts])


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
