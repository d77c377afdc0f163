"""Notice what happens to a run: that it is asked to stop, and that ranks die.

Signals: SIGINT (Ctrl-C), SIGTERM, SIGHUP (the terminal goes), SIGUSR1, SIGUSR2 and SIGXCPU
(schedulers send them before the time is up; interrupts.py). One may reach the ranks at different moments, or one
rank alone; all finish the step they are at or the next, but no validation other than GRPO's, write
a checkpoint, export nothing and end with code 0. A second SIGINT ends the process at once. A signal
that is ignored from the start, as nohup does with SIGHUP, stays so. torchrun passes signals on,
kills what is left after 30 seconds (`--shutdown-timeout`, from torch 2.13 on) and itself ends with
code 1. Before the first step, while that one is compiled, and after the last a signal ends the run
at once: there is nothing to save then.

Dead ranks: the kernel closes the connections of a process that dies, however it dies, and not those
of one that is merely slow. So every rank has one to rank 0 over which nothing goes; when it ends
without a word, rank 0 tells who it was, in one line, and makes all others end, also those that wait
in a collective for ever. That takes a moment; for a machine that vanishes, the 25 seconds until
TCP's keep-alive gives up. torchrun --max-restarts then starts all again, from the last checkpoint.
Ranks that live and wait for each other all the same are left to the collectives' timeout.
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
from minitrain.run.launch.interrupts import STOPS, Stopped, above, compiles, stop
from minitrain.run.launch.rendezvous import default_store

# seconds, seconds, times
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# seconds after which a rank whose collective has failed takes it for no other rank's death
VERDICT = 10.0
# seconds that rank 0, which has the store, stays for others that end after an error
FAREWELL = 5.0

TOLD = b"\nSIGINT: the run stops after this step, with a checkpoint (again: at once)\n"
# that this rank has got
_signals: list[int] = []

# --------------------------------------------------------------------------------------- stopping


def while_compiling(number: int, step: str) -> str:
    return f"{signal.Signals(number).name}: ended while torch.compile was at work on the {step}"


@contextmanager
def until_signal() -> Iterator[Callable[[], str]]:
    """Catch the signals that ask a run to stop.

    Yields a function that returns the name of one that some rank has got, "" if none has; all ranks
    call it together. That rank says so in the store, where rank 0 looks and tells all: they stop at
    the same place.
    """
    # one for each run
    store = default_store()
    name = f"minitrain/signal/{broadcast(secrets.token_hex(8))}"
    # torchrun passes on what the terminal sends to all: that is no second Ctrl-C
    echo = 1.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
    interrupted = 0.0
    step_done = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if not step_done and compiles(above(frame)):
            stop(number, line=while_compiling(number, "first step"))
        if number == signal.SIGINT and not interrupted:
            interrupted = time.monotonic()
            if os.environ.get("LOCAL_RANK", "0") == "0":
                # not print: the signal may have come in the middle of one
                with suppress(OSError):
                    os.write(2, TOLD)
        elif number == signal.SIGINT and time.monotonic() > interrupted + echo:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        _signals.append(number)

    def stopping() -> str:
        nonlocal step_done
        step_done = True
        number = next(iter(_signals), 0)
        # torchrun, which has the store, may have died of the same signal
        with suppress(RuntimeError):
            if number:
                store.set(name, str(number))
            elif dist.get_rank() == 0 and store.check([name]):
                number = int(store.get(name))
        number = broadcast_flag(number)
        return signal.Signals(number).name if number else ""

    # by signal.signal, which also says what was before
    before = {
        number: signal.signal(number, note)
        for number in STOPS
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield stopping
    except Exception as error:
        # a terminal interrupts the compiler's own processes, too
        if _signals and compiles(frame for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise Stopped(_signals[0], while_compiling(_signals[0], "step")) from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _signals.clear()


# ------------------------------------------------------------------------------------- dead ranks


class Watch:
    """This rank's part of the watch, in a thread.

    One byte goes over a connection, at the end: the code to end with.

    others: the ranks at the other ends, by connection: on rank 0 all others, elsewhere rank 0.
    """

    def __init__(self):
        self.others: dict[socket.socket, int] = {}
        # are all connections there?
        self.joined = 0
        self.complete = threading.Event()
        self.leaving = False
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.parent = os.getppid()
        # NCCL's own thread aborts a process that has waited too long; on gloo the rank says so
        self.gave_up = ""
        if dist.get_backend() == "nccl":
            self.gave_up = ", gave up waiting (see out_dir/logs/nccl-rank-*)"
        self.server = self.listen() if self.rank == 0 else self.join()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def listen(self) -> socket.socket:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(
            ("", 0), family=family, backlog=self.world, dualstack_ipv6=both
        )
        # a connection without it is not from one of our ranks
        self.key = secrets.token_hex(8)
        default_store().set("minitrain/watch", f"{server.getsockname()[1]} {self.key}")
        return server

    def join(self) -> None:
        """Connect to rank 0. Where that cannot be reached so, this rank goes unwatched."""
        port, key = default_store().get("minitrain/watch").decode().split()
        host = os.environ.get("MASTER_ADDR", "localhost")
        try:
            connection = socket.create_connection((host, int(port)), timeout=10)
            connection.sendall(f"{key}{self.rank:08d}".encode())
            self.add(connection, 0)
        except OSError as error:
            print(f"warning: rank {self.rank} is not watched: {error}", file=sys.stderr)

    def add(self, connection: socket.socket, rank: int) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            # not on every system
            if option := getattr(socket, name, None):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.others[connection] = rank
        self.joined += 1
        if self.joined == self.world - 1:
            self.complete.set()

    def run(self) -> None:
        """Listen to the other ranks until they have left: the thread's own loop."""
        while self.server or self.others:
            for ready in wait(filter(None, [*self.others, self.server]), timeout=2):
                self.admit() if ready is self.server else self.hear(ready)
            gone = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.parent
            # SIGUSR1 ends torchrun at once, and so does a second SIGINT, but after the first one
            # ranks are on their way
            if gone and {*_signals} <= {signal.SIGINT}:
                # whoever starts the run again must not meet ranks that still write
                self.end(1, "torchrun is gone" if os.environ["LOCAL_RANK"] == "0" else "")

    def admit(self) -> None:
        """Take a new connection, if it is one of ours."""
        with suppress(OSError, ValueError):
            connection, _ = self.server.accept()
            connection.settimeout(5)
            hello = connection.recv(24, socket.MSG_WAITALL)
            if secrets.compare_digest(hello[:16], self.key.encode()):
                self.add(connection, int(hello[16:]))

    def hear(self, connection: socket.socket) -> None:
        """Take the other side's last word; none, if it has died."""
        rank = self.others[connection]
        word = self.lost(connection)
        if not word and not self.leaving:
            # rank 0 tells of the others, and rank 1 of rank 0
            tells = self.rank == 0 or (rank == 0 and self.rank == 1)
            gone = f"rank {rank} is gone: it was killed{self.gave_up} or cannot be reached"
            self.end(1, gone if tells else "")
        # it has said why
        elif word and word[0]:
            self.end(word[0])

    def end(self, code: int, reason: str = "") -> None:
        """End this process and all others, from this thread, whatever the main one waits for."""
        if reason:
            # the first line break ends that of a progress bar
            line = f"error: {reason}; the run ends, and the same command continues from its last checkpoint"
            tell_torchrun(line)
            sys.stderr.write(f"\n{line}\n")
            sys.stderr.flush()
        self.tell(code)
        deadline = time.monotonic() + FAREWELL
        while self.rank == 0 and self.others and time.monotonic() < deadline:
            for ready in wait(self.others, timeout=0.01):
                self.lost(ready)
        os._exit(code)

    def lost(self, connection: socket.socket) -> bytes:
        """Return the other side's last word; nothing if it has died.

        After that its connection is of no more use.
        """
        self.others.pop(connection)
        try:
            return connection.recv(1)
        except OSError:
            return b""

    def leave(self, code: int) -> None:
        """Give notice, so that the others do not take this process for dead."""
        self.leaving = True
        if code == 0 and self.rank == 0 and self.world > 1:
            # so that all get the word
            self.complete.wait(5)
        self.tell(code)
        deadline = time.monotonic() + FAREWELL
        while code and self.rank == 0 and self.others and time.monotonic() < deadline:
            time.sleep(0.01)

    def tell(self, code: int) -> None:
        for connection in list(self.others):
            with suppress(OSError):
                connection.sendall(bytes([code]))


_watch: Watch | None = None


def begin() -> None:
    """Watch over the ranks of the process group that has just started."""
    global _watch
    if dist.get_world_size() > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        _watch = Watch()
        # for programs that end without `cli.run`, perhaps after an error that the interpreter has
        # shown; not run by SIGKILL, abort() and os._exit()
        atexit.register(lambda: _watch.leave(hasattr(sys, "last_value")))


def leave(code: int) -> None:
    """Tell the others that this process ends with `code`; if that is not 0, they end, too."""
    if _watch is not None:
        _watch.leave(code)


def await_verdict(error: Exception) -> None:
    """Wait, after an error that another rank's death explains; do not return if one has died."""
    if _watch is not None and (isinstance(error, dist.DistError) or "gloo" in str(error)):
        time.sleep(VERDICT)


def say_once(line: str) -> None:
    """Print a line to stderr on the first rank that asks for it.

    The others return once that is done.
    """
    store = default_store()
    name = f"minitrain/said/{line}"
    done = f"{name}/done"
    try:
        first = store.add(name, 1) == 1
    except RuntimeError:
        # the store has gone with its rank, which has said so, or why
        first = True
        if _watch is not None and _watch.rank:
            # the thread ends this process when it hears of it
            _watch.thread.join(3 * VERDICT)
    if first:
        # rank 0 has ended its own progress bar's line, but on another rank's terminal it may still
        # stand
        start = "\n" if dist.get_rank() else ""
        print(start + line, file=sys.stderr, flush=True)
    with suppress(RuntimeError):
        if first:
            store.set(done, "")
        else:
            store.wait([done], timedelta(seconds=VERDICT))
