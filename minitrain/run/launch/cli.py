"""Run command lines: a mistake is one line and exit code 2, and processes end cleanly."""

import argparse
import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from tqdm import tqdm

from minitrain.errors import InputError, refused
from minitrain.run.config.environment import tell_torchrun
from minitrain.run.launch.interrupts import Stopped, stopped_by_signals

CONFIGS = Path(__file__).parents[2] / "configs"
# type, or list of choices; default, or ... where it must be given; help
Option = tuple[Callable[[str], Any] | list[str], Any, str]


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """argparse's, with the docstring as it is written, and each option's default."""


class Parser(argparse.ArgumentParser):
    """argparse with `--debug`; its own complaints are one line too."""

    def __init__(self, options: dict[str, Option] | None = None, **kwargs):
        super().__init__(formatter_class=Formatter, **kwargs)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")
        for name, (kind, default, text) in (options or {}).items():
            way = {"choices": kind} if isinstance(kind, list) else {"type": kind}
            given = {"required": True} if default is ... else {"default": default}
            self.add_argument(name, help=text, **given, **way)

    def parse_args(
        self, args: list[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse words and options in any order; argparse itself takes only one run of words."""
        return self.parse_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see --help)")


def positive(
    kind: type, zero: bool = False, most: float = sys.float_info.max
) -> Callable[[str], float]:
    """Return an argparse type: a number above 0 (or at least 0), and at most `most`."""

    def parse(text: str) -> float:
        value = kind(text)
        if not (0 <= value <= most if zero else 0 < value <= most):
            limit = "finite" if most == sys.float_info.max else f"at most {most:,}"
            raise argparse.ArgumentTypeError(
                f"{text} must be {'at least' if zero else 'above'} 0, and {limit}"
            )
        return value

    # which argparse shows for what is not a number
    parse.__name__ = kind.__name__
    return parse


# an argparse type: ~ is the home folder, which shells leave alone in words such as --out=~/new
home_path = os.path.expanduser


def config_path(text: str) -> str:
    """Parse a config's path, as an argparse type.

    It is a file, or else one of the package's own configs, as configs/a/b.yaml or a/b.
    """
    own = CONFIGS / f"{text.removeprefix('configs/').removesuffix('.yaml')}.yaml"
    path = home_path(text)
    return str(own) if os.path.isfile(own) and not os.path.isfile(path) else path


def check_writable(option: str, file: str | None) -> None:
    """Raise InputError if the file of an option cannot be written: what fills it takes minutes."""
    path = Path(file or "")
    is_new = not path.exists()
    # the reader of a pipe would take this for its end
    if file is None or path.is_fifo():
        return
    with refused(f"--{option}={file} cannot be written"):
        path.open("ab").close()
        if is_new:
            # other ranks do the same
            path.unlink(missing_ok=True)


def bar(items: Iterable | None, total: int, unit: str, done: int = 0) -> tqdm:
    """Return a progress bar over items, of which `done` were there before; rarely told to a file."""
    often = 0.1 if sys.stderr.isatty() else 10
    return tqdm(items, total=total, unit=unit, initial=done, mininterval=often)


def use_huge_pages() -> None:
    """Ask for huge pages, before the first tensor.

    Decoding on the CPU, which reads all weights at every step, is 1.1 times as fast with them.
    """
    # of Linux's transparent huge pages, by torch's allocator
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def run(main: Callable[[list[str]], None]) -> None:
    """Run a command line's `main(arguments)` and exit.

    The code is 0; 2 after an InputError or a failing disk, told in one line; after a signal its
    number and 128, as 130 after Ctrl-C; 1 after all else. Where another rank has died, that is the
    line, not what it led to here.
    """
    sys.stdout, sys.stderr = Display(sys.stdout), Display(sys.stderr)
    arguments = sys.argv[1:]
    code = 0
    ended = False
    try:
        with stopped_by_signals():
            main(arguments)
        sys.stdout.flush()
        if group_is_up():
            from minitrain.parallel.agreement import wait_for_all

            wait_for_all()
    except Stopped as stopped:
        ended = True
        code = stopped.code
        say_once(str(stopped))
    except KeyboardInterrupt:
        code = 130
        say_once("interrupted")
    except Exception as error:
        line = in_one_line(error)
        code = 2 if line else 1
        tell_torchrun(f"error: {line}" if line else traceback.format_exc())
        if line is None:
            if not group_is_up():
                raise
            from minitrain.run.launch import watch

            watch.await_verdict(error)
        # once this mistake is told, other ranks end this process
        sys.stdout.flush()
        if line is None or "--debug" in arguments:
            traceback.print_exc()
        if line:
            say_once(f"error: {line}")
    if group_is_up():
        from minitrain.run.launch import watch

        # after an error the others are made to end too
        watch.leave(code)
    if ended or group_is_up():
        sys.stdout.flush()
        sys.stderr.flush()
        # The interpreter's own teardown sometimes aborts after FSDP has run on gloo, making success
        # a crash; and after a signal it would wait for the compiler. Nor is the group destroyed:
        # NCCL would wait for ever for a sampler's CUDA graphs, which hold kernels of its.
        os._exit(code)
    sys.exit(code)


def in_one_line(error: Exception) -> str | None:
    """Return what to tell of an error whose cause is known.

    That is a mistake of the user's, or something that the machine lacks.
    """
    if isinstance(error, InputError | OSError):
        return str(error)
    from minitrain.run.launch.failures import explain

    return explain(error)


class Display:
    """A standard stream that goes nowhere once nobody takes what is written.

    A pipe's reader or a terminal may have gone, or the stream may be closed from the start; the
    results of a run are its files. Who reads gets each line at once.
    Other failures, as of a full disk, are raised once, so that their own line can be told; those of
    stderr never are.
    """

    def __init__(self, stream: TextIO | None):
        self.stream = stream or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        if isinstance(stream, io.TextIOWrapper):
            # letters that the terminal has not, in a text or a file's name; and, also under
            # PYTHONUNBUFFERED, a line is one write: else the lines of two ranks mix
            stream.reconfigure(
                errors="backslashreplace", line_buffering=True, write_through=False
            )
            # a stream in memory has no number
            with suppress(OSError):
                # else a pipe that its reader has let fill up is an error
                os.set_blocking(stream.fileno(), True)

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        return self._attempt(self.stream.write, text)

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    def _attempt(self, function: Callable, *arguments) -> Any:
        try:
            return function(*arguments)
        except OSError as error:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.stream.fileno())
            if error.errno not in (errno.EPIPE, errno.EIO) and self is not sys.stderr:
                raise
            return function(*arguments)


def say_once(line: str) -> None:
    """Print to stderr what several ranks may have found, such as the same mistake in the config."""
    if group_is_up():
        from minitrain.run.launch import watch

        watch.say_once(line)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr)


def group_is_up() -> bool:
    """Return whether this process has joined others.

    It does not import torch, which takes seconds, for a command that has not needed it.
    """
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()
