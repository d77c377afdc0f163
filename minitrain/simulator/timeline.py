"""Turn a trace into seconds: what each kernel and message costs, and what runs at the same time.

Kernels run one after the other on the compute stream. Collectives run on one stream per mesh
dimension, from the moment when their inputs are there; a kernel that reads what a collective brings
waits for it, and that wait is the exposed communication. FSDP's own copies run on its streams, as
in PyTorch. Its next all-gather starts only when the one before has been copied out: this bounds how
far it runs ahead.

    matrix product   launch + max(FLOPs / (rate x filled x k / (k + 128)) + beside x bytes / HBM,
                     bytes / HBM); filled: the share of the waves of 128 x 256 tiles that has work,
                     with RECOVERED of the idle rest; an expert's products each fill tiles of their
                     own
    attention        launch + FLOPs / (rate of the kernel and direction x keys / (keys + start)),
                     keys: of a query
    other kernels    launch + bytes / HBM; with the compiler, neighbors become one kernel, whose
                     inner tensors cost nothing unless something later reads them
    collective       latency + bytes on the wire / bandwidth: (n - 1) / n of the payload, twice for
                     an all-reduce; NVLink within a domain; between domains the adapters of the
                     group's GPUs there, at most NVLink
    all-to-all       latency + the slower of what leaves the GPU, by NVLink, and what leaves the
                     domain, by its adapter
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from minitrain.bench.rows import constants
from minitrain.errors import InputError
from minitrain.settings import Config
from minitrain.simulator.trace import SHARDS, Event, Trace

# rows and columns of a matrix product's result that a multiprocessor computes at a time
GEMM_TILE = 128, 256
# what reads FSDP's gathered weights; the latter on one rank, where nothing is copied out
READS_GATHERED = ("split_with_sizes_copy", "embedding")
# the share of an incomplete last wave's idle time that smaller tiles and split products use
# No public figure tells it. Between 0 and 1 no row of 14 tried moves by more than 1.8 %.
RECOVERED = 0.6
# channels per head up to which an attention kernel is slower
NARROW = 64


@dataclass(frozen=True)
class Attention:
    """Rates of an attention kernel.

    forward, backward: FLOP/s with 128 channels per head and very many keys. narrow: the share of
    these with 64 channels or fewer. start: what a query costs besides its keys, in keys.
    """

    forward: float
    backward: float
    narrow: float
    start: float

    def seconds(self, event: Event) -> float:
        channels, keys = event.sizes
        rate = self.backward if "backward" in event.name else self.forward
        if channels <= NARROW:
            rate *= self.narrow
        return event.flops / rate * (1 + self.start / keys)


@dataclass(frozen=True)
class System:
    """Rates that large kernels and messages reach, per GPU; systems.yaml has their sources.

    FLOP/s:
        bf16, fp8: of matrix products. attention: of its kernels, by the form of the event.
    bytes/s:
        memory; nvlink: of large all-gathers within a domain, one direction. network: of each GPU's
        own adapter, between domains; dispatch_network: of an all-to-all there. host_link: between a
        GPU and its host, each way.
    Shares:
        decode_weights, decode_caches: of `memory`, in decoding. beside, grouped_beside: of the time
        for a product's bytes, what its arithmetic does not hide; the latter of an expert's.
        unfused: bytes that eager element-wise kernels move per byte of compiled ones.
    Seconds:
        launch, grouped_launch: the least of a kernel. latency, far_latency: of a message.
        dispatch: of an all-to-all of experts' rows, besides. expert_layer: the least of a layer of
        experts and micro-batch, in which the host waits for counts of tokens. local_expert: more of
        that for each expert that a rank holds. step: the host's, per optimizer step. decode_step:
        the host's, per decoding step.
    capacity: bytes of memory. domain: GPUs that NVLink connects. gemm_tiles: multiprocessors.
    capability: CUDA's compute capability, which says what FP8 units multiply (models/fp8_forms.py).
    """

    name: str
    bf16: float
    fp8: float
    attention: dict[str, Attention]
    memory: float
    launch: float
    beside: float
    grouped_beside: float
    grouped_launch: float
    dispatch: float
    dispatch_network: float
    expert_layer: float
    local_expert: float
    unfused: float
    nvlink: float
    domain: int
    network: float
    host_link: float
    latency: float
    far_latency: float
    gemm_tiles: int
    step: float
    capacity: float
    decode_weights: float
    decode_caches: float
    decode_step: float
    capability: tuple[int, int] = (9, 0)

    def kernel_seconds(self, event: Event) -> float:
        """Return the seconds of a matrix product, of attention, or of another kernel by itself."""
        if event.kind == "attention":
            return self.attention[event.form].seconds(event) + self.launch
        moved = sum(n for _, n in event.reads + event.writes) / self.memory
        if event.kind == "memory":
            return self.unfused * moved + self.launch
        work = event.flops / self.gemm_rate(event)
        if event.kind == "grouped":
            return max(work + self.grouped_beside * moved, moved) + self.grouped_launch
        return max(work + self.beside * moved, moved) + self.launch

    def gemm_rate(self, event: Event) -> float:
        rate = {1: self.fp8, 2: self.bf16}.get(event.element, self.bf16 / 16)
        if not event.sizes:
            return rate
        batch, m, n, k = event.sizes
        waves = batch * ceil(m / GEMM_TILE[0]) * ceil(n / GEMM_TILE[1]) / self.gemm_tiles
        filled = 1 - (1 - waves / ceil(waves)) * (1 - RECOVERED)
        return rate * filled * k / (k + 128)

    def collective_seconds(self, event: Event, ranks: list[int]) -> float:
        """Return the seconds of a message.

        ranks: those of the group in the whole world, where neighbors share a domain.
        """
        if "send" in event.name or "recv" in event.name:
            return self.latency + event.payload / self.bandwidth(ranks[:2])
        name = event.name.replace("_", "")
        turns = 2 if "allreduce" in name else 1
        moved = turns * event.payload * (len(ranks) - 1) / len(ranks)
        if "alltoall" in name:
            near = self.in_domain(ranks)
            far = event.payload * (len(ranks) - near) / len(ranks)
            besides = self.dispatch if event.dimension != "cp" else 0.0
            return self.latency + max(far / self.dispatch_network, moved / self.nvlink) + besides
        return self.latency + moved / self.bandwidth(ranks)

    def bandwidth(self, ranks: list[int]) -> float:
        """Return bytes/s per rank of a ring.

        The link is NVLink, or as many adapters as the group has GPUs in a domain.
        """
        near = self.in_domain(ranks)
        return self.nvlink if near == len(ranks) else min(self.nvlink, near * self.network)

    def in_domain(self, ranks: list[int]) -> int:
        """Count the ranks that share the first one's NVLink domain."""
        return sum(rank // self.domain == ranks[0] // self.domain for rank in ranks)


def load_system(name: str, setting: str = "--system") -> System:
    """Return a system of systems.yaml by its name, such as dgx-h100 or, as in the tables, DGX-H100.

    Raises InputError, which names the setting, for an unknown one, or one whose attention would be
    faster than its matrix products, of which attention is made.
    """
    known = constants("systems")
    if name.lower() not in known:
        raise InputError(f"{setting}={name} is not one of {', '.join(known)}")
    system = System(name.lower(), **rates_of(known[name.lower()]))
    for form, kernel in system.attention.items():
        rate = max(kernel.forward, kernel.backward)
        if rate > system.bf16:
            raise InputError(
                f"{setting}={name}: systems.yaml has its {form} attention at {rate / 1e12:.4g} TFLOP/s, above bf16's "
                f"{system.bf16 / 1e12:.4g} (give the machine kernels of its own)"
            )
    return system


def own_system(config: Config) -> str:
    """Return the name of the system that the config's published row ran on."""
    return config.reference.get("system", "dgx-h100").lower()


def peak_rate(config: Config, system: System) -> float:
    """Return the FLOP/s of matrix products of which MFU is a share."""
    return system.fp8 if config.precision == "fp8" else system.bf16


def rates_of(values: dict) -> dict:
    """Return the fields of a System from its entry in systems.yaml.

    There, `attention` has the names of kernels, by form.
    """
    kernels = constants("kernels")
    rates = {name: value for name, value in values.items() if name != "attention"}
    if "capability" in values:
        rates["capability"] = tuple(values["capability"])
    if "attention" in values:
        attention = values["attention"].items()
        rates["attention"] = {form: Attention(**kernels[name]) for form, name in attention}
    return rates


class Span(NamedTuple):
    """A kernel or message.

    name, kind: of its last operator. begin, end: in seconds.
    waited: seconds that the stream had waited for collectives before it.
    event: the index of one of its events in the trace.
    """

    stream: str
    name: str
    kind: str
    begin: float
    end: float
    waited: float
    event: int


@dataclass
class Timeline:
    """When everything happened, in seconds from the start of the step.

    at: when compute had reached each event. end: when all streams were done.
    """

    spans: list[Span] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    end: float = 0.0


def play(trace: Trace, system: System, fused: bool) -> Timeline:
    """Play a trace on a system. fused: with element-wise kernels fused, as the compiler does.

    Messages between stages of a pipeline take no time here: what waits for them depends on other
    ranks (see `replay`).
    """
    return _Player(trace, system, fused).play()


class _Player:
    def __init__(self, trace: Trace, system: System, fused: bool):
        self.trace = trace
        self.system = system
        self.fused = fused
        self.line = Timeline()
        # until when the compute stream is busy
        self.clock = 0.0
        # until when each dimension's stream is busy
        self.free = defaultdict(float)
        # when a storage holds its values
        self.ready = defaultdict(float)
        # the stream that wrote a storage last
        self.made_by: dict[int, str] = {}
        # by stream, storages of the last all-gather that no kernel has read yet
        self.waiting: dict[str, set[int]] = {}
        # when the last all-gather's result was first read
        self.consumed = defaultdict(float)
        # element-wise kernels that are fused into one
        self.run: list[Event] = []

    def play(self) -> Timeline:
        marked = {index for index, _ in self.trace.marks}
        for index, event in enumerate(self.trace.events):
            stream = self.stream_of(event)
            if event.kind == "wait":
                # costs nothing by itself: its result is there when its input is
                self.written(event.writes, "compute", self.ready[event.reads[0][0]])
            elif stream == "compute" and event.kind == "memory" and self.fused:
                self.run.append(event)
            else:
                self.finish_run(index)
                if stream == "compute":
                    self.compute(index, event)
                else:
                    self.communicate(index, stream, event)
            # no kernel spans two passes: a pass's time includes its last kernel
            if index + 1 in marked:
                self.finish_run(index + 1)
            self.line.at.append(self.clock)
        self.finish_run(len(self.trace.events))
        self.line.end = max(self.clock, *self.free.values(), 0.0)
        return self.line

    def stream_of(self, event: Event) -> str:
        """Return the stream that an event runs on.

        Collectives, FSDP's copies into them and its work on reduced gradients run beside compute.
        """
        if event.kind == "collective":
            return event.dimension
        if event.name == "all_gather_copy_in":
            return "dp_shard"
        # the streams that made its inputs; a few bytes are a scalar, such as a norm
        makers = {self.made_by.get(number) for number, size in event.reads if size > 8}
        if event.kind == "memory" and len(makers) == 1 and event.name not in READS_GATHERED:
            maker = makers.pop()
            if maker in SHARDS:
                unread = set().union(*self.waiting.values())
                if unread.isdisjoint(n for n, _ in event.reads):
                    return maker
        return "compute"

    def begin(self, event: Event, free: float) -> float:
        """Return when an event can begin: its stream is free, and its inputs are there."""
        return max([free, *(self.ready[number] for number, _ in event.reads)])

    def compute(self, index: int, event: Event) -> None:
        begin = self.begin(event, self.clock)
        waited = begin - self.clock
        self.clock = begin + self.system.kernel_seconds(event)
        span = Span("compute", event.name, event.kind, begin, self.clock, waited, index)
        self.line.spans.append(span)
        for stream, numbers in self.waiting.items():
            if not numbers.isdisjoint(number for number, _ in event.reads):
                self.consumed[stream] = self.clock
                numbers.clear()
        self.written(event.writes, "compute", self.clock)

    def communicate(self, index: int, stream: str, event: Event) -> None:
        begin = self.begin(event, self.free[stream])
        if stream == "pp":
            seconds = 0.0
        elif event.kind != "collective":
            seconds = sum(n for _, n in event.reads + event.writes) / self.system.memory
        else:
            seconds = self.system.collective_seconds(event, self.trace.groups[event.group][1])
            # FSDP's; those that compute waits for are called all_gather
            if "allgather" in event.name:
                begin = max(begin, self.consumed[stream])
                self.waiting[stream] = {number for number, _ in event.writes}
        self.free[stream] = end = begin + seconds
        self.line.spans.append(Span(stream, event.name, event.kind, begin, end, 0.0, index))
        self.written(event.writes, stream, end)

    def written(self, writes: Iterable[tuple[int, int]], stream: str, when: float) -> None:
        for number, _ in writes:
            self.ready[number] = when
            self.made_by[number] = stream

    def finish_run(self, end: int) -> None:
        """Run the collected kernels, which end before event `end`, as one.

        It reads what they did not make, and writes what is not freed before `end`.
        """
        if not self.run:
            return
        reads = {}
        made = {}
        for event in self.run:
            for number, size in event.reads:
                if number not in made:
                    reads[number] = max(size, reads.get(number, 0))
            for number, size in event.writes:
                made[number] = max(size, made.get(number, 0))
        kept = [(n, size) for n, size in made.items() if self.trace.died.get(n, end) >= end]
        fused = Event(self.run[-1].name, "memory", 0, list(reads.items()), kept)
        self.compute(end - len(self.run), fused)
        self.written(made.items(), "compute", self.clock)
        self.run = []
