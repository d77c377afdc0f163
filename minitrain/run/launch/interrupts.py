"""End a command soon after a signal, with a line that says so.

A signal raises `Stopped` wherever the command is, so that `finally` clauses remove incomplete files.
The process then ends without Python's teardown, which would wait minutes for the compiler's threads,
and after PATIENCE seconds at the latest, even if the main thread waits in C++ for other ranks, where
Python runs no handler. While a run trains, watch.py installs other handlers.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
# seconds
PATIENCE = 8.0
# modules whose functions are on the stack while torch compiles; compiled code runs outside of them.
# torch 2.13 has no public way to ask
COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx")


class Stopped(KeyboardInterrupt):
    """A signal that ends the command. line: to print; by default, a line that names the signal."""

    def __init__(self, number: int, line: str = ""):
        ended = f"ended by {signal.Signals(number).name}"
        super().__init__(line or ("interrupted" if number == signal.SIGINT else ended))
        self.code = 128 + number


# True if this process runs a command line, False in a notebook
_is_command = False


def stop(number: int, frame: FrameType | None = None) -> None:
    """Raise Stopped: a handler."""
    raise Stopped(number)


def end_late(stopped: Stopped) -> None:
    """End a command's process after PATIENCE seconds, with one line for all ranks of this machine."""
    if not _is_command:
        return

    def end() -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            os.write(2, f"{stopped}\n".encode())
        os._exit(stopped.code)

    timer = threading.Timer(PATIENCE, end)
    timer.daemon = True
    timer.start()


def listen(signals: socket.socket) -> None:
    """End the process late after a signal whose handler is `stop`; this is a thread's loop.

    signals: receives the number of each signal as a byte, from Python's handler in C.
    """
    with signals:
        while number := signals.recv(1):
            if signal.getsignal(number[0]) is stop:
                end_late(Stopped(number[0]))


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Make signals that ask a command to stop raise Stopped, except those that nohup ignores."""
    global _is_command
    _is_command = True
    signals, numbers = socket.socketpair()
    numbers.setblocking(False)
    threading.Thread(target=listen, args=(signals,), daemon=True).start()
    before = {
        number: signal.signal(number, stop)
        for number in STOPS
        if signal.getsignal(number) != signal.SIG_IGN
    }
    previous = signal.set_wakeup_fd(numbers.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        _is_command = False
        signal.set_wakeup_fd(previous)
        numbers.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def above(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def compiles(frames: Iterable[FrameType]) -> bool:
    """Return True if torch.compile runs in one of the frames. This does not import torch."""
    return any(frame.f_globals.get("__name__") in COMPILERS for frame in frames)
