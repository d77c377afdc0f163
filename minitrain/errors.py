"""InputError: a user's mistake, as opposed to a bug."""

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any


class InputError(Exception):
    """A mistake in a config, a file or a checkpoint: what is wrong, where, what would be right.

    The command lines print the message and end with exit code 2; `--debug` shows the traceback too.
    Whatever it quotes from a file, the message is one printable line.
    """

    # characters of it that are shown, half from either end
    LONGEST = 1000

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
    """Return a hint how to download `name` from Hugging Face's hub; "" if it cannot be a repository.

    option: goes before the folder. kind: further words for the hub's command.
    """
    if "://" in name:
        return " (only files on this machine are read: download it)"
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) or os.path.exists(
        os.path.dirname(name)
    ):
        return ""
    return f" (of the hub? hf download {name}{kind} --local-dir DIR, then {option}DIR)"


@contextmanager
def located(where: str | Path) -> Iterator[None]:
    """Put `where` before the InputError that is raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


@contextmanager
def as_input_error(problem: str) -> Iterator[None]:
    """Turn an OSError, or wrong characters, into an InputError with the problem and its reason."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise InputError(f"{problem}: {getattr(error, 'strerror', None) or error}") from error


def reading(file: Path) -> AbstractContextManager[None]:
    """Turn an error of reading into an InputError that names the file."""
    return as_input_error(f"{file} cannot be read")


@contextmanager
def writing(file: str | Path) -> Iterator[None]:
    """Add the name of the file that is written to an OSError.

    The system leaves it out where a disk is full.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise
