"""Activation offload: what blocks save for the backward pass waits in the host's memory.

    forward pass    while block i + 1 computes, what block i has saved is copied to the host; once
                    block i + 1 is done, the device's memory of it is freed
    backward pass   while block i computes, what block i - 1 has saved is copied back

The device then holds the activations of two blocks, however many there are. Nothing is computed
twice and nothing is rounded: gradients are the same to the bit. A block's activations cross the bus
twice, about 34 h bytes per token of width h in bf16 each way; they are hidden if a block computes
for longer than that takes. Copies run on a stream of their own, from and to pinned memory, of which
torch rounds each piece up to a power of two and keeps what is freed for the next step. On the CPU
the same code makes plain copies.

A block's own are tensors of at least MIN_BYTES that are not its parameters or buffers, nor what it
is called with beside hidden states: masks, rotary tables and texts, which other blocks save too.
Indices stay as well, which are small, and which FlexAttention's masks share.

Blocks that recompute (full-offload) save their input alone: 2 h bytes go and come, which hardly any
block is too short for, and the device's activations no longer grow with the number of layers.

The autograd graph owns all copies: they are freed when it is, after an exception too.
Hooks of saved tensors run around a block's call, so outside of its compiled graph and of FSDP's
hooks. Source: vDNN (Rhu et al. 2016); torch.autograd.graph.save_on_cpu, which waits for each copy.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module

from minitrain.models.variants import set_variant
from minitrain.parallel.shards import copy_to_host, to_local

# smaller tensors are not worth a copy's launch
MIN_BYTES = 1 << 20


def offload(blocks: list[Module]) -> None:
    """Make `blocks`, which run in this order, offload what they save. Parameter names stay.

    A block's first argument is its own, hidden states; all others belong to several blocks.
    """
    runs = Runs(blocks[0]) if blocks else None
    for block in blocks:
        set_variant(block, offloading(type(block)))
        block.runs = runs


# one class, as in recompute.py
@cache
def offloading(kind: type) -> type:
    """Return the variant of a block's class that offloads what a call saves."""

    class Offloading(kind):
        def __call__(self, hidden: Tensor, *others, **more):
            if not torch.is_grad_enabled():
                return super().__call__(hidden, *others, **more)
            with self.runs.saved_by(self, (*others, *more.values())):
                return super().__call__(hidden, *others, **more)

    return Offloading


class Runs:
    """The last run of blocks that follow each other. The graph owns it, so it may be gone."""

    def __init__(self, first: Module):
        self.first = first
        self.last = lambda: None

    @contextmanager
    def saved_by(self, block: Module, shared: tuple) -> Iterator[None]:
        """Offload what a forward pass of `block` saves inside a `with` statement."""
        last = self.last()
        run = Run(block, shared, None if block is self.first else last)
        with saved_tensors_hooks(run.pack, run.unpack):
            yield
        run.to_host()
        if last is not None:
            last.release()
        self.last = weakref.ref(run)


class Stored:
    """A storage that a block has saved: on the device, on the host, or on both; uint8 [bytes]."""

    def __init__(self, tensor: Tensor):
        count = tensor.untyped_storage().nbytes() // tensor.itemsize
        everything = tensor.detach().as_strided((count,), (1,), 0)
        self.device: Tensor | None = everything.view(torch.uint8)
        self.host: Tensor | None = None


class Saved(NamedTuple):
    """What autograd keeps in place of a tensor: a view of a storage."""

    stored: Stored
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class Run:
    """A forward pass of one block and its backward pass.

    shared: what the block is called with beside hidden states. before: the run of the block before,
        whose backward pass comes next.
    """

    def __init__(self, block: Module, shared: tuple, before: "Run | None"):
        self.block = block
        self.shared = shared
        self.before = weakref.ref(before) if before else lambda: None
        # by `identity`; what the graph has freed is gone
        self.stored: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
        # where copies on CUDA are complete
        self.left: torch.cuda.Event | None = None
        self.arrived: torch.cuda.Event | None = None
        self.wanted = False

    @cached_property
    def kept(self) -> set[int]:
        """Return the storages that are not the block's own to move.

        First asked for inside of the block's forward pass, when FSDP has gathered its weights.
        """
        weights = [*self.block.parameters(), *self.block.buffers()]
        return {
            identity(to_local(x).untyped_storage()) for x in tensors_in((weights, self.shared))
        }

    def pack(self, tensor: Tensor) -> Tensor | Saved:
        """Return what autograd keeps of a saved tensor [...]."""
        # DTensors, and tensors of a compiler at work, have no memory
        if not has_memory(tensor) or tensor.dtype in (torch.int32, torch.int64):
            return tensor
        storage = tensor.untyped_storage()
        key = identity(storage)
        odd = storage.nbytes() % tensor.itemsize
        if storage.nbytes() < MIN_BYTES or odd or key in self.kept:
            return tensor
        self.place = tensor.device
        # several tensors may be views of one storage, and Linears of the same input save it again.
        # What is saved is not changed in place, or autograd would refuse it without offload
        stored = self.stored.get(key)
        if stored is None:
            stored = self.stored[key] = Stored(tensor)
        return Saved(stored, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def unpack(self, saved: Tensor | Saved) -> Tensor:
        """Return the tensor [...] that `pack` got."""
        if isinstance(saved, Tensor):
            return saved
        self.to_device()
        before = self.before()
        if before is not None:
            before.to_device()
        if self.arrived:
            self.arrived.wait()
        everything = saved.stored.device.view(saved.dtype)
        return everything.as_strided(saved.shape, saved.stride, saved.offset)

    def to_host(self) -> None:
        """Begin to copy what the forward pass has saved to the host."""
        # FSDP has freed a gathered weight, and will fill it again itself
        own = [x for x in self.stored.values() if x.device.untyped_storage().nbytes()]
        if own:
            with beside(self.place) as stream:
                for stored in own:
                    stored.host = copy_to_host(stored.device)
            self.left = stream and stream.record_event()

    def release(self) -> None:
        """Free the device's memory of what is on the host, unless the backward pass has begun."""
        if self.wanted:
            return
        if self.left:
            # a later kernel may get the memory
            self.left.wait()
        for stored in self.stored.values():
            if stored.host is not None:
                stored.device = None

    def to_device(self) -> None:
        """Begin to copy back what is on the host alone, once."""
        if self.wanted:
            return
        self.wanted = True
        absent = [stored for stored in self.stored.values() if stored.device is None]
        if not absent:
            return
        # memory of the stream that computes
        buffers = [torch.empty_like(stored.host, device=self.place) for stored in absent]
        with beside(self.place) as stream:
            for stored, buffer in zip(absent, buffers, strict=True):
                if stream:
                    # should an exception free it while it is filled
                    buffer.record_stream(stream)
                stored.device = copy_to_device(stored.host, buffer)
                stored.host = None
        self.arrived = stream and stream.record_event()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors [...] in nested lists, tuples and dataclasses, such as masks."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        yield from tensors_in(list(vars(value).values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


@contextmanager
def beside(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Run copies after what the device has been given so far, but beside what comes next.

    Yields the stream of copies; None on the CPU, which makes them at once.
    """
    if device.type != "cuda":
        yield None
        return
    stream = copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def copy_to_device(x: Tensor, buffer: Tensor) -> Tensor:
    """Copy x [...] from pinned memory into a buffer [...] on the device, asynchronously; return that."""
    return buffer.copy_(x, non_blocking=True)


def identity(storage: UntypedStorage) -> int:
    """Return a number that a living storage shares with no other one. Fake ones have no address."""
    return StorageWeakRef(storage).cdata


def has_memory(tensor: Tensor) -> bool:
    """Tell whether a tensor [...] is a plain one, whose storage can be copied."""
    return type(tensor) is Tensor
