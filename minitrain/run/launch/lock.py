"""Keep a second run out of an out_dir: two would delete checkpoints and mix their numbers.

Rank 0's process holds a POSIX lock on OUT_DIR/.lock, which the kernel takes away however that
process ends. A network file system may need a moment to learn that a machine has vanished: hence
the patience. Where there are no locks at all, as on some of those, nothing is kept out.
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

from minitrain.errors import InputError, naming

# seconds; NFS 4 forgets the locks of a machine after 90
PATIENCE = 100.0


@contextmanager
def locked(folder: Path, leads: bool) -> Iterator[None]:
    """Be the only run in `folder`.

    leads: whether this is the run's first rank; the others leave the lock to it.
    Raises InputError if another run has been there for too long; OSError if the folder cannot be
    written to.
    """
    if not leads:
        yield
        return
    with (folder / ".lock").open("a+b", buffering=0) as file:
        with naming(file.name):
            wait_for(file)
        yield


def wait_for(file: FileIO) -> None:
    """Take the lock, and leave one's name in the file."""
    deadline = time.monotonic() + PATIENCE
    told = False
    while not take(file):
        file.seek(0)
        holder = file.read().decode(errors="replace").strip() or "another process"
        if time.monotonic() > deadline:
            folder = os.path.dirname(file.name)
            raise InputError(
                f"{holder} is training in out_dir={folder!r} (wait for it, or use another out_dir)"
            )
        if not told:
            told = f"waiting for {holder}, which is training in the same out_dir"
            print(told, file=sys.stderr, flush=True)
        time.sleep(0.1)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())


def take(file: FileIO) -> bool:
    """Take the lock unless another process has it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # either may be raised for a lock that is taken, others where there are no locks
        return not isinstance(error, BlockingIOError | PermissionError)
    return True
