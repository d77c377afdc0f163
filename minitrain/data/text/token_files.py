"""Read files of tokens of any size (raw, .npy, llm.c's or Megatron's), each row when it is needed.

They are not memory-mapped, because reading a mapped file that has shrunk kills the process. Here any
change of a file since it was opened is an error. The files that were read last stay open, because
opening is slow on network file systems; if one is deleted or replaced meanwhile, its old bytes are
read. text_rows.py cuts the tokens into rows.
"""

import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from pathlib import Path

import numpy as np

from minitrain.data.files import check_unchanged, stamp_of
from minitrain.errors import InputError, reading
from minitrain.formats.magic import kind_of_binary, kind_of_tokens, read_head

# number of files that stay open; a process may usually have 256 or 1024
OPEN = 128
# bytes
LLMC_HEADER = 1024
# llm.c's magic number -> dtype: files of GPT-2's and Llama 3's tokens
LLMC = {20240520: "<u2", 20240801: "<u4"}
# magic number, version, code of the dtype, number of sequences, number of documents + 1
MEGATRON_HEADER = "<9sQBQQ"
# code -> dtype
MEGATRON = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
NPY = b"\x93NUMPY"
# the most and the fewest tokens from which `check_width` judges
LOOKED_AT = 1 << 13
FEWEST = 1 << 7
# tokens that are read at a time to find documents
BLOCK = 1 << 20


@dataclass
class TokenFile:
    """A file of tokens, which are read as file[start:stop]."""

    file: Path
    dtype: np.dtype
    # where the first token begins, in bytes
    offset: int
    # int64 [documents], in tokens; a single one if documents are not marked
    lengths: np.ndarray
    vocab_size: int
    # size and time of the file when it was opened
    stamp: tuple[int, int]

    def __len__(self) -> int:
        return int(self.lengths.sum())

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return tokens. Raises InputError for ids outside the vocabulary, and if the file changed."""
        window = self._load(part.start, part.stop - part.start)
        wrong = np.flatnonzero((window < 0) | (window >= self.vocab_size))
        if len(wrong):
            where = f"{self.file} holds {window[wrong[0]]} at token {part.start + wrong[0]}"
            raise InputError(
                f"{where}, outside the vocabulary of model.vocab_size={self.vocab_size}"
            )
        return window

    def find_documents(self, end: int) -> None:
        """Read the whole file, and set the lengths of documents, which end with the token `end`."""
        size = len(self)
        blocks = range(0, size, BLOCK)
        ends = [
            np.flatnonzero(self._load(n, min(BLOCK, size - n)) == end) + n + 1 for n in blocks
        ]
        borders = np.unique(np.concatenate([[0], *ends, [size]]))
        self.lengths = np.diff(borders)

    def _load(self, place: int, count: int) -> np.ndarray:
        size = self.dtype.itemsize
        with reading(self.file):
            file = kept_open(self.file, self.stamp)
            check_unchanged(self.file, file.fileno(), self.stamp)
            raw = os.pread(file.fileno(), count * size, self.offset + place * size)
        if len(raw) < count * size:
            raise InputError(
                f"{self.file} ends before token {place + count}, which it had when the run began"
            )
        return np.frombuffer(raw, self.dtype)


def check_width(file: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Raise InputError if raw tokens seem to be halves of wider ones, where every other half is 0 or 1."""
    even = tokens[: len(tokens) // 2 * 2]
    if len(even) < FEWEST:
        return
    size = 2 * tokens.dtype.itemsize
    pairs = np.unique(even.view(f"<u{size}"))
    # tokens 0 and 1 alone make at most 4 different pairs, which prove nothing
    if pairs[-1] < vocab_size and len(pairs) > 4:
        better = "data.token_dtype=uint32" if size == 4 else "uint32 or .npy"
        raise InputError(
            f"{file} holds tokens of {size} bytes each, not {tokens.dtype} (use {better})"
        )


@lru_cache(OPEN)
def kept_open(file: Path, stamp: tuple[int, int]) -> FileIO:
    """Return the open file, which is closed when the cache drops it.

    stamp: part of the cache's key, so that a dataset that is opened later gets the file as it is then.
    """
    return open(file, "rb", buffering=0)


def open_tokens(file: Path, raw_dtype: str, vocab_size: int) -> TokenFile:
    """Open a .npy file, a file with llm.c's header or with Megatron's .idx, or raw tokens.

    raw_dtype: of raw tokens, which are little-endian.
    """
    index = file.with_suffix(".idx")
    lengths = None
    try:
        with reading(file):
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
    # NumPy can raise almost any exception for a damaged header
    except Exception as error:
        reason = error
        if file.suffix == ".npy" and head and not head.startswith(NPY):
            raw = "without a header (raw tokens, as Dolma's, are read from .bin)"
            reason = f"it is {kind_of_binary(file, head) or raw}"
        raise InputError(
            f"{file} does not hold tokens as {file.suffix or raw_dtype}: {reason}"
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
    """Return the dtype of a .bin file of `size` bytes, and the lengths of its documents in tokens.

    After the header come the lengths of sequences (int32), their offsets in bytes (int64), and for
    each document the number of its first sequence (int64), with the number of all sequences at the
    end. Source: Megatron-LM/megatron/core/datasets/indexed_dataset.py.
    """
    with reading(index):
        raw = index.read_bytes()
    begin = struct.calcsize(MEGATRON_HEADER)
    magic, version, code, count, documents = struct.unpack(
        MEGATRON_HEADER, raw[:begin].ljust(begin, b"\0")
    )
    if magic != b"MMIDIDX\0\0" or version != 1 or code not in MEGATRON:
        raise InputError(f"{index} is not version 1 of Megatron's index of a file of integers")
    if len(raw) != begin + 12 * count + 8 * documents:
        raise InputError(
            f"{index} has a header for {count:,} sequences, but {len(raw):,} bytes (is it whole?)"
        )
    dtype = np.dtype(MEGATRON[code])
    lengths = np.frombuffer(raw, "<i4", count, begin)
    places = np.frombuffer(raw, "<i8", count, begin + 4 * count)
    firsts = np.frombuffer(raw, "<i8", documents, begin + 12 * count)
    borders = np.cumsum(np.append(0, lengths))
    total = int(borders[-1]) * dtype.itemsize
    if size != total or (lengths < 0).any() or (places != borders[:-1] * dtype.itemsize).any():
        raise InputError(
            f"{index.with_suffix('.bin')} has {size:,} bytes, its index {index.name} tells of {total:,}, one sequence "
            f"after another"
        )
    if [*firsts[:1], *firsts[-1:]] != [0, count] or (np.diff(firsts) < 0).any():
        raise InputError(f"{index} does not divide its {count:,} sequences into documents")
    return dtype, np.diff(borders[firsts])


def read_llmc_header(file: Path, head: bytes, size: int) -> np.dtype | None:
    """Return the dtype of tokens after llm.c's header of 256 int32; None without such a header.

    The header begins with a magic number, a version and the number of tokens. Source:
    llm.c/dev/data/data_common.py. size: the file's, in bytes.
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
