"""Documents and JSON lines of files, and what happens to those that are unusable.

They are errors, or with data.on_error=skip left out and counted.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from minitrain.errors import InputError, readable
from minitrain.formats.magic import kind_of_binary, kind_of_json, placeholder, read_head

Parse = Callable[[dict, str], Any]


@dataclass
class Skips:
    """Unusable data: an error, or if skipping it is `allowed`, left out and counted.

    Files of text that cannot be opened are errors in any case.
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
        """Return the note in brackets, for the end of a line."""
        return f" ({self.note})" if self.count else ""


def read_texts(files: list[Path], skips: Skips) -> Iterator[str]:
    """Yield each file as one document. Empty ones are usable: trees of source files have many."""
    for file in files:
        with readable(file):
            raw = file.read_bytes()
        text = skips.read(decode, raw, file)
        if text is not None:
            yield text


def decode(raw: bytes, file: Path) -> str:
    # zeros are UTF-8, too
    look = kind_of_binary if b"\0" in raw[:4096] else placeholder
    if what := look(file, raw):
        raise InputError(f"{file} is {what}")
    try:
        # without a byte order mark
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = kind_of_binary(file, raw)
        told = f"{what}, no text" if what else f"not UTF-8 at byte {error.start}"
        raise InputError(f"{file} is {told} (data.exclude leaves files out)") from error


class Number(float):
    """A number of a JSON file that keeps its spelling: Python would write 0.00005 as 5e-05."""

    def __new__(cls, text: str):
        number = super().__new__(cls, text)
        number.text = text
        return number

    def digits(self) -> str:
        """Return the digits as written, with a power of ten written out as far as people would."""
        in_reach = 1e-30 < abs(self) < 1e30
        return f"{Decimal(self.text):f}" if "e" in self.text.lower() and in_reach else self.text


def read_jsonl(files: list[Path], parse: Parse, skips: Skips) -> Iterator[Any]:
    """Yield parse(object, FILE:LINE) for every line that is not blank.

    A file without any is unusable.
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


def _parse_line(line: bytes, where: str, parse: Parse) -> Any:
    try:
        text = line.decode("utf-8-sig")
        tree = json.loads(
            text, parse_constant=_refuse_constant, object_pairs_hook=_object, parse_float=Number
        )
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise InputError(f"{where}: must be a JSON object, not {type(tree).__name__}")
    return parse(tree, where)


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _object(pairs: list) -> dict:
    tree = {}
    for key, value in pairs:
        if key in tree:
            raise ValueError(f"key {key!r} is given twice")
        tree[key] = value
    return tree


def text_of(record: dict, key: str, hint: str = "") -> str:
    """Return the text record[key]. Raises InputError for all else. hint: if it is missing."""
    if key not in record:
        raise InputError(f"no key {key!r}{hint}")
    text = record[key]
    if not isinstance(text, str):
        raise InputError(f"{key!r} must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{key!r} holds half of a surrogate pair, which is not text") from None
    return text
