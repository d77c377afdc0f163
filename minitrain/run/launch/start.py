"""Start the process group and arrange its ranks as meshes.

A run is always distributed: alone, it is a world of one rank with the same code path.
"""

import logging
import os
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn import Module

from minitrain.errors import InputError
from minitrain.formats.hf import load_weights
from minitrain.formats.peft import fill_adapters
from minitrain.models.lora import is_adapter
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
from minitrain.training.build import initialize
from minitrain.training.loop import Trainer


def pick_device(setting: str) -> torch.device:
    """Return the device of this process; auto: its own GPU if there is one, else the CPU.

    Where a process sees only one GPU that is its own, as Slurm's --gpus-per-task=1 and torchrun's
    --virtual-local-rank have it; `check_own_gpus` sees to that.
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
    """Raise InputError, on all ranks alike, if two ranks have the same GPU.

    It looks at ranks that took the only GPU they see, or the first. All call it together. On the
    CPU nothing is compared.
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
    """Join the process group (NCCL on GPUs, gloo on CPUs) and arrange its ranks.

    Raises InputError, before any group starts, if the layout does not fit the number of ranks; and
    one that is the same on all ranks if their config or code differs.
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
    # silences a warning, on every rank, that gathering weights that tensor parallelism splits too
    # takes two collectives
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    meshes = meshes_of(config, device.type)
    if begins:
        set_timeout(config.timeout_s)
    return meshes


def join(device: torch.device) -> None:
    """Start the process group of what torchrun has started, or of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "WORLD_SIZE" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    allow_open_files()
    # to find each other
    timeout = timedelta(minutes=10)
    store, rank, world = join_store(timeout)
    check_device_type(store, rank, device.type)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)
    watch.begin()


def let_segments_grow() -> None:
    """Let CUDA's allocator grow its segments, before it is used, unless the user has set it.

    Else what experts need, more or less in each step, leaves holes that no tensor fits.
    """
    # the names of torch 2.9 and later, and of all
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def be_deterministic() -> None:
    """Make the same run again the same to the bit, on the same machine, layout and versions.

    Data, initial weights, dropout and samples are functions of the seed anyway. What is left are
    kernels that add up in whatever order their threads come, mostly on GPUs. torch then takes
    others: for attention FlashAttention's deterministic backward pass, and never cuDNN's
    (FlexAttention's adds up in a fixed order). An operation that has no such form raises an error,
    in one line (failures.py). To call before CUDA, NCCL or the compiler are used; what the user has
    set in the environment stays. Its cost has not been measured on a GPU.
    """
    # without it cuBLAS may pick other algorithms each time
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # sums inside a switch come in no fixed order; names match whole
    os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree,CollnetDirect,CollnetChain")
    # of the compiler and cuDNN too, which would choose kernels by the clock
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def meshes_of(config: Config, device_type: str) -> Meshes:
    """Arrange the ranks of the running process group, whose number `check_layout` has accepted."""
    p = config.parallel
    return build_meshes(
        device_type, p.dp_replicate, p.cp, p.tp, p.pp, p.ep, spare=config.grpo.generation_ranks
    )


def make_trainer(config: Config, meshes: Meshes) -> Trainer:
    """Return a Trainer with the weights of `model.path` and `lora.path`, where there are such."""
    return Trainer(config, meshes, fill=fill_weights)


def fill_weights(config: Config, model: Module) -> None:
    """Read the weights of `model.path` and `lora.path` into a model.

    Weights that are in no file get initial values.
    """
    path = config.model.path
    lora = config.lora
    if path:
        load_weights(model, path)
        initialize(model, config.seed, is_adapter)
    else:
        initialize(model, config.seed)
    if lora and lora.path:
        fill_adapters(model, lora, lora.path)


def check_device(config: Config, device: torch.device) -> None:
    """Raise InputError for settings that `device` is not made for."""
    on_gpu = device.type == "cuda"
    if config.profile.memory and not on_gpu:
        raise InputError(
            "profile.memory=true records the memory of a GPU, and this run is on the CPU (use false)"
        )
    if config.precision == "fp8" and on_gpu and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise InputError(f"precision=fp8 needs FP8 units, which {name} lacks (use bf16)")


def set_timeout(seconds: float, groups: Iterable[dist.ProcessGroup] | None = None) -> None:
    """Set the timeout of groups, by default of all that exist.

    A group that is made later has torch's own, 10 minutes with NCCL and 30 with gloo, unless it is
    made with another.
    """
    for group in groups or all_groups():
        group.set_timeout(timedelta(seconds=seconds))


def wait_for_ever() -> None:
    """Bound no wait from here on, neither in groups nor in the store.

    There NCCL's ranks meet before one sends to another for the first time, to make a communicator
    for these two.
    """
    set_timeout(FOR_EVER.total_seconds())
    default_store().set_timeout(FOR_EVER)
