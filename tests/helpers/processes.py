"""Start processes that end with their test, among them ranks that a test can kill.

They have default signal handlers. Most are forked from the pool's server.
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

# seconds in which remaining ranks must end
LIMIT = 120
# processes of the running test
STARTED = []


def start_server() -> None:
    """Start the server, after which processes start within milliseconds."""
    fork(os.getpid).join()


def fork(function: Callable, *args: Any, daemon: bool = False):
    """Call `function(*args)` in a process forked from the server; returns the multiprocessing.Process."""
    process = SERVER.Process(target=call, args=(function, args), daemon=daemon)
    process.start()
    STARTED.append(process)
    return process


def call(function: Callable, args: tuple) -> None:
    # the server has the variables of the test in which it began
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    default_signals()
    function(*args)


def popen(words: list, **options: Any) -> subprocess.Popen:
    """Start a program."""
    process = subprocess.Popen(words, preexec_fn=default_signals, **options)
    STARTED.append(process)
    return process


def default_signals() -> None:
    """Restore signal handlers that nohup, or a shell that runs tests in the background, has disabled."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def end_started() -> None:
    """End processes that the test has left running; torchrun gets time to end its ranks."""
    while STARTED:
        process = STARTED.pop()
        if isinstance(process, subprocess.Popen):
            end_program(process)
        else:
            process.kill()
            process.join()


def end_program(program: subprocess.Popen) -> None:
    # `with` closes its pipes
    with program:
        program.terminate()
        with suppress(subprocess.TimeoutExpired):
            program.wait(10)
        program.kill()


def reserved_port() -> socket.socket:
    """Return a socket that reserves a port: a server that reuses addresses can listen on it, but nobody else gets it.

    A port that merely was free may be taken by another test before rank 0 listens on it.
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
    """Run a rank's process: `function(*args)` through cli.run, with torchrun's environment variables.

    watched: a semaphore to release when the rank's group is up and watched.
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
    """Processes that run `function(*args)` as ranks; their output is appended to the file `log`."""

    def __init__(self, world: int, log: Path, function: Callable, *args: Any):
        start_server()
        self.port = reserved_port()
        self.log = log
        # not events, whose lock would stay locked if a process is killed while it sets one
        self.watched = [SERVER.Semaphore(0) for _ in range(world)]
        port = self.port.getsockname()[1]
        self.processes = [
            fork(rank_main, function, args, rank, world, port, log, watched, daemon=True)
            for rank, watched in enumerate(self.watched)
        ]

    def wait(self, seconds: float) -> bool:
        """Return True if all ranks end within this time."""
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
        """Kill one rank by SIGKILL; return the seconds until the others have ended."""
        began = time.monotonic()
        self.send(rank, signal.SIGKILL)
        self.processes[rank].join()
        if not all(watched.get_value() for watched in self.watched):
            # as torchrun does, because ranks that have not met would wait for each other
            for other in range(len(self.processes)):
                self.send(other, signal.SIGTERM)
        ended = self.wait(LIMIT)
        for process in self.processes:
            process.kill()
        assert ended, f"after the death of rank {rank}: {self.codes()}\n{self.log.read_text()}"
        return time.monotonic() - began
