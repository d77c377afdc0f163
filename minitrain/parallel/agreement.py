"""What the ranks tell each other about the run, and first of all: do all run the same thing?

A rank with another config, other source files or other data would not fail: it would train
something else, or leave the others waiting in a collective that it never joins. One message of 32
bytes per rank tells; only where they differ do the ranks exchange what they have, to say which
entry it is. Compared before anything waits for anything.

Such messages are short and for the host, so they go over gloo also where the run's own group is
NCCL's: that would take GPU memory for all ranks' buffers, and wait for the device.
"""

import hashlib
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minitrain.errors import InputError

FOR_EVER = timedelta(days=10)

# the default group, and the one beside it
_control: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None


def control_group() -> dist.ProcessGroup:
    """A group of all ranks that is not NCCL's: the default one, or one beside it, which the first
    call makes.
    """
    global _control
    if dist.get_backend() != "nccl":
        return dist.group.WORLD
    if _control is None or _control[0] is not dist.group.WORLD:
        _control = dist.group.WORLD, dist.new_group(backend="gloo")
    return _control[1]


def broadcast_flag(number: int) -> int:
    """Return rank 0's `number` or flag on all ranks. All call it together.

    A tree of log2(ranks) messages one behind the other, where an all-reduce on gloo is a ring of 2
    x ranks of them.
    """
    if dist.get_world_size() == 1:
        return number
    said = torch.tensor(int(number))
    dist.broadcast(said, 0, group=control_group())
    return said.item()


def wait_for_all() -> None:
    """Return when all ranks have come here, however long some take to write files. The watch sees
    those that die.
    """
    if dist.get_world_size() > 1:
        dist.monitored_barrier(control_group(), timeout=FOR_EVER)


def check_same(what: dict[str, dict[str, Any]]) -> None:
    """Raises InputError, the same on all ranks, if some rank has other entries than rank 0. All
    ranks call it together.

    what: names and values by subject, as {"config": {"optim.lr": 0.1}, "code": {"train.py":
    digest}}.
    """
    own = {
        f"{subject}: {name}": value
        for subject, entries in what.items()
        for name, value in entries.items()
    }
    digest = hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).digest()
    if len(set(gather(digest))) > 1:
        ranks = gather(own)
        raise InputError(
            next(
                difference(rank, ranks[0], own) for rank, own in enumerate(ranks) if own != ranks[0]
            )
        )


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, on every rank: of a group, or of all."""
    group = control_group() if group is None else group
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def gather_to_first(value: Any, group: dist.ProcessGroup) -> list[Any] | None:
    """Every rank's value, on the group's first rank; None on the others."""
    values = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values


def broadcast(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """The `value` of rank `source`, on every rank: of a group, or of all."""
    values = [value]
    dist.broadcast_object_list(values, source, group=control_group() if group is None else group)
    return values[0]


def difference(rank: int, first: dict[str, Any], own: dict[str, Any]) -> str:
    name = next(
        name for name in sorted({*first, *own}) if first.get(name, ...) != own.get(name, ...)
    )
    theirs, ours = (str(entries.get(name, "nothing"))[:100] for entries in (first, own))
    return f"rank {rank} differs from rank 0 in {name}: {ours}, not {theirs} (all ranks must have the same)"


def code_digests() -> dict[str, str]:
    """A digest of each source file of this package, and torch's version."""
    package = Path(__file__).parents[1]
    files = {
        str(file.relative_to(package)): file.read_bytes() for file in sorted(package.rglob("*.py"))
    }
    return {"torch": torch.__version__} | {
        name: hashlib.sha256(text).hexdigest()[:16] for name, text in files.items()
    }


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under the dotted names that the command line has for them."""
    flat = {}
    for key, value in tree.items():
        flat |= (
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat
