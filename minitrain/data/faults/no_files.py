"""Tell what there is where a path finds no data, or how it would be written."""

import os
from collections import Counter

from minitrain.data.faults.wording import Wording
from minitrain.errors import hub_hint


def why_none(
    pattern: str, there: list[str] | None, kind: str, suffixes: tuple[str, ...], words: Wording
) -> str:
    """Return a hint in parentheses on a path without data; "" if there is none.

    there: the files of a folder, None if the path is no folder. suffixes: of the files in a folder
    that are data of this kind.
    """
    if there is None:
        if pattern == "-":
            return " (/dev/stdin is the standard input)"
        if "," in pattern and words.path:
            return f" (a list is written {words.path}='[{pattern}]')"
        return hub_hint(pattern, words.give, " --repo-type dataset")
    if not there:
        return " (the folder is empty, or all in it is hidden)"
    counts = Counter(os.path.splitext(file)[1] for file in there).most_common(3)
    found = ", ".join(f"{count:,} {suffix or 'without a suffix'}" for suffix, count in counts)
    counting = (
        f"as {words.kind}{kind} a folder's {' or '.join(suffixes)} files count, it has {found}"
    )
    return f" ({counting}; a glob such as '*.json' takes any)"
