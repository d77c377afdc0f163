"""Check that all ranks have the same config, code and data, before the first real collective.

A rank with another config, other source files or other data would not fail by itself: it would train
something else, or leave the others waiting in a collective that it never joins. Ranks first compare
a digest of 32 bytes. Only if digests differ, they exchange all entries to name the first difference.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from minitrain.errors import InputError
from minitrain.parallel.agreement import gather


def check_same(entries: dict[str, dict[str, Any]]) -> None:
    """Raise InputError on all ranks if some rank's entries differ from rank 0's. All ranks call it.

    entries: names and values by subject, such as
        {"config": {"optim.lr": 0.1}, "code": {"train.py": digest}}.
    """
    own = {}
    for subject, values in entries.items():
        own |= {f"{subject}: {name}": value for name, value in values.items()}
    digest = hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).digest()
    if len(set(gather(digest))) > 1:
        ranks = gather(own)
        rank = next(rank for rank, other in enumerate(ranks) if other != ranks[0])
        raise InputError(difference(rank, ranks[0], ranks[rank]))


def difference(rank: int, first: dict[str, Any], own: dict[str, Any]) -> str:
    """Return a line on the first entry that differs. first: rank 0's entries; own: those of `rank`."""
    names = sorted({*first, *own})
    name = next(name for name in names if first.get(name, ...) != own.get(name, ...))
    theirs, ours = (str(entries.get(name, "nothing"))[:100] for entries in (first, own))
    return f"rank {rank} differs from rank 0 in {name}: {ours}, not {theirs} (all ranks must have the same)"


@cache
def code_digests() -> dict[str, str]:
    """Return a digest of each source file of this package by its path, and torch's version.

    They are read once per process, because files that change later do not change what it runs.
    """
    package = Path(__file__).parents[2]
    digests = {"torch": torch.__version__}
    for file in sorted(package.rglob("*.py")):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        digests[str(file.relative_to(package))] = digest[:16]
    return digests


def flatten_settings(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as a flat dict by dotted names."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten_settings(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
