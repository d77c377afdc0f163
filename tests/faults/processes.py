"""Ranks as processes of their own, which a test may kill: forks of a server that imports torch once."""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 30  # seconds in which the ranks that are left must have ended


def forks() -> multiprocessing.context.BaseContext:
    """A context whose processes start within milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.test_grpo", "minitrain.train"])
    first = context.Process(target=os.getpid)
    first.start()
    first.join()
    return context


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def rank_main(function: Callable, args: tuple, rank: int, world: int, port: int, log: Path, watched) -> None:
    """The life of a process: `function(*args)` in the environment that torchrun would have made, by way of cli.run.

    watched: an event to set when this rank's group is up and watched over.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    import torch

    from minitrain import cli
    from minitrain.runtime import watch

    begin = watch.begin
    watch.begin = lambda: (begin(), watched.set())
    torch.set_num_threads(1)
    cli.run(lambda _: function(*args))


class Ranks:
    """`function(*args)` on so many ranks; what they print is appended to the file `log`."""

    def __init__(self, world: int, log: Path, function: Callable, *args: Any):
        context, port = forks(), free_port()
        self.log, self.watched = log, [context.Event() for _ in range(world)]
        self.processes = [
            context.Process(target=rank_main, args=(function, args, rank, world, port, log, watched))
            for rank, watched in enumerate(self.watched)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds: float) -> bool:
        """Have all ended within so many seconds?"""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        return None not in self.codes()

    def codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]

    def send(self, rank: int, number: signal.Signals) -> None:
        if self.processes[rank].exitcode is None:
            os.kill(self.processes[rank].pid, number)

    def kill(self, rank: int) -> float:
        """SIGKILL for one rank; returns the seconds until the others have ended."""
        began = time.monotonic()
        self.send(rank, signal.SIGKILL)
        self.processes[rank].join()
        if not all(watched.is_set() for watched in self.watched):
            for other in range(len(self.processes)):
                self.send(other, signal.SIGTERM)  # as torchrun does: ranks that do not know each other wait for long
        ended = self.wait(LIMIT)
        for process in self.processes:
            process.kill()
        assert ended, f"after the death of rank {rank}: {self.codes()}\n{self.log.read_text()}"
        return time.monotonic() - began
