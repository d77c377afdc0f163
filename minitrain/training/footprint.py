"""Reckon what a rank's weights, gradients and optimizer states take, before any of it is allocated.

Bytes per parameter: weights 4 (precision=bf16-pure and frozen ones beside bf16: 2), gradients as
weights, AdamW's states 8 (optim.states=bf16: 4). Left out: activations, weights that are gathered,
and what libraries take.
"""

import math
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import Module

from minitrain.errors import InputError
from minitrain.parallel.shards import local
from minitrain.settings import Config

LINUX_MEMORY = Path("/proc/meminfo")
OWN_GROUPS = Path("/proc/self/cgroup")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
GIB = 1 << 30


def footprint(model: Module, config: Config, trained: bool = True) -> dict[str, int]:
    """Return the bytes of this rank's parts, by kind. The model may be on the meta device; trained:
    not a reference.
    """
    parts = [local(parameter) for parameter in model.parameters()]
    learned = [part for part in parts if part.requires_grad and trained]
    moments = {"fp32": 8, "bf16": 4}[config.optim.states] if config.optim.name == "adamw" else 0
    return {
        "weights": sum(part.nbytes for part in parts),
        "gradients": sum(part.nbytes for part in learned),
        "optimizer states": sum(part.numel() * moments for part in learned),
    }


def check_fits(model: Module, config: Config, device: torch.device, trained: bool = True) -> None:
    """Raise InputError if this rank's parts of a model on the meta device exceed the free memory of
    `device`.
    """
    sizes = footprint(model, config, trained)
    room = free_memory(device)
    need = sum(sizes.values())
    if need <= room:
        return
    count = sum(local(parameter).numel() for parameter in model.parameters())
    ways = {
        "precision=bf16-pure optim.states=bf16": 8 * count,
        "lora.rank=16 precision=bf16": 2 * count,
    }
    fitting = [
        f"{words} ({size / GIB:.1f})" for words, size in ways.items() if size < min(need, room)
    ]
    fitting.append(
        f"{dist.get_world_size() * math.ceil(need / room)} ranks that share them, or a smaller model"
    )
    raise InputError(
        f"{told(sizes)} are needed on a rank, and {room / GIB:.1f} are free on its {device.type.upper()} "
        f"(use {', '.join(fitting)})"
    )


def told(sizes: dict[str, int]) -> str:
    parts = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in sizes.items())
    return f"{sum(sizes.values()) / GIB:.1f} GiB ({parts})"


def free_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated on `device`; on a CPU where the system does not tell
    (macOS), all it has.

    On Linux not more than the limits of this process's control groups, as containers and Slurm set
    them: the kernel kills what takes more.
    """
    if device.type == "cuda":
        # by torch's own allocator
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if not LINUX_MEMORY.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # what caches of files hold can be had, too
    available = re.search(r"MemAvailable:\s+(\d+) kB", LINUX_MEMORY.read_text())[1]
    limits = [1024 * int(available)]
    for line in OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        # of version 2, which names no controllers
        group = CONTROL_GROUPS / controllers / path.strip("/")
        for folder in (group, *group.parents):
            for file in (folder / "memory.max", folder / "memory.limit_in_bytes"):
                if file.exists():
                    # none for "max"
                    limits += map(int, re.findall(r"\d+", file.read_text()))
    return min(limits)
