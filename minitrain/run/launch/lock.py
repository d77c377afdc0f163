"""Keep a second run out of an out_dir, because two would delete each other's checkpoints.

Rank 0 holds a POSIX lock on OUT_DIR/.lock, which the kernel releases however the process ends. On a
network file system the lock of a machine that has vanished stays for a while, so a new run waits up
to PATIENCE seconds for it. On a file system without locks, a second run is not noticed.
"""

import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from minitrain.errors import InputError, writing

# seconds; NFS 4 releases the locks of a vanished machine after 90
PATIENCE = 100.0


@contextmanager
def locked(folder: Path, leads: bool) -> Iterator[None]:
    """Hold the lock of `folder`.

    leads: whether this is the run's first rank; other ranks do nothing.
    Raises InputError if another run holds the lock for longer than PATIENCE, and OSError if the
    folder cannot be written.
    """
    if not leads:
        yield
        return
    with (folder / ".lock").open("a+b", buffering=0) as file:
        with writing(file.name):
            wait_for(file)
        yield


def wait_for(file: FileIO) -> None:
    """Take the lock, and write this process's name into the file."""
    deadline = time.monotonic() + PATIENCE
    has_printed = False
    while not take(file):
        file.seek(0)
        holder = file.read().decode(errors="replace").strip() or "another process"
        if time.monotonic() > deadline:
            folder = os.path.dirname(file.name)
            raise InputError(
                f"{holder} is training in out_dir={folder!r} (wait for it, or use another out_dir)"
            )
        if not has_printed:
            has_printed = True
            line = f"waiting for {holder}, which is training in the same out_dir"
            print(line, file=sys.stderr, flush=True)
        time.sleep(0.1)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())


def take(file: FileIO) -> bool:
    """Take the lock, and return True; False if another process holds it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # these two mean that the lock is taken; others, that the file system has no locks
        return not isinstance(error, BlockingIOError | PermissionError)
    return True
