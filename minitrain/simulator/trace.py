"""Record what a training step does on one rank: kernels, collectives, and the memory it holds.

A dispatch mode sits below autograd, FSDP and compiled graphs, and sees each operator in order, with
its tensors. These may be fake (`--simulate`: nothing is computed and nothing allocated) or real. So
the counts of a run on a thousand GPUs can be compared with those of a real run. Views and
allocations cost nothing and are not recorded.
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

# no public name tells where DTensor infers shapes, and none is below autograd
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

# the dimensions over which FSDP communicates, by collectives of its own
SHARDS = ("dp_replicate", "dp_shard")
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations")


class Event(NamedTuple):
    """One kernel or collective.

    kind: `gemm`, `grouped`, `attention`, `memory`, `collective`, or the `wait` for one.
    reads, writes: (storage number, bytes) of each tensor.
    sizes: of a matrix product (batch or experts, m, n, k), the last three of one product; of
        attention (channels per head, keys per query).
    element: bytes per element of the factors of a product.
    payload: bytes of a collective's full, gathered or unreduced tensor.
    group, dimension: a collective's group, a name in `Trace.groups`, and its mesh dimension.
    form: of attention, `full`, `causal` or `flex`, which computes any other mask.
    """

    name: str
    kind: str
    flops: int
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]
    sizes: tuple[int, ...] = ()
    element: int = 2
    payload: int = 0
    group: str = ""
    dimension: str = ""
    form: str = ""

    def renumbered(self, now: dict[int, int]) -> "Event":
        """Return the same event on other storages. now: number here -> number there."""
        reads = [(now[number], size) for number, size in self.reads]
        writes = [(now[number], size) for number, size in self.writes]
        return self._replace(reads=reads, writes=writes)


@dataclass
class Trace:
    """The record of one rank's step.

    events: in the order of issue.
    died: storage number -> index of the event after which the storage was freed.
    groups: name of a process group -> its mesh dimensions, and its ranks.
    marks: (index of the next event, label).
    blocks: (index of the next event, name of the block that runs from there on, or None).
    held: bytes by kind of memory, as in MEMORY_KINDS, when each event was issued.
    peak: bytes by kind of memory when their sum was largest, after the event `peak_at`. Its kind
        `gathered` is what collectives bring, and the weights that FSDP and FP8 make of it.
    """

    events: list[Event] = field(default_factory=list)
    died: dict[int, int] = field(default_factory=dict)
    groups: dict[str, tuple[list[str], list[int]]] = field(default_factory=dict)
    marks: list[tuple[int, object]] = field(default_factory=list)
    blocks: list[tuple[int, str | None]] = field(default_factory=list)
    held: list[tuple[int, ...]] = field(default_factory=list)
    peak: dict[str, int] = field(default_factory=dict)
    peak_at: int = 0

    def flops(self, times: Iterable[int] = repeat(1)) -> int:
        """Return the FLOPs of a step. times: how often each event happens."""
        return sum(n * event.flops for event, n in zip(self.events, times, strict=False))

    def collectives(self, times: Iterable[int] = repeat(1)) -> dict[str, list[int]]:
        """Count [calls, bytes] by `dimension/operation`. times: how often each event happens."""
        totals: dict[str, list[int]] = {}
        for event, n in zip(self.events, times, strict=False):
            if event.kind == "collective":
                entry = totals.setdefault(f"{event.dimension}/{event.name}", [0, 0])
                entry[0] += n
                entry[1] += n * event.payload
        return totals


class Tracer(TorchDispatchMode):
    """Fills `self.trace` with what runs inside `with Tracer(...)`.

    groups: as in Trace.
    log: if a list, the methods that change the trace or the memory note their calls there (see
        repeat.py).
    active: the tracer inside whose `with` the program is.
    Tensors that exist before `with` count once `hold` has named their kind.
    """

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
        self.held = Counter(dict.fromkeys(MEMORY_KINDS, 0))
        self.most = 0
        self.count = 0
        self.muted = 0
        self.log: list[tuple] | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # what the compiler does while it compiles is no part of the program
        return True

    # ------------------------------------------------------------------------------------------------------- memory

    def hold(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count these plain tensors' storages as `kind`, also in what the peak has been so far."""
        for number in map(self.number, tensors):
            self.count_as(number, kind)

    def count_as(self, number: int, kind: str) -> None:
        self.note("count_as", number, kind)
        size, before = self.sizes[number]
        self.sizes[number] = size, kind
        totals = [self.held]
        if self.trace.peak and self.born[number] <= self.trace.peak_at:
            totals.append(self.trace.peak)
        for total in totals:
            total[before] -= size
            total[kind] += size

    def number(self, tensor: Tensor, kind: str = "activations") -> int:
        """Return the number of the storage of a tensor [...].

        A storage not seen before counts as `kind` from now until it is freed.
        """
        storage = tensor.untyped_storage()
        address = storage_address(storage)
        if address not in self.numbers:
            self.adopt(tensor, self.new_number(kind))
        number = self.numbers[address]
        self.resize(number, storage.nbytes())
        return number

    def new_number(self, kind: str) -> int:
        self.count += 1
        self.note("new_number", self.count, kind)
        self.sizes[self.count] = 0, kind
        self.born[self.count] = len(self.trace.events)
        return self.count

    def adopt(self, tensor: Tensor, number: int) -> None:
        """Give this tensor's storage a number, for as long as the storage lives. tensor: [...]."""
        storage = tensor.untyped_storage()
        address = storage_address(storage)
        self.numbers[address] = number
        weakref.finalize(storage, self.forget, number, address)

    def resize(self, number: int, size: int) -> None:
        before, kind = self.sizes[number]
        if size != before:
            self.note("resize", number, size)
            self.sizes[number] = size, kind
            self.held[kind] += size - before
            total = sum(self.held.values())
            if total > self.most:
                self.most = total
                self.trace.peak = dict(self.held)
                self.trace.peak_at = len(self.trace.events)

    def forget(self, number: int, address: int | None = None) -> None:
        """Count the storage as freed. address: its own, if it had one."""
        self.note("forget", number)
        if self.numbers.get(address) == number:
            del self.numbers[address]
        size, kind = self.sizes.pop(number)
        self.held[kind] -= size
        self.trace.died[number] = len(self.trace.events) - 1

    def note(self, method: str, *what) -> None:
        if self.log is not None:
            self.log.append((method, *what))

    # -------------------------------------------------------------------------------------------------------- hooks

    def __enter__(self):
        resize = torch.UntypedStorage.resize_
        allocate = FSDPParam.init_all_gather_outputs
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_and_count(storage, size):
            """Follow FSDP2, which frees and allocates gathered weights by resizing storages."""
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
            """Follow FSDP2's first allocation; later ones resize the storage."""
            allocate(parameter, *args, **kwargs)
            self.hold(parameter.all_gather_outputs, "gathered")

        def propagate_muted(*args, **kwargs):
            """Leave out the tensors of global size from which DTensor infers shapes."""
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
        """Trace nothing of what runs inside."""
        self.muted += 1
        try:
            yield
        finally:
            self.muted -= 1

    def record(self, event: Event) -> None:
        self.note("record", event)
        self.trace.events.append(event)
        self.trace.held.append(tuple(self.held.values()))

    def mark(self, label: object) -> None:
        self.trace.marks.append((len(self.trace.events), label))

    # ------------------------------------------------------------------------------------------------------ operators

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.muted or op is torch.ops.prim.device.default:
            return op(*args, **kwargs)
        if any(issubclass(t, DTensor | functional.AsyncCollectiveTensor) for t in types):
            # they unwrap themselves, and their inner operators come back here
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
        """Run one of this package's operators that changes a tensor.

        Until the compiler writes kernels, a graph holds it as one that returns a new tensor. The
        kernel that it becomes changes its argument: so it is recorded.
        """
        args = [
            kwargs[name] if name in kwargs else _all_bases[kwargs[f"_{name}_base_index"]]
            for name in argument_names(op)
        ]
        return self.__torch_dispatch__(op, (), args), *_all_bases

    def record_kernel(self, name: str, inputs: list, written: list, kernel: dict) -> None:
        """Record a kernel with the bytes that it moves. kernel: as `operator_work` returns it."""
        writes = {self.number(x): traffic(x) for x in written}
        reads = {self.number(x): traffic(x) for x in inputs}
        if name in ROWS_READ:
            most = max(writes.values(), default=0)
            reads = {number: min(size, most) for number, size in reads.items()}
        # of the factors, not of what their product is added to
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
        if name in ("_wrap_tensor_autograd", "barrier", "monitored_barrier_"):
            return
        where = {}
        if name != "wait_tensor":
            group = self.group_of(args)
            functional = op.namespace != "c10d"
            where = dict(group=group, dimension=self.dimension_of(group, functional))
            if not functional:
                outputs = tensors(args[0])
                inputs = [x for x in inputs if not any(x is y for y in outputs)] or inputs
        # the result of a wait is another tensor if fake: its argument counts as gathered, too
        kind = "activations" if where else "gathered"
        writes = [(self.number(x, "gathered"), x.nbytes) for x in outputs]
        reads = [(self.number(x, kind), x.nbytes) for x in inputs]
        if not where:
            self.record(Event(name, "wait", 0, reads, writes))
            return
        for number, _ in writes:
            if self.sizes[number][1] == "activations":
                self.count_as(number, "gathered")
        payload = max(sum(size for _, size in moved) for moved in (writes, reads))
        name = name.strip("_")
        self.record(Event(name, "collective", 0, reads, writes, payload=payload, **where))

    def group_of(self, args) -> str:
        """Return the name of a collective's group.

        A group that no mesh has (a flattened one, the world) gets the dimension `others`.
        """
        boxed = tensors(args, torch.ScriptObject)
        # an operator of c10d has the group itself, a functional collective its name as last string
        if boxed:
            name = dist.ProcessGroup.unbox(boxed[0]).group_name
        else:
            name = tensors(args, str)[-1]
        if name not in self.trace.groups:
            group = next(group for group in all_groups() if group.group_name == name)
            self.trace.groups[name] = ["others"], dist.get_process_group_ranks(group)
        return name

    def dimension_of(self, group: str, functional: bool) -> str:
        """Return the mesh dimension that communicates.

        Dimensions of the same ranks share a group; FSDP's calls are told by their form.
        """
        names = self.trace.groups[group][0]
        return next((name for name in names if (name in SHARDS) != functional), names[0])
