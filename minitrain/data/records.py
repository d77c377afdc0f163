"""Read JSON objects from files.

They are lines of JSON or items of a JSON array, plain or compressed by gzip, or rows of parquet and
arrow files, which the package pyarrow reads. `read_records` is the way in: it hands each object to
the function that knows what it should hold, and puts FILE:LINE before the error of one that does
not. Unusable objects and files are errors; with data.on_error=skip they are left out and counted.
"""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from minitrain.data.faults.skips import Skips
from minitrain.data.faults.wording import SETTINGS, Wording
from minitrain.data.faults.wrong_text import encoding_of, in_utf8, not_json
from minitrain.errors import InputError, located, reading
from minitrain.formats.magic import kind_of_json, read_head

Parse = Callable[[dict], Any]
# first bytes of files
GZIP = b"\x1f\x8b"
PARQUET = b"PAR1"
ARROW = b"ARROW1"
ARROW_STREAM = b"\xff\xff\xff\xff"
TABLES = PARQUET, ARROW, ARROW_STREAM
# last bytes of a stream; pyarrow does not notice if a stream is cut between batches
END_OF_STREAM = ARROW_STREAM + bytes(4)
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
            for where, read in objects_of(file, head, words):
                empty = False
                value = skips.read(parse_object, read, where, parse)
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
        if head.startswith(TABLES):
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
        first = parse_json(whole[: several.start() + 1] if several else whole, SETTINGS)
    except InputError:
        return named and several is not None
    return (named and several is not None) or any(key in first for key in keys)


def objects_of(
    file: Path, head: bytes, words: Wording
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield for each object of a file its place, for messages, and a function that returns it.

    It is a function so that an object that cannot be parsed is left out alone. head: the file's.
    """
    if head.startswith(TABLES):
        for number, row in enumerate(table_rows(file, head), 1):
            yield f"{file}:{number}", partial(plain_row, row)
        return
    number = 0
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
                    yield from items_of(raw, file, words)
                    return
                lines = raw.split(b"\n")
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{file}:{number}", partial(parse_json, line, words)
    except (EOFError, zlib.error) as error:
        raise InputError(f"{file}:{number + 1}: damaged or cut off: {error}") from error


def items_of(raw: bytes, file: Path, words: Wording) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the items of a JSON array, as `objects_of` does."""
    with located(file):
        items = parse_json(raw, words)
    for number, item in enumerate(items):
        yield f"{file}[{number}]", lambda item=item: item


def table_rows(file: Path, head: bytes) -> Iterator[dict]:
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


def plain_row(row: dict) -> dict:
    return {key: plain(value) for key, value in row.items()}


def plain(value: Any) -> Any:
    """Return a value of a table in the form that JSON would have; NaN stays.

    Bytes are decoded as UTF-8, because Spark and Hive write text as bytes; invalid ones are refused
    by `text_of`. Dates and the like become text. In a column of structs, every struct has the keys of
    all others: keys with null are left out.
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, float):
        return Number(repr(value))
    return value if isinstance(value, str | int | None) else str(value)


def parse_object(read: Callable[[], Any], where: str, parse: Parse) -> Any:
    """Return parse(read()). Raises InputError that begins with `where`, also for what is no object."""
    with located(where):
        tree = read()
        if not isinstance(tree, dict):
            hint = (
                ' (messages stand in one: {"messages": [...]})' if isinstance(tree, list) else ""
            )
            raise InputError(f"must be a JSON object, not {type(tree).__name__}{hint}")
        return parse(tree)


def parse_json(raw: bytes, words: Wording) -> Any:
    try:
        text = raw.decode("utf-8-sig")
        return json.loads(
            text,
            parse_constant=refuse_constant,
            object_pairs_hook=without_repeats,
            parse_float=Number,
        )
    except UnicodeDecodeError as error:
        raise InputError(f"not valid JSON: {error}{in_utf8(raw)}") from error
    except (ValueError, RecursionError) as error:
        hint = not_json(text, words.lines) if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"not valid JSON: {error}{hint}") from error


def refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def without_repeats(pairs: list) -> dict:
    """Return the dict of an object's keys and values. Raises ValueError for a key that is given twice."""
    tree = {}
    for key, value in pairs:
        if key in tree:
            raise ValueError(f"key {key!r} is given twice")
        tree[key] = value
    return tree


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
