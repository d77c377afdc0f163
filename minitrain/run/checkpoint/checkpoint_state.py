"""Collect the tensors that a checkpoint stores, and check that they fit the run that loads them."""

import hashlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn import Module
from torch.optim import Optimizer

from minitrain.errors import InputError
from minitrain.parallel.agreement import gather
from minitrain.parallel.shards import cut_slices, full_slice
from minitrain.training.adamw import kept_on_host

# a checkpoint's index: name -> shape and dtype
Saved = dict[str, TensorStorageMetadata]


def state_tensors(model: Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return weights and buffers by name, and optimizer state as `norm.weight/exp_avg`.

    The weights must be collected first: this makes FSDP free gathered weights, after which its
    parameters are the ones that the optimizer knows.
    """
    tensors = changing(model)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = value
    return tensors


def frozen_names(model: Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def changing(model: Module) -> dict[str, Tensor]:
    """Return the trained weights and the buffers."""
    fixed = set(frozen_names(model))
    return {name: tensor for name, tensor in model.state_dict().items() if name not in fixed}


def frozen_digest(model: Module, group: dist.ProcessGroup) -> str:
    """Return a digest of the frozen weights that does not depend on how they are sharded.

    They are gathered in pieces, because a GPU may not have room for a whole stack of experts.
    """
    tensors = model.state_dict()
    sums = {}
    for name in frozen_names(model):
        slices = cut_slices(tensors[name])
        sums[name] = sum(bit_sum(full_slice(tensors[name], where)) for where in slices)
    everywhere = {}
    for each in gather(sums, group):
        everywhere |= each
    return hashlib.sha256(json.dumps(everywhere, sort_keys=True).encode()).hexdigest()


def bit_sum(tensor: Tensor) -> int:
    """Return the sum of all elements' bits as integers, which does not depend on the order."""
    whole_number = getattr(torch, f"int{8 * tensor.element_size()}")
    return tensor.contiguous().view(whole_number).sum(dtype=torch.int64).item()


def prepare_optimizer(optimizer: Optimizer, model: Module, saved: Saved) -> dict[str, Tensor]:
    """Replace the optimizer's state by empty tensors to load the saved state into; return them.

    Their names are `parameter name/key`. A tensor with its parameter's shape is sharded like it; its
    dtype is that of `optimizer.defaults["states"]`, otherwise the parameter's, and fp32 for averages.
    Loading converts to that dtype. All others are scalars, such as Adam's step. All are on the
    weights' device, as fused kernels need them, or where `kept_on_host` says.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    away = kept_on_host(optimizer)
    optimizer.state.clear()
    tensors = {}
    for entry, stored in saved.items():
        name, _, key = entry.partition("/")
        if not key or name not in parameters:
            continue
        parameter = parameters[name]
        device = "cpu" if parameter in away and key != "ema" else parameter.device
        if stored.size == parameter.shape:
            dtype = optimizer.defaults.get("states", parameter.dtype)
            if key == "ema":
                dtype = torch.float32
            tensor = torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
        else:
            dtype = stored.properties.dtype
            tensor = torch.empty(stored.size, dtype=dtype, device=device)
        tensors[entry] = optimizer.state[parameter][key] = tensor
    return tensors


def check_weights(
    folder: Path, saved: Saved, weights: dict[str, Tensor], names: set[str]
) -> None:
    """Raise InputError unless a checkpoint has exactly the model's weights, in their shapes.

    weights: this rank's. names: those of all ranks' weights. Also refuses optimizer states that are
    neither of their weight's shape nor scalars, because they could take any amount of memory.
    """
    sizes = {entry: list(stored.size) for entry, stored in saved.items()}
    own = {name: list(tensor.shape) for name, tensor in weights.items()}
    problems = []
    for name, shape in own.items():
        if name not in sizes:
            problems.append(f"it has no {name}, which is {shape} in the model")
        elif sizes[name] != shape:
            problems.append(f"{name} is {sizes[name]}, and {shape} in the model")
    for entry, size in sizes.items():
        name, _, key = entry.partition("/")
        if not key and name not in names:
            problems.append(f"it has {name} {size}, which the model does not have")
        elif key and name in own and size not in (own[name], []):
            problems.append(f"its {entry} is {size}, and {name} {own[name]}")
    if problems:
        raise InputError(
            f"checkpoint {folder} does not fit the model (use another out_dir, or its run's task and model): "
            f"{problems[0]}"
        )


def check_origin(folder: Path, description: dict, optimizer: Optimizer, base: str) -> None:
    """Raise InputError if a checkpoint is of another optimizer, or of other frozen base weights."""
    own = type(optimizer).__name__
    if description["optimizer"] != own:
        raise InputError(
            f"checkpoint {folder} holds the state of {description['optimizer']}, not of {own} (use its run's "
            f"optim.name, or another out_dir)"
        )
    if description["base"] != base:
        raise InputError(
            f"checkpoint {folder} was trained over another base model, or the same stored in another precision (use "
            f"that one, or another out_dir)"
        )
