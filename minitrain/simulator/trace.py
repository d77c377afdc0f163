"""Record what a training step does on one rank: every kernel and collective in order, and the
memory that it holds.

A dispatch mode sits below autograd, FSDP and compiled graphs, and sees each operator with its
tensors. These may be fake (`--simulate`: nothing is computed and nothing allocated) or real, so
that what is counted for a thousand GPUs can be counted in a real run too, and compared. Views and
allocations cost nothing and are not recorded.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from math import prod
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload  # no public name for either
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import (
    _resolve_process_group,  # no public name finds a group
)
from torch.distributed.fsdp._fully_shard._fsdp_param import (
    FSDPParam,  # no public name says what it gathers into
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import minitrain.models.fp8
import minitrain.models.lora  # noqa: F401  these two define operators
from minitrain.errors import InputError

aten = torch.ops.aten
SHARDS = (
    "dp_replicate",
    "dp_shard",
)  # the dimensions over which FSDP communicates, by collectives of its own
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
ROWS_READ = (
    "embedding",
    "index_select",
    "gather",
    "index",
    "scatter",
    "scatter_add",
)  # of their large operand
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations")


@dataclass(slots=True)
class Event:
    """One kernel or collective.

    kind: `gemm`, `grouped`, `attention`, `memory`, `collective`, or the `wait` for one. reads,
    writes: (storage number, bytes) of each tensor. sizes: of a matrix product, (batch or groups, m,
    n, k); of attention, channels per head and keys per query. payload: bytes of a collective's
    full, gathered or unreduced tensor; group: its name in `Trace.groups`; dimension: that of the
    mesh that it runs over. element: bytes per element of what is multiplied.
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
        """The same on other storages. now: their numbers, by those here."""
        reads = [(now[number], size) for number, size in self.reads]
        writes = [(now[number], size) for number, size in self.writes]
        return replace(self, reads=reads, writes=writes)


@dataclass
class Trace:
    """events: in the order of issue. died: after which event (its index) a storage was freed, by
    storage number.

    groups: by name of a process group, its mesh dimensions and its ranks. marks: (event index,
    label).
    peak: bytes by kind of memory at the moment when their sum was largest, after the event
    `peak_at`. `gathered`: what collectives bring, and the weights that FSDP and FP8 make of it.
    """

    events: list[Event] = field(default_factory=list)
    died: dict[int, int] = field(default_factory=dict)
    groups: dict[str, tuple[list[str], list[int]]] = field(default_factory=dict)
    marks: list[tuple[int, object]] = field(default_factory=list)
    peak: dict[str, int] = field(default_factory=dict)
    peak_at: int = 0

    def flops(self, times: Iterable[int] = repeat(1)) -> int:
        """times: how often each event happens."""
        return sum(n * event.flops for event, n in zip(self.events, times, strict=False))

    def collectives(self, times: Iterable[int] = repeat(1)) -> dict[str, list[int]]:
        """[calls, bytes] of each `dimension/operation`. times: how often each event happens."""
        totals: dict[str, list[int]] = {}
        for event, n in zip(self.events, times, strict=False):
            if event.kind == "collective":
                entry = totals.setdefault(f"{event.dimension}/{event.name}", [0, 0])
                entry[0] += n
                entry[1] += n * event.payload
        return totals


class Tracer(TorchDispatchMode):
    """Fills `self.trace` with what runs inside `with Tracer(...)`.

    groups: as in Trace. Tensors that exist before count when `hold` names their kind. log: if a
    list, the methods that change the trace or the memory note their calls there (see repeat.py).
    active: the tracer inside whose `with` we are.
    """

    active: "Tracer | None" = None
    supports_higher_order_operators = True

    def __init__(self, groups: dict[str, tuple[list[str], list[int]]]):
        super().__init__()
        self.trace = Trace(groups=groups)
        self.numbers: dict[int, int] = {}  # of living storages, by address
        self.sizes: dict[int, tuple[int, str]] = {}  # bytes and kind, by number
        self.born: dict[int, int] = {}  # after which event, by number
        self.held = Counter(dict.fromkeys(MEMORY_KINDS, 0))
        self.most = 0
        self.count = 0
        self.muted = 0
        self.log: list[tuple] | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what the compiler does while it compiles is no part of the program

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
        """The number of the tensor's storage; a storage not seen before counts as `kind` from now
        until it dies.
        """
        storage = tensor.untyped_storage()
        if storage._cdata not in self.numbers:
            self.adopt(tensor, self.new_number(kind))
        number = self.numbers[storage._cdata]
        self.resize(number, storage.nbytes())
        return number

    def new_number(self, kind: str) -> int:
        self.count += 1
        self.note("new_number", self.count, kind)
        self.sizes[self.count] = 0, kind
        self.born[self.count] = len(self.trace.events)
        return self.count

    def adopt(self, tensor: Tensor, number: int) -> None:
        """Let the number be that of this tensor's storage, for as long as it lives."""
        storage = tensor.untyped_storage()
        self.numbers[storage._cdata] = number
        weakref.finalize(storage, self.forget, number, storage._cdata)

    def resize(self, number: int, size: int) -> None:
        before, kind = self.sizes[number]
        if size != before:
            self.note("resize", number, size)
            self.sizes[number] = size, kind
            self.held[kind] += size - before
            total = sum(self.held.values())
            if total > self.most:
                self.most = total
                self.trace.peak, self.trace.peak_at = dict(self.held), len(self.trace.events)

    def forget(self, number: int, address: int | None = None) -> None:
        """The storage is freed. address: its own, if it had one."""
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

        def resize_and_count(storage, size):  # FSDP2 frees and brings back gathered weights so
            result = resize(storage, size)
            if storage._cdata in self.numbers:
                number = self.numbers[storage._cdata]
                if size == 0:
                    self.trace.died[number] = len(self.trace.events) - 1
                elif self.sizes[number][0] == 0:
                    self.sizes[number] = 0, "gathered"
                self.resize(number, size)
            return result

        def allocate_and_count(
            parameter, *args, **kwargs
        ):  # the first time; later it brings them back
            allocate(parameter, *args, **kwargs)
            self.hold(parameter.all_gather_outputs, "gathered")

        def propagate_muted(*args, **kwargs):  # DTensor infers shapes with tensors of global size
            with self.silent():
                return propagate(*args, **kwargs)

        Tracer.active = self
        self.patches = ExitStack()
        self.patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_and_count))
        self.patches.enter_context(
            patch.object(FSDPParam, "init_all_gather_outputs", allocate_and_count)
        )
        name = "_propagate_tensor_meta_non_cached"
        self.patches.enter_context(patch.object(ShardingPropagator, name, propagate_muted))
        return super().__enter__()

    def __exit__(self, *exception):
        Tracer.active = None
        self.patches.close()
        return super().__exit__(*exception)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """What runs inside is not traced."""
        self.muted += 1
        try:
            yield
        finally:
            self.muted -= 1

    def record(self, event: Event) -> None:
        self.note("record", event)
        self.trace.events.append(event)

    def mark(self, label: object) -> None:
        self.trace.marks.append((len(self.trace.events), label))

    # ------------------------------------------------------------------------------------------------------ operators

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.muted or op is torch.ops.prim.device.default:
            return op(*args, **kwargs)
        if any(issubclass(t, DTensor | AsyncCollectiveTensor) for t in types):
            return NotImplemented  # they unwrap themselves, and the inner operators come back here
        if op is torch.ops.higher_order.auto_functionalized_v2:
            return self.in_place(*args, **kwargs)
        out = op(*args, **kwargs)
        if isinstance(op, HigherOrderOperator):
            op, args = wrapped_operator(op, args)
        if (
            is_view(op)
            or op.namespace in ("profiler", "prim")
            or op.__name__.startswith("_local_scalar")
        ):
            return out
        inputs = tensors((args, kwargs))
        outputs = tensors(out)
        if op.namespace in COLLECTIVES:
            self.record_collective(op, args, inputs, outputs)
        elif is_allocation(op):
            for x in outputs:
                self.number(x)
        else:
            self.record_kernel(op, args, kwargs, inputs, outputs, out)
        return out

    def in_place(self, op, *, _all_bases: list[Tensor], **kwargs) -> tuple:
        """An operator of ours that changes a tensor, as a graph has it until the compiler writes
        kernels: it returns a new one then, but in the end changes what it is given."""
        names = [argument.name for argument in op._schema.arguments]
        args = [
            kwargs[name] if name in kwargs else _all_bases[kwargs[f"_{name}_base_index"]]
            for name in names
        ]
        return self.__torch_dispatch__(op, (), args), *_all_bases

    def record_kernel(self, op, args, kwargs, inputs, outputs, out) -> None:
        name = op._overloadpacket.__name__
        written = outputs + written_arguments(op, args, kwargs)
        writes = {self.number(x): traffic(x) for x in written}
        most = max(writes.values(), default=0)
        reads = {
            self.number(x): min(traffic(x), most) if name in ROWS_READ else traffic(x)
            for x in inputs
        }
        kernel = work(op, name, args, kwargs, out)
        # of the factors, not of what their product is added to
        element = min((x.element_size() for x in inputs if x.is_floating_point()), default=2)
        self.record(
            Event(
                name,
                reads=list(reads.items()),
                writes=list(writes.items()),
                element=element,
                **kernel,
            )
        )

    def record_collective(self, op, args, inputs, outputs) -> None:
        name = op._overloadpacket.__name__
        if name in ("_wrap_tensor_autograd", "barrier", "monitored_barrier_"):
            return
        if name == "wait_tensor":  # a fake one gives another tensor
            reads, writes = (
                [(self.number(x, "gathered"), x.nbytes) for x in given]
                for given in (inputs, outputs)
            )
            self.record(Event(name, "wait", 0, reads, writes))
            return
        group = self.group_of(args)
        functional = op.namespace != "c10d"
        written = outputs if functional else tensors(args[0])
        read = (
            inputs
            if functional
            else [x for x in inputs if not any(x is y for y in written)] or inputs
        )
        payload = max(sum(x.nbytes for x in written), sum(x.nbytes for x in read))
        self.hold(
            (x for x in written if self.sizes[self.number(x, "gathered")][1] == "activations"),
            "gathered",
        )
        writes = [(self.number(x), x.nbytes) for x in written]
        reads = [(self.number(x), x.nbytes) for x in read]
        where = dict(payload=payload, group=group, dimension=self.dimension_of(group, functional))
        self.record(Event(name.strip("_"), "collective", 0, reads, writes, **where))

    def group_of(self, args) -> str:
        """The name of a collective's group, noted as of `others` if no mesh has it (flattened ones,
        the world).
        """
        boxed = [value for value in tree_leaves(args) if isinstance(value, torch.ScriptObject)]
        if boxed:  # an operator of c10d
            name = dist.ProcessGroup.unbox(boxed[0]).group_name
        else:  # a functional collective, whose last string it is
            name = [value for value in tree_leaves(args) if isinstance(value, str)][-1]
        if name not in self.trace.groups:
            self.trace.groups[name] = (
                ["others"],
                dist.get_process_group_ranks(_resolve_process_group(name)),
            )
        return name

    def dimension_of(self, group: str, functional: bool) -> str:
        """Dimensions of the same ranks share a group; FSDP's calls are told from others by their
        form.
        """
        names = self.trace.groups[group][0]
        return next((name for name in names if (name in SHARDS) != functional), names[0])


def wrapped_operator(op: HigherOrderOperator, args: tuple) -> tuple[OpOverload, tuple]:
    """Return the operator that a higher-order one runs, with its arguments.

    Recomputation runs what draws random numbers so, with the random state saved or given back
    (run_and_save_rng_state).
    """
    places = [place for place, value in enumerate(args) if isinstance(value, OpOverload)]
    if len(places) != 1:
        raise InputError(
            f"--simulate does not know what the operator {op} costs (use compile=false)"
        )
    return args[places[0]], args[places[0] + 1 :]


def is_view(op) -> bool:
    """Does it return an input seen differently, without touching memory?"""
    infos = [result.alias_info for result in op._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def is_allocation(op) -> bool:
    name = op._overloadpacket.__name__
    return name.startswith(("empty", "new_empty")) or name in (
        "set_",
        "resize_",
        "_unsafe_view",
        "_reshape_alias",
    )


def tensors(tree) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def written_arguments(op, args, kwargs) -> list[Tensor]:
    """The tensors that the operator changes in place."""
    schema = op._schema.arguments
    given = zip(schema, args, strict=False)
    named = ((a, kwargs[a.name]) for a in schema if a.name in kwargs)
    return [
        x
        for a, value in (*given, *named)
        if a.alias_info and a.alias_info.is_write
        for x in tensors(value)
    ]


def traffic(tensor: Tensor) -> int:
    """Bytes that reading or writing it moves: repeated elements of an expanded tensor only once."""
    return (
        prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        * tensor.element_size()
    )


# ---------------------------------------------------------------------------------------------------------------- work


def work(op, name: str, args, kwargs, out) -> dict[str, object]:
    """What an Event has of an operator's call: kind, FLOPs, and sizes if these matter."""
    packet = op._overloadpacket
    if packet in FACTORS:
        a, b = FACTORS[packet](*args)
        m = a.shape[-2]
        n = b.shape[-1]
        k = a.shape[-1]
        if (
            packet is aten._grouped_mm
        ):  # rows by expert times a stack; or k is cut by expert, which gives a stack
            groups = len(b) if b.dim() == 3 else len(out)
            return {"kind": "grouped", "flops": 2 * m * n * k, "sizes": (groups, m, n, k)}
        batch = len(a) if a.dim() == 3 else 1
        return {"kind": "gemm", "flops": 2 * batch * m * n * k, "sizes": (batch, m, n, k)}
    if packet in ATTENTION:
        return ATTENTION[packet](*args)
    if packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
        return {"kind": "attention" if "attention" in name else "gemm", "flops": flops}
    return {"kind": "memory", "flops": 0}


FACTORS: dict[object, Callable] = {  # of each matrix product, among its arguments
    **dict.fromkeys(
        (aten.mm, aten.bmm, aten._grouped_mm, aten._scaled_mm, torch.ops.minitrain.scaled_mm),
        lambda a, b, *_: (a, b),
    ),
    **dict.fromkeys(  # addmm_: the head's weight gradient in fp32
        (aten.addmm, aten.addmm_, aten.baddbmm, torch.ops.minitrain.add_product),
        lambda total, a, b, *_: (a, b),
    ),
    torch.ops.minitrain.linear_fp32: lambda x, weight: (x, weight.mT),
}


def attention_work(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    pairs: float | None = None,
    backward: bool = False,
) -> dict[str, object]:
    """What an Event has of attention.

    pairs: of query and key in a row, as FlexAttention's mask allows them; None: plain attention, of
    half of the square if causal, else of all of it. Backward there are five products: scores again,
    and the gradients of weights, values, queries and keys.
    """
    rows, heads, queries, channels = q.shape
    form = "flex" if pairs is not None else "causal" if causal else "full"
    pairs = queries * k.shape[2] / (2 if causal else 1) if pairs is None else pairs
    products = 3 * channels + 2 * v.shape[-1] if backward else channels + v.shape[-1]
    sizes = channels, round(pairs / queries)
    return {
        "kind": "attention",
        "flops": int(2 * rows * heads * pairs * products),
        "sizes": sizes,
        "form": form,
    }


ATTENTION: dict[object, Callable] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, dropout=0.0, causal=False, *_: attention_work(q, k, v, causal)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, out, log_sum, dropout=0.0, causal=False, *_: attention_work(
            q, k, v, causal, backward=True
        )
    ),
}
