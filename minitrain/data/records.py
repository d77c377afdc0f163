"""Read documents and JSON objects from files, and handle unusable ones.

Objects are lines of JSON or items of a JSON array, plain or compressed by gzip, or rows of parquet and
arrow files, which the package pyarrow reads. Unusable objects and files are errors; with
data.on_error=skip they are left out and counted.
"""

import gzip
import json
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from minitrain.data.faults.wording import SETTINGS, Wording
from minitrain.data.faults.wrong_text import encoding_of, in_utf8, not_json
from minitrain.errors import InputError, located, reading
from minitrain.formats.magic import kind_of_binary, kind_of_json, read_head, stand_in_kind

Parse = Callable[[dict], Any]
# first bytes of files
GZIP = b"\x1f\x8b"
PARQUET = b"PAR1"
ARROW = b"ARROW1"
ARROW_STREAM = b"\xff\xff\xff\xff"
# last bytes of a stream; pyarrow does not notice if a stream is cut between batches
END_OF_STREAM = ARROW_STREAM + bytes(4)
# bytes of a text that are read at a time
PIECE = 1 << 20
# where a text may be cut: after a line, preferably without other white space around the line break
CUTS = re.compile(r"(?<=\S)\n(?=\S)"), re.compile(r"\n(?=\S)")
# the end of a value before another line with a value: JSON lines, not one value over all lines
ADJOINING = re.compile(rb"[\]}][ \t\r]*\n\s*[\[{]")
# suffixes of files that always hold objects
RECORDS = (".jsonl", ".jsonl.gz", ".parquet", ".arrow")
LINES = (*RECORDS, ".ndjson", ".ndjson.gz")
# suffixes of files that may hold objects
JSON = (".json", ".json.gz")
# bytes of JSON from which `holds_records` judges
LOOKED_AT = 1 << 24
# the beginning of an array of objects, or of an empty array
ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*(\{|\]|$)")


@dataclass
class Skips:
    """Counts unusable data that is skipped; if skipping is not `allowed`, it is an error.

    Text files that cannot be opened are always errors.
    """

    allowed: bool = False
    count: int = 0
    first: str = ""

    def read(self, function: Callable, *arguments) -> Any:
        """Return function(*arguments), or None if that raised InputError and was counted."""
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
        """Return the note in parentheses, for the end of a line."""
        return f" ({self.note})" if self.count else ""


def read_texts(
    files: list[Path], skips: Skips, in_pieces: bool = False, words: Wording = SETTINGS
) -> Iterator[str | Iterator[str]]:
    """Yield each file as one document. Empty files are usable: trees of source code have many.

    in_pieces: yield an iterator over pieces of each file, so that it need not fit in memory.
    """
    for file in files:
        if in_pieces:
            # read once before, so that no pieces of a skipped file are yielded
            if skips.read(deque, pieces_of(file, words), 0) is not None:
                yield pieces_of(file, words)
            continue
        with reading(file):
            raw = file.read_bytes()
        text = skips.read(decode, raw, file, 0, words)
        if text is not None:
            yield text


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as 1 row or 1,200 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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


class Number(float):
    """A number of a JSON file that keeps its text: Python would write 0.00005 as 5e-05."""

    def __new__(cls, text: str):
        number = super().__new__(cls, text)
        number.text = text
        return number

    def digits(self) -> str:
        """Return the digits as written; exponents are expanded for numbers of usual size."""
        in_reach = 1e-30 < abs(self) < 1e30
        return f"{Decimal(self.text):f}" if "e" in self.text.lower() and in_reach else self.text


def read_records(
    files: list[Path], parse: Parse, skips: Skips, words: Wording = SETTINGS
) -> Iterator[Any]:
    """Yield parse(object) for every JSON object of the files.

    Errors name FILE:LINE. A file without objects is unusable, and so is the rest of a damaged file.
    """
    for file in files:
        with reading(file):
            head = read_head(file)
        empty = True
        try:
            for where, read in _items(file, head, words):
                empty = False
                value = skips.read(_parse, read, where, parse)
                if value is not None:
                    yield value
            if empty:
                raise InputError(f"{file} is empty")
        except InputError as error:
            skips.refuse(error)


def holds_records(file: Path, keys: Sequence[str]) -> bool:
    """Return True if a file is a table, lines of JSON objects, or an array of them.

    It judges by the first bytes. A single object may be the settings of some program, so it counts
    only if it has one of `keys`; so does JSON in a file without a suffix of JSON.
    """
    if file.name.endswith(LINES):
        return True
    with reading(file):
        head = read_head(file)
        if head.startswith((PARQUET, ARROW, ARROW_STREAM)):
            return True
        try:
            with gzip.open(file) if head.startswith(GZIP) else open(file, "rb") as raw:
                begin = raw.peek(4096)[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
                whole = raw.read(LOOKED_AT) if begin.startswith((b"{", b"[")) else b""
        except (EOFError, zlib.error):
            return False
    named = file.name.endswith(JSON)
    if begin.startswith(b"[") or not whole:
        return named and re.match(rb"\[\s*\{", begin) is not None
    several = ADJOINING.search(whole)
    try:
        first = _parse_json(whole[: several.start() + 1] if several else whole, SETTINGS)
    except InputError:
        return named and several is not None
    return (named and several is not None) or any(key in first for key in keys)


def _items(file: Path, head: bytes, words: Wording) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield for each object of a file its place, for messages, and a function that returns it."""
    number = 0
    if head.startswith((PARQUET, ARROW, ARROW_STREAM)):
        for number, row in enumerate(_table_rows(file, head), 1):
            yield f"{file}:{number}", partial(_plain_row, row)
        return
    opened = gzip.open if head.startswith(GZIP) else open
    try:
        with reading(file), opened(file, "rb") as lines:
            head = lines.peek(4096)[:4096]
            if what := kind_of_json(file, head, words.kind):
                raise InputError(f"{file} is {what}")
            if b"\0" in head and encoding_of(head):
                raise InputError(f"{file} is not UTF-8{in_utf8(head)}")
            if ARRAY.match(head):
                raw = lines.read()
                if not ADJOINING.search(raw):
                    with located(file):
                        items = _parse_json(raw, words)
                    for number, item in enumerate(items):
                        yield f"{file}[{number}]", partial(_as_it_is, item)
                    return
                lines = raw.split(b"\n")
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{file}:{number}", partial(_parse_json, line, words)
    except (EOFError, zlib.error) as error:
        raise InputError(f"{file}:{number + 1}: damaged or cut off: {error}") from error


def _table_rows(file: Path, head: bytes) -> Iterator[dict]:
    """Yield the rows of a parquet or arrow file as Python objects."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"{file} needs the package pyarrow: pip install pyarrow") from error
    try:
        with open(file, "rb") as raw:
            if head.startswith(PARQUET):
                batches = pyarrow.parquet.ParquetFile(raw).iter_batches(1024)
            elif head.startswith(ARROW):
                table = pyarrow.ipc.open_file(raw)
                batches = map(table.get_batch, range(table.num_record_batches))
            else:
                raw.seek(-8, 2)
                if raw.read() != END_OF_STREAM:
                    raise InputError("the stream has no end (is the file whole?)")
                raw.seek(0)
                batches = pyarrow.ipc.open_stream(raw)
            for batch in batches:
                # otherwise damaged offsets could point outside of the data
                batch.validate(full=True)
                yield from batch.to_pylist()
    # pyarrow can raise almost any exception for damaged files
    except Exception as error:
        raise InputError(f"{file} cannot be read by pyarrow: {error}") from error


def _plain_row(row: dict) -> dict:
    return {key: _plain(value) for key, value in row.items()}


def _plain(value: Any) -> Any:
    """Return a value of a table in the form that JSON would have; NaN stays.

    Bytes are decoded as UTF-8, because Spark and Hive write text as bytes; invalid ones are refused
    by `text_of`. Dates and the like become text. In a column of structs, every struct has the keys of
    all others: keys with null are left out.
    """
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, float):
        return Number(repr(value))
    return value if isinstance(value, str | int | None) else str(value)


def _as_it_is(item: Any) -> Any:
    return item


def _parse(read: Callable[[], Any], where: str, parse: Parse) -> Any:
    with located(where):
        tree = read()
        if not isinstance(tree, dict):
            hint = (
                ' (messages stand in one: {"messages": [...]})' if isinstance(tree, list) else ""
            )
            raise InputError(f"must be a JSON object, not {type(tree).__name__}{hint}")
        return parse(tree)


def _parse_json(raw: bytes, words: Wording) -> Any:
    try:
        text = raw.decode("utf-8-sig")
        return json.loads(
            text, parse_constant=_refuse_constant, object_pairs_hook=_object, parse_float=Number
        )
    except UnicodeDecodeError as error:
        raise InputError(f"not valid JSON: {error}{in_utf8(raw)}") from error
    except (ValueError, RecursionError) as error:
        hint = not_json(text, words.lines) if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"not valid JSON: {error}{hint}") from error


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _object(pairs: list) -> dict:
    tree = {}
    for key, value in pairs:
        if key in tree:
            raise ValueError(f"key {key!r} is given twice")
        tree[key] = value
    return tree


def other_task(record: dict, words: Wording, *kinds: str) -> str:
    """Return what an object is, and what takes it, if it is one of `kinds`; "" otherwise.

    kinds: of document, chat and pair.
    """
    has_pair = record.get("chosen") is not None and record.get("rejected") is not None
    chats = [key for key in ("messages", "conversations") if record.get(key)]
    found = {
        "pair": "'chosen' and 'rejected' are a pair of replies" if has_pair else "",
        "chat": f"{chats[0]!r} is a chat" if chats else "",
        "document": "'text' is a document" if isinstance(record.get("text"), str) else "",
    }
    return next((found[kind] + getattr(words, kind) for kind in kinds if found[kind]), "")


def text_of(record: dict, key: str, hint: str = "") -> str:
    """Return the text record[key]. Raises InputError if it is none. hint: if the key is missing."""
    if key not in record:
        raise InputError(f"no key {key!r}{hint}")
    text = record[key]
    if not isinstance(text, str):
        raise InputError(f"{key!r} must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{key!r} holds half of a surrogate pair, or bytes that are not UTF-8, which is not text"
        ) from None
    return text
