"""A corpus: documents of tokens laid end to end, which lie in memory or in files."""

import io
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np

from minitrain.data.sample import Sample
from minitrain.data.text.token_files import TokenFile
from minitrain.data.tokenizer import LONGEST_TOKEN, Tokenizer, encode_after

# texts, each whole or in pieces
Documents = Iterable[str | Iterator[str]]


@dataclass
class Corpus:
    """Spans of tokens, laid end to end. A document ends at the end of each span."""

    # token files, or arrays [n]
    stores: Sequence[TokenFile | np.ndarray]
    # int64 [spans]: index of the span's store
    which: np.ndarray
    # int64 [spans]: first token in the store, and number of tokens
    starts: np.ndarray
    lengths: np.ndarray
    # int64 [spans]: bytes of text; None if unknown
    sizes: np.ndarray | None = None
    # the id that ends documents within a span, or -1
    document_end: int = -1

    def __post_init__(self):
        # int64 [spans + 1]: place of each span in the corpus, and the length of the corpus
        self.firsts = np.cumsum(np.append(0, self.lengths))

    def __len__(self) -> int:
        return int(self.firsts[-1])

    @property
    def predicted(self) -> int:
        """Return the number of tokens that are predicted: all but the first of each document."""
        return len(self) - len(self.lengths)

    def select(self, chosen: np.ndarray) -> "Corpus":
        """Return the spans where bool `chosen` [spans] is true."""
        return replace(
            self,
            which=self.which[chosen],
            starts=self.starts[chosen],
            lengths=self.lengths[chosen],
            sizes=None if self.sizes is None else self.sizes[chosen],
        )

    def read(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens [length + 1] from `start` on, and bool [length], true at the ends of documents.

        If a span ends after `length` tokens, no further one is returned.
        """
        windows = []
        ends = []
        for number, place, count in self._parts(start, length):
            store = self.stores[self.which[number]]
            begin = int(self.starts[number]) + place
            is_last = place + count == self.lengths[number]
            # includes the token after them, if it is in the same span
            window = store[begin : begin + count + (not is_last)]
            ended = window[:count] == self.document_end
            ended[-1] |= is_last
            windows.append(window.astype(np.int64))
            ends.append(ended)
        return np.concatenate(windows), np.concatenate(ends)

    def origin(self, start: int, length: int) -> str:
        """Return the numbers of these tokens' documents, counted as they were kept, or the files."""
        parts = list(self._parts(start, length))
        if self.sizes is not None:
            first = parts[0][0] + 1
            last = parts[-1][0] + 1
            return f"document {first}" if first == last else f"documents {first} to {last}"
        places = {}
        for number, place, count in parts:
            store = self.which[number]
            begin = int(self.starts[number]) + place
            last = begin + count - 1
            first, _ = places.get(store, (begin, last))
            places[store] = first, last
        return ", ".join(
            f"{self.stores[store].file} tokens {first} to {last}"
            for store, (first, last) in places.items()
        )

    def _parts(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield the spans that have some of these tokens, each with their start and number in it."""
        number = int(np.searchsorted(self.firsts, start, "right")) - 1
        while length:
            place = start - int(self.firsts[number])
            count = min(length, int(self.lengths[number]) - place)
            if count:
                yield number, place, count
            number += 1
            start += count
            length -= count


def join_files(parts: list[tuple[TokenFile, int, int]], document_end: int) -> Corpus:
    """Return the tokens from number `first` to before `stop` of each file, laid end to end."""
    spans = [np.zeros((3, 0), np.int64)]
    for number, (file, first, stop) in enumerate(parts):
        borders = np.clip(np.cumsum(np.append(0, file.lengths)), first, stop)
        lengths = np.diff(borders)
        spans.append(np.stack([np.full_like(lengths, number), borders[:-1], lengths]))
        spans[-1] = spans[-1][:, lengths > 0]
    files = [file for file, _, _ in parts]
    return Corpus(files, *np.concatenate(spans, axis=1), document_end=document_end)


def tokenize(documents: Documents, tokenizer: Tokenizer) -> Corpus:
    """Return all documents, begun and ended as the tokenizer has it, at 2 or 4 bytes a token."""
    out = io.BytesIO()
    lengths, sizes = write_tokens(documents, tokenizer, out)
    store = np.frombuffer(out.getbuffer(), token_dtype(tokenizer))
    return in_one_store(store, lengths, sizes)


def in_one_store(store: TokenFile | np.ndarray, lengths: np.ndarray, sizes: np.ndarray) -> Corpus:
    """Return the corpus of documents that lie end to end in a store."""
    return Corpus([store], np.zeros_like(lengths), np.cumsum(lengths) - lengths, lengths, sizes)


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    # config.json may name an eos far beyond the vocabulary
    count = max(tokenizer.vocab_size, 1 + (tokenizer.eos_id or 0))
    return np.dtype(np.uint16 if count <= 1 << 16 else np.uint32)


def write_tokens(
    documents: Documents, tokenizer: Tokenizer, out: BinaryIO
) -> tuple[np.ndarray, np.ndarray]:
    """Write all documents' tokens. Empty ones are left out.

    Returns int64 [documents] each: lengths in tokens, sizes in bytes. A model is asked to continue
    a prompt that begins with bos: if it never saw one, that would be an untrained embedding. Texts
    that have it written at their start, as rendered chats do, get no second.
    """
    dtype = token_dtype(tokenizer)
    beginning = np.array(tokenizer.beginning_ids, dtype)
    eos = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype)
    lengths = array("q")
    sizes = array("q")
    for document in documents:
        length = 0
        size = 0
        before = ""
        for text in [document] if isinstance(document, str) else document:
            ids = encode_after(before, text, tokenizer.encode_array)
            before = text[-LONGEST_TOKEN:]
            if len(ids) and not length and not np.array_equal(ids[: len(beginning)], beginning):
                out.write(beginning)
                length += len(beginning)
            out.write(ids.astype(dtype))
            length += len(ids)
            size += len(text.encode())
        if length:
            out.write(eos)
            lengths.append(length + len(eos))
            sizes.append(size)
    return np.array(lengths, np.int64), np.array(sizes, np.int64)


def cut_documents(corpus: Corpus, length: int) -> list[Sample]:
    """Return pieces of at most `length` tokens whose labels are all tokens but the first of a document."""
    pieces = []
    for first, size in zip(corpus.firsts, corpus.lengths, strict=False):
        document, _ = corpus.read(first, size)
        for start in range(0, len(document) - 1, length):
            stop = min(start + length, len(document) - 1)
            pieces.append(Sample(document[start:stop], document[start + 1 : stop + 1]))
    return pieces
