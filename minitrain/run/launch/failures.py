"""Record a failing rank: its traceback in a file of its own, and one line where one says it all.

torchrun mixes what the ranks print. So each rank that fails appends its own to
out_dir/logs/rank-N.log. A collective that has waited in vain says so and nothing else; torch's
flight recorder knows which it was, and the stack who called it. With NCCL it is another thread that
finds it out, and ends the process: then the recorder writes what each rank was at into the same
folder, as nccl-rank-N, for `torchfrtrace`.
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
import torch.distributed as dist

from minitrain.errors import InputError
from minitrain.run.config.environment import env_int

PACKAGE = Path(__file__).parents[2]
# files whose collectives say nothing of what was waited for
WAITING_FOR_CALLERS = ("agreement.py", "collectives.py")


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Log an exception that ends this rank's run below `folder`.

    Raises InputError for those that one line explains.
    """
    try:
        yield
    except Exception as error:
        when = time.strftime("%Y-%m-%d %H:%M:%S %z")
        head = f"{when} rank {rank()} on {socket.gethostname()}, process {os.getpid()}, torch {torch.__version__}\n"
        file = folder / "logs" / f"rank-{rank()}.log"
        # a disk that is full must not hide the error itself
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as stream:
                stream.write(head + "".join(traceback.format_exception(error)) + "\n")
        if line := explain(error):
            raise InputError(line) from error
        raise


def rank() -> int:
    """Return this process's rank, also before it joins others.

    A RANK that is left over without WORLD_SIZE means nothing.
    """
    if dist.is_initialized():
        return dist.get_rank()
    return env_int("RANK") if "WORLD_SIZE" in os.environ else 0


def explain(error: Exception) -> str | None:
    """Return one line for failures of torch whose cause and remedy are known."""
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
            f"rank {rank()} is out of memory{f' ({asked[0]})' if asked else ''}: use recompute=full, a smaller "
            f"batch.micro, batch.seq_len or optim.states=bf16, or more ranks; for sampling a smaller rollout.memory"
        )
    # or what is named cannot be run: a folder, a text, nothing
    named = [f": {os.environ[name]!r}" for name in ("CXX", "CC") if name in os.environ]
    lacking = "No working C++ compiler", "Failed to find C compiler"
    if any(text in message for text in (*lacking, *named)):
        return "compile=true needs a C++ compiler, and torch finds none (install g++, set CXX, or use compile=false)"
    return None


def where_in_collective(error: Exception) -> str:
    """Return the operation and its caller in this package.

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
    """Return the oldest operation that this rank has begun and not ended.

    If the failure has ended it, return the last one. torch's flight recorder keeps them, on gloo as
    on NCCL.
    """
    # no public name
    from torch._C._distributed_c10d import _dump_fr_trace_json

    entries = json.loads(_dump_fr_trace_json()).get("entries", [])
    candidates = [entry for entry in entries if not entry["retired"]] or entries[-1:]
    return candidates[0]["profiling_name"].split(":")[-1] if candidates else "a collective"


def record_flights(folder: Path) -> None:
    """Let NCCL's watchdog write the last operations of each rank on a timeout.

    To call before the group starts.

    What the user has set stays. Names as in torch's list of ProcessGroupNCCL's environment
    variables.
    """
    (folder / "logs").mkdir(exist_ok=True)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "logs" / "nccl-rank-"))
