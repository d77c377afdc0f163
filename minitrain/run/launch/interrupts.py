"""End a command that is asked to stop: soon, with a line of its own, whatever it is at.

A signal raises `Stopped` where the command is, so that `finally` clauses remove what is half-written.
The compiler's threads would go on for minutes, and the interpreter would wait for them: the process
ends without its teardown, and after PATIENCE seconds at the latest. While a run trains, watch.py has
handlers of its own.
"""

import os
import signal
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
# torch has no public way to ask whether it compiles (2.13); code that is compiled runs outside these
COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx")


class Stopped(KeyboardInterrupt):
    """A signal that ends the command, with the line that says so."""

    def __init__(self, number: int, line: str = ""):
        ended = f"ended by {signal.Signals(number).name}"
        super().__init__(line or ("interrupted" if number == signal.SIGINT else ended))
        self.code = 128 + number


# whether this process is a command's own, and not a notebook's
_is_command = False


def stop(number: int, frame: FrameType | None = None, line: str = "") -> None:
    """Raise Stopped; end a command's process if that has not done so in time. A signal's handler."""
    stopped = Stopped(number, line)

    def end() -> None:
        os.write(2, f"{stopped}\n".encode())
        os._exit(stopped.code)

    if _is_command:
        timer = threading.Timer(PATIENCE, end)
        timer.daemon = True
        timer.start()
    raise stopped


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let signals that ask a command to stop raise Stopped; one that is ignored (nohup) stays so."""
    global _is_command
    _is_command = True
    before = {
        number: signal.signal(number, stop)
        for number in STOPS
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        _is_command = False
        for number, handler in before.items():
            signal.signal(number, handler)


def above(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def compiles(frames: Iterable[FrameType]) -> bool:
    """Return True if torch.compile is at work in one of the frames, which need not import torch."""
    return any(frame.f_globals.get("__name__") in COMPILERS for frame in frames)
