"""Processes that a test starts: they have a shell's signals, and end with the test, if not before.

Among them ranks that a test may kill; most are forks of the pool's server.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.helpers.pool import SERVER

# seconds in which the ranks that are left must have ended: only against waiting for ever
LIMIT = 120
STARTED = []  # by the test that runs now


def start_server() -> None:
    """From then on processes start within milliseconds."""
    fork(os.getpid).join()


def fork(function: Callable, *args: Any, daemon: bool = False):
    """Call `function(*args)` in a process forked from the server; returns the multiprocessing.Process."""
    process = SERVER.Process(target=call, args=(function, args), daemon=daemon)
    process.start()
    STARTED.append(process)
    return process


def call(function: Callable, args: tuple) -> None:
    default_signals()
    function(*args)


def popen(words: list, **options: Any) -> subprocess.Popen:
    """Start a program."""
    process = subprocess.Popen(words, preexec_fn=default_signals, **options)
    STARTED.append(process)
    return process


def default_signals() -> None:
    """Heed signals that nohup, or a shell that starts tests in the background, has let this process ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def end_started() -> None:
    """End what the test has left running, after a moment in which torchrun may end its ranks."""
    while STARTED:
        process = STARTED.pop()
        if isinstance(process, subprocess.Popen):
            end_program(process)
        else:
            process.kill()
            process.join()


def end_program(program: subprocess.Popen) -> None:
    with program:  # which closes its pipes
        program.terminate()
        with suppress(subprocess.TimeoutExpired):
            program.wait(10)
        program.kill()


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
        self.port = reserved_port()
        self.log = log
        self.watched = [SERVER.Semaphore(0) for _ in range(world)]
        port = self.port.getsockname()[1]
        self.processes = [
            fork(rank_main, function, args, rank, world, port, log, watched, daemon=True)
            for rank, watched in enumerate(self.watched)
        ]

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
