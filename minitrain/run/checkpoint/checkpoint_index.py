"""Write a checkpoint's tensors by torch.distributed.checkpoint (DCP), and read them by its index.

DCP's index `.metadata` is a pickle. It is read by an unpickler that allows only the index's classes
and cannot run code.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from minitrain.errors import InputError
from minitrain.run.checkpoint.checkpoint_files import INDEX, FileSum


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

    def __init__(self, folder: Path, files: dict[str, FileSum]):
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
