"""Do all ranks run the same thing? Compared when their group starts, before anything waits for anything.

A rank with another config, other source files or other data would not fail: it would train something else, or leave
the others waiting in a collective that it never joins. One message of 32 bytes per rank tells; only where they differ
do the ranks exchange what they have, to say which entry it is.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minitrain.errors import InputError


def check_same(what: dict[str, dict[str, Any]]) -> None:
    """Raises InputError, the same on all ranks, if some rank has other entries than rank 0. All ranks call it together.

    what: names and values by subject, as {"config": {"optim.lr": 0.1}, "code": {"train.py": digest}}.
    """
    own = {f"{subject}: {name}": value for subject, entries in what.items() for name, value in entries.items()}
    digest = hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).digest()
    if len(set(gather(digest))) > 1:
        ranks = gather(own)
        raise InputError(next(difference(rank, ranks[0], own) for rank, own in enumerate(ranks) if own != ranks[0]))


def gather(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def difference(rank: int, first: dict[str, Any], own: dict[str, Any]) -> str:
    name = next(name for name in sorted({*first, *own}) if first.get(name) != own.get(name))
    theirs, ours = (str(entries.get(name, "nothing"))[:100] for entries in (first, own))
    return f"rank {rank} differs from rank 0 in {name}: {ours}, not {theirs} (all ranks must have the same)"


def code_digests() -> dict[str, str]:
    """A digest of each source file of this package, and torch's version."""
    package = Path(__file__).parents[1]
    files = {str(file.relative_to(package)): file.read_bytes() for file in sorted(package.rglob("*.py"))}
    return {"torch": torch.__version__} | {name: hashlib.sha256(text).hexdigest()[:16] for name, text in files.items()}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under the dotted names that the command line has for them."""
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
