"""Memory that training and sampling leave to each other, where a rank does both in turns (grpo.offload).

    sampling    the optimizer's states and the reference's weights are on the host
    training    the sampler's own weights are gone: the refit that follows writes all of them anew

Tensors stay what they are, so that optimizers, FSDP and compiled graphs need not know: only their storage is given
back, and taken again. Copies wait for no one, since all that the device does later comes after them.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor


class Memory:
    """Is for training at first. waiting, sampler: give the tensors that nothing but training, or sampling, needs."""

    def __init__(self, waiting: Callable[[], Iterable[Tensor]], sampler: Callable[[], Iterable[Tensor]]):
        self.waiting, self.sampler, self.sampling = waiting, sampler, True
        self.on_host: list[tuple[UntypedStorage, Tensor]] = []
        self.gone: list[tuple[UntypedStorage, int]] = []
        self.for_training()

    def for_sampling(self) -> None:
        """From now on until `for_training`. The sampler's weights hold nothing yet."""
        if not self.sampling:
            self.on_host = [(storage, to_host(storage)) for storage in storages(self.waiting())]
            for storage, size in self.gone:
                storage.resize_(size)
            self.gone, self.sampling = [], True

    def for_training(self) -> None:
        """From now on until `for_sampling`."""
        if self.sampling:
            self.gone = [(storage, storage.nbytes()) for storage in storages(self.sampler())]
            for storage, _ in self.gone:
                storage.resize_(0)
            for storage, values in self.on_host:
                storage.resize_(values.nbytes)
                as_bytes(storage).copy_(values, non_blocking=True)
            self.on_host, self.sampling = [], False


def storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Of this rank's parts, each once, whoever shares it."""
    parts = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    found = {storage.data_ptr(): storage for storage in (part.untyped_storage() for part in parts)}
    return [storage for storage in found.values() if storage.nbytes()]


def to_host(storage: UntypedStorage) -> Tensor:
    """The bytes of a storage, which is empty then."""
    values = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    values.copy_(as_bytes(storage), non_blocking=True)
    storage.resize_(0)
    return values


def as_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
