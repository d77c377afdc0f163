"""Write and check the files of a checkpoint: what it has, whether it is what was written, its index.

`extra.json` is written last and describes the rest: size and CRC-32 of every other file, and its
own CRC-32. That finds accidents (files cut short, flipped bits, parts that were never copied), not
forgers: so the names in it are those of regular files in the folder, or it is refused; and DCP's
index of the parts, `.metadata`, which is a pickle, is read by an unpickler that admits nothing but
the index, and cannot run code. A file that is missing, or that its disk cannot read, is damaged;
other failures to read, of a network file system or of too many open files, may pass, and are
raised.

Cost: zlib's CRC-32 takes half a second per gigabyte and core, in every rank for its own part of
what is saved, read back from the page cache; before loading, all files are read once more, spread
over the ranks.
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
# bytes that are read at once
BLOCK = 1 << 22
# seconds for which a node may go on seeing an older state of a folder on NFS (its acdirmax)
FILE_PATIENCE = 60.0
LOST = (errno.ENOENT, errno.ENOTDIR, errno.EIO)

# a file's size in bytes and CRC-32
Sum = list[int]


class Damaged(InputError):
    """A checkpoint's files are not what was written; one before it may be whole."""


# -------------------------------------------------------------------------------------- checksums


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
    """Raise Damaged instead of an OSError that says that the file's content is lost."""
    try:
        yield
    except OSError as error:
        if error.errno not in LOST:
            raise
        raise Damaged(f"{file.name} cannot be read: {error.strerror}") from error


def size_of(file: Path) -> int:
    """Return a file's size in bytes.

    Raises Damaged for a file that may never come to an end, such as a pipe or a device.
    """
    size = file.stat().st_size
    if not file.is_file():
        raise Damaged(f"{file.name} is not a regular file")
    return size


def check_file(file: Path, expected: Sum) -> None:
    """Raise Damaged if a file is missing or lost, or has another size or content.

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
    """Return what is wrong with a checkpoint, if anything.

    That is its description, or one of its files share, share + shares, ...
    """
    try:
        files = read_description(folder)["files"]
        for name in sorted(files)[share::shares]:
            check_file(folder / name, files[name])
    except Damaged as error:
        return str(error)
    return None


# ------------------------------------------------------------------------------------ description


def write_description(folder: Path, description: dict) -> None:
    """Write a checkpoint's description.

    It can be anything that JSON can hold, with `files`: the Sum of each file by its name.
    """
    write_synced(folder / DESCRIPTION, json.dumps(description | {"crc32": own_sum(description)}))


def read_description(folder: Path) -> dict:
    """Read what `write_description` wrote.

    Raises Damaged for anything else, and OSError if reading fails.
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
    """Raise ValueError unless `extra` is an object and `files` is right.

    It must have the Sum of the index and of the files beside it.
    """
    if not (isinstance(extra, dict) and isinstance(files, dict) and INDEX in files):
        raise ValueError(f"extra and files must be objects, and files must have {INDEX}")
    for name, value in files.items():
        if Path(name).name != name or not name.isprintable():
            raise ValueError(f"{name!r} is not the name of a file in its folder")
        if not isinstance(value, list) or [type(number) for number in value] != [int, int]:
            raise ValueError(f"{name!r} has {value!r}, which is not a size and a checksum")


def own_sum(description: dict) -> int:
    return zlib.crc32(json.dumps(description, sort_keys=True).encode())


# ------------------------------------------------------------------------ DCP's reader and writer


class Writer(dcp.FileSystemWriter):
    """DCP's writer, which knows afterwards what this rank wrote: `files`.

    DCP loses what goes wrong in threads of its own, a full disk for example, and publishes an index
    without those tensors: so it has none. With copy_ahead it would put copies on a CUDA stream, of whatever
    device this thread has.
    """

    def __init__(self, folder: Path):
        super().__init__(folder, thread_count=1, per_thread_copy_ahead=0)
        self.files: set[str] = set()

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future:
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as error:
            # in which torch.save hides what the disk said
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        self.files = {part.storage_data.relative_path for part in written.value()}
        return written


class IndexedReader(dcp.FileSystemReader):
    """DCP's reader, with `.metadata` read once and by the strict unpickler.

    Raises InputError for a hostile one.

    files: those that the checkpoint has.
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
# _local: in Python 3.13, and in no other
PATHS = re.compile(r"pathlib(\._local)?\.(Posix|Windows)Path")


class IndexUnpickler(pickle.Unpickler):
    """Admits what an index of tensors consists of, and nothing else.

    It refuses BytesStorageMetadata, too, which DCP would go on to unpickle.
    """

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        # not the class itself, whose attributes a pickle could set, for the whole process
        if PATHS.fullmatch(full):
            return lambda *parts: Path(*parts)
        # as Python 3.11.2 writes an Enum's member; of nothing else
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
        # a damaged pickle can raise nearly anything
        raise InputError(f"{file} is not the index of a checkpoint: {error}") from error
    return index


def first_failure(error: dcp.CheckpointException) -> str:
    """Return one line on what went wrong on the first rank that failed."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"{cause!r} on rank {rank}".replace("\n", " ")


# ---------------------------------------------------------------------------------------- folders


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of all complete checkpoints, ascending.

    A folder whose name no checkpoint gets, such as step-5, is none.
    """
    numbers = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    return sorted(
        int(number) for number in numbers if number.isdecimal() and number == f"{int(number):08d}"
    )


def clean_up(folder: Path) -> tuple[str, str]:
    """Make the folder, or remove what a killed run left in it.

    Returns the names of a new file in it, for `await_file`, and of this node.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("step-*.old"):
        if old.is_dir() and not old.with_suffix("").exists():
            old.replace(old.with_suffix(""))
    for leftover in [*folder.glob("step-*.tmp"), *folder.glob("step-*.old")]:
        with tolerated(leftover):
            delete(leftover)
    # another run removes it should it stay
    probe = f"step-{secrets.token_hex(8)}.tmp"
    (folder / probe).touch()
    return probe, socket.gethostname()


def await_file(file: Path, node: str) -> None:
    """Return once this rank sees what rank 0, on `node`, has just made.

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
    """Delete a checkpoint, which is never half gone under its final name."""
    with tolerated(folder):
        delete(folder.replace(folder.with_suffix(".tmp")))


@contextmanager
def tolerated(path: Path) -> Iterator[None]:
    """Warn where something of no more use cannot be deleted.

    That must not end a run whose state is on disk. On NFS a file that is deleted while a process
    reads it, as an upload or evaluation may, stays and keeps its folder.
    """
    try:
        yield
    except OSError as error:
        print(f"warning: {path} cannot be removed: {error}", file=sys.stderr)


def delete(path: Path) -> None:
    """Delete whatever is there: a folder with all in it, a file, nothing.

    Of a link, what it leads to stays.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def set_aside(damaged: dict[Path, str]) -> None:
    """Rename damaged checkpoints, for someone to look at: they count as such no more.

    damaged: what is wrong with each.
    """
    for folder, problem in damaged.items():
        aside = folder.with_suffix(".damaged")
        delete(aside)
        folder.replace(aside)
        print(
            f"warning: checkpoint {folder} is damaged: {problem} (now {aside.name})",
            file=sys.stderr,
        )
