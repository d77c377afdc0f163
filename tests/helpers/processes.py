"""Ranks as processes of their own, which a test may kill: forks of the pool's server."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.pool import SERVER

LIMIT = (
    120  # seconds in which the ranks that are left must have ended: only against waiting for ever
)


def start_server() -> None:
    """From then on processes start within milliseconds."""
    first = SERVER.Process(target=os.getpid)
    first.start()
    first.join()


def reserved_port() -> socket.socket:
    """A socket whose port nobody else is given while it is open; a server that reuses addresses can listen on it.

    A port that is only known to have been free may be another test's by the time that rank 0 listens on it.
    """
    dual = socket.has_dualstack_ipv6()
    holder = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if dual:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    holder.bind(("", 0))
    return holder


def rank_main(
    function: Callable, args: tuple, rank: int, world: int, port: int, log: Path, watched
) -> None:
    """The life of a process: `function(*args)` in the environment that torchrun would have made, by way of cli.run.

    watched: a semaphore to release when this rank's group is up and watched over.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    import torch

    from minitrain.run.launch import cli, watch

    begin = watch.begin
    watch.begin = lambda: (begin(), watched.release())
    torch.set_num_threads(1)
    cli.run(lambda _: function(*args))


class Ranks:
    """`function(*args)` on so many ranks; what they print is appended to the file `log`."""

    def __init__(self, world: int, log: Path, function: Callable, *args: Any):
        start_server()
        # no events: whoever is killed while setting one keeps its lock for ever
        self.port, self.log, self.watched = (
            reserved_port(),
            log,
            [SERVER.Semaphore(0) for _ in range(world)],
        )
        port = self.port.getsockname()[1]
        self.processes = [
            SERVER.Process(
                target=rank_main,
                args=(function, args, rank, world, port, log, watched),
                daemon=True,
            )
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
        if not all(watched.get_value() for watched in self.watched):
            for other in range(len(self.processes)):
                self.send(
                    other, signal.SIGTERM
                )  # as torchrun does: ranks that do not know each other wait for long
        ended = self.wait(LIMIT)
        for process in self.processes:
            process.kill()
        assert ended, f"after the death of rank {rank}: {self.codes()}\n{self.log.read_text()}"
        return time.monotonic() - began
