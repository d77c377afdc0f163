"""List, make, rename and delete the folders of a run's checkpoints."""

import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minitrain.errors import InputError

# seconds for which a node may see an outdated state of a folder on NFS (its acdirmax)
FILE_PATIENCE = 60.0


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of all complete checkpoints, ascending; other folders, as step-5, are ignored."""
    numbers = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    return sorted(
        int(number) for number in numbers if number.isdecimal() and number == f"{int(number):08d}"
    )


def clean_up(folder: Path) -> tuple[str, str]:
    """Make the folder, or remove what a killed run left in it.

    Returns the name of a new file in it, for `await_file`, and the name of this node.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("step-*.old"):
        if old.is_dir() and not old.with_suffix("").exists():
            old.replace(old.with_suffix(""))
    for leftover in [*folder.glob("step-*.tmp"), *folder.glob("step-*.old")]:
        with tolerated(leftover):
            delete(leftover)
    # the suffix makes the next `clean_up` remove it, if this run is killed
    probe = f"step-{secrets.token_hex(8)}.tmp"
    (folder / probe).touch()
    return probe, socket.gethostname()


def await_file(file: Path, node: str) -> None:
    """Return once this rank sees a file that rank 0 has made on `node`.

    Raises InputError after FILE_PATIENCE.
    """
    deadline = time.monotonic() + FILE_PATIENCE
    while not file.exists():
        if time.monotonic() > deadline:
            raise InputError(
                f"{file.parent} on {socket.gethostname()} is not the folder that {node} has under this name (use an "
                f"out_dir that all nodes share: each rank writes its part of a checkpoint there)"
            )
        time.sleep(0.1)


def make_empty(folder: Path) -> None:
    """Make an empty folder in place of whatever is there."""
    delete(folder)
    folder.mkdir(parents=True)


def remove(folder: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that its final name never has an incomplete one."""
    with tolerated(folder):
        delete(folder.replace(folder.with_suffix(".tmp")))


@contextmanager
def tolerated(path: Path) -> Iterator[None]:
    """Warn instead of raising an OSError, for deletions that are not essential.

    On NFS a file that is deleted while another process reads it, such as an upload, stays, and its
    folder too.
    """
    try:
        yield
    except OSError as error:
        print(f"warning: {path} cannot be removed: {error}", file=sys.stderr)


def delete(path: Path) -> None:
    """Delete a folder with its content, a file, or a link (but not its target), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def set_aside(damaged: dict[Path, str]) -> None:
    """Rename damaged checkpoints, so that they no longer count. damaged: what is wrong with each."""
    for folder, problem in damaged.items():
        aside = folder.with_suffix(".damaged")
        delete(aside)
        folder.replace(aside)
        print(
            f"warning: checkpoint {folder} is damaged: {problem} (now {aside.name})",
            file=sys.stderr,
        )
