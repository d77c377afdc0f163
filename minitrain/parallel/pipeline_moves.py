"""What the ranks of a pipeline send each other beside hidden states: a tied weight, and an export."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Module

from minitrain.parallel.agreement import gather
from minitrain.parallel.shards import Slices, assemble, cut_slices, full_slice, to_local


class Places(NamedTuple):
    """Where the stages of a pipeline are.

    group: its ranks. ranks: the rank of each stage, in order.
    """

    group: dist.ProcessGroup
    ranks: list[int]

    def move(
        self,
        tensor: Tensor | None,
        like: Tensor | None,
        source: int,
        target: int,
        device: torch.device | None = None,
    ) -> Tensor | None:
        """Send a tensor [...] from the rank of stage `source` to that of `target`; return it there.

        like: a tensor of its shape and type, on the target's rank. device: None: that of `like`.
        """
        sender = self.ranks[source]
        receiver = self.ranks[target]
        if sender == receiver:
            return tensor
        if self.group.rank() == sender:
            dist.send(tensor, group=self.group, group_dst=receiver)
        if self.group.rank() == receiver:
            tensor = torch.empty_like(like, device=device)
            dist.recv(tensor, group=self.group, group_src=sender)
        return tensor


class TiedWeight:
    """A parameter of the first stage, such as the embedding, of which the last stage has a copy.

    The first stage owns it. Before a step the last one gets a copy, and after it sends the copy's
    gradient back. So gradient norm, optimizer and checkpoints see one parameter.
    name: in both stages. stages: this rank's, by number.
    """

    def __init__(self, name: str, stages: dict[int, Module], places: Places):
        self.name = name
        self.places = places
        self.last = len(places.ranks) - 1
        # None where they are not here
        self.stages = stages.get(0), stages.get(self.last)

    def weights(self) -> list[nn.Parameter | None]:
        """Return the parameter and the last stage's copy, [...], None where they are not here."""
        return [stage and stage.get_parameter(self.name) for stage in self.stages]

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the parameter to the last stage."""
        first, last = self.weights()
        # the shards alone: FSDP shards first and last stage alike
        arrived = self.places.move(to_local(first), to_local(last), 0, self.last)
        if last is not None:
            to_local(last).copy_(arrived)

    @torch.no_grad()
    def add_gradient(self) -> None:
        """Add the gradient of the last stage's copy to that of the parameter."""
        first, last = self.weights()
        if not any(p is not None and p.requires_grad for p in (first, last)):
            return
        grad = None
        if last is not None:
            # there is none if this step did not use the copy, as without multi-token prediction
            grad = torch.zeros_like(to_local(last)) if last.grad is None else to_local(last.grad)
        arrived = self.places.move(grad, to_local(first), self.last, 0)
        if first is not None:
            to_local(first.grad).add_(arrived)
        if last is not None:
            # else the next step would add to it
            last.grad = None


def full_tensors(
    here: dict[str, tuple[int, Tensor]], places: Places, device: torch.device
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield all stages' tensors in order, [...] on rank 0, None elsewhere.

    here: by name, the number of its stage and the tensor, of this rank's stages.
    All ranks iterate together. One slice at a time is gathered in its stage and sent to rank 0.
    """
    own = [(number, name, cut_slices(x), x.shape, x.dtype) for name, (number, x) in here.items()]
    entries = [entry for listing in gather(own, places.group) for entry in listing]

    def moved(number: int, name: str, where: Slices, like: Tensor) -> Tensor | None:
        """Return slice `where` of a tensor on rank 0. like: the full tensor on meta, [...]."""
        piece = full_slice(here[name][1], where).contiguous() if name in here else None
        return places.move(piece, like[where], number, 0, device)

    for number, name, slices, shape, dtype in sorted(entries, key=lambda entry: entry[0]):
        like = torch.empty(shape, dtype=dtype, device="meta")
        parts = ((where, moved(number, name, where, like)) for where in slices)
        yield name, assemble(parts, shape, dtype)
