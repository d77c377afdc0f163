"""Run functions on several gloo ranks.

The worker processes serve many tests: a run on them takes milliseconds. They are forked from a server that has imported
what all need, and replaced now and then, with what tests have left in them. Each run finds a default process group of
exactly its world size, as torchrun would have made it, so the code under test needs no knowledge of the pool. A rank
that fails or hangs fails the test, with its traceback; all workers are then replaced, since some may be stuck in a
collective.
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

GRACE = 3.0  # seconds that the other ranks get to report too, once one has failed
PATIENCE = 300.0  # seconds for a run, and for a rank to wait for others in a collective: only against waiting for ever
RUNS = 4  # before a new process group: those of old meshes keep threads and sockets
LIFE = 40  # runs before new workers: compiled code may hold groups for ever
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.helpers.server"])


class RankFailure(AssertionError):
    """A function raised, died or hung on some rank of a pool."""


@dataclass
class Worker:
    process: multiprocessing.Process
    connection: Connection
    stacks: Path  # where the process writes its stack when asked to


class Pool:
    """`run` calls a function on any number of ranks; there are as many processes as the largest run needed.

    least: how many to start in any case.
    """

    def __init__(self, least: int = 4):
        self.least = least
        self.folder = tempfile.TemporaryDirectory(prefix="minitrain-pool-")
        self.workers: list[Worker] = []
        self.numbers = itertools.count()
        # world size and store file of the process group that the workers have now
        self.group = (0, "")
        self.left = RUNS  # how many more runs have it
        self.runs = 0  # of the present workers

    def run(
        self, world_size: int, function: Callable, *args: Any, timeout: float = PATIENCE
    ) -> list[Any]:
        """The ranks' results of `function(*args)`, by rank. The function must be importable, results must pickle.

        DTensors in them arrive whole, as plain tensors; see `assemble`.

        Raises RankFailure with the traceback of the rank that failed first (a dead one before those that only noticed),
        or the stacks of those that did not answer within `timeout` seconds.
        """
        if self.runs == LIFE:
            self.stop()
        self.runs += 1
        while len(self.workers) < max(world_size, self.least):
            self._start_worker(len(self.workers))
        if self.group[0] != world_size or self.left == 0:
            self.group, self.left = (world_size, self._new_path("store")), RUNS
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
        self.workers, self.group, self.runs = [], (0, ""), 0

    def close(self) -> None:
        """Let the workers end by themselves, and clean up."""
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
    """Each rank's (succeeded, result or traceback), in order of arrival; ranks that did not answer are missing."""
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
    """The first failure; or, if there is only silence, what the silent ranks are doing.

    A death comes first whenever it was noticed: peers may report their lost connections before it.
    """
    failed = [rank for rank, (succeeded, _) in answers.items() if not succeeded]
    if failed:
        first = min(failed, key=lambda rank: workers[rank].process.is_alive())
        return f"rank {first} of {len(workers)} (failed: {sorted(failed)})\n{answers[first][1]}"
    silent = [rank for rank in range(len(workers)) if rank not in answers]
    stacks = [stack_of(workers[rank]) for rank in silent]
    return "\n".join([f"no answer from ranks {silent} of {len(workers)}", *stacks])


def stack_of(worker: Worker) -> str:
    """What it is doing: all that it writes, which is all there once half a second has brought nothing more."""
    os.kill(worker.process.pid, signal.SIGUSR1)
    deadline, text = time.monotonic() + 30, ""
    while time.monotonic() < deadline:
        time.sleep(0.5)
        before, text = text, worker.stacks.read_text()
        if text and text == before:
            break
    return text


def work(rank: int, connection: Connection, stacks: Path) -> None:
    """The life of a worker process: answer tasks until an empty one comes."""
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
            torch.manual_seed(0)  # whatever ran here before
            answer = pack((True, function(*args)))
        except BaseException:  # DCP's CheckpointException and pytest's Failed are no Exceptions
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
    os._exit(0)  # a normal exit after FSDP has run now and then aborts


def share_gloo_threads() -> None:
    """One thread polls all groups' sockets, where torch gives each group its own: a hundred of them take a core."""
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")

    class Gloo(dist.ProcessGroupGloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._threads, options._timeout = [device], 1, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Gloo


def join(rank: int, world_size: int, store: str) -> None:
    """Leave the process group of earlier runs and make a new one, with the environment that torchrun would have set."""
    if dist.is_initialized():
        torch.compiler.reset()  # compiled blocks hold groups too
        gc.collect()
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # DTensor takes meshes of the same shape for the same, even old ones
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store, timeout = dist.FileStore(store, world_size), timedelta(seconds=PATIENCE)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
    )


# ------------------------------------------------------------------------------------------------------ sharded results


@dataclass
class Part:
    """What a rank has of a DTensor: `whole[slices]`."""

    values: Tensor
    slices: tuple[slice, ...]
    shape: torch.Size  # of the whole


def part_of(tensor: DTensor) -> Part:
    """A copy."""
    values, slices = local_shard(tensor)
    return Part(values.detach().clone(), slices, tensor.shape)


class Packer(pickle.Pickler):
    """Sends this rank's parts of DTensors."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            return Part, (*local_shard(value), value.shape)
        return NotImplemented


def pack(value: Any) -> bytes:
    stream = io.BytesIO()
    Packer(stream).dump(value)
    return stream.getvalue()


def assemble(results: list[Any]) -> list[Any]:
    """The ranks' results with whole tensors instead of parts: those at the same place in all ranks' results are one.

    Where ranks have the same elements, these must be equal to the bit.
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
    if path not in wholes:
        wholes[path] = torch.full(part.shape, float("nan"), dtype=part.values.dtype)
    place = wholes[path][part.slices]
    assert (place.isnan() | (place == part.values)).all(), (
        f"ranks have different copies of {keystr(path)}"
    )
    place.copy_(part.values)
