"""Turn a trace into seconds: the time of each kernel and message, and what runs concurrently.

Kernels run one after the other on the compute stream. Collectives run on one stream per mesh
dimension, as soon as their inputs are ready. A kernel that reads a collective's result waits for it;
this wait is exposed communication. FSDP's own copies run on its streams, as in PyTorch. Its next
all-gather starts only after the previous one has been copied out, which limits how far it runs ahead.

    matrix product   launch + max(FLOPs / (rate x filled x k / (k + 128)) + beside x bytes / HBM,
                     bytes / HBM)
                     filled: the share of the multiprocessors that have a tile of 128 x 256, over
                     all waves, plus RECOVERED of the idle rest. Each expert's product fills tiles
                     of its own.
    attention        launch + FLOPs / (rate x keys / (keys + start))
                     rate: of the kernel in this direction; keys: per query
    other kernels    launch + bytes / HBM
                     If compiled, neighboring kernels are fused into one, and tensors between them
                     cost nothing unless a later kernel reads them.
    collective       latency + bytes on the wire / bandwidth
                     bytes: (n - 1) / n of the payload, twice that for an all-reduce; bandwidth:
                     NVLink's within a domain; between domains that of the network adapters of the
                     group's GPUs in one domain, but at most NVLink's.
    all-to-all       latency + the slower of the bytes that leave the GPU, over NVLink, and the bytes
                     that leave the domain, over the GPU's network adapter
    copy             bytes / the link to the host, in one stream for both directions, after what the
                     compute stream has been given so far
    update on the    the slowest of the bytes out, the bytes back, and those that the host's memory
    host             moves, as all three overlap (training/adamw.py)

A kernel is slower while a collective runs, whose copies take some of the multiprocessors. And a step
waits for the slowest of its ranks, see `System.slowest`.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil
from statistics import NormalDist
from typing import NamedTuple

from minitrain.bench.rows import constants
from minitrain.errors import InputError
from minitrain.settings import Config
from minitrain.simulator.trace import SHARDS, Event, Trace

# rows and columns of a matrix product's result that a multiprocessor computes at a time
GEMM_TILE = 128, 256
# operators that read FSDP's gathered weights; `embedding` does on one rank, where none are copied out
READS_GATHERED = ("split_with_sizes_copy", "embedding")
# the share of an incomplete last wave's idle time that smaller tiles and split-k products use. There is
# no public figure; values from 0 to 1 change none of 14 tried rows by more than 1.8 %
RECOVERED = 0.6
# attention kernels are slower with this many channels per head or fewer
NARROW = 64


@dataclass(frozen=True)
class Attention:
    """Rates of an attention kernel."""

    # FLOP/s with 128 channels per head and very many keys
    forward: float
    backward: float
    # the share of these rates that heads of NARROW channels or fewer reach
    narrow: float
    # the fixed cost of a query, as a number of keys
    start: float

    def seconds(self, event: Event) -> float:
        channels, keys = event.sizes
        rate = self.backward if "backward" in event.name else self.forward
        if channels <= NARROW:
            rate *= self.narrow
        return event.flops / rate * (1 + self.start / keys)


class Rows(NamedTuple):
    """Rows of an all-to-all of experts, over those in the trace (see simulate.py, `sent_rows`)."""

    # that are sent, and that leave the domain
    sent: float = 1.0
    far: float = 1.0
    # one for each expert of a token
    copies: float = 1.0


AS_TRACED = Rows()


@dataclass(frozen=True)
class System:
    """Rates that large kernels and messages reach, per GPU; systems.yaml has their sources."""

    name: str
    # FLOP/s of matrix products
    bf16: float
    fp8: float
    # of `fp8`, by fp8.form
    fp8_shares: dict[str, float]
    # attention kernels, by the form of mask: full, causal or flex
    attention: dict[str, Attention]
    # number of multiprocessors: tiles of a matrix product that run at a time
    gemm_tiles: int
    # multiprocessors that a collective takes while it runs
    channels: int
    # standard deviation of the ranks' speeds, as a share of their mean
    spread: float

    # bytes of memory
    capacity: float
    # bytes/s of memory
    memory: float
    # the share of a matrix product's memory time that its arithmetic does not hide; for experts
    beside: float
    grouped_beside: float
    # bytes that eager element-wise kernels move per byte of compiled ones
    unfused: float
    # least seconds of a kernel; of a grouped product of experts
    launch: float
    grouped_launch: float

    # number of GPUs that NVLink connects
    domain: int
    # bytes/s of large all-gathers within a domain, in one direction
    nvlink: float
    # the share of tensor parallelism's messages that products do not hide
    tensor: float
    # bytes/s of each GPU's network adapter, between domains; of an all-to-all there
    network: float
    dispatch_network: float
    # bytes/s between a GPU and its host, in each direction; of the host's memory, for each GPU
    host_link: float
    host_memory: float
    # seconds of a small message; between domains while decoding
    latency: float
    far_latency: float
    # additional seconds of an all-to-all of experts' rows
    dispatch: float
    # whom a token's row is sent to: the `ranks` of its experts; the same, if experts are drawn at
    # random whatever the config's gate (`random_ranks`), over the network once per domain; or each of
    # its `experts`, so drawn
    sent_to: str
    # how often an all-to-all's rows, one for each expert, are read or written besides
    passes: float

    # seconds of the host per optimizer step
    step: float
    # least seconds of an experts' layer and micro-batch: the host waits for token counts
    expert_layer: float
    # additional seconds of these for each expert on the rank
    local_expert: float

    # shares of `memory` that decoding kernels reach
    decode_weights: float
    decode_caches: float
    # seconds of the host per decoding step
    decode_step: float

    # CUDA's compute capability, which says what FP8 units multiply: see models/fp8_forms.py
    capability: tuple[int, int] = (9, 0)
    rows: Rows = AS_TRACED

    def slowest(self, ranks: int) -> float:
        """Return the time of the slowest of so many ranks over the mean rank's, minus 1.

        It is the expected largest of as many normal numbers (Blom's approximation).
        """
        return self.spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))

    def kernel_seconds(self, event: Event) -> float:
        """Return the seconds of a kernel that runs alone."""
        if event.kind == "attention":
            return self.attention[event.form].seconds(event) + self.launch
        if event.kind == "host update":
            out, back = (sum(n for _, n in moved) for moved in (event.reads, event.writes))
            return max(
                out / self.host_link, back / self.host_link, event.payload / self.host_memory
            )
        moved = sum(n for _, n in event.reads + event.writes) / self.memory
        if event.kind == "memory":
            return self.unfused * moved + self.launch
        work = event.flops / self.gemm_rate(event)
        if event.kind == "grouped":
            return max(work + self.grouped_beside * moved, moved) + self.grouped_launch
        return max(work + self.beside * moved, moved) + self.launch

    def gemm_rate(self, event: Event) -> float:
        """Return the FLOP/s of a matrix product of the event's sizes."""
        rate = {1: self.fp8, 2: self.bf16}.get(event.element, self.bf16 / 16)
        if not event.sizes:
            return rate
        batch, m, n, k = event.sizes
        waves = batch * ceil(m / GEMM_TILE[0]) * ceil(n / GEMM_TILE[1]) / self.gemm_tiles
        filled = 1 - (1 - waves / ceil(waves)) * (1 - RECOVERED)
        return rate * filled * k / (k + 128)

    def collective_seconds(self, event: Event, ranks: list[int]) -> float:
        """Return the seconds of a message.

        ranks: global ranks of its group; consecutive ranks share a domain.
        """
        if "send" in event.name or "recv" in event.name:
            return self.latency + event.payload / self.bandwidth(ranks[:2])
        name = event.name.replace("_", "")
        turns = 2 if "allreduce" in name else 1
        moved = turns * event.payload * (len(ranks) - 1) / len(ranks)
        if "alltoall" in name:
            near = self.in_domain(ranks)
            far = event.payload * (len(ranks) - near) / len(ranks)
            if event.dimension == "cp":
                return self.latency + max(far / self.dispatch_network, moved / self.nvlink)
            far *= self.rows.far / self.dispatch_network
            besides = self.passes * self.rows.copies * event.payload / self.memory
            sent = max(far, self.rows.sent * moved / self.nvlink)
            return self.latency + sent + besides + self.dispatch
        exposed = self.tensor if event.dimension == "tp" else 1.0
        return exposed * (self.latency + moved / self.bandwidth(ranks))

    def bandwidth(self, ranks: list[int]) -> float:
        """Return bytes/s per rank of a ring.

        Between domains, a ring uses the network adapters of all its GPUs in a domain.
        """
        near = self.in_domain(ranks)
        return self.nvlink if near == len(ranks) else min(self.nvlink, near * self.network)

    def in_domain(self, ranks: list[int]) -> int:
        """Count the ranks that share the first one's NVLink domain."""
        return sum(rank // self.domain == ranks[0] // self.domain for rank in ranks)


def load_system(name: str, setting: str = "--system") -> System:
    """Return a system of systems.yaml by its name in any case, such as dgx-h100 or DGX-H100.

    Raises InputError, which names `setting`, for an unknown name, or if the system's attention would
    be faster than its matrix products.
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
    """Return the FLOP/s of matrix products that MFU refers to."""
    return system.fp8 if config.precision == "fp8" else system.bf16


def rates_of(values: dict) -> dict:
    """Return the fields of a System from its entry in systems.yaml, with kernels in place of names."""
    kernels = constants("kernels")
    rates = {name: value for name, value in values.items() if name != "attention"}
    if "capability" in values:
        rates["capability"] = tuple(values["capability"])
    if "attention" in values:
        attention = values["attention"].items()
        rates["attention"] = {form: Attention(**kernels[name]) for form, name in attention}
    return rates


class Span(NamedTuple):
    """A kernel or message on a timeline, in seconds."""

    stream: str
    # name and kind of the operator; of the last one, if several are fused
    name: str
    kind: str
    begin: float
    end: float
    # seconds that the stream waited for collectives and copies before `begin`
    waited: float
    # index in the trace of one of its events
    event: int
    # the part of `waited` that was for copies
    copied: float = 0.0


@dataclass
class Timeline:
    """When everything happened, in seconds from the start of the step."""

    spans: list[Span] = field(default_factory=list)
    # for each event, when the compute stream had reached it
    at: list[float] = field(default_factory=list)
    # when all streams had finished
    end: float = 0.0


def play(trace: Trace, system: System, fused: bool) -> Timeline:
    """Return the timeline of a trace on a system. fused: whether element-wise kernels are fused.

    Messages between pipeline stages take no time here, because waiting for them depends on the other
    ranks (see replay.py).
    """
    return _Player(trace, system, fused).play()


class _Player:
    """The state of all streams while a trace is played."""

    def __init__(self, trace: Trace, system: System, fused: bool):
        self.trace = trace
        self.system = system
        self.fused = fused
        self.line = Timeline()
        # when the compute stream becomes free
        self.clock = 0.0
        # when the stream of each mesh dimension becomes free, and when no collective runs any more
        self.free = defaultdict(float)
        self.busy = 0.0
        # storage -> when its values are ready
        self.ready = defaultdict(float)
        # storage -> the stream that wrote it last
        self.made_by: dict[int, str] = {}
        # storage -> when it was copied to the host
        self.left: dict[int, float] = {}
        # stream -> storages of its last all-gather, until a kernel reads one of them
        self.waiting: dict[str, set[int]] = {}
        # stream -> when the result of its last all-gather was read
        self.consumed = defaultdict(float)
        # when what blocks have left on the host has been copied, so that its memory is free
        self.released = 0.0
        # consecutive element-wise kernels, to be fused into one, by their indices in the trace
        self.run: dict[int, Event] = {}

    def play(self) -> Timeline:
        marked = {index for index, _ in self.trace.marks}
        for index, event in enumerate(self.trace.events):
            stream = self.stream_of(event)
            if event.kind == "wait":
                # waiting costs nothing by itself: its result is ready when its input is
                self.written(event.writes, "compute", self.ready[event.reads[0][0]])
            elif stream == "compute" and event.kind == "memory" and self.fused:
                self.run[index] = event
            else:
                self.finish_run(index)
                if event.kind == "copied":
                    self.released = max(self.released, *(self.left[n] for n, _ in event.reads))
                elif stream == "compute":
                    self.compute(index, event)
                else:
                    self.communicate(index, stream, event)
            # kernels are not fused across a mark, so that a pass's time includes its last kernel
            if index + 1 in marked:
                self.finish_run(index + 1)
            self.line.at.append(self.clock)
        self.finish_run(len(self.trace.events))
        self.line.end = max(self.clock, *self.free.values(), 0.0)
        return self.line

    def stream_of(self, event: Event) -> str:
        """Return the stream that an event runs on.

        Collectives, FSDP's copies into their buffers, and its work on reduced gradients run on the
        streams of their mesh dimensions, everything else on the compute stream.
        """
        if event.kind in ("collective", "copy"):
            return event.dimension
        if event.name == "all_gather_copy_in":
            return "dp_shard"
        # streams that wrote its inputs; inputs of a few bytes are scalars, such as a norm
        makers = {self.made_by.get(number) for number, size in event.reads if size > 8}
        if event.kind == "memory" and len(makers) == 1 and event.name not in READS_GATHERED:
            maker = makers.pop()
            if maker in SHARDS:
                unread = set().union(*self.waiting.values())
                if unread.isdisjoint(n for n, _ in event.reads):
                    return maker
        return "compute"

    def begin(self, event: Event, free: float) -> float:
        """Return when an event can begin: its stream is free and its inputs are ready."""
        return max([free, *(self.ready[number] for number, _ in event.reads)])

    def compute(self, index: int, event: Event) -> None:
        """Run a kernel on the compute stream. index: of the event in the trace."""
        copies = [self.ready[n] for n, _ in event.reads if self.made_by.get(n) == "host"]
        others = [self.ready[n] for n, _ in event.reads if self.made_by.get(n) != "host"]
        gathered = max([self.clock, *others])
        begin = max([gathered, self.released, *copies])
        waited = begin - self.clock
        copied = begin - gathered
        seconds = self.system.kernel_seconds(event)
        shared = min(seconds, max(0.0, self.busy - begin))
        self.clock = begin + seconds + shared * self.system.channels / self.system.gemm_tiles
        span = Span("compute", event.name, event.kind, begin, self.clock, waited, index, copied)
        self.line.spans.append(span)
        for stream, numbers in self.waiting.items():
            if not numbers.isdisjoint(number for number, _ in event.reads):
                self.consumed[stream] = self.clock
                numbers.clear()
        self.written(event.writes, "compute", self.clock)

    def communicate(self, index: int, stream: str, event: Event) -> None:
        """Run a collective, or one of FSDP's copies, on a mesh dimension's stream."""
        begin = self.begin(event, self.free[stream])
        if event.kind == "copy":
            begin = max(begin, self.clock)
            seconds = sum(n for _, n in event.reads + event.writes) / self.system.host_link
        elif stream == "pp":
            seconds = 0.0
        elif event.kind != "collective":
            seconds = sum(n for _, n in event.reads + event.writes) / self.system.memory
        else:
            seconds = self.system.collective_seconds(event, self.trace.groups[event.group][1])
            # only FSDP's collective has this name; functional ones are named all_gather
            if "allgather" in event.name:
                begin = max(begin, self.consumed[stream])
                self.waiting[stream] = {number for number, _ in event.writes}
        self.free[stream] = end = begin + seconds
        if event.kind == "copy":
            self.left |= {number: end for number, _ in event.reads}
        if event.kind == "collective":
            self.busy = max(self.busy, end)
        self.line.spans.append(Span(stream, event.name, event.kind, begin, end, 0.0, index))
        self.written(event.writes, stream, end)

    def written(self, writes: Iterable[tuple[int, int]], stream: str, when: float) -> None:
        """Note which stream wrote these storages, and when. writes: as in Event."""
        for number, _ in writes:
            self.ready[number] = when
            self.made_by[number] = stream

    def finish_run(self, end: int) -> None:
        """Run the collected kernels as one, whose last event is the one before index `end`.

        It reads the tensors that none of them wrote, and writes those that are not freed before `end`.
        """
        if not self.run:
            return
        reads = {}
        made = {}
        for event in self.run.values():
            for number, size in event.reads:
                if number not in made:
                    reads[number] = max(size, reads.get(number, 0))
            for number, size in event.writes:
                made[number] = max(size, made.get(number, 0))
        kept = [(n, size) for n, size in made.items() if self.trace.died.get(n, end) >= end]
        fused = Event(event.name, "memory", 0, list(reads.items()), kept)
        self.compute(min(self.run), fused)
        self.written(made.items(), "compute", self.clock)
        self.run = {}
