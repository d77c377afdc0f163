"""Start the process group, arrange its ranks as named meshes, and find a rank's part of a sharded tensor.

A run is always distributed: alone, it is a world of one rank with the same code path.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # no public name for it
from torch.nn import Module

from minitrain.errors import InputError
from minitrain.formats.tensor_files import Slices, all_of
from minitrain.parallel.agreement import FOR_EVER, check_same, code_digests, flatten, gather
from minitrain.run import watch
from minitrain.run.config_checks import check_layout
from minitrain.run.determinism import be_deterministic
from minitrain.run.rendezvous import check_device_type, join_store, number, prepare_connections
from minitrain.settings import Config, to_dict


@dataclass(frozen=True)
class Meshes:
    """The same ranks, seen by what is split over them.

    Neighbouring ranks, which share the fastest links, are tensor-parallel; then come context, shards, replicas, stages.
    """

    parameters: DeviceMesh  # 2-D (dp_replicate, dp_shard): copied over the first, sharded over the second, cp included
    batch: DeviceMesh  # 1-D: the ranks that take different rows of a batch
    loss: DeviceMesh  # 1-D, batch x cp: the ranks that see different tokens, whose losses add up
    tokens: DeviceMesh  # 1-D, batch x cp x tp: the ranks that see different tokens between blocks, and in routers
    row: DeviceMesh  # 1-D, cp x tp: those of them that share rows
    cp: DeviceMesh
    tp: DeviceMesh
    pp: DeviceMesh
    experts: DeviceMesh | None  # if ep > 1, 3-D (dp_replicate, dp_shard, ep): split over the last, sharded as above


def world_size() -> int:
    """The number of processes that torchrun started; 1 without torchrun. Known before any group starts."""
    return number("WORLD_SIZE", 1)


def pick_device(setting: str) -> torch.device:
    """auto: this process's own GPU if there is one, else the CPU.

    Where a process sees only one GPU that is its own, as Slurm's --gpus-per-task=1 and torchrun's --virtual-local-rank
    have it; `check_own_gpus` sees to that.
    """
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("device=cuda, but torch finds no GPU here (use auto or cpu)")
    gpus, place = torch.cuda.device_count(), number("LOCAL_RANK")
    processes = max(number("LOCAL_WORLD_SIZE", 1), place + 1)
    if processes > gpus > 1:
        raise InputError(f"{processes} processes on this node, but torch sees {gpus} GPUs here (start one for each)")
    return torch.device("cuda", place if gpus > 1 else 0)


def check_own_gpus(device: torch.device) -> None:
    """Raises InputError, on all ranks alike, if two that took the only GPU they see, or the first, have the same.

    All call it together. On the CPU nothing is compared.
    """
    if device.type == "cuda":
        unplaced = torch.cuda.device_count() == 1 or "LOCAL_RANK" not in os.environ
        gpus = gather(str(torch.cuda.get_device_properties(device).uuid) if unplaced else None)
        first: dict[str | None, int] = {}
        for rank, gpu in enumerate(gpus):
            if gpu and first.setdefault(gpu, rank) != rank:
                raise InputError(f"ranks {first[gpu]} and {rank} have the same GPU (start one process for each GPU)")


def start(config: Config) -> Meshes:
    """Join the process group (NCCL on GPUs, gloo on CPUs) and arrange its ranks.

    Raises InputError, before any group starts, if the layout does not fit the number of ranks; and one that is the same
    on all ranks if their config or code differs.
    """
    check_layout(config, world_size())
    device = pick_device(config.device)
    check_device(config, device)
    if config.deterministic:
        be_deterministic()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if begins := not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        prepare_connections()
        timeout = timedelta(minutes=10)  # to find each other
        store, rank, world = join_store(timeout)
        check_device_type(store, rank, device.type)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)
        watch.begin()
    if dist.get_world_size() > 1:
        check_same({"config": flatten(to_dict(config)), "code": code_digests()})
        check_own_gpus(device)
    # silences a warning, on every rank, that gathering weights that tensor parallelism splits too takes two collectives
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    meshes = build_meshes(config, device.type)
    if begins:
        set_timeout(config.timeout_s)
    return meshes


def check_device(config: Config, device: torch.device) -> None:
    """Raises InputError for settings that `device` is not made for."""
    on_gpu = device.type == "cuda"
    if config.profile.memory and not on_gpu:
        raise InputError("profile.memory=true records the memory of a GPU, and this run is on the CPU (use false)")
    if config.parallel.async_tp and not on_gpu:
        raise InputError("parallel.async_tp=true needs CUDA devices, and this run is on the CPU (use false)")
    if config.precision == "fp8" and on_gpu and torch.cuda.get_device_capability(device) < (8, 9):
        raise InputError(f"precision=fp8 needs FP8 units, which {torch.cuda.get_device_name(device)} lacks (use bf16)")
    if config.task == "diffusion" and config.data.packed and on_gpu and not config.compile:
        raise InputError("data.packed=true on a GPU needs compile=true: else each new length compiles attention anew")


def set_timeout(seconds: float, groups: Iterable[dist.ProcessGroup] | None = None) -> None:
    """Set the timeout of groups, by default of all that exist.

    A group that is made later has torch's own, 10 minutes with NCCL and 30 with gloo, unless it is made with another.
    """
    for group in list(c10d._world.pg_map) if groups is None else groups:  # no public name, nor for timeouts
        c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def wait_for_ever() -> None:
    """Bound no wait from here on, neither in groups nor in the store.

    There NCCL's ranks meet before one sends to another for the first time, to make a communicator for these two.
    """
    set_timeout(FOR_EVER.total_seconds())
    c10d._get_default_store().set_timeout(FOR_EVER)


def checkpoint_group(config: Config, ranks: Iterable[int]) -> dist.ProcessGroup:
    """A group for `ranks` to write checkpoints, where they wait for each other's disks: half an hour at least."""
    timeout = max(timedelta(minutes=30), timedelta(seconds=config.timeout_s))
    return dist.new_group(list(ranks), timeout=timeout, backend="gloo")


def build_meshes(config: Config, device_type: str) -> Meshes:
    """Arrange the ranks of the running process group, whose number `check_layout` has accepted.

    FSDP wants its mesh and tensor parallelism's to be slices of one; meshes that cut the ranks otherwise stand apart.
    """
    p, world = config.parallel, dist.get_world_size()
    ranks = world - config.grpo.generation_ranks  # the others get meshes of the same shapes, which nothing uses
    shards = ranks // (p.dp_replicate * p.tp * p.pp)  # context-parallel ranks share the work of holding parameters
    rows = ranks // (p.cp * p.tp * p.pp)

    def grid(**sizes: int) -> DeviceMesh:
        if ranks < world:
            sizes = {"role": world // ranks, **sizes}
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    for_parameters = grid(pp=p.pp, dp_replicate=p.dp_replicate, dp_shard=shards, tp=p.tp)
    # no public name; one all-reduce for the gradient norm, not two
    loss, tokens = for_parameters["dp_shard"], for_parameters["dp_shard", "tp"]._flatten("shards")
    if p.dp_replicate > 1:  # else these serve for both: each communicator takes memory of the GPU
        loss = for_parameters["dp_replicate", "dp_shard"]._flatten("loss")
        tokens = for_parameters["dp_replicate", "dp_shard", "tp"]._flatten("tokens")
    for_rows = grid(pp=p.pp, batch=rows, cp=p.cp, tp=p.tp)
    for_experts = None
    if p.ep > 1:
        for_experts = grid(pp=p.pp, dp_replicate=p.dp_replicate, dp_shard=shards * p.tp // p.ep, ep=p.ep)
        for_experts["dp_shard", "ep"]._flatten("expert_shards")
        for_experts = for_experts["dp_replicate", "dp_shard", "ep"]
    return Meshes(
        parameters=for_parameters["dp_replicate", "dp_shard"],
        batch=for_rows["batch"],
        loss=loss,
        tokens=tokens,
        row=for_rows["cp", "tp"]._flatten("row"),
        cp=for_rows["cp"],
        tp=for_parameters["tp"],
        pp=for_parameters["pp"],
        experts=for_experts,
    )


def owned(parameter: Tensor) -> tuple[Tensor, Slices]:
    """This rank's part of a parameter, and where it lies in the whole: `whole[slices]` has the part's shape.

    A plain tensor is all of itself. Writing to the part writes to the parameter.
    """
    if not isinstance(parameter, DTensor):
        return all_of(parameter)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def local(tensor: Tensor | None) -> Tensor | None:
    """This rank's part of a tensor alone, which is faster than `owned`: where it lies takes time to find out."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_over(mesh: DeviceMesh, tensor: Tensor) -> Tensor:
    """The sum of all ranks' tensors, in place."""
    if mesh.size() > 1:
        dist.all_reduce(tensor, group=mesh.get_group())
    return tensor


def own_stretch(mesh: DeviceMesh, row: Tensor) -> Tensor:
    """This rank's of the equal stretches of a row [batch, seq, ...]. Raises InputError if its ranks do not divide it:
    messages of different lengths would end in a crash, or not at all."""
    if row.shape[1] % mesh.size():
        raise InputError(f"a row of {row.shape[1]} tokens does not divide by {mesh.size()} ranks (use another size)")
    return row.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]


def whole_tensors(model: Module, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor | None]]:
    """The model's tensors of `wanted` names, one at a time, whole on rank 0; None elsewhere. All ranks iterate."""
    for name, shard in model.state_dict().items():  # after a forward pass some parameters() are whole, in bf16
        if wanted(name):
            parts = ((where, whole_piece(shard, where)) for where in pieces(shard))
            yield name, join(parts, shard.shape, shard.dtype)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all ranks' parts. All ranks call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_piece(tensor: Tensor, where: Slices) -> Tensor:
    """`whole(tensor)[where]` for one of its `pieces`, of which alone the parts are gathered."""
    if not isinstance(tensor, DTensor):
        return tensor[where]
    part, like = tensor.to_local()[where].contiguous(), torch.empty(tensor.shape, device="meta")[where].contiguous()
    piece = DTensor.from_local(part, tensor.device_mesh, tensor.placements, shape=like.shape, stride=like.stride())
    return piece.full_tensor()


def pieces(tensor: Tensor, most: int = 1 << 30) -> list[Slices]:
    """Pieces of a tensor, of about `most` bytes, to be gathered one at a time: a stack of experts can be larger than
    what a GPU has free. Cut along the longest dimension that is not sharded; if all are, there is one piece."""
    _, everything = all_of(tensor)
    split = {p.dim for p in getattr(tensor, "placements", ()) if isinstance(p, Shard)}
    dim = max((d for d in range(tensor.ndim) if d not in split), key=lambda d: tensor.shape[d], default=None)
    if dim is None or tensor.numel() * tensor.itemsize <= most:
        return [everything]
    length = tensor.shape[dim]
    step = max(1, length * most // (tensor.numel() * tensor.itemsize))
    cuts = [slice(i, min(i + step, length)) for i in range(0, length, step)]
    return [(*everything[:dim], cut, *everything[dim + 1 :]) for cut in cuts]


def join(parts: Iterable[tuple[Slices, Tensor | None]], shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """The tensor that gathered pieces make up, on rank 0 in the host's memory; other ranks take them and get None."""
    result = torch.empty(shape, dtype=dtype) if dist.get_rank() == 0 else None
    for where, part in parts:
        if result is not None:
            result[where] = part
    return result
