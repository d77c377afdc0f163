"""Record the kernels, the collectives and the memory of a training step on one rank.

A dispatch mode sits below autograd, FSDP and compiled graphs, and sees every operator with its tensors,
in order. The tensors may be fake (`--simulate`, where nothing is computed or allocated) or real, so
that tests can compare the counts of both. Views and allocations cost nothing and are not recorded.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# there is no public name for the place where DTensor infers shapes
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from minitrain.parallel.collectives import functional
from minitrain.parallel.fsdp import FSDPParam
from minitrain.run.launch.rendezvous import all_groups
from minitrain.simulator.operators import (
    ROWS_READ,
    argument_names,
    is_allocation,
    is_free,
    operator_work,
    storage_address,
    tensors,
    traffic,
    wrapped_operator,
    written_arguments,
)

# mesh dimensions over which FSDP communicates, by collectives of c10d instead of functional ones
SHARDS = ("dp_replicate", "dp_shard")
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations")


class Event(NamedTuple):
    """One kernel or collective."""

    name: str
    # gemm, grouped, attention, memory, collective, or `wait` for a collective; copy, copied and
    # host update: see host_copies.py
    kind: str
    flops: int
    # (storage number, bytes) of each tensor
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]
    # matrix products: (batch or experts, m, n, k), where m, n, k are those of one product;
    # attention: (channels per head, keys per query)
    sizes: tuple[int, ...] = ()
    # bytes per element of a matrix product's factors
    element: int = 2
    # bytes of a collective's full tensor: after gathering, or before reducing
    payload: int = 0
    # a collective's group, as a key of `Trace.groups`, and its mesh dimension
    group: str = ""
    dimension: str = ""
    # attention: full, causal, or flex for any other mask
    form: str = ""

    def renumbered(self, now: dict[int, int]) -> "Event":
        """Return the same event on other storages. now: old storage number -> new number."""
        reads = [(now[number], size) for number, size in self.reads]
        writes = [(now[number], size) for number, size in self.writes]
        return self._replace(reads=reads, writes=writes)


@dataclass
class Trace:
    """The record of one rank's step."""

    # all events, in the order in which they were issued
    events: list[Event] = field(default_factory=list)
    # storage number -> index of the event after which the storage was freed
    died: dict[int, int] = field(default_factory=dict)
    # name of a process group -> its mesh dimensions and its ranks
    groups: dict[str, tuple[list[str], list[int]]] = field(default_factory=dict)
    # (index of the next event, label); see `trace_step`
    marks: list[tuple[int, object]] = field(default_factory=list)
    # (index of the next event, name of the block that begins there; None: a forward pass ends)
    blocks: list[tuple[int, str | None]] = field(default_factory=list)
    # for each event, bytes by kind when it was issued, in the order of MEMORY_KINDS
    memory: list[tuple[int, ...]] = field(default_factory=list)
    # bytes by kind when their sum was largest, after event `peak_at`. `gathered` are results of
    # collectives, and the weights that FSDP and FP8 make of them
    peak: dict[str, int] = field(default_factory=dict)
    peak_at: int = 0
    # the most bytes of activations on the host
    host_peak: int = 0

    def flops(self, times: Iterable[int] = repeat(1)) -> int:
        """Return the FLOPs of a step. times: how often each event happens in it."""
        return sum(n * event.flops for event, n in zip(self.events, times, strict=False))

    def collectives(self, times: Iterable[int] = repeat(1)) -> dict[str, list[int]]:
        """Return [calls, bytes] by `dimension/operation`. times: how often each event happens."""
        totals: dict[str, list[int]] = {}
        for event, n in zip(self.events, times, strict=False):
            if event.kind == "collective":
                entry = totals.setdefault(f"{event.dimension}/{event.name}", [0, 0])
                entry[0] += n
                entry[1] += n * event.payload
        return totals


class Tracer(TorchDispatchMode):
    """Record in `self.trace` what runs inside `with Tracer(...)`.

    Memory of tensors that exist before is counted once `classify` is called with their kind.
    groups: as in Trace.
    """

    # the tracer whose `with` block is being executed
    active: "Tracer | None" = None
    supports_higher_order_operators = True

    def __init__(self, groups: dict[str, tuple[list[str], list[int]]]):
        super().__init__()
        self.trace = Trace(groups=groups)
        # address of a living storage -> its number
        self.numbers: dict[int, int] = {}
        # number -> bytes and kind
        self.sizes: dict[int, tuple[int, str]] = {}
        # number -> index of the event before which it was first seen
        self.born: dict[int, int] = {}
        # bytes by kind now, and the largest sum so far
        self.memory = Counter(dict.fromkeys(MEMORY_KINDS, 0))
        self.most = 0
        # bytes on the host now
        self.on_host = 0
        # number of storages seen so far
        self.count = 0
        # depth of nested `silent` blocks
        self.muted = 0
        # repeat.py sets a list here; methods that change the trace then append their calls
        self.log: list[tuple] | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # operators that the compiler runs while it compiles are not part of the step
        return True

    # --- memory

    def classify(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count the storages of these plain tensors as `kind`, also in the peak so far."""
        for number in map(self.number, tensors):
            self.set_kind(number, kind)

    def set_kind(self, number: int, kind: str) -> None:
        """Change the kind of a storage, also in the peak so far."""
        self.note("set_kind", number, kind)
        size, before = self.sizes[number]
        self.sizes[number] = size, kind
        totals = [self.memory]
        if self.trace.peak and self.born[number] <= self.trace.peak_at:
            totals.append(self.trace.peak)
        for total in totals:
            total[before] -= size
            total[kind] += size

    def number(self, tensor: Tensor, kind: str = "activations") -> int:
        """Return the number of a tensor's storage.

        A storage that was not seen before counts as `kind` from now on until it is freed.
        """
        storage = tensor.untyped_storage()
        address = storage_address(storage)
        if address not in self.numbers:
            self.adopt(tensor, self.new_number(kind))
        number = self.numbers[address]
        self.resize(number, storage.nbytes())
        return number

    def new_number(self, kind: str) -> int:
        """Return a number for a new storage of size 0."""
        self.count += 1
        self.note("new_number", self.count, kind)
        self.sizes[self.count] = 0, kind
        self.born[self.count] = len(self.trace.events)
        return self.count

    def adopt(self, tensor: Tensor, number: int) -> None:
        """Give a tensor's storage a number for as long as the storage lives."""
        storage = tensor.untyped_storage()
        address = storage_address(storage)
        self.numbers[address] = number
        weakref.finalize(storage, self.forget, number, address)

    def resize(self, number: int, size: int) -> None:
        """Set the bytes of a storage, and update the peak."""
        before, kind = self.sizes[number]
        if size != before:
            self.note("resize", number, size)
            self.sizes[number] = size, kind
            self.memory[kind] += size - before
            total = sum(self.memory.values())
            if total > self.most:
                self.most = total
                self.trace.peak = dict(self.memory)
                self.trace.peak_at = len(self.trace.events)

    def forget(self, number: int, address: int | None = None) -> None:
        """Count a storage as freed. address: its storage object's; None while replaying a recording."""
        self.note("forget", number)
        if self.numbers.get(address) == number:
            del self.numbers[address]
        size, kind = self.sizes.pop(number)
        self.memory[kind] -= size
        self.trace.died[number] = len(self.trace.events) - 1

    def hold_on_host(self, size: int) -> None:
        """Count bytes that are kept on the host, or with a negative size freed there."""
        self.on_host += size
        self.trace.host_peak = max(self.trace.host_peak, self.on_host)

    def note(self, method: str, *arguments) -> None:
        """Append a call of one of this class's methods to the log, if there is one."""
        if self.log is not None:
            self.log.append((method, *arguments))

    # --- hooks

    def __enter__(self):
        resize = torch.UntypedStorage.resize_
        allocate = FSDPParam.init_all_gather_outputs
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_and_count(storage, size):
            """Count gathered weights, which FSDP2 frees and allocates by resizing storages."""
            result = resize(storage, size)
            if storage_address(storage) in self.numbers:
                number = self.numbers[storage_address(storage)]
                if size == 0:
                    self.trace.died[number] = len(self.trace.events) - 1
                elif self.sizes[number][0] == 0:
                    self.sizes[number] = 0, "gathered"
                self.resize(number, size)
            return result

        def allocate_and_count(parameter, *args, **kwargs):
            """Count FSDP2's first allocation of gathered weights; later ones resize the storage."""
            allocate(parameter, *args, **kwargs)
            self.classify(parameter.all_gather_outputs, "gathered")

        def propagate_muted(*args, **kwargs):
            """Leave out operators on the global shapes, by which DTensor infers shapes."""
            with self.silent():
                return propagate(*args, **kwargs)

        Tracer.active = self
        self.patches = ExitStack()
        for owner, name, stand_in in (
            (torch.UntypedStorage, "resize_", resize_and_count),
            (FSDPParam, "init_all_gather_outputs", allocate_and_count),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_muted),
        ):
            self.patches.enter_context(patch.object(owner, name, stand_in))
        return super().__enter__()

    def __exit__(self, *exception):
        Tracer.active = None
        self.patches.close()
        return super().__exit__(*exception)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Record nothing of what runs inside."""
        self.muted += 1
        try:
            yield
        finally:
            self.muted -= 1

    def record(self, event: Event) -> None:
        """Append an event, and the memory that is held now."""
        self.note("record", event)
        self.trace.events.append(event)
        self.trace.memory.append(tuple(self.memory.values()))

    def mark(self, label: object) -> None:
        """Put a label before the next event."""
        self.trace.marks.append((len(self.trace.events), label))

    # --- operators

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.muted or op is torch.ops.prim.device.default:
            return op(*args, **kwargs)
        if any(issubclass(t, DTensor | functional.AsyncCollectiveTensor) for t in types):
            # these classes unwrap themselves, and their inner operators are dispatched here again
            return NotImplemented
        if op is torch.ops.higher_order.auto_functionalized_v2:
            return self.in_place(*args, **kwargs)
        out = op(*args, **kwargs)
        op, args = wrapped_operator(op, args)
        if is_free(op):
            return out
        name = op.overloadpacket.__name__
        inputs = tensors((args, kwargs))
        outputs = tensors(out)
        if op.namespace in COLLECTIVES:
            self.record_collective(op, name, args, inputs, outputs)
        elif is_allocation(name):
            for x in outputs:
                self.number(x)
        else:
            written = outputs + written_arguments(op, args, kwargs)
            self.record_kernel(name, inputs, written, operator_work(op, name, args, kwargs, out))
        return out

    def in_place(self, op, *, _all_bases: list[Tensor], **kwargs) -> tuple:
        """Run one of this package's operators that write in place, within a compiled graph.

        The compiler's graphs have it in a functional form that returns a new tensor. Only its code
        generation, which does not run here, restores the in-place form. That form is recorded.
        """
        args = [
            kwargs[name] if name in kwargs else _all_bases[kwargs[f"_{name}_base_index"]]
            for name in argument_names(op)
        ]
        return self.__torch_dispatch__(op, (), args), *_all_bases

    def record_kernel(self, name: str, inputs: list, written: list, kernel: dict) -> None:
        """Record a kernel with the bytes that it moves. kernel: from `operator_work`."""
        writes = {self.number(x): traffic(x) for x in written}
        reads = {self.number(x): traffic(x) for x in inputs}
        if name in ROWS_READ:
            most = max(writes.values(), default=0)
            reads = {number: min(size, most) for number, size in reads.items()}
        # the factors' size: a tensor that their product is added to may have wider elements
        element = min((x.element_size() for x in inputs if x.is_floating_point()), default=2)
        event = Event(
            name,
            reads=list(reads.items()),
            writes=list(writes.items()),
            element=element,
            **kernel,
        )
        self.record(event)

    def record_collective(self, op, name: str, args, inputs: list, outputs: list) -> None:
        """Record a collective, or the wait for one, with its group and payload."""
        if name in ("_wrap_tensor_autograd", "barrier", "monitored_barrier_"):
            return
        where = {}
        if name != "wait_tensor":
            group = self.group_of(args)
            is_functional = op.namespace != "c10d"
            where = dict(group=group, dimension=self.dimension_of(group, is_functional))
            if not is_functional:
                outputs = tensors(args[0])
                inputs = [x for x in inputs if not any(x is y for y in outputs)] or inputs
        # waiting for a fake tensor returns another tensor, so its argument counts as gathered too
        kind = "activations" if where else "gathered"
        writes = [(self.number(x, "gathered"), x.nbytes) for x in outputs]
        reads = [(self.number(x, kind), x.nbytes) for x in inputs]
        if not where:
            self.record(Event(name, "wait", 0, reads, writes))
            return
        for number, _ in writes:
            if self.sizes[number][1] == "activations":
                self.set_kind(number, "gathered")
        payload = max(sum(size for _, size in moved) for moved in (writes, reads))
        name = name.strip("_")
        self.record(Event(name, "collective", 0, reads, writes, payload=payload, **where))

    def group_of(self, args) -> str:
        """Return the name of a collective's group.

        A group that no mesh has (a flattened one, the world) gets the dimension `others`.
        """
        boxed = tensors(args, torch.ScriptObject)
        # c10d's operators take the group itself, functional collectives its name as the last string
        if boxed:
            name = dist.ProcessGroup.unbox(boxed[0]).group_name
        else:
            name = tensors(args, str)[-1]
        if name not in self.trace.groups:
            group = next(group for group in all_groups() if group.group_name == name)
            self.trace.groups[name] = ["others"], dist.get_process_group_ranks(group)
        return name

    def dimension_of(self, group: str, is_functional: bool) -> str:
        """Return the mesh dimension of a collective.

        Dimensions with the same ranks share a group. Of these, calls that are not functional are
        FSDP's.
        """
        names = self.trace.groups[group][0]
        return next((name for name in names if (name in SHARDS) != is_functional), names[0])
