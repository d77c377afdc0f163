"""Bring the trainer's weights to the sampler, from any layout to any other, while both stay sharded.

Every rank tells once which box (a range per dimension) of each whole tensor it has to give, and which it wants. Boxes
that overlap make a plan, the same on all ranks: who sends which region of which tensor to whom. If several ranks have
a region (replicas), the receiver itself is the first choice, and receivers take turns among the others. A refit then
posts the plan's sends and receives, point to point and in one order everywhere, some tensors at a time; no rank ever
holds more than its own parts and one such bucket, which is bounded for each rank by itself.

So a layout is nothing but boxes: FSDP, tensor, expert and pipeline parallel, on the same ranks or on others. Weights
travel in the receiver's type. Left out: compression, and sampling on with the old weights while the new ones travel.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from minitrain.models.tensor_files import Slices
from minitrain.parallel.mesh import owned
from minitrain.runtime.agreement import gather

Box = tuple[tuple[int, int], ...]  # first and behind the last index, per dimension
Parts = dict[str, tuple[Tensor, Slices]]  # by name: this rank's part, and where it lies in the whole tensor
BUCKET = 1 << 28  # elements that a rank sends or receives at most between two waits


class Move(NamedTuple):
    """One rank sends the region `box` of a tensor to another, or copies it if that is itself."""

    name: str
    source: int
    target: int
    box: Box
    dtype: torch.dtype


class Refit:
    """Calling it copies what the ranks' `give()` returns into their `want()`. All ranks of the world call it together.

    give: returns this rank's parts of the trainer's weights. want: this rank's parts of the sampler's weights, where
    they are now. A rank that does not train, or does not sample, has none. Raises ValueError if a part that is wanted
    is nowhere given.
    group: where the plan is made; the weights themselves travel in the default group.
    """

    def __init__(self, give: Callable[[], Parts], want: Callable[[], Parts], group: dist.ProcessGroup | None = None):
        self.give, self.want, self.rank = give, want, dist.get_rank()
        offers, wishes = gather(describe(give()), group), gather(describe(want()), group)
        buckets = cut(plan(offers, wishes), BUCKET)
        self.buckets = [[move for move in moves if self.rank in (move.source, move.target)] for moves in buckets]
        if dist.get_backend() == "nccl":  # where all ranks must take part in a group's first operation
            dist.all_reduce(torch.zeros((), device="cuda"))

    @torch.no_grad()
    def __call__(self) -> None:
        given, wanted = self.give(), self.want()
        for bucket in self.buckets:
            self.run(bucket, given, wanted)

    def run(self, moves: list[Move], given: Parts, wanted: Parts) -> None:
        """Post all of this rank's sends and receives in a bucket at once, then wait for them."""
        operations, arrivals = [], []
        for move in moves:
            place = region(wanted[move.name], move.box) if move.target == self.rank else None
            if move.source == self.rank:
                source = region(given[move.name], move.box)
                if place is not None:
                    place.copy_(source)
                else:
                    operations.append(dist.P2POp(dist.isend, source.to(move.dtype).contiguous(), move.target))
            elif place is not None:
                arrivals.append((place, place.new_empty(place.shape)))
                operations.append(dist.P2POp(dist.irecv, arrivals[-1][1], move.source))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        for place, arrived in arrivals:
            place.copy_(arrived)


def parts_of(model: Module) -> Parts:
    """This rank's parts of a model's weights."""
    return {name: owned(tensor) for name, tensor in model.state_dict().items()}


def region(part: tuple[Tensor, Slices], box: Box) -> Tensor:
    """The view of a part that is the region `box` of the whole tensor."""
    tensor, where = part
    return tensor[tuple(slice(a - s.start, b - s.start) for (a, b), s in zip(box, where, strict=True))]


# ------------------------------------------------------------------------------------------------------------- the plan


def describe(parts: Parts) -> dict[str, tuple[Box, torch.dtype]]:
    return {name: (tuple((s.start, s.stop) for s in where), part.dtype) for name, (part, where) in parts.items()}


def plan(offers: list[dict], wishes: list[dict]) -> list[Move]:
    """What has to move, in an order that all ranks find; offers, wishes: of each rank, as `describe` has them."""
    holders: dict[str, dict[Box, list[int]]] = {}  # by tensor and box
    for rank, boxes in enumerate(offers):
        for name, (box, _) in boxes.items():
            holders.setdefault(name, {}).setdefault(box, []).append(rank)
    moves = []
    for name in sorted(set().union(*wishes)):
        receivers = [(rank, *boxes[name]) for rank, boxes in enumerate(wishes) if name in boxes]
        for turn, (rank, wanted, dtype) in enumerate(receivers):
            found = [
                Move(name, rank if rank in ranks else ranks[turn % len(ranks)], rank, common, dtype)
                for box, ranks in holders.get(name, {}).items()
                if (common := overlap(box, wanted)) is not None
            ]
            if sum(volume(move.box) for move in found) != volume(wanted):
                raise ValueError(f"rank {rank} wants {name} {wanted}, of which the trainer has {found}")
            moves += found
    return moves


def overlap(a: Box, b: Box) -> Box | None:
    """The box that both have; None if that is empty."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(first < end for first, end in common) else None


def volume(box: Box) -> int:
    return math.prod(end - first for first, end in box)


def cut(moves: list[Move], most: int) -> list[list[Move]]:
    """The moves in order, in buckets of which no rank sends and receives more than `most` elements, or one move."""
    buckets, load = [], Counter()
    for move in moves:
        ends = (move.source, move.target) if move.source != move.target else ()  # a copy needs no buffer
        size = volume(move.box)
        if not buckets or any(load[rank] and load[rank] + size > most for rank in ends):
            buckets.append([])
            load = Counter()
        buckets[-1].append(move)
        load.update(dict.fromkeys(ends, size))
    return buckets
