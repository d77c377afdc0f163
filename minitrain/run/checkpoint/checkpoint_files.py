"""Write and check the files of a checkpoint: description, checksums, DCP's index, folders.

`extra.json` is written last. It holds the size and CRC-32 of every other file, and its own CRC-32.
Checksums find accidents (truncated files, flipped bits, parts that were not copied), not attacks.
Against these, names in `extra.json` must be those of regular files in the folder, and DCP's index
`.metadata`, a pickle, is read by an unpickler that allows only the index's classes and cannot run
code. A file that is missing or unreadable on its disk counts as damaged. Other failures to read, such
as those of a network or of too many open files, may be temporary, and are raised.

Cost: CRC-32 takes half a second per gigabyte and core. After saving, each rank reads its own part back
from the page cache; before loading, the ranks share the reading of all files.
"""

import errno
import json
import pickle
import re
import secrets
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from minitrain.errors import InputError
from minitrain.run.checkpoint.durable import write_synced

DESCRIPTION = "extra.json"
INDEX = ".metadata"
# bytes per read
BLOCK = 1 << 22
# seconds for which a node may see an outdated state of a folder on NFS (its acdirmax)
FILE_PATIENCE = 60.0
# errors that mean that a file's content is lost
LOST = (errno.ENOENT, errno.ENOTDIR, errno.EIO)

# [size in bytes, CRC-32] of a file
Sum = list[int]


class Damaged(InputError):
    """A checkpoint's files differ from what was written; an earlier checkpoint may be undamaged."""


# --- checksums


def measure(file: Path) -> Sum:
    """Return [size, CRC-32] of a file. Raises OSError if it cannot be read."""
    size = crc = 0
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(BLOCK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return [size, crc]


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Raise Damaged instead of an OSError that means that the file's content is lost."""
    try:
        yield
    except OSError as error:
        if error.errno not in LOST:
            raise
        raise Damaged(f"{file.name} cannot be read: {error.strerror}") from error


def size_of(file: Path) -> int:
    """Return a file's size in bytes. Raises Damaged for a pipe or a device, which may never end."""
    size = file.stat().st_size
    if not file.is_file():
        raise Damaged(f"{file.name} is not a regular file")
    return size


def check_file(file: Path, expected: Sum) -> None:
    """Raise Damaged if a file is missing, or has another size or content than expected.

    Raises OSError if reading fails otherwise.
    """
    with reading(file):
        size = size_of(file)
        if size != expected[0]:
            raise Damaged(
                f"{file.name} has {size:,} bytes, and had {expected[0]:,} when it was written"
            )
        if measure(file) != expected:
            raise Damaged(f"{file.name} has other content than when it was written (CRC-32)")


def find_damage(folder: Path, share: int, shares: int) -> str | None:
    """Return what is wrong with a checkpoint's description or files; None if nothing is.

    Only files number share, share + shares, ... are checked.
    """
    try:
        files = read_description(folder)["files"]
        for name in sorted(files)[share::shares]:
            check_file(folder / name, files[name])
    except Damaged as error:
        return str(error)
    return None


# --- description


def write_description(folder: Path, description: dict) -> None:
    """Write a checkpoint's description as JSON. Its `files` are the Sum of each file by name."""
    write_synced(folder / DESCRIPTION, json.dumps(description | {"crc32": own_sum(description)}))


def read_description(folder: Path) -> dict:
    """Return what `write_description` wrote.

    Raises Damaged if it was changed, and OSError if reading fails.
    """
    file = folder / DESCRIPTION
    try:
        with reading(file):
            size_of(file)
            description = json.loads(file.read_text("utf-8"))
        if description.pop("crc32") != own_sum(description):
            raise ValueError("it has other content than when it was written (CRC-32)")
        check_description(**description)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(
            f"{DESCRIPTION} is not the description of a checkpoint: {error!r}"
        ) from error
    return description


def check_description(optimizer: str, base: str, extra: dict, files: dict[str, Sum]) -> None:
    """Raise ValueError unless `extra` is an object, and `files` maps the names of files to Sums."""
    if not (isinstance(extra, dict) and isinstance(files, dict) and INDEX in files):
        raise ValueError(f"extra and files must be objects, and files must have {INDEX}")
    for name, value in files.items():
        if Path(name).name != name or not name.isprintable():
            raise ValueError(f"{name!r} is not the name of a file in its folder")
        if not isinstance(value, list) or [type(number) for number in value] != [int, int]:
            raise ValueError(f"{name!r} has {value!r}, which is not a size and a checksum")


def own_sum(description: dict) -> int:
    """Return the CRC-32 of a description."""
    return zlib.crc32(json.dumps(description, sort_keys=True).encode())


# --- DCP's reader and writer


class Writer(dcp.FileSystemWriter):
    """DCP's writer; afterwards `files` has the names of the files that this rank wrote."""

    def __init__(self, folder: Path):
        # One thread: DCP drops errors of additional threads, such as a full disk, and then writes an
        # index without their tensors. No copying ahead: it would use a CUDA stream of the device that
        # is current in this thread
        super().__init__(folder, thread_count=1, per_thread_copy_ahead=0)
        self.files: set[str] = set()

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future:
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save hides the disk's error in it
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        self.files = {part.storage_data.relative_path for part in written.value()}
        return written


class IndexedReader(dcp.FileSystemReader):
    """DCP's reader, which reads `.metadata` once and by the strict unpickler.

    files: the checkpoint's files. Raises InputError if the index names others.
    """

    def __init__(self, folder: Path, files: dict[str, Sum]):
        super().__init__(folder)
        self.index = read_index(folder / INDEX)
        for part in self.index.storage_data.values():
            if part.relative_path not in files:
                raise InputError(
                    f"{folder / INDEX} names {part.relative_path!r}, which is no file of this checkpoint"
                )

    def read_metadata(self, *args, **kwargs) -> Metadata:
        return self.index


# classes and functions that an index may name
ADMITTED = """
torch.Size
torch.serialization._get_layout
torch.distributed.checkpoint.filesystem._StorageInfo
torch.distributed.checkpoint.metadata.ChunkStorageMetadata
torch.distributed.checkpoint.metadata.Metadata
torch.distributed.checkpoint.metadata.MetadataIndex
torch.distributed.checkpoint.metadata.StorageMeta
torch.distributed.checkpoint.metadata.TensorProperties
torch.distributed.checkpoint.metadata.TensorStorageMetadata
torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
"""
# Python 3.13, and no other, pickles paths as pathlib._local's
PATHS = re.compile(r"pathlib(\._local)?\.(Posix|Windows)Path")


class IndexUnpickler(pickle.Unpickler):
    """An unpickler that allows only what an index of tensors consists of.

    It also refuses BytesStorageMetadata, whose content DCP would unpickle.
    """

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        # not the class itself, because a pickle could set its attributes
        if PATHS.fullmatch(full):
            return lambda *parts: Path(*parts)
        # Python 3.11.2 pickles members of an Enum by getattr; allow no other attributes
        if full == "builtins.getattr":
            return lambda kind, member: kind.__members__[member]
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or full in ADMITTED.split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {full}, which has no place there")


def read_index(file: Path) -> Metadata:
    """Return DCP's index of a checkpoint. Raises InputError for anything else."""
    try:
        with file.open("rb") as stream:
            index = IndexUnpickler(stream).load()
        if not isinstance(index, Metadata):
            raise TypeError(f"it holds a {type(index).__name__}")
    except Exception as error:
        # a damaged pickle can raise almost any exception
        raise InputError(f"{file} is not the index of a checkpoint: {error}") from error
    return index


def first_failure(error: dcp.CheckpointException) -> str:
    """Return a line on the error of the first rank that failed."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"{cause!r} on rank {rank}".replace("\n", " ")


# --- folders


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
