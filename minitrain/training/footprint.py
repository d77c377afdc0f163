"""Estimate the bytes of a rank's weights, gradients and optimizer states before allocating them.

Bytes per parameter: weights 4 (2 with precision=bf16-pure, or if frozen with bf16), gradients as
many as weights, averages 4 (optim.ema). Optimizer-state bytes are measured on a stand-in: AdamW 8
(4 with optim.states=bf16), Muon 4; with optim.offload AdamW's are on the host. Of activations a lower
bound is known, `least_activations`: about half of what blocks save. Left out: gathered weights, and
what libraries take.

The ranks of a host share its memory: all say what they need, and what is free, before any allocates.
"""

import math
import os
import re
import socket
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from minitrain.errors import InputError
from minitrain.hashing import seed_of
from minitrain.models.moe import Experts
from minitrain.parallel.collectives import sum_over_
from minitrain.parallel.mesh import Meshes
from minitrain.parallel.recompute import OFFLOADED
from minitrain.parallel.shards import to_local
from minitrain.settings import Config, Optim
from minitrain.training.adamw import kept_on_host
from minitrain.training.optim import make_optimizer

LINUX_MEMORY = Path("/proc/meminfo")
OWN_GROUPS = Path("/proc/self/cgroup")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
# the files of a control group with its limit and its use, in versions 2 and 1
LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
# settings of `recompute` with which a block saves little more than its input
INPUTS_ALONE = ("full", "attention", "full-offload")
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
        "optimizer states": state_bytes(learning, config.optim),
    }


def on_host(model: Module, config: Config, trained: bool = True) -> int:
    """Return the bytes of the optimizer states that this rank keeps on the host."""
    if not (config.optim.offload and trained):
        return 0
    named = model.named_parameters()
    learning = [(name, to_local(p)) for name, p in named if p.requires_grad]
    return state_bytes(learning, config.optim, away=True)


def state_bytes(
    parameters: Iterable[tuple[str, Tensor]], optim: Optim, away: bool = False
) -> int:
    """Return the bytes of the optimizer's states for trained parameters [...], each with its name.

    away: of those on the host, in place of those on the device. They are those after one step on
    stand-ins, two numbers wide: a stand-in for each kind of parameter. States whose shape differs
    from the parameter's are left out.
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
    hosted = kept_on_host(optimizer)
    # averages stay where the weights are
    size = 4 * numbers.total() if optim.ema and not away else 0
    for kind, stand_in in stand_ins.items():
        if (stand_in in hosted) != away:
            continue
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


def least_activations(model: Module, config: Config, recompute: str | int) -> int:
    """Return the least bytes that a micro-batch's forward pass on this rank saves for its backward pass.

    Blocks save at least what their matrix products put out, or with recomputation their own input.
    The model may be on the meta device. 0 for videos, which differ in size.
    """
    if config.task == "diffusion":
        return 0
    shape = config.model.config
    every = recompute if isinstance(recompute, int) else 1
    again = isinstance(recompute, int) or recompute in INPUTS_ALONE
    # of a token, on all blocks
    numbers = 0
    for place, block in enumerate(blocks_of(model)):
        if again and place % every == 0:
            numbers += shape.hidden_size
            continue
        for module in block.modules():
            if isinstance(module, Linear):
                numbers += module.out_features
            elif isinstance(module, Experts):
                # gate and up; the backward pass does not need what experts put out (models/moe.py)
                width = shape.moe_intermediate_size * (2 if module.gated else 1)
                numbers += shape.num_experts_per_tok * width
    p = config.parallel
    tokens = config.batch.micro * config.batch.seq_len // (p.cp * p.tp)
    return tokens * numbers * (4 if config.precision == "fp32" else 2)


def blocks_of(model: Module) -> list[Module]:
    """Return the blocks of a model, or of all stages of a pipeline that this rank has."""
    return [block for part in model.modules() for block in getattr(part, "blocks", ())]


def least_on_device(model: Module, config: Config, recompute: str | int) -> int:
    """Return those of `least_activations` that stay on the device: of two blocks with offload."""
    saved = least_activations(model, config, recompute)
    return saved * 2 // max(2, len(blocks_of(model))) if recompute in OFFLOADED else saved


def check_fits(model: Module, config: Config, meshes: Meshes, trained: bool = True) -> None:
    """Raise InputError if this rank's part of a meta-device model exceeds the free memory.

    All ranks that build the model call this together, before any of them allocates.
    """
    device = meshes.device
    sizes = footprint(model, config, trained)
    away = {"optimizer states": on_host(model, config, trained)}
    saved = 0
    if trained:
        saved = least_on_device(model, config, config.recompute)
        if config.recompute in OFFLOADED:
            away["activations at least"] = least_activations(model, config, config.recompute)
    where = device.type.upper()
    if device.type == "cpu":
        # the host is the device
        sizes = {kind: sizes.get(kind, 0) + away.get(kind, 0) for kind in sizes | away}
        size = sum(sizes.values()) + saved
        host = host_memory(size, meshes)
        room = host.free * size / max(host.needed, 1)
        if host.ranks > 1:
            where += f", which {host.ranks} ranks share"
    else:
        if config.optim.offload or config.recompute in OFFLOADED:
            check_host(away, host_memory(sum(away.values()), meshes))
        room = free_memory(device)
    need = sum(sizes.values())
    if need + saved <= room:
        return
    if need <= room:
        sizes["activations at least"] = saved
        settings = ("full", *OFFLOADED) if device.type != "cpu" else ("full",)
        ways = {
            f"recompute={each}": need + least_on_device(model, config, each) for each in settings
        }
        last = "a smaller batch.micro or batch.seq_len"
    else:
        ways = ways_to_shrink(model, config, device, sizes)
        # further ranks of one host would share its memory too
        others = "hosts" if device.type == "cpu" else "ranks"
        now = dist.get_world_size() // (host.ranks if device.type == "cpu" else 1)
        last = f"{now * math.ceil(need / room)} {others} that share them, or a smaller model"
    limit = min(sum(sizes.values()), room)
    fitting = [f"{words} ({size / GIB:.1f})" for words, size in ways.items() if size < limit]
    raise InputError(
        f"{describe_sizes(sizes)} are needed on a rank, and {room / GIB:.1f} are free on its {where} "
        f"(use {', '.join([*fitting, last])})"
    )


def ways_to_shrink(
    model: Module, config: Config, device: torch.device, sizes: dict[str, int]
) -> dict[str, int]:
    """Return the bytes of weights, gradients and states on the device with other settings, by their words."""
    count = sum(to_local(parameter).numel() for parameter in model.parameters())
    ways = {}
    if device.type != "cpu" and config.optim.name == "adamw":
        ways["optim.offload=true"] = sum(sizes.values()) - sizes["optimizer states"]
    return ways | {
        "precision=bf16-pure optim.states=bf16": 8 * count,
        "lora.rank=16 precision=bf16": 2 * count,
    }


def check_host(away: dict[str, int], host: "HostMemory") -> None:
    """Raise InputError if a host has no room for what its GPUs' ranks keep there. away: this rank's bytes."""
    if host.needed <= host.free:
        return
    parts = " and ".join(
        f"{host.ranks} x {size / GIB:.1f} GiB of {kind}" for kind, size in away.items() if size
    )
    raise InputError(
        f"{parts} are needed on the host, and {host.free / GIB:.1f} are free (use optim.states=bf16, lora.rank=16, "
        f"recompute=full, more hosts, or optim.offload=false)"
    )


class HostMemory(NamedTuple):
    """The memory of a host: how many ranks run there, bytes that they need together, and free ones."""

    ranks: int
    needed: float
    free: float


def host_memory(size: int, meshes: Meshes) -> HostMemory:
    """Return the memory of this rank's host. size: bytes that this rank needs of it.

    All ranks call this before any of them allocates, so that what one is about to take is not
    missing from what another one finds free.
    """
    # 2^53 and less are exact in fp64
    host = seed_of(socket.gethostname()) >> 10
    table = torch.zeros(dist.get_world_size(), 3, dtype=torch.float64)
    table[dist.get_rank()] = torch.tensor(
        [host, size, free_memory(torch.device("cpu"))], dtype=torch.float64
    )
    table = sum_over_(meshes.pp, sum_over_(meshes.tokens, table.to(meshes.device)))
    _, sizes, free = zip(*(row for row in table.tolist() if row[0] == host), strict=True)
    return HostMemory(len(sizes), sum(sizes), min(free))


def describe_sizes(sizes: dict[str, int]) -> str:
    """Return the sum and the parts in GiB."""
    parts = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in sizes.items())
    return f"{sum(sizes.values()) / GIB:.1f} GiB ({parts})"


def free_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated on `device`.

    On Linux that is at most what is left of the limits of this process's control groups, which
    containers and Slurm set: the kernel kills processes above them. On macOS it is all the memory of
    the machine.
    """
    if device.type == "cuda":
        # torch's allocator holds it and can use it
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if not LINUX_MEMORY.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # includes file caches, which the kernel can drop
    available = re.search(r"MemAvailable:\s+(\d+) kB", LINUX_MEMORY.read_text())[1]
    rooms = [1024 * int(available)]
    for line in OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        # version 2 has one tree for all controllers and names none
        group = CONTROL_GROUPS / controllers / path.strip("/")
        for folder in (group, *group.parents):
            for limit, usage in LIMITS:
                if (folder / limit).exists():
                    # "max" has no digits: no limit
                    limits = re.findall(r"\d+", (folder / limit).read_text())
                    rooms += [int(most) - used_memory(folder, usage) for most in limits]
    return max(0, min(rooms))


def used_memory(folder: Path, usage: str) -> int:
    """Return the bytes that a control group uses, without file caches, which the kernel can drop.

    usage: the name of the file that counts them. A tree's root has no such file: 0.
    """
    if not (folder / usage).exists():
        return 0
    numbers = {}
    if (folder / "memory.stat").exists():
        lines = (folder / "memory.stat").read_text().splitlines()
        numbers = {name: int(number) for name, number in map(str.split, lines)}
    # version 1 counts the groups below under names of their own
    caches = (
        numbers.get(f"total_{name}", numbers.get(name, 0))
        for name in ("active_file", "inactive_file")
    )
    return int((folder / usage).read_text()) - sum(caches)
