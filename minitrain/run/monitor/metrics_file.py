"""Read and write metrics.jsonl, the numbers of a run: one JSON object per step, a line each."""

import json
import math
from pathlib import Path


def to_line(numbers: dict) -> str:
    """Return a line of JSON.

    JSON knows only finite numbers: all others, as those of a skipped step, are null.
    """
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in numbers.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def read_lines(file: Path) -> tuple[list[dict], int]:
    """Return the steps' numbers in a metrics.jsonl, and how many other lines it has.

    Blank lines do not count. A kill may have cut the last one short, and someone may have edited
    the file. There may be none.
    """
    if not file.exists():
        return [], 0
    texts = file.read_text("utf-8-sig", "replace").splitlines()
    found = [read_line(text) for text in texts if text.strip()]
    lines = list(filter(None, found))
    return lines, len(found) - len(lines)


def read_line(text: str) -> dict | None:
    try:
        # NaN, which others may have written, is null
        line = json.loads(text, parse_constant=lambda word: None)
        return line if type(line["step"]) is int else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
