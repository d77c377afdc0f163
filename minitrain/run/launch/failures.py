"""Record why a rank failed: its traceback in a file, and one line if the cause is known.

torchrun mixes the output of all ranks, so each failing rank appends its traceback to
out_dir/logs/rank-N.log. The error of a collective that timed out does not name it; torch's flight
recorder knows which collective it was, and the stack shows its caller. With NCCL another thread
notices the timeout and ends the process. The flight recorder then writes each rank's last operations
to out_dir/logs/nccl-rank-N, for `torchfrtrace`.
"""

import json
import os
import re
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from minitrain.errors import InputError
from minitrain.run.config.environment import rank

PACKAGE = Path(__file__).parents[2]
# collectives in these files are called on behalf of other files, which are the ones to name
WAITING_FOR_CALLERS = ("agreement.py", "collectives.py")


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Write an exception that ends this rank's run to a log in `folder`.

    Raises InputError in place of exceptions that `explain` knows.
    """
    try:
        yield
    except Exception as error:
        when = time.strftime("%Y-%m-%d %H:%M:%S %z")
        head = f"{when} rank {rank()} on {socket.gethostname()}, process {os.getpid()}, torch {torch.__version__}\n"
        file = folder / "logs" / f"rank-{rank()}.log"
        # a full disk must not hide the original error
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as stream:
                stream.write(head + "".join(traceback.format_exception(error)) + "\n")
        if line := explain(error):
            raise InputError(line) from error
        raise


def explain(error: Exception) -> str | None:
    """Return one line on a failure of torch whose cause and remedy are known; None for others."""
    message = str(error).strip() or type(error).__name__
    if "Timed out waiting" in message:
        return (
            f"rank {rank()} waited in vain for others in {where_in_collective(error)}: some rank is stuck, or takes "
            f"longer than timeout_s (out_dir/logs has where this rank was)"
        )
    if "does not have a deterministic implementation" in message:
        return f"deterministic=true: {message.split(',')[0]} (use deterministic=false)"
    if isinstance(error, MemoryError) or re.search(
        "out of memory|can't allocate memory|size calculation overflowed", message
    ):
        asked = re.search(
            r"Tried to allocate [^.]*\.\d* \w+|you tried to allocate \d+ bytes", message
        )
        return (
            f"rank {rank()} is out of memory{f' ({asked[0]})' if asked else ''}: use recompute=full or "
            f"offload, a smaller batch.micro, batch.seq_len or optim.states=bf16, or more ranks; for sampling a "
            f"smaller rollout.memory"
        )
    # CXX or CC may name something that cannot be executed
    named = [f": {os.environ[name]!r}" for name in ("CXX", "CC") if name in os.environ]
    lacking = "No working C++ compiler", "Failed to find C compiler"
    if any(text in message for text in (*lacking, *named)):
        return "compile=true needs a C++ compiler, and torch finds none (install g++, set CXX, or use compile=false)"
    return None


def where_in_collective(error: Exception) -> str:
    """Return the collective that failed and its caller in this package.

    For example `all_reduce in total_norm (training/optim.py:104)`.
    """
    caller = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        file = Path(code.co_filename)
        if file.is_relative_to(PACKAGE) and file.name not in WAITING_FOR_CALLERS:
            name = code.co_qualname.split(".<locals>")[0]
            caller = f" in {name} ({file.relative_to(PACKAGE)}:{line})"
    return pending_operation() + caller


def pending_operation() -> str:
    """Return the name of this rank's oldest unfinished collective; if there is none, the last one.

    torch's flight recorder has them, for gloo and for NCCL.
    """
    # there is no public name
    from torch._C._distributed_c10d import _dump_fr_trace_json

    entries = json.loads(_dump_fr_trace_json()).get("entries", [])
    candidates = [entry for entry in entries if not entry["retired"]] or entries[-1:]
    return candidates[0]["profiling_name"].split(":")[-1] if candidates else "a collective"


def record_flights(folder: Path) -> None:
    """Make NCCL's watchdog write each rank's last operations on a timeout.

    Call before the group starts. Environment variables that the user has set are kept.
    """
    (folder / "logs").mkdir(exist_ok=True)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "logs" / "nccl-rank-"))
