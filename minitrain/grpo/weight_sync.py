"""Weight sync: copy the trainer's weights to the sampler, from any layout to any other.

Every rank announces once which box (a range per dimension) of each full tensor it holds for
training, its source shard, and which it needs for sampling, its target shard. From overlapping
boxes all ranks make the same plan: who sends which region of which tensor to whom. A region that a
rank holds itself is copied. Of one that several others hold (replicas), receivers take turns among
these.

A sync posts the plan's sends and receives, point to point, in buckets and in one order everywhere.
A rank never holds more than its own shards and one bucket of bounded size.

So a layout is nothing but boxes: FSDP, tensor, expert and pipeline parallel, on the same ranks or
on others. Weights travel in the receiver's type. Left out: compression, and sampling with the old
weights while the new ones travel.
"""

import math
from collections.abc import Callable, Iterator
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

    source: returns this rank's shards of the trainer's weights; none on a rank that only samples.
    target: returns those of the sampler's weights, which are written to; none on a rank that only
        trains. Both are called for each sync: a tensor may have other memory by then.
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
        # of each rank: name -> (box, dtype)
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
        # (region of the sampler's weights, what comes for it)
        received = []
        for move in moves:
            target = region(wanted[move.name], move.box) if move.target == self.rank else None
            if move.source == self.rank:
                source = region(given[move.name], move.box)
                if target is not None:
                    target.copy_(source)
                else:
                    operations.append(
                        dist.P2POp(dist.isend, source.to(move.dtype).contiguous(), move.target)
                    )
            elif target is not None:
                # a region is seldom contiguous, as what is received must be
                received.append((target, target.new_empty(target.shape)))
                operations.append(dist.P2POp(dist.irecv, received[-1][1], move.source))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        for target, tensor in received:
            target.copy_(tensor)


def shards_of(model: Module) -> Shards:
    """Return this rank's shards of a model's weights."""
    return {name: local_shard(tensor) for name, tensor in model.state_dict().items()}


def region(shard: tuple[Tensor, Slices], box: Box) -> Tensor:
    """Return the view of a shard that is the region `box` of the full tensor [...]."""
    tensor, where = shard
    # the shard's own indices begin at its start in the full tensor
    return tensor[
        tuple(slice(a - s.start, b - s.start) for (a, b), s in zip(box, where, strict=True))
    ]


# --- the plan


def boxes_of(shards: Shards) -> dict[str, tuple[Box, torch.dtype]]:
    """Return each shard's box and type."""
    return {
        name: (tuple((s.start, s.stop) for s in where), part.dtype)
        for name, (part, where) in shards.items()
    }


def plan(rank: int, sources: list[dict], targets: list[dict], most: int) -> list[list[Move]]:
    """Return the moves of `rank`, in buckets. sources, targets: of each rank, from `boxes_of`.

    A send and its receive must be in the same bucket. So every rank goes through the moves of all
    ranks in the same order, millions on hundreds of ranks. A bucket ends for all ranks where one of
    them would send and receive more than `most` elements in it.
    """
    buckets = [[]]
    # elements that each rank sends and receives in the current bucket
    load = [0] * len(targets)
    for move, size in all_moves(sources, targets):
        # a rank's copy to itself needs no buffer
        if move.source != move.target:
            # without a load yet, they take a move of any size
            busiest = max(load[move.source], load[move.target])
            if busiest and busiest + size > most:
                buckets.append([])
                load = [0] * len(targets)
            load[move.source] += size
            load[move.target] += size
        if rank in (move.source, move.target):
            buckets[-1].append(move)
    return buckets


def all_moves(sources: list[dict], targets: list[dict]) -> Iterator[tuple[Move, int]]:
    """Yield the moves of all ranks, each with its number of elements, in the same order on every rank.

    sources, targets: see `plan`. Raises ValueError where a target's box is not covered.
    """
    # name -> box -> ranks that hold it
    holders: dict[str, dict[Box, list[int]]] = {}
    for holder, boxes in enumerate(sources):
        for name, (box, _) in boxes.items():
            holders.setdefault(name, {}).setdefault(box, []).append(holder)
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
            # the trainer's boxes do not overlap, so volumes tell whether they cover the target
            if sum(size for *_, size in pieces[wanted]) != volume(wanted):
                raise ValueError(
                    f"rank {target} wants {name} {wanted}, of which the trainer has {pieces[wanted]}"
                )
            for ranks, box, size in pieces[wanted]:
                source = target if target in ranks else ranks[turn % len(ranks)]
                yield Move(name, source, target, box, dtype), size


def regions_of(wanted: Box, held: dict[Box, list[int]]) -> list[tuple[list[int], Box, int]]:
    """Return the regions of a box that some ranks hold, each as (ranks, region, volume)."""
    regions = []
    for box, ranks in held.items():
        common = tuple(
            (max(first, begin), min(last, end))
            for (first, last), (begin, end) in zip(box, wanted, strict=True)
        )
        if all(first < end for first, end in common):
            regions.append((ranks, common, volume(common)))
    return regions


def volume(box: Box) -> int:
    return math.prod(end - first for first, end in box)
