"""Read what a launcher says of this process in environment variables."""

import os

from minitrain.errors import InputError


def world_size() -> int:
    """Return the number of processes that torchrun started, before any group; 1 without torchrun."""
    return env_int("WORLD_SIZE", 1)


def env_int(name: str, otherwise: int = 0) -> int:
    """Return an environment variable of this process; raise InputError if it is no whole number."""
    try:
        return int(os.environ.get(name, otherwise))
    except ValueError:
        said = f"{name}={os.environ[name]!r} is not a number"
        raise InputError(f"{said} (start with torchrun, or unset WORLD_SIZE)") from None
