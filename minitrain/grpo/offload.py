"""Memory that the parts of a step leave to each other, where a rank both trains and samples
(grpo.offload).

    generation, refit   the sampler's own weights
    logprobs            the reference's weights
    training            the optimizer's states

What a part does not need waits on the host, but for the sampler's weights: the next refit writes
all of them anew.

Tensors stay what they are, so that optimizers, FSDP and compiled graphs need not know: only their
storage is given back, and taken again. Copies wait for no one, since all that the device does later
comes after them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, UntypedStorage

from minitrain.parallel.shards import to_local

Tensors = Callable[[], Iterable[Tensor]]


class Memory:
    """Holds everything at first.

    kept, lost: tensors that only one part of a step needs, by its name; of those in `lost` the
    values are lost.
    """

    def __init__(self, kept: dict[str, Tensors], lost: dict[str, Tensors]):
        self.kept = kept
        self.lost = lost
        self.away: dict[str, list[tuple[UntypedStorage, int, UntypedStorage | None]]] = defaultdict(
            list
        )

    def hold(self, name: str) -> None:
        """From now on the tensors of this name, and no others."""
        for other, tensors in (self.kept | self.lost).items():
            for storage in storages(tensors()) if other != name else []:
                copy = to_host(storage) if other in self.kept else None
                self.away[other].append((storage, storage.nbytes(), copy))
                storage.resize_(0)
        for storage, size, copy in self.away.pop(name, []):
            storage.resize_(size)
            if copy is not None:
                storage.copy_(copy, non_blocking=True)


def storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Of this rank's parts, each once, whoever shares it."""
    found = {
        storage.data_ptr(): storage
        for storage in (to_local(tensor).untyped_storage() for tensor in tensors)
    }
    return [storage for storage in found.values() if storage.nbytes()]


def to_host(storage: UntypedStorage) -> UntypedStorage:
    """A copy."""
    copy = torch.empty(
        storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda"
    ).untyped_storage()
    return copy.copy_(storage, non_blocking=True)
