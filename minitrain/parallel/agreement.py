"""Exchange short Python values between ranks, such as flags and lists of names, on the host.

They travel over gloo, even if the run's own group uses NCCL: NCCL would take GPU memory for
buffers of all ranks, and wait for the device. All ranks of a group call a function together.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from minitrain.errors import InputError

FOR_EVER = timedelta(days=10)

# the default group, and a gloo group of the same ranks
_control: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None


def control_group() -> dist.ProcessGroup:
    """Return a group of all ranks that is not NCCL's. The first call makes it if needed."""
    global _control
    if dist.get_backend() != "nccl":
        return dist.group.WORLD
    if _control is None or _control[0] is not dist.group.WORLD:
        _control = dist.group.WORLD, dist.new_group(backend="gloo")
    return _control[1]


def broadcast_flag(number: int) -> int:
    """Return rank 0's `number` or flag on all ranks.

    It takes log2(ranks) messages one after the other. An all-reduce on gloo would take 2 x ranks.
    """
    if dist.get_world_size() == 1:
        return number
    flag = torch.tensor(int(number))
    dist.broadcast(flag, 0, group=control_group())
    return flag.item()


def wait_for_all() -> None:
    """Wait until all ranks arrive here, however long one writes files.

    The watch (run/launch/watch.py) notices ranks that die.
    """
    if dist.get_world_size() > 1:
        dist.monitored_barrier(control_group(), timeout=FOR_EVER)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, on every rank. group: None: all ranks."""
    group = control_group() if group is None else group
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def gather_to_first(value: Any, group: dist.ProcessGroup) -> list[Any] | None:
    """Return the values of all ranks on the group's first rank; None on the others."""
    values = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values


def broadcast(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return the `value` of rank `source` on every rank. group: None: all ranks."""
    values = [value]
    dist.broadcast_object_list(values, source, group=control_group() if group is None else group)
    return values[0]


def together(group: dist.ProcessGroup | None, function: Callable, *arguments) -> Any:
    """Return `function(*arguments)` on every rank.

    If it fails on some, all raise the first failure, so that none waits forever.
    """
    result = failure = None
    try:
        result = function(*arguments)
    except (InputError, OSError) as error:
        failure = error
    for error in gather(failure, group):
        if error:
            raise error
    return result


def lead(group: dist.ProcessGroup | None, function: Callable, *arguments) -> Any:
    """Call `function(*arguments)` on rank 0, the first of the group; return its result everywhere.

    If it fails, all raise that failure.
    """
    is_first = dist.get_rank() == 0
    return broadcast(together(group, lambda: is_first and function(*arguments)), 0, group)
