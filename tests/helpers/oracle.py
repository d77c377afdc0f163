"""Train on several ranks, and check every step against plain autograd in one process: the oracle of all layouts.

Training is by SGD, because Adam would hide a wrong scale. The gradients of all parameters are compared, because the
loss would hide most mistakes. Each step is checked from the weights that it started with, so that rounding errors do
not add up over steps.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import register_dataclass, tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from minitrain.models.decoder import Decoder
from minitrain.models.frozen import freeze
from minitrain.models.lora import add_adapters
from minitrain.parallel.context import local_tokens
from minitrain.parallel.shards import full_tensor, to_local
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.run.tasks.initial_weights import fill_weights
from minitrain.settings import Config
from minitrain.training.build import build_model, initialize
from minitrain.training.loop import forward_backward
from minitrain.training.loss import IGNORE
from minitrain.training.objectives import make_objective
from minitrain.training.optim import clip_gradients
from tests.helpers.pool import Pool, part_of
from tests.helpers.training import filled_waits

# parameter name -> tensor
Tensors = dict[str, Tensor]


@dataclass
class Trace:
    """The record of a training run on one rank. A pipeline rank has only its own parameters."""

    # before the first step, and after each step
    weights: list[Tensors] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    # norm of all gradients, before clipping
    norms: list[float] = field(default_factory=list)


register_dataclass(Trace)


def ragged_batch(config: Config, step: int) -> Tensors:
    """Return a global batch whose rows have from no valid labels (the first) to most (the last)."""
    rows = config.batch.global_
    length = config.batch.seq_len
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(
        config.model.config.vocab_size, (rows, length + 1), generator=generator
    )
    valid = torch.arange(rows)[:, None] * length // rows
    labels = torch.where(torch.arange(length) < valid, tokens[:, 1:], IGNORE)
    return {"tokens": tokens[:, :-1], "labels": labels}


def packed_batch(config, step):
    """Return `ragged_batch` with packed documents of about four tokens, and positions that restart."""
    batch = ragged_batch(config, step)
    begins = (
        torch.rand(batch["tokens"].shape, generator=torch.Generator().manual_seed(step)) < 0.25
    )
    place = torch.arange(begins.shape[1])
    positions = place - torch.where(begins, place, 0).cummax(1).values
    return batch | {"document_ids": begins.cumsum(1), "positions": positions}


class Batches:
    """The global batches of several steps as a dataset."""

    def __init__(self, config: Config, steps: int, batch: Callable = ragged_batch):
        self.batches = [batch(config, step) for step in range(steps)]
        self.rows = config.batch.global_

    def __len__(self) -> int:
        return len(self.batches) * self.rows

    def row(self, n: int) -> Tensors:
        return {key: value[n % self.rows] for key, value in self.batches[n // self.rows].items()}


def train(tree: dict, steps: int = 2, batch: Callable = ragged_batch) -> Trace:
    """Train by SGD on this rank of the process group, by the package's own code. tree: a config, as in YAML.

    Gradients are recorded before they are clipped to `optim.clip`.
    """
    config = configs.from_dict(tree | {"device": "cpu"})
    meshes = start(config)
    model = build_model(config, meshes, fill_weights)
    objective = make_objective(config)
    trace = Trace(weights=[copies(model.named_parameters())])
    for step in range(steps):
        rows = micro_batches(objective.extend(batch(config, step)), config, meshes.batch)
        rows = [local_tokens(each, meshes.cp, config.parallel.context) for each in rows]
        loss = forward_backward(model, objective, rows, meshes, torch.device("cpu"))
        trace.losses.append(loss.item())
        trace.gradients.append(
            copies((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)
        )
        trace.norms.append(
            clip_gradients(list(model.parameters()), config.optim.clip, meshes.pp).item()
        )
        descend(model, config.optim.lr)
        trace.weights.append(copies(model.named_parameters()))
    return trace


@torch.no_grad()
def descend(model: Module, rate: float) -> None:
    """Run a step of SGD and drop the gradients. It works on local shards, because DTensor's operators are slow."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            to_local(parameter).sub_(to_local(parameter.grad), alpha=rate)
            parameter.grad = None


def count_calls(collective: str):
    """Return a patch that counts calls of a collective, under its name in this version of torch."""
    names = [f"{collective}_{form}" for form in ("single", "tensor", "into_tensor")]
    name = next(name for name in names if hasattr(dist, name))
    return mock.patch.object(dist, name, wraps=getattr(dist, name))


class Count(TorchDispatchMode):
    """Count the operators on plain tensors by key(operator, arguments); a key of None is not counted."""

    def __init__(self, key: Callable):
        super().__init__()
        self.key = key
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if DTensor in types:
            # the operators on its local tensors are dispatched here again
            return NotImplemented
        if (found := self.key(op, args)) is not None:
            self.counts[found] += 1
        return op(*args, **kwargs or {})


class Results(TorchDispatchMode):
    """Call `look` with every plain tensor that an operator returns."""

    def __init__(self, look: Callable):
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **kwargs or {})
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                self.look(tensor)
        return out


def collective(op, args) -> str | None:
    """Return the name of a functional collective, as used for activations; FSDP uses others."""
    return op._opname if op.namespace == "_c10d_functional" else None


def train_compiled(*args) -> Trace:
    """Run `train` with a compiler backend that makes graphs, but does not generate C++."""
    aot_eager = mock.patch("torch.compile", partial(torch.compile, backend="aot_eager"))
    with aot_eager, filled_waits():
        return train(*args)


def micro_batches(batch: Tensors, config: Config, ranks: DeviceMesh) -> list[Tensors]:
    """Return this rank's micro-batches of a global batch."""
    share = config.batch.global_ // ranks.size()
    first = ranks.get_local_rank() * share
    starts = range(first, first + share, config.batch.micro)
    return [
        {key: value[n : n + config.batch.micro] for key, value in batch.items()} for n in starts
    ]


@torch.no_grad()
def copies(named: Iterable[tuple[str, Tensor]]) -> Tensors:
    """Return copies of tensors; of sharded ones this rank's parts, which the pool assembles, faster than gathering."""
    return {
        name: part_of(tensor) if isinstance(tensor, DTensor) else tensor.clone()
        for name, tensor in named
    }


def snapshot(named: Iterable[tuple[str, Tensor]]) -> Tensors:
    """Return copies of the full tensors. Sharded ones are gathered: all ranks call this."""
    return {name: full_tensor(tensor.detach()).clone() for name, tensor in named}


def built(tree: dict) -> Tensors:
    """Return this rank's initial weights, in full."""
    config = configs.from_dict(tree | {"device": "cpu"})
    return snapshot(build_model(config, start(config), fill_weights).named_parameters())


def initial_weights(config: Config) -> Tensors:
    """Return the initial weights of a model without a layout."""
    model = plain_model(config)
    return snapshot(model.named_parameters())


def plain_model(config: Config) -> Decoder:
    """Return a model without a layout, with its initial weights."""
    model = Decoder(config.model.config)
    if config.lora:
        add_adapters(model, config.lora)
        if config.lora.base != "bf16":
            freeze(model.blocks, config.lora.base)
    initialize(model, config.seed)
    return model


def plain_step(config: Config, weights: Tensors, batch: Tensors) -> tuple[float, Tensors]:
    """Return the mean loss over the valid labels of a whole batch, and its gradients, without layout or micro-batches.

    It is in fp32 and by the package's own loss function, so that only the layout makes a difference. Other tests check
    the model and the loss.
    """
    model = plain_model(config)
    model.load_state_dict(weights, strict=False)
    objective = make_objective(config)
    loss = objective.loss(model, objective.extend(batch)) / (batch["labels"] != IGNORE).sum()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return loss.item(), dict(
        zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)
    )


def check_against_one_process(
    pool: Pool,
    world_size: int,
    tree: dict,
    steps: int = 2,
    batch: Callable = ragged_batch,
    tolerance: float = 1e-6,
    run: Callable = train,
    double: bool = False,
) -> None:
    """Train `tree` on `world_size` ranks; losses, gradients, their norm and weights must be those of `plain_step`.

    tolerance: on norm(difference) / norm(expected) of each parameter, and on the relative difference of losses. Initial
        weights must be bitwise equal.
    run: the function that each rank calls, `train` or a wrapper of it.
    double: compute in fp64 on both sides. This is for layouts that split sums in other ways than data parallelism,
        where gradients that nearly cancel, such as those of key biases, exceed the tolerance through rounding.
    """
    if double:
        with double_precision():
            run = partial(in_double_precision, run)
            return check_against_one_process(pool, world_size, tree, steps, batch, tolerance, run)
    config = configs.from_dict(tree)
    traces = pool.run(world_size, run, tree, steps, batch)
    check_close(
        [trace.weights[0] for trace in traces], initial_weights(config), 0, "initial weights"
    )
    for step in range(steps):
        weights = {
            name: tensor for trace in traces for name, tensor in trace.weights[step].items()
        }
        loss, gradients = plain_step(config, weights, batch(config, step))
        norm = (
            torch.stack([gradient.double().norm() for gradient in gradients.values()])
            .norm()
            .item()
        )
        rate = config.optim.lr * min(1, (config.optim.clip or norm) / norm)
        updated = {name: weights[name] - rate * gradients.get(name, 0) for name in weights}
        for rank, trace in enumerate(traces):
            assert abs(trace.losses[step] / loss - 1) <= tolerance, (
                f"loss of step {step} on rank {rank}"
            )
            assert abs(trace.norms[step] / norm - 1) <= tolerance, (
                f"gradient norm of step {step} on rank {rank}"
            )
        check_close(
            [trace.gradients[step] for trace in traces],
            gradients,
            tolerance,
            f"gradients of step {step}",
        )
        check_close(
            [trace.weights[step + 1] for trace in traces],
            updated,
            tolerance,
            f"weights after step {step}",
        )


def grouped_mm_by_expert(x, y, offs):
    """Return F.grouped_mm(x, y, offs=offs) from one product per expert: torch's takes no fp64."""
    ends = [0, *offs.tolist()]
    spans = list(itertools.pairwise(ends))
    if y.ndim == 2:
        return torch.stack([x[:, a:b] @ y[a:b] for a, b in spans])
    parts = [x[a:b] @ y[i] for i, (a, b) in enumerate(spans)]
    # rows beyond the last expert's belong to none
    return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], y.shape[2])])


@contextmanager
def double_precision():
    """Make fp64 the default dtype inside a `with` statement; experts' products take it then."""
    before = torch.get_default_dtype(), F.grouped_mm
    torch.set_default_dtype(torch.float64)
    F.grouped_mm = grouped_mm_by_expert
    try:
        yield
    finally:
        torch.set_default_dtype(before[0])
        F.grouped_mm = before[1]


def in_double_precision(function: Callable, *args):
    with double_precision():
        return function(*args)


def check_close(ranks: list[Tensors], expected: Tensors, tolerance: float, what: str) -> None:
    """Check that the ranks together have all tensors, each close to the expected one; report the worst.

    Tensors that should be zero and are only rounding, such as the gradients of GPT-3's key biases, are compared on the
    scale of the largest tensor.
    """
    nothing = 1e-10 * max(tensor.double().norm().item() for tensor in expected.values())
    actual = [
        (rank, name, tensor)
        for rank, tensors in enumerate(ranks)
        for name, tensor in tensors.items()
    ]
    assert {name for _, name, _ in actual} == set(expected), what
    errors = (
        (relative_error(tensor, expected[name], nothing), name, rank)
        for rank, name, tensor in actual
    )
    error, name, rank = max(errors)
    assert error <= tolerance, (
        f"{what}: {name} on rank {rank} is off by {error:.1e} (relative; allowed {tolerance})"
    )


def relative_error(actual: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return norm(actual - expected) / norm(expected), with 0 / 0 = 0; infinity for other shapes or infinite values.

    least: a lower bound of the divisor.
    """
    if actual.shape != expected.shape or not actual.isfinite().all():
        return float("inf")
    difference = (actual.double() - expected).norm().item()
    size = max(expected.double().norm().item(), least)
    if difference == 0:
        return 0.0
    return difference / size if size else float("inf")


def count_flops(function: Callable) -> dict[str, int]:
    """Return torch's count of the FLOPs of function() by operator, with attention as plain matrix products."""
    mapping = {torch.ops.aten._grouped_mm: grouped_mm_flops}
    with (
        FlopCounterMode(display=False, custom_mapping=mapping) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):
        function()
    return {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}


def grouped_mm_flops(a, b, *args, out_shape=None, **kwargs) -> int:
    """Return the FLOPs of a grouped product, for which torch has no formula."""
    return 2 * a[0] * a[1] * b[-1]
