"""Read files of text: whole, line by line, or in pieces of which each is tokenized alone."""

import re
from collections.abc import Iterator
from pathlib import Path

from minitrain.data.faults.skips import Skips
from minitrain.data.faults.wording import SETTINGS, Wording
from minitrain.data.faults.wrong_text import encoding_of, in_utf8
from minitrain.errors import InputError, reading
from minitrain.formats.magic import kind_of_binary, stand_in_kind

# bytes of a text that are read at a time
PIECE = 1 << 20
# where a text may be cut: after a line, preferably without other white space around the line break
CUTS = re.compile(r"(?<=\S)\n(?=\S)"), re.compile(r"\n(?=\S)")


def read_texts(
    files: list[Path], skips: Skips, in_pieces: bool = False, words: Wording = SETTINGS
) -> Iterator[str | Iterator[str]]:
    """Yield each file as one document. Empty files are usable: trees of source code have many.

    in_pieces: yield an iterator over pieces of each file, so that it need not fit in memory.
    """
    for file in files:
        if in_pieces:
            if not skips.allowed or skips.read(read_through, file, words):
                yield pieces_of(file, words)
            continue
        with reading(file):
            raw = file.read_bytes()
        text = skips.read(decode, raw, file, 0, words)
        if text is not None:
            yield text


def read_through(file: Path, words: Wording) -> bool:
    """Read a file to its end, so that no piece of one that will be skipped is yielded; return True."""
    for _ in pieces_of(file, words):
        pass
    return True


def lines_of(file: Path, words: Wording = SETTINGS) -> list[str]:
    """Return the lines of a text file that are not blank. Raises InputError if there are none."""
    text = "".join(read_texts([file], Skips(), words=words))
    # not splitlines, which would also split at U+2028 and the like
    lines = [line for line in re.split(r"\r?\n", text) if line.strip()]
    if not lines:
        raise InputError(f"{file} holds no line of text")
    return lines


def pieces_of(file: Path, words: Wording) -> Iterator[str]:
    """Yield a text in pieces of a few MiB, cut after lines that are not followed by white space.

    No token of the usual tokenizers spans such a place. If all lines are empty, indented or end in
    \\r\\n, tokens of GPT-2's and similar tokenizers may, which merge white space.
    """
    rest = ""
    place = 0
    with reading(file), file.open("rb") as raw:
        # whole lines, so that no character is split
        while block := raw.read(PIECE) + raw.readline():
            rest += decode(block, file, place, words)
            place += len(block)
            ends = next(
                filter(None, ([cut.end() for cut in c.finditer(rest)] for c in CUTS)), [0]
            )
            if ends[-1]:
                yield rest[: ends[-1]]
                rest = rest[ends[-1] :]
    yield rest


def decode(raw: bytes, file: Path, place: int = 0, words: Wording = SETTINGS) -> str:
    """Return the text of bytes that begin at `place` in a file. Raises InputError if it is no text."""
    # zero bytes are valid UTF-8, but mean a binary file
    binary = b"\0" in raw[:4096]
    if what := kind_of_binary(file, raw, words.kind) if binary else stand_in_kind(file, raw):
        raise InputError(f"{file} is {what}")
    # UTF-16 without a mark is also valid UTF-8, with zero bytes
    if not place and binary and encoding_of(raw):
        raise InputError(f"{file} is not UTF-8{in_utf8(raw)}")
    try:
        # drop a byte order mark
        return raw.decode("utf-8" if place else "utf-8-sig")
    except UnicodeDecodeError as error:
        what = kind_of_binary(file, raw, words.kind)
        fault = f"not UTF-8 at byte {place + error.start}{in_utf8(raw)}"
        fault = f"{what}, no text" if what else fault
        hint = f" ({words.exclude} leaves files out)" if words.exclude else ""
        raise InputError(f"{file} is {fault}{hint}") from error
