"""AdamW (Loshchilov & Hutter 2019) with weights and states in bf16, with or without stochastic rounding.

torch's fused kernel computes the update in fp32. A few million numbers at a time are converted to
fp32, updated and rounded back, so the copies take little memory. A parameter then takes 8 bytes
with its gradient if weights and states are bf16, and 12 bytes if the states are fp32. fp32
throughout takes 16.

bf16 has 8 significant bits. Rounding to nearest loses every update below 1/512 of a weight, however
often it is repeated, and also the slow decay of the second moment. Stochastic rounding rounds up or
down with probabilities that keep the mean (Zamirai et al. 2020, "Revisiting BFloat16 training").
Its random bits are a hash of the parameter's name, the step and the index in the full tensor. So
they depend neither on the layout nor on where a run is resumed.

With states on the host, a device keeps weights and gradients alone: 4 bytes a parameter if both are
bf16, and 8 in fp32. A few million numbers at a time, weights and gradients go to pinned memory, are
updated there by the same code, and the weights return. The norm that clips needs all gradients
first; then, while the host updates some numbers, the next ones come and the last ones return. In fp32
an update moves 28 bytes a number through the host's memory and 12 over the bus, which takes less
time: all copies but the first and the last are hidden, and to send gradients during the backward pass
would gain nothing. The next forward pass waits for the whole update.
"""

import hashlib
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from minitrain.hashing import mix_
from minitrain.parallel.activation_offload import beside
from minitrain.parallel.shards import Slices, copy_to_host, local_shard, to_local

# how many numbers are converted to fp32 at a time
AT_ONCE = 1 << 24


class RowBlock(NamedTuple):
    """Consecutive rows of a parameter with their gradient and states, all views of local shards.

    slices: their position in the full parameter. step: updates so far, an fp32 scalar.
    weight, gradient, exp_avg, exp_avg_sq: each [rows, ...], in fp32 or bf16.
    """

    name: str
    slices: Slices
    step: Tensor
    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class AdamW(torch.optim.Optimizer):
    """AdamW for parameters in fp32 or bf16, sharded or not. Its checkpoints are torch.optim.AdamW's.

    states: the type of exp_avg and exp_avg_sq.
    stochastic: round bf16 numbers stochastically, not to nearest.
    names: the name of every parameter, for stochastic rounding.
    on_host: keep states on the host, and update there.
    """

    def __init__(
        self,
        groups: list[dict],
        states: torch.dtype,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        stochastic: bool = False,
        names: dict[Parameter, str] | None = None,
        on_host: bool = False,
    ):
        if stochastic and not names:
            raise ValueError("stochastic rounding needs the names of parameters")
        defaults = dict(lr=lr, betas=betas, eps=eps, fused=True, states=states, on_host=on_host)
        super().__init__(groups, defaults)
        self.names = names or {}
        self.stochastic = stochastic

    @torch.no_grad()
    def step(self, closure=None) -> None:
        # a scalar 1 if `update_weights` skips this update
        skip = getattr(self, "found_inf", None)
        for group in self.param_groups:
            self.update_group(group, skip)

    def update_group(self, group: dict, skip: Tensor | None) -> None:
        """Update a group's parameters and count their steps, unless `skip`, a scalar [], is 1."""
        # blocks bound the memory of fp32 copies
        batches = group_by_size(self.row_blocks(group))
        if group["on_host"]:
            # waits for the gradients
            skip = None if skip is None else skip.cpu()
            self.update_on_host(batches, group, skip)
        else:
            for blocks in batches:
                self.update(blocks, group, skip)
        for parameter in group["params"]:
            if parameter.grad is not None:
                self.state[parameter]["step"] += 1 if skip is None else 1 - skip

    def row_blocks(self, group: dict) -> Iterator[RowBlock]:
        """Yield the local shards of a group's parameters that have gradients, in blocks of rows."""
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            # empty before the first update
            state = self.state[parameter] or self.new_state(parameter, group)
            weight, slices = local_shard(parameter)
            others = (parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            tensors = [weight, *map(to_local, others)]
            yield from split_rows(self.names.get(parameter, ""), slices, state["step"], tensors)

    def new_state(self, parameter: Parameter, group: dict) -> dict[str, Tensor]:
        """Set a parameter's state to zeros, under the names of torch.optim.AdamW, and return it.

        parameter: [...], as exp_avg and exp_avg_sq; step is a scalar.
        """
        device = "cpu" if group["on_host"] else parameter.device
        like = dict(dtype=group["states"], device=device)
        self.state[parameter] = {
            "step": torch.zeros((), device=device),
            "exp_avg": torch.zeros_like(parameter, **like),
            "exp_avg_sq": torch.zeros_like(parameter, **like),
        }
        return self.state[parameter]

    def update_on_host(
        self, batches: Iterator[list[RowBlock]], group: dict, skip: Tensor | None
    ) -> None:
        """Update lists of blocks [rows, ...] on the host, where their states are, unless `skip` is 1."""
        # `pairwise` begins to copy the next list before it yields this one
        coming = pairwise(chain(map(copy_blocks, batches), [None]))
        for (blocks, copies, arrived), _ in coming:
            if arrived:
                arrived.synchronize()
            self.update(copies, group, skip)
            for block, copy in zip(blocks, copies, strict=True):
                block.weight.copy_(copy.weight, non_blocking=True)

    def update(self, blocks: list[RowBlock], group: dict, skip: Tensor | None) -> None:
        """Update blocks [rows, ...] in place with torch's fused kernel, unless `skip` is 1."""
        # copies of bf16 numbers; float() returns fp32 tensors themselves, which change in place
        weights, gradients, averages, squares = (
            [getattr(block, key).float() for block in blocks]
            for key in ("weight", "gradient", "exp_avg", "exp_avg_sq")
        )
        beta1, beta2 = group["betas"]
        adamw(
            weights,
            gradients,
            averages,
            squares,
            # the maxima of AMSGrad
            [],
            # the kernel adds 1 to its steps, but a parameter's is shared by its blocks
            [block.step.clone() for block in blocks],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            found_inf=skip,
        )
        for block, *updated in zip(blocks, weights, averages, squares, strict=True):
            for key, value in zip(("weight", "exp_avg", "exp_avg_sq"), updated, strict=True):
                stored = getattr(block, key)
                # fp32 has changed in place
                if stored.dtype == torch.bfloat16:
                    self.store(stored, value, f"{block.name}/{key}", block.step, block.slices)

    def store(
        self, stored: Tensor, value: Tensor, key: str, step: Tensor, slices: Slices
    ) -> None:
        """Write fp32 numbers to `stored`, both [...], rounded to its type as `self.stochastic` says.

        key, step, slices: see `random_bits`.
        """
        if self.stochastic and stored.dtype == torch.bfloat16:
            value = round_stochastically(value, random_bits(key, step, slices))
        stored.copy_(value)


def copy_blocks(
    blocks: list[RowBlock],
) -> tuple[list[RowBlock], list[RowBlock], torch.cuda.Event | None]:
    """Begin to copy the weights and gradients of blocks [rows, ...] to the host.

    Returns blocks and copies, and on CUDA when the copies are complete.
    """
    with beside(blocks[0].weight.device) as stream:
        copies = [
            block._replace(
                weight=copy_to_host(block.weight), gradient=copy_to_host(block.gradient)
            )
            for block in blocks
        ]
        return blocks, copies, stream and stream.record_event()


def split_rows(
    name: str, slices: Slices, step: Tensor, tensors: list[Tensor]
) -> Iterator[RowBlock]:
    """Yield blocks of at most AT_ONCE numbers, or one row; none of an empty shard.

    tensors: a parameter's weight, gradient and states, each [rows, ...].
    """
    if not tensors[0].numel():
        return
    rows = max(1, AT_ONCE // tensors[0][:1].numel())
    # the shard's first row in the full parameter
    first = slices[0].start
    for start in range(0, len(tensors[0]), rows):
        parts = [tensor[start : start + rows] for tensor in tensors]
        where = slice(first + start, first + start + len(parts[0]))
        yield RowBlock(name, (where, *slices[1:]), step, *parts)


def group_by_size(blocks: Iterator[RowBlock]) -> Iterator[list[RowBlock]]:
    """Yield lists of blocks with about AT_ONCE numbers: small parameters share kernel launches."""
    batch = []
    count = 0
    for block in blocks:
        batch.append(block)
        count += block.weight.numel()
        if count >= AT_ONCE:
            yield batch
            batch = []
            count = 0
    if batch:
        yield batch


def kept_on_host(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    """Return the parameters whose states are on the host, but for averages of the weights."""
    groups = [group for group in optimizer.param_groups if group.get("on_host")]
    return {parameter for group in groups for parameter in group["params"]}


def states_on_device(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the states, each [...], that are not kept on the host."""
    away = kept_on_host(optimizer)
    return [
        state
        for parameter, states in optimizer.state.items()
        for key, state in states.items()
        if isinstance(state, Tensor) and (key == "ema" or parameter not in away)
    ]


# --- stochastic rounding


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Round x, fp32 [...], up or down to bf16, the nearer number more often: on average to x.

    bits: int32 [...], uniform in [0, 2^16).
    bf16 is the upper half of fp32. Adding random bits to the lower half carries into the upper half
    with the right probability. Infinities and NaNs stay.
    """
    # the mask clears the lower half
    rounded = ((x.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    # a carry can turn NaN into a number
    return torch.where(x.isnan(), x, rounded).bfloat16()


def random_bits(key: str, step: Tensor, slices: Slices) -> Tensor:
    """Return random int32 numbers, uniform in [0, 2^16), for `slices` of a full tensor.

    The result is [one dimension per slice]; it depends on key, step and the index in the full
    tensor alone. One dimension is hashed after the other, so only the last hash has the full size.
    """
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little", signed=True)
    bits = mix_(step.to(torch.int32) ^ seed)
    for part in slices:
        index = torch.arange(part.start, part.stop, dtype=torch.int32, device=step.device)
        bits = mix_(bits[..., None] ^ index)
    return (bits >> 16) & 0xFFFF
