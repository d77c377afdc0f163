"""Stop a run on a signal, and end all ranks when one of them dies.

Signals: SIGINT (Ctrl-C), SIGTERM, SIGHUP (the terminal closes), SIGUSR1, SIGUSR2 and SIGXCPU, which
schedulers send before the time is up. A signal may reach the ranks at different times, or only one
of them. All ranks stop after the same step, the current or the next one. They write a checkpoint,
skip validation (except GRPO's) and the export, and exit with code 0. A second SIGINT ends the process
immediately. A signal that is ignored from the start stays ignored, such as SIGHUP under nohup.
torchrun passes signals on, kills remaining ranks after 30 seconds (`--shutdown-timeout`, from torch
2.13 on), and itself exits with code 1. Before the first step, while torch compiles the first step, and
after the last one a signal ends the run immediately, because there is nothing to save (interrupts.py).

Dead ranks: the kernel closes the connections of a process that dies, however it dies, but not those
of a process that is merely slow. So every rank holds an idle connection to rank 0. If it closes
without notice, rank 0 prints in one line which rank is gone, and ends all others, including those
that wait in a collective. This takes a moment; if a whole machine vanishes, the 25 seconds until
TCP's keep-alive gives up. torchrun --max-restarts then restarts all ranks from the last checkpoint.
Ranks that are alive but wait for each other end by the collectives' timeout.
"""

import atexit
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import wait
from types import FrameType

import torch.distributed as dist

from minitrain.parallel.agreement import broadcast, broadcast_flag
from minitrain.run.config.environment import tell_torchrun
from minitrain.run.launch.interrupts import STOPS, Stopped, above, compiles, end_late
from minitrain.run.launch.rendezvous import default_store

# probe after 10 idle seconds, then every 5 seconds, at most 3 times
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# seconds that a rank waits after a failed collective, to hear whether another rank has died
VERDICT = 10.0
# seconds that rank 0, which holds the store, waits after an error for the others to end
FAREWELL = 5.0

FIRST_SIGINT = b"\nSIGINT: the run stops after this step, with a checkpoint (again: at once)\n"
# the signals that this process has received
_signals: list[int] = []

# --- signals


def stopped_compiling(number: int, step: str) -> Stopped:
    """Return the exception for a signal that ends a run while it compiles a step."""
    name = signal.Signals(number).name
    stopped = Stopped(number, f"{name}: ended while torch.compile was at work on the {step}")
    end_late(stopped)
    return stopped


@contextmanager
def until_signal() -> Iterator[Callable[[], str]]:
    """Catch the signals that ask a run to stop.

    Yields a function that all ranks call together. It returns the name of a signal that some rank has
    received, or "". A rank that receives a signal writes it to the store, and rank 0 reads it there
    and broadcasts it, so that all ranks stop after the same step.
    """
    # a new key for each run
    store = default_store()
    name = f"minitrain/signal/{broadcast(secrets.token_hex(8))}"
    # torchrun repeats a SIGINT that the terminal sends to all processes: ignore it within a second
    echo = 1.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
    interrupted = 0.0
    step_done = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if not step_done and compiles(above(frame)):
            raise stopped_compiling(number, "first step")
        if number == signal.SIGINT and not interrupted:
            interrupted = time.monotonic()
            if os.environ.get("LOCAL_RANK", "0") == "0":
                # not `print`, because the signal may have interrupted one
                with suppress(OSError):
                    os.write(2, FIRST_SIGINT)
        elif number == signal.SIGINT and time.monotonic() > interrupted + echo:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        _signals.append(number)

    def stopping() -> str:
        nonlocal step_done
        step_done = True
        number = next(iter(_signals), 0)
        # torchrun, which holds the store, may have died from the same signal
        with suppress(RuntimeError):
            if number:
                store.set(name, str(number))
            elif dist.get_rank() == 0 and store.check([name]):
                number = int(store.get(name))
        number = broadcast_flag(number)
        return signal.Signals(number).name if number else ""

    # signal.signal returns the previous handler
    before = {
        number: signal.signal(number, note)
        for number in STOPS
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield stopping
    except Exception as error:
        # Ctrl-C also interrupts the compiler's subprocesses, which makes compilation fail
        if _signals and compiles(frame for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise stopped_compiling(_signals[0], "step") from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _signals.clear()


# --- dead ranks


class Watch:
    """The connections of this rank, and the thread that waits for them to close.

    Only one byte is sent over a connection, when a rank leaves: the exit code for the other side.
    """

    def __init__(self):
        # connection -> rank at the other end: on rank 0 all others, elsewhere rank 0
        self.others: dict[socket.socket, int] = {}
        # number of connections so far; `complete` is set when all ranks are connected
        self.joined = 0
        self.complete = threading.Event()
        self.leaving = False
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.parent = os.getppid()
        # NCCL's watchdog aborts a process whose collective timed out; on gloo the rank reports it
        self.gave_up = ""
        if dist.get_backend() == "nccl":
            self.gave_up = ", gave up waiting (see out_dir/logs/nccl-rank-*)"
        self.server = None
        if self.rank == 0:
            self.server = self.listen()
        else:
            self.join()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def listen(self) -> socket.socket:
        """Return rank 0's server, whose port and key are in the store."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(
            ("", 0), family=family, backlog=self.world, dualstack_ipv6=both
        )
        # connections that do not send it are not from this run's ranks
        self.key = secrets.token_hex(8)
        default_store().set("minitrain/watch", f"{server.getsockname()[1]} {self.key}")
        return server

    def join(self) -> None:
        """Connect to rank 0; if that fails, warn that this rank is not watched."""
        port, key = default_store().get("minitrain/watch").decode().split()
        host = os.environ.get("MASTER_ADDR", "localhost")
        try:
            connection = socket.create_connection((host, int(port)), timeout=10)
            connection.sendall(f"{key}{self.rank:08d}".encode())
            self.add(connection, 0)
        except OSError as error:
            print(f"warning: rank {self.rank} is not watched: {error}", file=sys.stderr)

    def add(self, connection: socket.socket, rank: int) -> None:
        """Watch a connection to `rank`."""
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            # some systems lack some of these options
            if option := getattr(socket, name, None):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.others[connection] = rank
        self.joined += 1
        if self.joined == self.world - 1:
            self.complete.set()

    def run(self) -> None:
        """Watch all connections until they are closed; this is the thread's loop."""
        while self.server or self.others:
            for ready in wait(filter(None, [*self.others, self.server]), timeout=2):
                self.admit() if ready is self.server else self.hear(ready)
            gone = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.parent
            # other signals, such as SIGUSR1, also end torchrun, while its ranks still save
            if gone and {*_signals} <= {signal.SIGINT}:
                # otherwise a new run could start while these ranks still write
                self.end(1, "torchrun is gone" if os.environ["LOCAL_RANK"] == "0" else "")

    def admit(self) -> None:
        """Accept a new connection if it sends this run's key."""
        with suppress(OSError, ValueError):
            connection, _ = self.server.accept()
            connection.settimeout(5)
            # the key in 16 characters and the rank in 8, as `join` sends them
            hello = connection.recv(24, socket.MSG_WAITALL)
            if secrets.compare_digest(hello[:16], self.key.encode()):
                self.add(connection, int(hello[16:]))

    def hear(self, connection: socket.socket) -> None:
        """Handle a connection that is readable: the other side has left, or has died."""
        rank = self.others[connection]
        # its exit code in a byte, or nothing if it died
        word = self.close(connection)
        if not word and not self.leaving:
            # rank 0 reports the death of other ranks, and rank 1 that of rank 0
            reports = self.rank == 0 or (rank == 0 and self.rank == 1)
            gone = f"rank {rank} is gone: it was killed{self.gave_up} or cannot be reached"
            self.end(1, gone if reports else "")
        elif word and word[0]:
            # the rank left after an error, which it has reported itself
            self.end(word[0])

    def end(self, code: int, reason: str = "") -> None:
        """End this process and all others from this thread, whatever the main thread waits for."""
        if reason:
            # the line break before it ends the line of a progress bar
            line = f"error: {reason}; the run ends, and the same command continues from its last checkpoint"
            tell_torchrun(line)
            sys.stderr.write(f"\n{line}\n")
            sys.stderr.flush()
        self.notify(code)
        # until the others have ended, as they may need the store
        deadline = time.monotonic() + FAREWELL
        while self.rank == 0 and self.others and time.monotonic() < deadline:
            for ready in wait(self.others, timeout=0.01):
                self.close(ready)
        os._exit(code)

    def close(self, connection: socket.socket) -> bytes:
        """Stop watching a connection; return the byte that the other side sent, or b"" if it died."""
        self.others.pop(connection)
        try:
            return connection.recv(1)
        except OSError:
            return b""

    def leave(self, code: int) -> None:
        """Notify the others that this process ends, so that they do not take it for dead."""
        self.leaving = True
        if code == 0 and self.rank == 0 and self.world > 1:
            # ranks that connect later would not be notified
            self.complete.wait(5)
        self.notify(code)
        # here the watching thread closes connections
        deadline = time.monotonic() + FAREWELL
        while code and self.rank == 0 and self.others and time.monotonic() < deadline:
            time.sleep(0.01)

    def notify(self, code: int) -> None:
        """Send the exit code to the other side of every connection."""
        for connection in list(self.others):
            with suppress(OSError):
                connection.sendall(bytes([code]))


_watch: Watch | None = None


def begin() -> None:
    """Start to watch the ranks of the process group that has just started."""
    global _watch
    if dist.get_world_size() > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        _watch = Watch()
        # for programs that end without `cli.run`; sys.last_value exists if an exception ended them.
        # SIGKILL, abort() and os._exit() skip this
        atexit.register(lambda: _watch.leave(int(hasattr(sys, "last_value"))))


def leave(code: int) -> None:
    """Notify the others that this process ends with `code`; they end too if it is not 0."""
    if _watch is not None:
        _watch.leave(code)


def await_verdict(error: Exception) -> None:
    """Wait after an error that may come from another rank's death; if one has died, do not return."""
    if _watch is not None and (isinstance(error, dist.DistError) or "gloo" in str(error)):
        time.sleep(VERDICT)


def say_once(line: str) -> None:
    """Print a line to stderr on the first rank that calls this; others return after it is printed."""
    store = default_store()
    name = f"minitrain/said/{line}"
    done = f"{name}/done"
    try:
        first = store.add(name, 1) == 1
    except RuntimeError:
        # the store's process is gone, and other ranks cannot be asked
        first = True
        if _watch is not None and _watch.rank:
            # the watching thread ends this process if that was rank 0's, which has reported it
            _watch.thread.join(3 * VERDICT)
    if first:
        # another rank's line may follow rank 0's progress bar on the terminal
        start = "\n" if dist.get_rank() else ""
        print(start + line, file=sys.stderr, flush=True)
    with suppress(RuntimeError):
        if first:
            store.set(done, "")
        else:
            store.wait([done], timedelta(seconds=VERDICT))
