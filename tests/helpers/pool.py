"""Run functions on several gloo ranks, in processes that many tests share.

Worker processes are forked from a server that has imported everything, so a run takes milliseconds. They are replaced
after a while, because tests leave state in them. Each run finds a default process group of exactly its world size, as
under torchrun, so the tested code does not know of the pool. If a rank fails or hangs, the test fails with its
traceback, and all workers are replaced, because some may be stuck in a collective.
"""

import faulthandler
import gc
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._pytree import KeyPath, keystr, tree_flatten_with_path, tree_unflatten

from minitrain.parallel.shards import local_shard

# seconds in which other ranks can report after one has failed
GRACE = 3.0
# timeout of a run, and of a collective in it, in seconds
PATIENCE = 300.0
# number of runs with the same process group, because groups of meshes keep threads and sockets
RUNS = 4
# number of runs with the same workers, because compiled code may keep groups
LIFE = 40
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.helpers.server"])


class RankFailure(AssertionError):
    """A function raised, died or hung on some rank of a pool."""


@dataclass
class Worker:
    process: multiprocessing.Process
    connection: Connection
    # the file to which the process writes its stack on a signal
    stacks: Path


class Pool:
    """Call functions on any number of ranks, in as many processes as the largest run needed.

    least: number of processes to start in any case.
    """

    def __init__(self, least: int = 4):
        self.least = least
        self.folder = tempfile.TemporaryDirectory(prefix="minitrain-pool-")
        self.workers: list[Worker] = []
        self.numbers = itertools.count()
        # world size and store file of the workers' process group
        self.group = (0, "")
        # number of runs that remain for this group
        self.left = RUNS
        # number of runs of these workers
        self.runs = 0

    def run(
        self, world_size: int, function: Callable, *args: Any, timeout: float = PATIENCE
    ) -> list[Any]:
        """Call `function(*args)` on all ranks; return their results by rank.

        The function must be importable, and results must pickle. DTensors in results become full tensors: see
        `assemble`. Raises RankFailure with the traceback of the rank that failed first (a dead rank before those that
        noticed its death), or with the stacks of ranks that did not answer within `timeout` seconds.
        """
        if self.runs == LIFE:
            self.stop()
        self.runs += 1
        while len(self.workers) < max(world_size, self.least):
            self._start_worker(len(self.workers))
        if self.group[0] != world_size or self.left == 0:
            self.group = (world_size, self._new_path("store"))
            self.left = RUNS
        self.left -= 1
        workers = self.workers[:world_size]
        task = pickle.dumps((self.group, function, args))
        for worker in workers:
            worker.connection.send_bytes(task)
        answers = collect(workers, timeout)
        if len(answers) < world_size or not all(succeeded for succeeded, _ in answers.values()):
            message = describe_failure(workers, answers)
            self.stop()
            raise RankFailure(message)
        return assemble([answers[rank][1] for rank in range(world_size)])

    def stop(self) -> None:
        """Kill all workers; the next run starts new ones."""
        for worker in self.workers:
            worker.process.kill()
            worker.process.join()
        self.workers = []
        self.group = (0, "")
        self.runs = 0

    def close(self) -> None:
        """End the workers, and remove all files."""
        for worker in self.workers:
            worker.connection.send_bytes(b"")
        for worker in self.workers:
            worker.process.join(5)
        self.stop()
        self.folder.cleanup()

    def _start_worker(self, rank: int) -> None:
        ours, theirs = SERVER.Pipe()
        stacks = Path(self._new_path("stacks"))
        process = SERVER.Process(target=work, args=(rank, theirs, stacks), daemon=True)
        process.start()
        theirs.close()
        self.workers.append(Worker(process, ours, stacks))

    def _new_path(self, kind: str) -> str:
        return str(Path(self.folder.name, f"{kind}-{next(self.numbers)}"))


def collect(workers: list[Worker], timeout: float) -> dict[int, tuple[bool, Any]]:
    """Return each rank's (succeeded, result or traceback) in order of arrival, without ranks that did not answer."""
    answers: dict[int, tuple[bool, Any]] = {}
    ranks = {worker.connection: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout
    while ranks and (ready := wait(list(ranks), max(0, deadline - time.monotonic()))):
        for connection in ready:
            rank = ranks.pop(connection)
            answers[rank] = receive(workers[rank])
            if not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE)
    return answers


def receive(worker: Worker) -> tuple[bool, Any]:
    try:
        return pickle.loads(worker.connection.recv_bytes())
    except EOFError:
        worker.process.join()
        return False, f"the process died with exit code {worker.process.exitcode}"


def describe_failure(workers: list[Worker], answers: dict[int, tuple[bool, Any]]) -> str:
    """Return the first failure or, if some ranks did not answer and none failed, the stacks of these.

    A dead rank counts as the first failure, although others may have reported their lost connections before.
    """
    failed = [rank for rank, (succeeded, _) in answers.items() if not succeeded]
    if failed:
        first = min(failed, key=lambda rank: workers[rank].process.is_alive())
        return f"rank {first} of {len(workers)} (failed: {sorted(failed)})\n{answers[first][1]}"
    silent = [rank for rank in range(len(workers)) if rank not in answers]
    stacks = [stack_of(workers[rank]) for rank in silent]
    return "\n".join([f"no answer from ranks {silent} of {len(workers)}", *stacks])


def stack_of(worker: Worker) -> str:
    """Make a worker write its stack, and return it once it has not grown for half a second."""
    os.kill(worker.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 30
    text = ""
    while time.monotonic() < deadline:
        time.sleep(0.5)
        before = text
        text = worker.stacks.read_text()
        if text and text == before:
            break
    return text


def work(rank: int, connection: Connection, stacks: Path) -> None:
    """Run a worker process: answer tasks until an empty one comes."""
    torch.set_num_threads(1)
    share_gloo_threads()
    faulthandler.register(signal.SIGUSR1, stacks.open("w"))
    joined = None
    while task := connection.recv_bytes():
        try:
            group, function, args = pickle.loads(task)
            if group != joined:
                join(rank, *group)
                joined = group
            torch.manual_seed(0)
            answer = pack((True, function(*args)))
        # DCP's CheckpointException and pytest's Failed are not subclasses of Exception
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
    # a normal exit sometimes aborts after FSDP has run
    os._exit(0)


def share_gloo_threads() -> None:
    """Make all groups share one thread that polls sockets; with one per group, a hundred would use up a core."""
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")

    class Gloo(dist.ProcessGroupGloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
            options = dist.ProcessGroupGloo._Options()
            options._devices = [device]
            options._threads = 1
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Gloo


def join(rank: int, world_size: int, store: str) -> None:
    """Replace the process group of earlier runs by a new one, with torchrun's environment variables."""
    if dist.is_initialized():
        # compiled blocks hold groups too
        torch.compiler.reset()
        gc.collect()
        dist.destroy_process_group()
        # DTensor's cache does not distinguish meshes of old groups
        _clear_sharding_prop_cache()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.FileStore(store, world_size)
    timeout = timedelta(seconds=PATIENCE)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
    )


# --- sharded results


@dataclass
class Part:
    """A rank's part of a DTensor: `whole[slices]`."""

    values: Tensor
    slices: tuple[slice, ...]
    # shape of the whole tensor
    shape: torch.Size


def part_of(tensor: DTensor) -> Part:
    """Return a copy of this rank's part."""
    values, slices = local_shard(tensor)
    return Part(values.detach().clone(), slices, tensor.shape)


class Packer(pickle.Pickler):
    """A pickler that replaces DTensors by this rank's parts."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            return Part, (*local_shard(value), value.shape)
        return NotImplemented


def pack(value: Any) -> bytes:
    stream = io.BytesIO()
    Packer(stream).dump(value)
    return stream.getvalue()


def assemble(results: list[Any]) -> list[Any]:
    """Return the ranks' results with full tensors in place of parts.

    Parts at the same place in the ranks' results belong to one tensor. Elements that several ranks have must be bitwise
    equal.
    """
    flat = [tree_flatten_with_path(result) for result in results]
    wholes: dict[KeyPath, Tensor] = {}
    for path, part in itertools.chain.from_iterable(leaves for leaves, _ in flat):
        if isinstance(part, Part):
            add_part(wholes, path, part)
    return [
        tree_unflatten([wholes.get(path, leaf) for path, leaf in leaves], spec)
        for leaves, spec in flat
    ]


def add_part(wholes: dict[KeyPath, Tensor], path: KeyPath, part: Part) -> None:
    """Copy a part into the full tensor at `path`."""
    if path not in wholes:
        # bytes as fp64: no integer says that it is missing
        kind = part.values.dtype if part.values.is_floating_point() else torch.float64
        wholes[path] = torch.full(part.shape, float("nan"), dtype=kind)
    place = wholes[path][part.slices]
    assert (place.isnan() | (place == part.values)).all(), (
        f"ranks have different copies of {keystr(path)}"
    )
    place.copy_(part.values)
