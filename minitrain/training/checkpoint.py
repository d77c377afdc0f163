"""Checkpoints from which a run continues exactly, on the same or another number of ranks.

A checkpoint is a folder `step-00000100` that all ranks see. Each rank writes the parts of weights and optimizer state
that it holds, through torch.distributed.checkpoint (DCP), which can read them back into any other layout; `extra.json`
holds what is no tensor. The folder is called `step-00000100.tmp` until all of it is on disk, so whatever has its final
name is complete, and a kill at any moment leaves the one before. DCP's index of the parts, `.metadata`, is a pickle; it
is read by an unpickler that admits nothing but the index, so a checkpoint cannot run code.

Not stored: learning rates, data position and random state, which are functions of the config and the step; and frozen
weights, beside which adapters are trained, but for a digest that tells whether they are still the same.
"""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.nn import Module
from torch.optim import Optimizer

from minitrain.errors import InputError
from minitrain.parallel.mesh import whole

Saved = dict[str, TensorStorageMetadata]  # what a checkpoint's index says of each tensor: its shape and dtype


class Checkpointer:
    """Saves to and loads from `folder`. All ranks make one together, and call its methods together.

    keep: how many checkpoints stay on disk, the newest ones.
    group: the ranks that have the model, the first rank among them; a group on gloo that nothing else uses meanwhile.
    asynchronous: save() returns as soon as the state is copied to host memory, and a thread writes the copy.
    """

    def __init__(
        self, folder: str | Path, keep: int, asynchronous: bool = False, group: dist.ProcessGroup | None = None
    ):
        self.folder, self.keep = Path(folder), keep
        # the thread's own: training uses the default group meanwhile
        self.group = dist.new_group(backend="gloo") if group is None else group
        self.leads = dist.get_rank() == 0
        self.thread = ThreadPoolExecutor(1) if asynchronous else None
        self.pending: Future | None = None
        self.bases: WeakKeyDictionary[Module, str] = WeakKeyDictionary()
        self._together(lambda: self.leads and clean(self.folder))

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none."""
        return max(complete_steps(self.folder), default=None)

    def save(self, step: int, model: Module, optimizer: Optimizer, extra: dict) -> None:
        """Write a checkpoint of `step`, replacing one of the same step. extra: anything that JSON can hold.

        Raises OSError if this write, or the pending one, fails; the checkpoints before it stay.
        """
        self.wait()
        tensors = state_tensors(model, optimizer)
        about = {"optimizer": type(optimizer).__name__, "base": self._base(model), "extra": extra}
        if self.thread is None:
            self._write(step, tensors, about)
        else:
            self.pending = self.thread.submit(self._write, step, BlockingAsyncStager().stage(tensors), about)

    def wait(self) -> None:
        """Return when no save is pending. Raises OSError if the pending one failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def load(self, model: Module, optimizer: Optimizer) -> dict | None:
        """Fill model and optimizer from the newest complete checkpoint; returns its `extra`, or None if there is none.

        Raises InputError if the checkpoint is of another model or optimizer, with nothing changed, or is damaged.
        """
        self.wait()
        step = self._gather(self.latest())[0]
        if step is None:
            return None
        folder = self._path(step)
        reader, about = self._together(lambda: (IndexedReader(folder), read_json(folder / "extra.json")))
        weights = changing(model)
        names = set().union(*self._gather(list(weights)))  # a rank of a pipeline has only some
        self._together(lambda: check_weights(folder, reader.index.state_dict_metadata, weights, names))
        check_optimizer(folder, about["optimizer"], optimizer)
        check_base(folder, about["base"], self._base(model))
        state = prepare_optimizer(optimizer, model, reader.index.state_dict_metadata)
        try:
            dcp.load({**weights, **state}, storage_reader=reader, process_group=self.group)
        except dcp.CheckpointException as error:
            raise InputError(f"checkpoint {folder} cannot be read: {first_failure(error)}") from error
        return about["extra"]

    def _write(self, step: int, tensors: dict[str, Tensor], about: dict) -> None:
        temporary = self._path(step).with_suffix(".tmp")
        self._together(lambda: self.leads and make_empty(temporary))
        # With a single thread DCP would put its copies on a CUDA stream, of whatever device this thread may have.
        writer = dcp.FileSystemWriter(temporary, thread_count=2)
        try:
            dcp.save(tensors, storage_writer=writer, process_group=self.group)
        except dcp.CheckpointException as error:
            raise OSError(f"checkpoint {temporary} cannot be written: {first_failure(error)}") from error
        self._together(lambda: self.leads and self._publish(step, temporary, about))

    def _publish(self, step: int, temporary: Path, about: dict) -> None:
        """Give a complete folder its final name, then remove checkpoints that are no longer kept."""
        write_json(temporary / "extra.json", about)
        sync_folder(temporary)
        final = self._path(step)
        if final.exists():
            final.replace(final.with_suffix(".old"))  # `clean` brings it back should the next line not be reached
        temporary.replace(final)
        sync_folder(self.folder)
        shutil.rmtree(final.with_suffix(".old"), ignore_errors=True)
        for old in [n for n in complete_steps(self.folder) if n <= step][: -self.keep]:
            remove(self._path(old))

    def _base(self, model: Module) -> str:
        """A digest of the frozen weights, the same however they are sharded. They do not change: made once a model."""
        if model in self.bases:
            return self.bases[model]
        sums = {name: bit_sum(whole(tensor)) for name, tensor in frozen(model).items()}
        everywhere = {name: value for each in self._gather(sums) for name, value in each.items()}
        self.bases[model] = hashlib.sha256(json.dumps(everywhere, sort_keys=True).encode()).hexdigest()
        return self.bases[model]

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        values = [None] * self.group.size()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _together(self, function: Callable[[], Any]) -> Any:
        """`function()` on all ranks; if it fails on some, all raise the first failure, so that none waits for ever."""
        result = failure = None
        try:
            result = function()
        except (InputError, OSError) as error:
            failure = error
        failures = [error for error in self._gather(failure) if error]
        if failures:
            raise failures[0]
        return result


# ---------------------------------------------------------------------------------------------------- what is stored


def state_tensors(model: Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights and buffers by name, and optimizer state as `parameter name/key`: `norm.weight/exp_avg`.

    The weights come first: FSDP then frees what it has gathered, and its parameters are those that the optimizer knows.
    """
    tensors = changing(model)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = value
    return tensors


def frozen(model: Module) -> dict[str, Tensor]:
    """Weights that are not trained."""
    tensors = model.state_dict()
    return {name: tensors[name] for name, parameter in model.named_parameters() if not parameter.requires_grad}


def changing(model: Module) -> dict[str, Tensor]:
    """Weights that are trained, and buffers."""
    fixed = frozen(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in fixed}


def bit_sum(tensor: Tensor) -> int:
    """The sum of all elements' bits taken as whole numbers: the same in whatever order they are added."""
    whole_number = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(whole_number).sum(dtype=torch.int64).item()


def prepare_optimizer(optimizer: Optimizer, model: Module, saved: Saved) -> dict[str, Tensor]:
    """Replace the optimizer's state by empty tensors for all that is saved, and return them by `parameter name/key`.

    What has its parameter's shape is sharded like it, and of the type that this optimizer keeps, which reading converts
    to; the rest are scalars, such as Adam's step.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    steps_on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    optimizer.state.clear()
    tensors = {}
    for entry, stored in saved.items():
        name, _, key = entry.partition("/")
        if key and name in parameters:
            parameter = parameters[name]
            if stored.size == parameter.shape:
                dtype = optimizer.defaults.get("states", parameter.dtype)
                tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                device = parameter.device if steps_on_device else "cpu"
                tensor = torch.empty(stored.size, dtype=stored.properties.dtype, device=device)
            tensors[entry] = optimizer.state[parameter][key] = tensor
    return tensors


def check_weights(folder: Path, saved: Saved, weights: dict[str, Tensor], names: set[str]) -> None:
    """Raises InputError if a checkpoint's weights are not exactly `weights`, or, on all ranks together, `names`."""
    problem = f"checkpoint {folder} does not fit the model:"
    for name, tensor in weights.items():
        if name not in saved:
            raise InputError(f"{problem} it has no {name}, which is {list(tensor.shape)} in the model")
        if saved[name].size != tensor.shape:
            raise InputError(f"{problem} {name} is {list(saved[name].size)}, and {list(tensor.shape)} in the model")
    for name in saved:
        if "/" not in name and name not in names:
            raise InputError(f"{problem} it has {name} {list(saved[name].size)}, which the model has not")


def check_optimizer(folder: Path, saved: str, optimizer: Optimizer) -> None:
    """Raises InputError if a checkpoint's optimizer state is of another kind of optimizer."""
    if saved != type(optimizer).__name__:
        raise InputError(f"checkpoint {folder} holds the state of {saved}, not of {type(optimizer).__name__}")


def check_base(folder: Path, saved: str, own: str) -> None:
    """Raises InputError if a checkpoint's adapters were trained beside other frozen weights."""
    if saved != own:
        raise InputError(f"checkpoint {folder} was trained over another base model (use that one, or another out_dir)")


# ----------------------------------------------------------------------------------------------------------- reading


class IndexedReader(dcp.FileSystemReader):
    """DCP's reader, with `.metadata` read once and by the strict unpickler. Raises InputError if that is damaged."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.index = read_index(folder / ".metadata")

    def read_metadata(self, *args, **kwargs) -> Metadata:
        return self.index


DCP = "torch.distributed.checkpoint."
ADMITTED = {
    *((DCP + "metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata",
                                            "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    (DCP + "filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"),
}  # fmt: skip


class IndexUnpickler(pickle.Unpickler):
    """Admits what an index of tensors consists of; not BytesStorageMetadata, which DCP would go and unpickle."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or (module, name) in ADMITTED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place there")


def read_index(file: Path) -> Metadata:
    """DCP's index of a checkpoint; raises InputError for anything else."""
    try:
        with file.open("rb") as stream:
            index = IndexUnpickler(stream).load()
        if not isinstance(index, Metadata):
            raise TypeError(f"it holds a {type(index).__name__}")
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise InputError(f"{file} is not the index of a checkpoint: {error}") from error
    return index


def read_json(file: Path) -> dict:
    """What `write_json` wrote; raises InputError for anything else."""
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        return {key: about[key] for key in ("optimizer", "base", "extra")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{file} is not the description of a checkpoint: {error!r}") from error


def first_failure(error: dcp.CheckpointException) -> str:
    """One line on what went wrong on the first rank that failed."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"{cause!r} on rank {rank}".replace("\n", " ")


# ----------------------------------------------------------------------------------------------------------- folders


def complete_steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, ascending."""
    numbers = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    return sorted(int(number) for number in numbers if number.isdecimal())


def clean(folder: Path) -> None:
    """Make the folder, or remove what a killed run left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("step-*.old"):
        if not old.with_suffix("").exists():
            old.replace(old.with_suffix(""))
    for leftover in [*folder.glob("step-*.tmp"), *folder.glob("step-*.old")]:
        shutil.rmtree(leftover)


def make_empty(folder: Path) -> None:
    """An empty folder, whatever was there."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()


def remove(folder: Path) -> None:
    """Delete a checkpoint, which is never half gone under its final name."""
    shutil.rmtree(folder.replace(folder.with_suffix(".tmp")))


def write_json(file: Path, value: Any) -> None:
    with file.open("w", encoding="utf-8") as stream:
        json.dump(value, stream)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, as fsync does for a file's content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
