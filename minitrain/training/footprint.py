"""Estimate the bytes of a rank's weights, gradients and optimizer states before allocating them.

Bytes per parameter: weights 4 (2 with precision=bf16-pure, or if frozen with bf16), gradients as
many as weights, AdamW's states 8 (4 with optim.states=bf16), Muon's momentum 4, averages 4
(optim.ema). Left out: activations, gathered weights, and what libraries take.
"""

import math
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from minitrain.errors import InputError
from minitrain.parallel.shards import to_local
from minitrain.settings import Config, Optim
from minitrain.training.muon import has_muon

LINUX_MEMORY = Path("/proc/meminfo")
OWN_GROUPS = Path("/proc/self/cgroup")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
GIB = 1 << 30


def footprint(model: Module, config: Config, trained: bool = True) -> dict[str, int]:
    """Return the bytes of this rank's shards by kind. The model may be on the meta device.

    trained: with gradients and optimizer states.
    """
    sizes = {"weights": 0, "gradients": 0, "optimizer states": 0}
    for name, parameter in model.named_parameters():
        part = to_local(parameter)
        sizes["weights"] += part.nbytes
        if part.requires_grad and trained:
            sizes["gradients"] += part.nbytes
            sizes["optimizer states"] += part.numel() * state_bytes(name, part, config.optim)
    return sizes


def state_bytes(name: str, parameter: Tensor, optim: Optim) -> int:
    """Return the optimizer's bytes for each number of a parameter [...]."""
    size = {"fp32": 8, "bf16": 4}[optim.states]
    if optim.name == "sgd":
        size = 0
    elif optim.name == "muon" and has_muon(name, parameter):
        size = 4
    return size + 4 * (optim.ema > 0)


def check_fits(model: Module, config: Config, device: torch.device, trained: bool = True) -> None:
    """Raise InputError if this rank's shards of a meta-device model exceed the free memory."""
    sizes = footprint(model, config, trained)
    room = free_memory(device)
    need = sum(sizes.values())
    if need <= room:
        return
    count = sum(to_local(parameter).numel() for parameter in model.parameters())
    ways = {
        "precision=bf16-pure optim.states=bf16": 8 * count,
        "lora.rank=16 precision=bf16": 2 * count,
    }
    limit = min(need, room)
    fitting = [f"{words} ({size / GIB:.1f})" for words, size in ways.items() if size < limit]
    ranks = dist.get_world_size() * math.ceil(need / room)
    fitting.append(f"{ranks} ranks that share them, or a smaller model")
    raise InputError(
        f"{describe_sizes(sizes)} are needed on a rank, and {room / GIB:.1f} are free on its {device.type.upper()} "
        f"(use {', '.join(fitting)})"
    )


def describe_sizes(sizes: dict[str, int]) -> str:
    """Return the sum and the parts in GiB."""
    parts = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in sizes.items())
    return f"{sum(sizes.values()) / GIB:.1f} GiB ({parts})"


def free_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated on `device`.

    On Linux that is at most the limit of this process's control groups, which containers and Slurm
    set: the kernel kills processes above it. On macOS it is all the memory of the machine.
    """
    if device.type == "cuda":
        # torch's allocator holds it and can use it
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if not LINUX_MEMORY.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # includes file caches, which the kernel can drop
    available = re.search(r"MemAvailable:\s+(\d+) kB", LINUX_MEMORY.read_text())[1]
    limits = [1024 * int(available)]
    for line in OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        # version 2 has one tree for all controllers and names none
        group = CONTROL_GROUPS / controllers / path.strip("/")
        for folder in (group, *group.parents):
            for file in (folder / "memory.max", folder / "memory.limit_in_bytes"):
                if file.exists():
                    # "max" has no digits: no limit
                    limits += map(int, re.findall(r"\d+", file.read_text()))
    return min(limits)
