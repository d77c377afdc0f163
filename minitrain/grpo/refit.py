"""Bring the trainer's weights to the sampler, from any layout to any other, while both stay
sharded.

Every rank tells once which box (a range per dimension) of each whole tensor it has to give, and
which it wants. Boxes that overlap make a plan: who sends which region of which tensor to whom. Each
rank finds its own part of it by itself. If several ranks have a region (replicas), the receiver
itself is the first choice, and receivers take turns among the others. A refit then posts the plan's
sends and receives, point to point and in one order everywhere, some tensors at a time; no rank ever
holds more than its own parts and one such bucket, which is bounded for each rank by itself.

So a layout is nothing but boxes: FSDP, tensor, expert and pipeline parallel, on the same ranks or
on others. Weights travel in the receiver's type. Left out: compression, and sampling on with the
old weights while the new ones travel.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from minitrain.parallel.agreement import gather
from minitrain.parallel.shards import Slices, local_shard

# first and behind the last index, per dimension
Box = tuple[tuple[int, int], ...]
# by name: this rank's part, and where it lies in the whole tensor
Parts = dict[str, tuple[Tensor, Slices]]
# elements that a rank sends or receives at most between two waits
BUCKET = 1 << 28


class Move(NamedTuple):
    """One rank sends the region `box` of a tensor to another, or copies it if that is itself."""

    name: str
    source: int
    target: int
    box: Box
    dtype: torch.dtype


class Refit:
    """Calling it copies what the ranks' `give()` returns into their `want()`. All ranks of the
    world call it together.

    give: returns this rank's parts of the trainer's weights. want: this rank's parts of the
    sampler's weights, where they are now. A rank that does not train, or does not sample, has none.
    Raises ValueError if a part that is wanted is nowhere given.
    group: where the plan is made; the weights themselves travel in the default group.
    """

    def __init__(
        self,
        give: Callable[[], Parts],
        want: Callable[[], Parts],
        group: dist.ProcessGroup | None = None,
    ):
        self.give = give
        self.want = want
        self.rank = dist.get_rank()
        offers = gather(describe(give()), group)
        wishes = gather(describe(want()), group)
        self.buckets = plan(self.rank, offers, wishes, BUCKET)
        # where all ranks must take part in a group's first operation
        if dist.get_backend() == "nccl":
            dist.all_reduce(torch.zeros((), device="cuda"))

    @torch.no_grad()
    def __call__(self) -> None:
        given = self.give()
        wanted = self.want()
        for bucket in self.buckets:
            self.run(bucket, given, wanted)

    def run(self, moves: list[Move], given: Parts, wanted: Parts) -> None:
        """Post all of this rank's sends and receives in a bucket at once, then wait for them."""
        operations = []
        arrivals = []
        for move in moves:
            place = region(wanted[move.name], move.box) if move.target == self.rank else None
            if move.source == self.rank:
                source = region(given[move.name], move.box)
                if place is not None:
                    place.copy_(source)
                else:
                    operations.append(
                        dist.P2POp(dist.isend, source.to(move.dtype).contiguous(), move.target)
                    )
            elif place is not None:
                arrivals.append((place, place.new_empty(place.shape)))
                operations.append(dist.P2POp(dist.irecv, arrivals[-1][1], move.source))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        for place, arrived in arrivals:
            place.copy_(arrived)


def parts_of(model: Module) -> Parts:
    """This rank's parts of a model's weights."""
    return {name: local_shard(tensor) for name, tensor in model.state_dict().items()}


def region(part: tuple[Tensor, Slices], box: Box) -> Tensor:
    """The view of a part that is the region `box` of the whole tensor."""
    tensor, where = part
    return tensor[
        tuple(slice(a - s.start, b - s.start) for (a, b), s in zip(box, where, strict=True))
    ]


# ------------------------------------------------------------------------------------------------------------- the plan


def describe(parts: Parts) -> dict[str, tuple[Box, torch.dtype]]:
    return {
        name: (tuple((s.start, s.stop) for s in where), part.dtype)
        for name, (part, where) in parts.items()
    }


def plan(rank: int, offers: list[dict], wishes: list[dict], most: int) -> list[list[Move]]:
    """What `rank` has to send, receive or copy, in buckets; offers, wishes: of each rank, as
    `describe` has them.

    Every rank goes through the moves of all, in the same order, and so makes the same cuts: before
    a move by which some rank would send and receive more than `most` elements in a bucket. They are
    millions on hundreds of ranks.
    """
    # by tensor and box
    holders: dict[str, dict[Box, list[int]]] = {}
    for holder, boxes in enumerate(offers):
        for name, (box, _) in boxes.items():
            holders.setdefault(name, {}).setdefault(box, []).append(holder)
    buckets = [[]]
    load = [0] * len(wishes)
    for name in sorted(set().union(*wishes)):
        receivers = [(target, *boxes[name]) for target, boxes in enumerate(wishes) if name in boxes]
        pieces = {
            wanted: cut(wanted, holders.get(name, {}))
            for wanted in {wanted for _, wanted, _ in receivers}
        }
        for turn, (target, wanted, dtype) in enumerate(receivers):
            if sum(size for *_, size in pieces[wanted]) != volume(wanted):
                raise ValueError(
                    f"rank {target} wants {name} {wanted}, of which the trainer has {pieces[wanted]}"
                )
            for ranks, box, size in pieces[wanted]:
                source = target if target in ranks else ranks[turn % len(ranks)]
                # a copy needs no buffer
                if source != target:
                    busiest = max(load[source], load[target])
                    if busiest and busiest + size > most:
                        buckets.append([])
                        load = [0] * len(wishes)
                    load[source] += size
                    load[target] += size
                if rank in (source, target):
                    buckets[-1].append(Move(name, source, target, box, dtype))
    return buckets


def cut(wanted: Box, held: dict[Box, list[int]]) -> list[tuple[list[int], Box, int]]:
    """The regions of a box that some ranks hold, each with these ranks and its volume."""
    common = [(ranks, overlap(box, wanted)) for box, ranks in held.items()]
    return [(ranks, box, volume(box)) for ranks, box in common if box is not None]


def overlap(a: Box, b: Box) -> Box | None:
    """The box that both have; None if that is empty."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(first < end for first, end in common) else None


def volume(box: Box) -> int:
    return math.prod(end - first for first, end in box)
