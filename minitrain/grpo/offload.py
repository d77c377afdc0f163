"""Offload between the parts of a GRPO step, where a rank both trains and samples (grpo.offload).

    generation, refit   need the sampler's own weights
    logprobs            needs the reference's weights
    training            needs the optimizer's states

Tensors that a part does not need are offloaded to the host, except the sampler's weights, which the
next weight sync overwrites. Only storages are freed and allocated again, so optimizers, FSDP and
compiled graphs keep their tensors. Copies are asynchronous: later work on the device is ordered
after them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, UntypedStorage

from minitrain.parallel.shards import copy_to_host, to_local

Tensors = Callable[[], Iterable[Tensor]]


class Memory:
    """Keeps on the device what the current part of a step needs; at first, everything.

    kept, lost: tensors that only one part of a step needs, by the part's name. The values of `lost`
    are not saved.
    """

    def __init__(self, kept: dict[str, Tensors], lost: dict[str, Tensors]):
        self.kept = kept
        self.lost = lost
        # by part: (storage, its bytes, its copy on the host, or None if its values are lost)
        self.away: dict[str, list[tuple[UntypedStorage, int, Tensor | None]]] = defaultdict(list)

    def hold(self, name: str) -> None:
        """Load the tensors of this name, and offload all others."""
        for other, tensors in (self.kept | self.lost).items():
            if other == name:
                continue
            for storage in storages(tensors()):
                copy = copy_to_host(bytes_of(storage)) if other in self.kept else None
                self.away[other].append((storage, storage.nbytes(), copy))
                storage.resize_(0)
        for storage, size, copy in self.away.pop(name, []):
            # the same storage object: all tensors that use it have their memory back
            storage.resize_(size)
            if copy is not None:
                bytes_of(storage).copy_(copy, non_blocking=True)


def bytes_of(storage: UntypedStorage) -> Tensor:
    """Return all bytes of a storage as a tensor, uint8 [bytes], of the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return the distinct storages of this rank's local tensors, each [...]."""
    found = {
        storage.data_ptr(): storage
        for storage in (to_local(tensor).untyped_storage() for tensor in tensors)
    }
    return [storage for storage in found.values() if storage.nbytes()]
