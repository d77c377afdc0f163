"""Estimate the bytes of a rank's weights, gradients and optimizer states before allocating them.

Bytes per parameter: weights 4 (2 with precision=bf16-pure, or if frozen with bf16), gradients as
many as weights, averages 4 (optim.ema). Optimizer-state bytes are measured on a stand-in: AdamW 8
(4 with optim.states=bf16), Muon 4; with optim.offload AdamW's are on the host. Left out: activations,
gathered weights, and what libraries take.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from minitrain.errors import InputError
from minitrain.parallel.shards import to_local
from minitrain.settings import Config, Optim
from minitrain.training.optim import make_optimizer

LINUX_MEMORY = Path("/proc/meminfo")
OWN_GROUPS = Path("/proc/self/cgroup")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
GIB = 1 << 30


def footprint(model: Module, config: Config, trained: bool = True) -> dict[str, int]:
    """Return the bytes of this rank's shards by kind. The model may be on the meta device.

    trained: with gradients and optimizer states. What is on the host is left out, see `on_host`.
    """
    parts = [(name, to_local(p)) for name, p in model.named_parameters()]
    learning = [(name, part) for name, part in parts if part.requires_grad and trained]
    return {
        "weights": sum(part.nbytes for _, part in parts),
        "gradients": sum(part.nbytes for _, part in learning),
        "optimizer states": state_bytes(learning, config.optim) - on_host(model, config, trained),
    }


def on_host(model: Module, config: Config, trained: bool = True) -> int:
    """Return the bytes of the optimizer states that this rank keeps on the host."""
    if not (config.optim.offload and trained):
        return 0
    named = model.named_parameters()
    learning = [(name, to_local(p)) for name, p in named if p.requires_grad]
    # averages stay where the weights are
    return state_bytes(learning, replace(config.optim, ema=0.0))


def state_bytes(parameters: Iterable[tuple[str, Tensor]], optim: Optim) -> int:
    """Return the bytes of the optimizer's states for trained parameters [...], each with its name.

    They are those after one step on stand-ins, two numbers wide: a stand-in for each kind of
    parameter. States whose shape differs from the parameter's are left out.
    """
    # by name without the layer's number, dimensions and type
    numbers = Counter()
    for name, parameter in parameters:
        kind = re.sub(r"\.\d+\.", ".{}.", name), parameter.ndim, parameter.dtype
        numbers[kind] += parameter.numel()
    model = Module()
    stand_ins = {}
    for i, kind in enumerate(numbers):
        name, ndim, dtype = kind
        stand_ins[kind] = add_parameter(model, name.replace("{}", str(i)), ndim, dtype)
    optimizer = make_optimizer(model, optim)
    optimizer.step()
    size = 4 * numbers.total() if optim.ema else 0
    for kind, stand_in in stand_ins.items():
        states = [x for x in optimizer.state[stand_in].values() if isinstance(x, Tensor)]
        each = sum(x.itemsize for x in states if x.shape == stand_in.shape)
        size += numbers[kind] * each
    return size


def add_parameter(model: Module, path: str, ndim: int, dtype: torch.dtype) -> Parameter:
    """Add a parameter [2, 2, ...] of zeros with a gradient to a model, and return it."""
    *parts, name = path.split(".")
    for part in parts:
        if not hasattr(model, part):
            model.add_module(part, Module())
        model = getattr(model, part)
    parameter = Parameter(torch.zeros((2,) * ndim, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    model.register_parameter(name, parameter)
    return parameter


def check_fits(model: Module, config: Config, device: torch.device, trained: bool = True) -> None:
    """Raise InputError if this rank's shards of a meta-device model exceed the free memory."""
    sizes = footprint(model, config, trained)
    away = on_host(model, config, trained)
    if device.type == "cpu":
        # the host is the device
        sizes["optimizer states"] += away
    else:
        check_host(away)
    room = free_memory(device)
    need = sum(sizes.values())
    if need <= room:
        return
    count = sum(to_local(parameter).numel() for parameter in model.parameters())
    ways = {}
    if device.type != "cpu" and config.optim.name == "adamw":
        ways["optim.offload=true"] = need - sizes["optimizer states"]
    ways |= {
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


def check_host(size: int) -> None:
    """Raise InputError if every rank of this host takes `size` bytes of it and they are not free."""
    # torchrun sets it
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    room = free_memory(torch.device("cpu"))
    if ranks * size > room:
        raise InputError(
            f"optim.offload=true: {ranks} x {size / GIB:.1f} GiB of optimizer states are needed on the host, and "
            f"{room / GIB:.1f} are free (use optim.states=bf16, lora.rank=16, more hosts, or optim.offload=false)"
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
