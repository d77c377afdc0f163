"""Read the documents of files, and make a corpus of their tokens.

A document is a whole file, or the text of a JSON object under the key data.field.
"""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from minitrain.data.faults.skips import Skips
from minitrain.data.faults.wording import OPTIONS, SETTINGS, Wording
from minitrain.data.files import find_files, stamp_of
from minitrain.data.held_out import split_lone
from minitrain.data.records import holds_records, read_records, text_of
from minitrain.data.text.corpus import Corpus, tokenize
from minitrain.data.text.token_cache import keep_tokens
from minitrain.data.text_files import read_texts
from minitrain.data.tokenizer import Tokenizer, tokenizer_file, with_companions
from minitrain.settings import Data


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
            yield from read_records([file], partial(document_text, field, words), skips, words)
        else:
            yield from read_texts([file], skips, words=words)


def document_text(field: str, words: Wording, record: dict) -> str:
    keys = ", ".join(list(record)[:5])
    hint = f"it has {keys}: {words.field} names the key that holds the text"
    return text_of(record, field, f" ({hint}; {words.chats})")


def stamps_of(files: list[Path], tokenizer: str) -> list[tuple]:
    """Return paths, sizes and times of files of texts, and of those of a tokenizer, by its name."""
    own = tokenizer_file(tokenizer)
    seen = [*files, *(with_companions(own) if own else [])]
    return [(str(file.resolve()), stamp_of(file)) for file in seen]


def read_corpus(
    files: list[Path], data: Data, tokenizer: Tokenizer, skips: Skips
) -> tuple[Corpus, bool]:
    """Return the corpus of all files (in data.cache, if set), and whether it is a single document.

    With validation, a single document is split into two, of which the second is held out. A cache does
    not depend on the validation, so there the document's tokens are split, otherwise its text.
    """
    if data.kind == "text":
        documents = read_texts(files, skips, in_pieces=bool(data.cache))
    else:
        documents = read_records(files, partial(document_text, data.field, SETTINGS), skips)
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
