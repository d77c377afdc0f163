"""Exponential moving average (EMA) of the weights, for validation and for the model that a run writes.

After update t = 0, 1, ... the average becomes d * average + (1 - d) * weights, and the weights
themselves after the first. d is optim.ema; with optim.ema_warmup at most (1 + t) / (10 + t), as in
diffusers, so that short runs forget their beginning. torch's AveragedModel has a constant d.

The averages are part of the optimizer's state: sharded as the weights are, in checkpoints and
resharded with them. They are fp32, since bf16 would round small changes away: 4 bytes a parameter.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module

from minitrain.parallel.fsdp import reshard
from minitrain.parallel.shards import to_local
from minitrain.settings import Optim


@torch.no_grad()
def update_averages(
    optimizer: torch.optim.Optimizer, settings: Optim, step: int, finite: Tensor
) -> None:
    """Update the averages, fp32 [...] as the weights, after the optimizer's step.

    step: the update's number, from 0. finite: a bool scalar; if False, the step was skipped and the
    averages stay.
    """
    decay = settings.ema
    if settings.ema_warmup:
        decay = min(decay, (1 + step) / (10 + step))
    # on the device: the host does not wait to know whether the step was skipped
    rate = (1 - decay) * finite
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # torch's AdamW wants an empty state before a parameter's first gradient
            if parameter.grad is not None:
                state = optimizer.state[parameter]
                if "ema" not in state:
                    state["ema"] = parameter.detach().to(torch.float32, copy=True)
                to_local(state["ema"]).lerp_(to_local(parameter).float(), rate)


def check_averages(optimizer: torch.optim.Optimizer, settings: Optim, step: int) -> list[str]:
    """Drop averages that the settings no longer ask for, and return notes for the user.

    step: the number of steps that are done.
    """
    found = [state for state in optimizer.state.values() if "ema" in state]
    if found and not settings.ema:
        for state in found:
            del state["ema"]
        return ["note: optim.ema=0: the checkpoint's averages of the weights are dropped"]
    if settings.ema and step and not found:
        return [f"note: optim.ema begins with the weights after step {step + 1}"]
    return []


@contextmanager
def averaged_weights(model: Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put the averages, if there are any, in place of the weights inside a `with` statement.

    The weights are kept meanwhile, which takes the room of gradients: there are none between steps.
    """
    states = optimizer.state.items()
    averages = {parameter: state["ema"] for parameter, state in states if "ema" in state}
    # the local shards
    kept = {parameter: parameter.detach().clone() for parameter in averages}
    fill(model, averages)
    try:
        yield
    finally:
        fill(model, kept)


@torch.no_grad()
def fill(model: Module, values: dict[Tensor, Tensor]) -> None:
    """Set parameters [...] to values, each of its parameter's shape and sharding."""
    # else FSDP would go on with the weights that it has gathered
    reshard(model)
    for parameter, value in values.items():
        to_local(parameter).copy_(to_local(value))
