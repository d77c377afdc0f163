"""Find the files that `data.path` names.

A folder stands for all files of data.kind in it and its subfolders, without hidden ones. As in globs
and the package datasets, hidden are names that begin with a dot (.git, .ipynb_checkpoints, .cache),
and folders such as __pycache__.
"""

import fnmatch
import functools
import glob
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from minitrain.data.faults.no_files import why_none
from minitrain.data.faults.wording import SETTINGS, Wording
from minitrain.data.records import JSON, LINES, RECORDS, holds_records
from minitrain.errors import InputError, reading
from minitrain.settings import Data

# data.kind -> suffixes of the files in a folder that are data
SUFFIXES = {
    "text": ("",),
    "jsonl": RECORDS,
    "tokens": (".npy", ".bin"),
    "latents": (".safetensors",),
}


def find_files(data: Data, words: Wording = SETTINGS) -> list[Path]:
    """Return the files of data.path without data.exclude, each once and sorted.

    A folder stands for its files of data.kind.
    """
    found = {}
    for pattern in [data.path] if isinstance(data.path, str) else data.path:
        found |= {os.path.abspath(file): file for file in files_of(pattern, data, words)}
    unwanted = [each for p in data.exclude for each in (p, f"*/{p}", os.path.abspath(p))]
    kept = [
        file
        for path, file in found.items()
        if not any(fnmatch.fnmatchcase(path, p) for p in unwanted)
    ]
    if not kept:
        raise InputError(f"data.exclude={data.exclude} leaves no file of data.path={data.path}")
    # links may lead to a folder by several names, even in circles. Keep the shortest name of a file:
    # it is sorted last, so it replaces the others in the dict
    kept.sort(key=lambda file: (len(file), file), reverse=True)
    # cached per folder, because there are far fewer folders than files
    real = functools.cache(os.path.realpath)
    shortest = {(real(os.path.dirname(file)), os.path.basename(file)): file for file in kept}
    return sorted(map(Path, shortest.values()))


def files_of(pattern: str, data: Data, words: Wording) -> list[str]:
    """Return the files that one entry of data.path names: a file, a folder or a glob."""
    path = os.path.expanduser(pattern.replace("{stdlib}", sysconfig.get_paths()["stdlib"]))
    there = None
    if os.path.isdir(path):
        there = list(files_below(path, words))
        files = [file for file in there if is_data(file, data)]
    else:
        named = [path, *glob.glob(path, recursive=True)]
        files = [file for file in named if os.path.isfile(file)]
    if not files:
        hint = why_none(pattern, there, data.kind, SUFFIXES[data.kind], words)
        raise InputError(f"{words.place}no file matches {pattern!r}{hint}")
    return files


def is_data(file: str, data: Data) -> bool:
    """Return True if a file of a folder is data: by its name, and for JSON also by its content."""
    # without pipes, which may never end; broken links are kept, and are an error when read
    if os.path.exists(file) and not os.path.isfile(file):
        return False
    if data.kind == "jsonl" and file.endswith((*LINES, *JSON)) and os.path.exists(file):
        return holds_records(Path(file), [data.field])
    return file.endswith(SUFFIXES[data.kind])


def files_below(top: str, words: Wording) -> Iterator[str]:
    """Yield the files in a folder and its subfolders, those behind links to folders last.

    Each folder is visited once, under its own name if it has one below `top`.
    """
    tops = [top]
    seen = set()
    for start in tops:
        for folder, folders, names in os.walk(start):
            if os.path.realpath(folder) in seen:
                folders.clear()
                continue
            seen.add(os.path.realpath(folder))
            folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
            tops += filter(os.path.islink, [os.path.join(folder, name) for name in folders])
            names = [name for name in names if not name.startswith(".")]
            yield from (
                os.path.join(folder, name) for name in without_caches(folder, names, words)
            )


def without_caches(folder: str, names: list[str], words: Wording) -> list[str]:
    """Return the names of a folder's files, without caches if save_to_disk of `datasets` made it."""
    if "dataset_dict.json" in names:
        raise InputError(f"{words.place}{folder} holds several splits (name one, a folder in it)")
    if not {"dataset_info.json", "state.json"} <= {*names}:
        return names
    state = Path(folder, "state.json")
    with reading(state):
        listed = state.read_text(encoding="utf-8")
    return [name for name in names if json.dumps(name) in listed]


def stamp_of(file: Path | int) -> tuple[int, int]:
    """Return a file's size and time of modification. file: a path or a file descriptor."""
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns


def check_unchanged(name: Path, file: Path | int, stamp: tuple[int, int]) -> None:
    """Raise InputError if a file no longer has this stamp. name: for the message."""
    if stamp_of(file) != stamp:
        raise InputError(
            f"{name} has changed since the run began: its rows are no longer those of the earlier steps"
        )
