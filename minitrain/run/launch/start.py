"""Choose the device, start the process group, and arrange its ranks in meshes.

A run is always distributed: a single process is a world of one rank, on the same code path.
"""

import logging
import os
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from minitrain.errors import InputError
from minitrain.parallel.agreement import FOR_EVER, gather
from minitrain.parallel.mesh import Meshes, build_meshes
from minitrain.run.config.environment import env_int, world_size
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.config.load import to_dict
from minitrain.run.launch import watch
from minitrain.run.launch.rendezvous import (
    all_groups,
    allow_open_files,
    check_device_type,
    default_store,
    join_store,
)
from minitrain.run.launch.same_run import check_same, code_digests, flatten_settings
from minitrain.settings import Config


def pick_device(setting: str) -> torch.device:
    """Return this process's device. setting: auto, cuda or cpu; auto prefers a GPU.

    A process that sees a single GPU uses that one, as with Slurm's --gpus-per-task=1 and torchrun's
    --virtual-local-rank. `check_own_gpus` checks that no two processes then share it.
    """
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise InputError("device=cuda, but torch finds no GPU here (use auto or cpu)")
    if setting == "cpu" or not available:
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    place = env_int("LOCAL_RANK")
    processes = max(env_int("LOCAL_WORLD_SIZE", 1), place + 1)
    if processes > gpus > 1:
        raise InputError(
            f"{processes} processes on this node, but torch sees {gpus} GPUs here (start one for each)"
        )
    return torch.device("cuda", place if gpus > 1 else 0)


def check_own_gpus(device: torch.device) -> None:
    """Raise InputError on all ranks if two ranks have the same GPU. All ranks call it.

    Only ranks without LOCAL_RANK, or that see a single GPU, are compared; on the CPU, none are.
    """
    if device.type != "cuda":
        return
    unplaced = torch.cuda.device_count() == 1 or "LOCAL_RANK" not in os.environ
    gpus = gather(str(torch.cuda.get_device_properties(device).uuid) if unplaced else None)
    for rank, gpu in enumerate(gpus):
        if gpu and (first := gpus.index(gpu)) < rank:
            raise InputError(
                f"ranks {first} and {rank} have the same GPU (start one process for each GPU)"
            )


def start(config: Config) -> Meshes:
    """Join the process group (NCCL on GPUs, gloo on CPUs) and return its meshes.

    Raises InputError if the layout does not fit the number of ranks, before a group starts; and, the
    same on all ranks, if configs or code differ.
    """
    check_layout(config, world_size())
    device = pick_device(config.device)
    check_device(config, device)
    if config.deterministic:
        be_deterministic()
    if device.type == "cuda":
        let_segments_grow()
        torch.backends.cuda.enable_cudnn_sdp(config.cudnn_attention)
        torch.cuda.set_device(device)
    begins = not dist.is_initialized()
    if begins:
        join(device)
    if dist.get_world_size() == 1:
        return meshes_of(config, device.type)
    check_same({"config": flatten_settings(to_dict(config)), "code": code_digests()})
    check_own_gpus(device)
    # torch would warn on every rank that gathering weights that are also tensor-parallel takes two
    # collectives
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    meshes = meshes_of(config, device.type)
    if begins:
        set_timeout(config.timeout_s)
    return meshes


def join(device: torch.device) -> None:
    """Start the process group of all processes that torchrun started, or of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "WORLD_SIZE" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    allow_open_files()
    # within which all ranks must have found each other
    timeout = timedelta(minutes=10)
    store, rank, world = join_store(timeout)
    check_device_type(store, rank, device.type)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)
    watch.begin()


def let_segments_grow() -> None:
    """Make CUDA's allocator use expandable segments, unless the user has configured it.

    Sizes of experts' tensors change from step to step; without expandable segments they fragment the
    memory. Call before CUDA is used.
    """
    # torch 2.9 added the first name; the second is older
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def be_deterministic() -> None:
    """Make runs bitwise reproducible, on the same machine, layout and versions.

    Data, initial weights, dropout and samples are always functions of the seed. Only kernels that add
    up in the order in which their threads finish, mostly on GPUs, make runs differ. torch replaces
    them by deterministic ones: for attention, FlashAttention's deterministic backward pass instead of
    cuDNN's (FlexAttention's is deterministic already). An operation without such a kernel raises an
    error, which failures.py explains. Call before CUDA, NCCL or the compiler are used. Environment
    variables that the user has set are kept. The cost on a GPU has not been measured.
    """
    # otherwise cuBLAS may choose another algorithm each time
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # exclude reductions inside network switches, whose order is not fixed
    os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree,CollnetDirect,CollnetChain")
    # also makes the compiler and cuDNN not choose kernels by timing them
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def meshes_of(config: Config, device_type: str) -> Meshes:
    """Return meshes of the process group's ranks. `check_layout` has accepted their number."""
    p = config.parallel
    return build_meshes(
        device_type, p.dp_replicate, p.cp, p.tp, p.pp, p.ep, spare=config.grpo.generation_ranks
    )


def check_device(config: Config, device: torch.device) -> None:
    """Raise InputError for settings that `device` does not support."""
    on_gpu = device.type == "cuda"
    if config.profile.memory and not on_gpu:
        raise InputError(
            "profile.memory=true records the memory of a GPU, and this run is on the CPU (use false)"
        )
    if config.precision == "fp8" and on_gpu and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise InputError(f"precision=fp8 needs FP8 units, which {name} lacks (use bf16)")


def set_timeout(seconds: float, groups: Iterable[dist.ProcessGroup] | None = None) -> None:
    """Set the timeout of groups; by default, of all existing ones.

    Groups that are made later have torch's default timeout, 10 minutes with NCCL and 30 with gloo.
    """
    for group in groups or all_groups():
        group.set_timeout(timedelta(seconds=seconds))


def remove_timeouts() -> None:
    """Remove the timeouts of all groups and of the store from here on.

    NCCL uses the store too: a pair of ranks meets there when one sends to the other the first time.
    """
    set_timeout(FOR_EVER.total_seconds())
    default_store().set_timeout(FOR_EVER)
