"""The one exception that means "the input is wrong, not the program"."""

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any


class InputError(Exception):
    """A mistake in a config, a file or a checkpoint, told in one line: what was wrong, where, and
    what would be right.

    The command lines print the message and end with exit code 2; `--debug` shows the traceback too.
    Whatever it quotes from a file, the message is one printable line.
    """

    LONGEST = 1000  # characters of it that are shown, half from either end

    def __str__(self) -> str:
        text = super().__str__()
        half = self.LONGEST // 2
        shown = text if len(text) <= self.LONGEST else f"{text[:half]} ... {text[-half:]}"
        return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in shown)


# of settings: whether there is a contradiction, and the line that tells it
Faults = Iterator[tuple[Any, str]]


def refuse(faults: Faults) -> None:
    """Raise InputError with the line of the first fault that is there; none after it is looked at."""
    for found, line in faults:
        if found:
            raise InputError(line)


def hub_hint(name: str, option: str, kind: str = "") -> str:
    """Return how to get what a name may stand for on Hugging Face's hub; empty for what cannot be
    one.

    kind: further words for the hub's command.
    """
    if "://" in name:
        return " (only files on this machine are read: download it)"
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) or os.path.exists(
        os.path.dirname(name)
    ):
        return ""
    return f" (of the hub? hf download {name}{kind} --local-dir DIR, then {option}DIR)"


def tell_torchrun(line: str) -> None:
    """Write torchelastic's error file, with which torchrun's report ends; without torchrun,
    nothing.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # in seconds, of which the report takes the least: other ranks fail because of this one, and
        # leave no file
        when = str(int(time.time()) - 1)
        with suppress(OSError):
            Path(file).write_text(
                json.dumps({"message": {"message": line, "extraInfo": {"timestamp": when}}})
            )


@contextmanager
def located(where: str | Path) -> Iterator[None]:
    """Put `where` before the InputError that is raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


@contextmanager
def refused(problem: str) -> Iterator[None]:
    """Raises InputError, with the problem and its reason, in place of an OSError, or of an error
    about characters.
    """
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise InputError(f"{problem}: {getattr(error, 'strerror', None) or error}") from error


def readable(file: Path) -> AbstractContextManager[None]:
    return refused(f"{file} cannot be read")


@contextmanager
def naming(file: str | Path) -> Iterator[None]:
    """Add the name of the file that is written to an OSError.

    The system leaves it out where a disk is full.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise
