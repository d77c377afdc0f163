"""Read what a launcher says of this process in environment variables, and answer it."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from minitrain.errors import InputError


def world_size() -> int:
    """Return the number of processes that torchrun started, before any group; 1 without torchrun."""
    return env_int("WORLD_SIZE", 1)


def env_int(name: str, otherwise: int = 0) -> int:
    """Return an environment variable of this process. Raises InputError if it is no whole number."""
    try:
        return int(os.environ.get(name, otherwise))
    except ValueError:
        said = f"{name}={os.environ[name]!r} is not a number"
        raise InputError(f"{said} (start with torchrun, or unset WORLD_SIZE)") from None


def tell_torchrun(line: str) -> None:
    """Write torchelastic's error file, with which torchrun's report ends; without it, nothing."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # in seconds, of which the report takes the least: other ranks fail because of this one, and
        # leave no file
        when = str(int(time.time()) - 1)
        with suppress(OSError):
            Path(file).write_text(
                json.dumps({"message": {"message": line, "extraInfo": {"timestamp": when}}})
            )
