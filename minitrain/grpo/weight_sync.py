"""Weight sync: copy the trainer's weights to the sampler, from any layout to any other.

Every rank announces once which box (a range per dimension) of each full tensor it holds for
training, its source shard, and which it needs for sampling, its target shard. Overlapping boxes
make a plan: who sends which region of which tensor to whom. Each rank finds its own share of it. If
several ranks hold a region (replicas), the receiver itself comes first, and receivers take turns
among the others. A sync posts the plan's sends and receives, point to point, in buckets and in one
order everywhere. A rank never holds more than its own shards and one bucket of bounded size.

So a layout is nothing but boxes: FSDP, tensor, expert and pipeline parallel, on the same ranks or
on others. Weights travel in the receiver's type. Left out: compression, and sampling with the old
weights while the new ones travel.
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

# (first, end) per dimension
Box = tuple[tuple[int, int], ...]
# by name: this rank's local tensor, and its slices of the full tensor
Shards = dict[str, tuple[Tensor, Slices]]
# most elements that a rank sends or receives between two waits
BUCKET = 1 << 28


class Move(NamedTuple):
    """One rank sends the region `box` of a tensor to another, or copies it if that is itself."""

    name: str
    source: int
    target: int
    box: Box
    dtype: torch.dtype


class WeightSync:
    """Copies the ranks' `source()` shards into their `target()` shards when called, by all ranks.

    source: returns this rank's shards of the trainer's weights; target: of the sampler's weights,
    where they are now. A rank that does not train, or does not sample, has none.
    group: for making the plan; the weights travel in the default group.
    Raises ValueError if a target shard has no source.
    """

    def __init__(
        self,
        source: Callable[[], Shards],
        target: Callable[[], Shards],
        group: dist.ProcessGroup | None = None,
    ):
        self.source = source
        self.target = target
        self.rank = dist.get_rank()
        sources = gather(boxes_of(source()), group)
        targets = gather(boxes_of(target()), group)
        self.buckets = plan(self.rank, sources, targets, BUCKET)
        # NCCL needs all ranks in a group's first operation
        if dist.get_backend() == "nccl":
            dist.all_reduce(torch.zeros((), device="cuda"))

    @torch.no_grad()
    def __call__(self) -> None:
        given = self.source()
        wanted = self.target()
        for bucket in self.buckets:
            self.run(bucket, given, wanted)

    def run(self, moves: list[Move], given: Shards, wanted: Shards) -> None:
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


def shards_of(model: Module) -> Shards:
    """Return this rank's shards of a model's weights."""
    return {name: local_shard(tensor) for name, tensor in model.state_dict().items()}


def region(shard: tuple[Tensor, Slices], box: Box) -> Tensor:
    """Return the view of a shard that is the region `box` of the full tensor [...]."""
    tensor, where = shard
    return tensor[
        tuple(slice(a - s.start, b - s.start) for (a, b), s in zip(box, where, strict=True))
    ]


# ------------------------------------------------------------------------------------------------------------- the plan


def boxes_of(shards: Shards) -> dict[str, tuple[Box, torch.dtype]]:
    """Return each shard's box and type."""
    return {
        name: (tuple((s.start, s.stop) for s in where), part.dtype)
        for name, (part, where) in shards.items()
    }


def plan(rank: int, sources: list[dict], targets: list[dict], most: int) -> list[list[Move]]:
    """Return the moves of `rank`, in buckets. sources, targets: of each rank, from `boxes_of`.

    Every rank goes through the moves of all ranks in the same order, millions on hundreds of ranks.
    So all cut at the same moves: those by which some rank would send and receive more than `most`
    elements in a bucket.
    """
    # name -> box -> ranks that hold it
    holders: dict[str, dict[Box, list[int]]] = {}
    for holder, boxes in enumerate(sources):
        for name, (box, _) in boxes.items():
            holders.setdefault(name, {}).setdefault(box, []).append(holder)
    buckets = [[]]
    load = [0] * len(targets)
    for name in sorted(set().union(*targets)):
        # (rank, box, dtype) of all that need the tensor
        receivers = [
            (target, *boxes[name]) for target, boxes in enumerate(targets) if name in boxes
        ]
        # once for each box: replicas want the same ones
        pieces = {
            wanted: regions_of(wanted, holders.get(name, {}))
            for wanted in {wanted for _, wanted, _ in receivers}
        }
        for turn, (target, wanted, dtype) in enumerate(receivers):
            if sum(size for *_, size in pieces[wanted]) != volume(wanted):
                raise ValueError(
                    f"rank {target} wants {name} {wanted}, of which the trainer has {pieces[wanted]}"
                )
            for ranks, box, size in pieces[wanted]:
                source = target if target in ranks else ranks[turn % len(ranks)]
                # a rank's copy to itself needs no buffer
                if source != target:
                    busiest = max(load[source], load[target])
                    if busiest and busiest + size > most:
                        buckets.append([])
                        load = [0] * len(targets)
                    load[source] += size
                    load[target] += size
                if rank in (source, target):
                    buckets[-1].append(Move(name, source, target, box, dtype))
    return buckets


def regions_of(wanted: Box, held: dict[Box, list[int]]) -> list[tuple[list[int], Box, int]]:
    """Return the regions of a box that some ranks hold, each as (ranks, region, volume)."""
    common = [(ranks, overlap(box, wanted)) for box, ranks in held.items()]
    return [(ranks, box, volume(box)) for ranks, box in common if box is not None]


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(first < end for first, end in common) else None


def volume(box: Box) -> int:
    return math.prod(end - first for first, end in box)
