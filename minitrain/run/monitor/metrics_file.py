"""Read and write metrics.jsonl, the numbers of a run: one JSON object per line and step."""

import json
import math
from pathlib import Path


def to_line(numbers: dict) -> str:
    """Return a line of JSON; numbers that are not finite, as in a skipped step, become null."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in numbers.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def read_lines(file: Path) -> tuple[list[dict], int]:
    """Return the numbers of all steps in a metrics.jsonl, and the number of other, not blank lines.

    There may be other lines because a run was killed while it wrote one, or the file was edited. A
    missing file is empty.
    """
    if not file.exists():
        return [], 0
    texts = file.read_text("utf-8-sig", "replace").splitlines()
    found = [read_line(text) for text in texts if text.strip()]
    lines = list(filter(None, found))
    return lines, len(found) - len(lines)


def no_steps(count: int) -> str:
    """Return a note on lines that `read_lines` leaves out."""
    return f"lines that are not the numbers of a step, and are left out: {count}"


def read_line(text: str) -> dict | None:
    """Return a line's numbers; None if it is not that of a step."""
    try:
        # other programs may write NaN: read it as null
        line = json.loads(text, parse_constant=lambda word: None)
        return line if type(line["step"]) is int else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
