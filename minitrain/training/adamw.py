"""AdamW (Loshchilov & Hutter 2019) on weights and states that are stored in bf16, with or without
stochastic rounding.

The arithmetic is torch's fused kernel, in fp32: a few million numbers at a time are widened,
updated, and rounded back, so that the copies take no memory worth mentioning. Per parameter,
gradients included, a step then takes 8 bytes for weights and states in bf16, and 12 with states in
fp32, against the 16 of fp32 throughout.

A bf16 number has 8 significant bits. Rounding to the nearest loses updates below 1/512 of a weight,
however often they are repeated, and the slow decay of the second moment. Stochastic rounding goes
up or down with probabilities that make the mean right (Zamirai et al. 2020, "Revisiting BFloat16
training"). Its random bits are a hash of the parameter's name, the step and the place in the whole
tensor, so they depend neither on the layout nor on where a run was resumed.
"""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from minitrain.hashing import mix
from minitrain.parallel.shards import Slices, local, owned

# numbers that are widened at a time
AT_ONCE = 1 << 24


class Piece(NamedTuple):
    """Rows of a parameter and all that belongs to them, as plain tensors that share the parameter's
    memory.

    place: where they lie in the whole parameter.
    """

    name: str
    place: Slices
    step: Tensor
    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class AdamW(torch.optim.Optimizer):
    """As torch.optim.AdamW, whose checkpoints fit, for parameters in fp32 or bf16, sharded or not.

    names: of all parameters. states: the type of exp_avg and exp_avg_sq. stochastic: how to round
    what is in bf16.
    """

    def __init__(
        self,
        groups: list[dict],
        names: dict[Parameter, str],
        states: torch.dtype,
        stochastic: bool,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ):
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, fused=True, states=states))
        self.names = names
        self.stochastic = stochastic

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for pieces in batches(self.pieces(group)):
                self.update(pieces, group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["step"] += 1 if self.skip is None else 1 - self.skip

    @property
    def skip(self) -> Tensor | None:
        """1 on the device where this update is to be left out: what `update_weights` tells all
        optimizers.
        """
        return getattr(self, "found_inf", None)

    def pieces(self, group: dict) -> Iterator[Piece]:
        """This rank's part of all parameters of a group that have gradients."""
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter] or self.new_state(parameter, group["states"])
            weight, place = owned(parameter)
            tensors = (weight, *map(local, (parameter.grad, state["exp_avg"], state["exp_avg_sq"])))
            yield from split_rows(self.names[parameter], place, state["step"], tensors)

    def new_state(self, parameter: Parameter, dtype: torch.dtype) -> dict[str, Tensor]:
        """Zeros, stored under the names that torch.optim.AdamW gives them."""
        self.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, dtype=dtype),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype),
        }
        return self.state[parameter]

    def update(self, pieces: list[Piece], group: dict) -> None:
        weights, gradients, averages, squares = (
            [getattr(piece, key).float() for piece in pieces]
            for key in ("weight", "gradient", "exp_avg", "exp_avg_sq")
        )
        beta1, beta2 = group["betas"]
        adamw(
            weights,
            gradients,
            averages,
            squares,
            [],
            [piece.step.clone() for piece in pieces],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            found_inf=self.skip,
        )
        for piece, *updated in zip(pieces, weights, averages, squares, strict=True):
            for key, value in zip(("weight", "exp_avg", "exp_avg_sq"), updated, strict=True):
                stored = getattr(piece, key)
                if stored.dtype != torch.bfloat16:
                    # fp32 was updated in place
                    continue
                if self.stochastic:
                    value = round_stochastically(
                        value, random_bits(f"{piece.name}/{key}", piece.step, piece.place)
                    )
                stored.copy_(value)


def split_rows(
    name: str, place: Slices, step: Tensor, tensors: tuple[Tensor, ...]
) -> Iterator[Piece]:
    """Pieces of at most AT_ONCE numbers, or one row; none of tensors that are empty on this
    rank.
    """
    rows = max(1, AT_ONCE // max(1, tensors[0][:1].numel()))
    first = place[0].start
    for start in range(0, len(tensors[0]) if tensors[0].numel() else 0, rows):
        parts = [tensor[start : start + rows] for tensor in tensors]
        yield Piece(
            name, (slice(first + start, first + start + len(parts[0])), *place[1:]), step, *parts
        )


def batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups of about AT_ONCE numbers: many small parameters share the launches of a
    kernel.
    """
    batch = []
    count = 0
    for piece in pieces:
        batch.append(piece)
        count += piece.weight.numel()
        if count >= AT_ONCE:
            yield batch
            batch = []
            count = 0
    if batch:
        yield batch


# ------------------------------------------------------------------------------------------------- stochastic rounding


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """x, fp32, as bf16: one of its two neighbours there, the nearer one more often, so that the
    mean over `bits` is x.

    bits: int32, uniform in [0, 2^16). A bf16 number is the upper half of an fp32 one: adding to the
    lower half carries into the upper with just the right probability. Infinities stay; so do NaNs,
    whose sum could be a number.
    """
    rounded = ((x.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    return torch.where(x.isnan(), x, rounded).bfloat16()


def random_bits(key: str, step: Tensor, place: Slices) -> Tensor:
    """int32 in [0, 2^16), uniform: the part at `place` of the random tensor that `key` and `step`
    choose.

    Each index is hashed in turn, so that the last dimension's hash alone has the full size.
    """
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little", signed=True)
    bits = mix(step.to(torch.int32) ^ seed)
    for part in place:
        bits = mix(
            bits[..., None]
            ^ torch.arange(part.start, part.stop, dtype=torch.int32, device=step.device)
        )
    return (bits >> 16) & 0xFFFF
