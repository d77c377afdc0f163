"""Run command lines: a user's mistake gives one line and exit code 2, and processes end cleanly."""

import argparse
import errno
import io
import os
import shutil
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any, NoReturn, TextIO

from tqdm import tqdm

from minitrain.errors import InputError, as_input_error
from minitrain.run.config.environment import group_is_up, tell_torchrun
from minitrain.run.launch.interrupts import Stopped, stopped_by_signals

# a command-line option: (type or list of choices, default or ... if it is required, help); bool is
# the type of a flag
Option = tuple[Callable[[str], Any] | list[str], Any, str]


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """argparse's formatter that keeps the docstring's lines, and shows defaults that are not empty."""

    def _get_help_string(self, action: argparse.Action) -> str:
        has_none = action.default is None or action.default is False or action.default == []
        return action.help if has_none else super()._get_help_string(action)


class Once(argparse.Action):
    """Store an option's value, and refuse a second one, which would replace it silently."""

    given = False

    def __call__(self, parser, namespace, values, option_string=None):
        if self.given and option_string:
            parser.error(f"{option_string} is given twice")
        self.given = True
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An argparse parser with `--debug`, whose errors are InputErrors.

    settings: accept settings as --key=value too, besides words key=value.
    """

    def __init__(
        self, options: dict[str, Option] | None = None, settings: bool = False, **kwargs
    ):
        super().__init__(formatter_class=Formatter, **kwargs)
        self.settings = settings
        self.register("action", None, Once)
        self.register("action", "store", Once)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")
        for name, (kind, default, text) in (options or {}).items():
            if kind is bool:
                self.add_argument(name, help=text, action="store_true")
                continue
            values = {"choices": kind} if isinstance(kind, list) else {"type": kind}
            if kind is file_path:
                values["metavar"] = "FILE"
            given = {"required": True} if default is ... else {"default": default}
            self.add_argument(name, help=text, **given, **values)

    def parse_args(
        self, args: list[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse words and options in any order; argparse by itself needs all words together."""
        if self.settings:
            # imported only here, because it describes all settings
            from minitrain.run.config.flags import take_flags

            args = take_flags(args, self._option_string_actions)
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

    # argparse shows this name in its message for a text that is no number
    parse.__name__ = kind.__name__
    return parse


# argparse types that expand ~, because shells do not expand it in words such as --out=~/new
home_path = os.path.expanduser


def file_path(text: str) -> str:
    """Return the path of a file; --help shows FILE."""
    return os.path.expanduser(text)


def check_new(out: str | Path) -> None:
    """Raise InputError if the folder --out exists."""
    if Path(out).exists():
        raise InputError(f"--out {out} exists already (name a new folder)")


@contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """Yield a folder beside `out` that becomes `out` at the end, or is removed after an error.

    So `out` is never half a result. Raises InputError if it exists.
    """
    check_new(out)
    out = Path(out)
    # a name that no user gives a folder
    work = out.with_name(f".{out.name}.minitrain")
    # of a process that was killed
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
        work.rename(out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def model_words(options: Namespace) -> str:
    """Return the options of a command that name its model, for another command."""
    adapter = f" --adapter {quote(options.adapter)}" if options.adapter else ""
    return f"--model {quote(options.model)}{adapter}"


def check_writable(option: str, file: str | None) -> None:
    """Raise InputError if an option's file cannot be written, before minutes are spent to fill it."""
    path = Path(file or "")
    is_new = not path.exists()
    # opening and closing a named pipe would end its reader's input
    if file is None or path.is_fifo():
        return
    with as_input_error(f"--{option}={file} cannot be written"):
        path.open("ab").close()
        if is_new:
            # another rank may have removed it already
            path.unlink(missing_ok=True)


def bar(items: Iterable | None, total: int, unit: str, done: int = 0) -> tqdm:
    """Return a progress bar over items. done: items that were finished before.

    If stderr is not a terminal, it is printed only every 10 seconds.
    """
    often = 0.1 if sys.stderr.isatty() else 10
    return tqdm(items, total=total, unit=unit, initial=done, mininterval=often)


def use_huge_pages() -> None:
    """Make torch's CPU allocator use huge pages. Call before the first tensor is made.

    Decoding on the CPU, which reads all weights at every step, is 1.1 times as fast with them.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def run(main: Callable[[list[str]], None]) -> None:
    """Run a command line's `main(arguments)` and exit.

    Exit codes: 0; 2 after an InputError or an OSError, which are printed as one line; 128 and its
    number after a signal, 130 after Ctrl-C; 1 after other errors. If another rank has died, that is
    reported, not the error that it caused here.
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
        # flushed first: once the error is printed, other ranks may end this process
        sys.stdout.flush()
        if line is None or "--debug" in arguments:
            traceback.print_exc()
        if line:
            say_once(f"error: {line}")
    if group_is_up():
        from minitrain.run.launch import watch

        # after an error this also ends the other ranks
        watch.leave(code)
    if ended or group_is_up():
        sys.stdout.flush()
        sys.stderr.flush()
        # Python's own teardown sometimes aborts after FSDP has run on gloo, which would make a
        # success a crash; after a signal it would wait for the compiler. The group is not destroyed,
        # because NCCL would wait forever for a sampler's CUDA graphs, which hold NCCL kernels
        os._exit(code)
    sys.exit(code)


def in_one_line(error: Exception) -> str | None:
    """Return a line for an error whose cause is known, otherwise None.

    The cause is a mistake of the user's, or something that the machine lacks.
    """
    if isinstance(error, InputError | OSError):
        return str(error)
    from minitrain.run.launch.failures import explain

    return explain(error)


class Display:
    """A standard stream that discards what is written once nobody reads it anymore.

    A run's results are its files, so it continues if the reader of a pipe or the terminal is gone, or
    the stream was closed from the start. Other failures, such as a full disk, are raised once, so
    that they can be reported; those of stderr are never raised.
    """

    def __init__(self, stream: TextIO | None):
        self.stream = stream or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        if isinstance(stream, io.TextIOWrapper):
            # escape characters that the terminal cannot show. Write whole lines, also under
            # PYTHONUNBUFFERED, so that lines of several ranks do not mix
            stream.reconfigure(
                errors="backslashreplace", line_buffering=True, write_through=False
            )
            # streams in memory have no file descriptor
            with suppress(OSError):
                # wait for a slow reader of a pipe instead of raising an error
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
    """Print a line to stderr on one rank, if several may have it, such as a mistake in the config."""
    if group_is_up():
        from minitrain.run.launch import watch

        watch.say_once(line)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr)
