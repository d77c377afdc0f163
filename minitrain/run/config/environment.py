"""Read the launcher's environment variables, and report errors to torchrun.

Nothing here imports torch, which takes seconds, so commands that do not need it start fast.
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from minitrain.errors import InputError


def world_size() -> int:
    """Return the number of processes that torchrun started, before any group; 1 without torchrun."""
    return env_int("WORLD_SIZE", 1)


def group_is_up() -> bool:
    """Return whether this process is in a process group."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


def rank() -> int:
    """Return this process's rank, also before the process group starts.

    RANK counts only together with WORLD_SIZE.
    """
    if group_is_up():
        return sys.modules["torch"].distributed.get_rank()
    return env_int("RANK") if "WORLD_SIZE" in os.environ else 0


def env_int(name: str, otherwise: int = 0) -> int:
    """Return an environment variable as a number. Raises InputError if it is no whole number."""
    try:
        return int(os.environ.get(name, otherwise))
    except ValueError:
        raise InputError(
            f"{name}={os.environ[name]!r} is not a number (start with torchrun, or unset WORLD_SIZE)"
        ) from None


def tell_torchrun(line: str) -> None:
    """Write the error file that torchrun's report shows, if torchrun has named one."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # the report shows the failure with the least timestamp, in whole seconds. torchrun dates those
        # of ranks without a file, which fail because of this one: a second less puts this one first
        when = str(int(time.time()) - 1)
        with suppress(OSError):
            Path(file).write_text(
                json.dumps({"message": {"message": line, "extraInfo": {"timestamp": when}}})
            )
