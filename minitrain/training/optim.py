"""Optimizer, learning-rate schedule and gradient clipping, for parameters on one or more meshes.

An update that is not finite is skipped on the device, so the host does not wait for it.
"""

import math

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter

from minitrain.parallel.collectives import sum_over_
from minitrain.settings import Optim
from minitrain.training.adamw import AdamW
from minitrain.training.muon import Muon, has_muon
from minitrain.training.sgd import SGD

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_optimizer(model: Module, optim: Optim) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov & Hutter 2019), Muon or SGD. Only matrices have weight decay."""
    decayed = []
    orthogonal = []
    others = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if optim.name == "muon" and has_muon(name, p):
            orthogonal.append(p)
        # experts' biases have two dimensions, Wan's shifts, scales and gates three
        elif p.ndim > 1 and not name.endswith(("bias", "scale_shift_table")):
            decayed.append(p)
        else:
            others.append(p)
    groups = [
        {"params": decayed, "weight_decay": optim.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if optim.name == "sgd":
        return SGD(groups, dict(lr=optim.lr))
    settings = dict(lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps)
    states = TYPES[optim.states]
    rounding = dict(
        stochastic=optim.stochastic_rounding, names={p: n for n, p in model.named_parameters()}
    )
    if optim.name == "muon":
        products = TYPES[optim.newton_schulz]
        # their products run on the device, where their momentum stays
        own = {"params": orthogonal, "newton_schulz": products, "on_host": False}
        groups.append(groups[0] | own)
        return Muon(groups, states, **settings, **rounding, on_host=optim.offload)
    # torch's AdamW keeps states in the parameters' type, and rounds to the nearest number
    torch_states = all(
        (p.dtype == torch.bfloat16) == (optim.states == "bf16") for p in decayed + others
    )
    if torch_states and not (optim.stochastic_rounding or optim.offload):
        return torch.optim.AdamW(groups, **settings, fused=True)
    return AdamW(groups, states, **settings, **rounding, on_host=optim.offload)


def update_weights(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Run optimizer.step() if `finite`, a bool scalar [] on the device; else change nothing.

    torch.amp.GradScaler sets `found_inf` of torch's fused optimizers likewise; there is no public
    name.
    """
    optimizer.found_inf = (~finite).float()
    optimizer.step()
    del optimizer.found_inf


def learning_rate(step: int, steps: int, optim: Optim) -> float:
    """Return the learning rate of step 0, 1, ...: warm-up, then the schedule to final_lr * lr."""
    warmup = warmup_steps(steps, optim)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    start = warmup
    if optim.schedule == "wsd":
        start = max(warmup, steps - 1 - round(optim.decay * steps))
    progress = max(0, step - start) / max(1, steps - 1 - start)
    # the share of the way down that is left: from 1 to 0
    left = {
        "constant": 1.0,
        "linear": 1 - progress,
        "wsd": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }[optim.schedule]
    return optim.lr * (optim.final_lr + (1 - optim.final_lr) * left)


def warmup_steps(steps: int, optim: Optim) -> int:
    """Return the number of warm-up steps: optim.warmup, or a tenth of a run shorter than that."""
    return optim.warmup if optim.warmup <= steps else steps // 10


@torch.no_grad()
def clip_gradients(
    parameters: list[Parameter], max_norm: float | None, stages: DeviceMesh | None = None
) -> Tensor:
    """Scale all gradients so that their global 2-norm is at most `max_norm`.

    parameters: each [...], with its gradient. stages: the ranks of a pipeline, which have different
    parameters.
    Returns the norm before clipping, a scalar: that of the full gradients, equal on all ranks. The
    scale is rounded to the gradients' type.
    """
    # one norm for each mesh, over which DTensor sums its squares: experts have a mesh of their own
    by_mesh: dict = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = getattr(parameter.grad, "device_mesh", None)
            by_mesh.setdefault(mesh, []).append(parameter.grad)
    norms = []
    gradients = []
    for mesh, group in by_mesh.items():
        norm = total_norm(group)
        # without a mesh they are plain tensors
        norms.append(norm if mesh is None else norm.full_tensor())
        gradients += group if mesh is None else [gradient.to_local() for gradient in group]
    if not norms:
        # a stage of a pipeline may have nothing to train
        norms = [torch.zeros((), device=parameters[0].device)]
    total = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    if stages is not None and stages.size() > 1:
        # fp64 on all: one stage's norm may be fp64 (of fp64 parameters), another's fp32
        total = sum_over_(stages, total.double().square()).sqrt()
    if max_norm is not None:
        scale = (max_norm / (total + 1e-6)).clamp(max=1)
        for dtype, each in by_type(gradients).items():
            # with a scale of another type, torch would launch one kernel per gradient
            torch._foreach_mul_(each, scale.to(dtype))
    return total


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the common 2-norm of gradients, each [...], as a scalar in at least fp32.

    A sum of bf16 numbers over 256 ranks would stop growing.
    """
    norms = []
    for dtype, group in by_type(gradients).items():
        norms += torch._foreach_norm(group, 2, torch.promote_types(dtype, torch.float32))
    return torch.linalg.vector_norm(torch.stack(norms))


def by_type(tensors: list[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """Group tensors, each [...], by type: torch's foreach kernels want one type."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups
