"""Checkpoints from which a run continues exactly, on the same or another number of ranks.

A checkpoint is a folder `step-00000100` that all ranks see. Each rank writes the parts of weights
and optimizer state that it holds, through torch.distributed.checkpoint (DCP), which can read them
back into any other layout; `extra.json` holds what is not a tensor, and describes the files. The
folder is called `step-00000100.tmp` until all is on disk, so what has its final name is complete,
and a kill at any moment leaves the one before. Before one is loaded, its files are compared with
what was written (checkpoint_files.py): where one is damaged, the checkpoint before it is taken.

Not stored: learning rates, data position and random state, which are functions of the config and
the step; and frozen weights, beside which adapters are trained, but for a digest that tells whether
they are still the same.
"""

import hashlib
import json
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn import Module
from torch.optim import Optimizer

from minitrain.errors import InputError
from minitrain.parallel.agreement import gather
from minitrain.parallel.shards import cut_slices, full_slice
from minitrain.run.checkpoint_files import (
    INDEX,
    IndexedReader,
    Writer,
    await_file,
    clean,
    complete_steps,
    delete,
    find_damage,
    first_failure,
    make_empty,
    measure,
    read_description,
    remove,
    set_aside,
    tolerated,
    write_description,
)
from minitrain.run.durable import sync_folder
from minitrain.settings import Config

Saved = dict[
    str, TensorStorageMetadata
]  # what a checkpoint's index says of each tensor: its shape and dtype


class Checkpointer:
    """Saves to and loads from `folder`. All ranks make one together, and call its methods together.

    keep: how many checkpoints stay on disk, the newest ones.
    group: the ranks that have the model, the first rank among them; a group on gloo that nothing
    else uses meanwhile.
    asynchronous: save() returns as soon as the state is copied to host memory, and a thread writes
    the copy. Raises InputError, on all ranks alike, if some see another folder under this name, on
    a disk of their node.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int,
        asynchronous: bool = False,
        group: dist.ProcessGroup | None = None,
    ):
        self.folder = Path(folder)
        self.keep = keep
        # the thread's own: training uses the default group meanwhile
        self.group = dist.new_group(backend="gloo") if group is None else group
        self.leads = dist.get_rank() == 0
        self.thread = ThreadPoolExecutor(1) if asynchronous else None
        self.pending: Future | None = None
        self.bases: WeakKeyDictionary[Module, str] = WeakKeyDictionary()
        self._together(lambda: self.leads and clean(self.folder))
        self._check_shared()

    def _check_shared(self) -> None:
        name, node = gather((f"step-{secrets.token_hex(8)}.tmp", socket.gethostname()), self.group)[
            0
        ]
        probe = self.folder / name  # which `clean` removes should it stay
        self._together(lambda: self.leads and probe.touch())
        try:
            self._together(lambda: await_file(probe, node))
        finally:
            if self.leads:
                probe.unlink(missing_ok=True)

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none."""
        return max(complete_steps(self.folder), default=None)

    def save(self, step: int, model: Module, optimizer: Optimizer, extra: dict) -> None:
        """Write a checkpoint of `step`, replacing one of the same step. extra: anything that JSON
        can hold.

        Raises OSError if this write, or the pending one, fails; the checkpoints before it stay.
        """
        self.wait()
        tensors = state_tensors(model, optimizer)
        description = {
            "optimizer": type(optimizer).__name__,
            "base": self._base(model),
            "extra": extra,
        }
        if self.thread is None:
            self._write(step, tensors, description)
        else:
            copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            self.pending = self.thread.submit(self._write, step, copies, description)

    def wait(self) -> None:
        """Return when no save is pending. Raises OSError if the pending one failed."""
        pending = self.pending
        self.pending = None
        if pending is not None:
            pending.result()

    def load(self, model: Module, optimizer: Optimizer) -> dict | None:
        """Fill model and optimizer from the newest whole checkpoint; returns its `extra`, or None
        if there is none.

        Damaged ones that are newer get a line on stderr each and the name `step-00000100.damaged`.
        Raises InputError if that checkpoint is of another model or optimizer, with nothing changed,
        or all are damaged.
        """
        self.wait()
        step = self._newest_whole()
        if step is None:
            return None
        folder = self._path(step)
        description = self._together(lambda: read_description(folder))
        reader = self._together(lambda: IndexedReader(folder, description["files"]))
        weights = changing(model)
        names = set().union(
            *gather(list(weights), self.group)
        )  # a rank of a pipeline has only some
        self._together(
            lambda: check_weights(folder, reader.index.state_dict_metadata, weights, names)
        )
        check_origin(folder, description, optimizer, self._base(model))
        state = prepare_optimizer(optimizer, model, reader.index.state_dict_metadata)
        try:
            dcp.load({**weights, **state}, storage_reader=reader, process_group=self.group)
        except dcp.CheckpointException as error:
            raise InputError(
                f"checkpoint {folder} cannot be read: {first_failure(error)}"
            ) from error
        return description["extra"]

    def _newest_whole(self) -> int | None:
        """The newest step whose files are what was written, each rank looking at its share of them;
        None: no steps.

        Damaged ones keep their names if none is whole: a restart must not take that for a run that
        has not begun.
        """
        damaged = {}
        share = (self.group.rank(), self.group.size())
        for step in reversed(gather(complete_steps(self.folder), self.group)[0]):
            problem = self._together(partial(find_damage, self._path(step), *share))
            problems = [problem for problem in gather(problem, self.group) if problem]
            if not problems:
                self._together(lambda: self.leads and self._set_aside(damaged))
                return step
            damaged[step] = problems[0]
        if damaged:
            told = "; ".join(
                f"{self._path(step).name}: {problem}" for step, problem in damaged.items()
            )
            raise InputError(f"no checkpoint in {self.folder} is whole: {told}")
        return None

    def _set_aside(self, damaged: dict[int, str]) -> None:
        for step, problem in damaged.items():
            aside = set_aside(self._path(step))
            print(
                f"warning: checkpoint {self._path(step)} is damaged: {problem} (now {aside.name})",
                file=sys.stderr,
            )

    def _write(self, step: int, tensors: dict[str, Tensor], description: dict) -> None:
        temporary = self._path(step).with_suffix(".tmp")
        try:
            self._together(lambda: self.leads and make_empty(temporary))
            files = self._write_parts(temporary, tensors)
            self._together(
                lambda: (
                    self.leads and self._publish(step, temporary, description | {"files": files})
                )
            )
        except OSError:
            # a full disk needs the space; together, since the others' end would end the leader
            self._together(lambda: self.leads and shutil.rmtree(temporary, ignore_errors=True))
            raise

    def _write_parts(self, folder: Path, tensors: dict[str, Tensor]) -> dict[str, list[int]]:
        """Write all ranks' tensors; returns size and checksum of each file, taken by the rank that
        wrote it.
        """
        writer = Writer(folder)
        try:
            dcp.save(tensors, storage_writer=writer, process_group=self.group)
        except dcp.CheckpointException as error:
            raise OSError(
                f"checkpoint {folder} cannot be written: {first_failure(error)}"
            ) from error
        names = [*writer.files, INDEX] if self.leads else writer.files
        sums = self._together(lambda: {name: measure(folder / name) for name in names})
        return {name: value for each in gather(sums, self.group) for name, value in each.items()}

    def _publish(self, step: int, temporary: Path, description: dict) -> None:
        """Give a complete folder its final name, then remove checkpoints that are no longer
        kept.
        """
        write_description(temporary, description)
        sync_folder(temporary)
        final = self._path(step)
        if final.exists():
            final.replace(
                final.with_suffix(".old")
            )  # `clean` brings it back should the next line not be reached
        temporary.replace(final)
        sync_folder(self.folder)
        with tolerated(final.with_suffix(".old")):
            delete(final.with_suffix(".old"))
        for old in [n for n in complete_steps(self.folder) if n <= step][: -self.keep]:
            remove(self._path(old))

    def _base(self, model: Module) -> str:
        """A digest of the frozen weights, however they are sharded; computed once, as they do not
        change.

        Gathered in pieces: a GPU that holds its share need not have room for a whole stack of
        experts.
        """
        if model in self.bases:
            return self.bases[model]
        sums = {
            name: sum(bit_sum(full_slice(x, where)) for where in cut_slices(x))
            for name, x in frozen(model).items()
        }
        everywhere = {
            name: value for each in gather(sums, self.group) for name, value in each.items()
        }
        self.bases[model] = hashlib.sha256(
            json.dumps(everywhere, sort_keys=True).encode()
        ).hexdigest()
        return self.bases[model]

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _together(self, function: Callable[[], Any]) -> Any:
        """`function()` on all ranks; if it fails on some, all raise the first failure, so that none
        waits forever.
        """
        result = failure = None
        try:
            result = function()
        except (InputError, OSError) as error:
            failure = error
        failures = [error for error in gather(failure, self.group) if error]
        if failures:
            raise failures[0]
        return result


# ------------------------------------------------------------------------------------------------------ start and end


def resume(
    checkpointer: Checkpointer, config: Config, model: Module, optimizer: Optimizer, *names: str
) -> tuple[int, dict]:
    """Load the newest checkpoint, if there is one; returns what `resume_point` finds in it.

    Raises InputError if there is one and the config forbids to resume.
    """
    if not config.checkpoint.resume and checkpointer.latest() is not None:
        raise InputError(
            f"checkpoint.resume=false, but {checkpointer.folder} holds checkpoints (use another out_dir)"
        )
    return resume_point(
        checkpointer.folder, checkpointer.load(model, optimizer), config.steps, *names
    )


def save_step(
    checkpointer: Checkpointer, numbers: dict[str, Any], model: Module, optimizer: Optimizer
) -> None:
    """Write the checkpoint from which `resume` goes on after a step with these numbers."""
    extra = {"step": numbers["step"], "numbers": dict(numbers)}  # validation adds to them
    checkpointer.save(numbers["step"], model, optimizer, extra)


def resume_point(folder: Path, extra: dict | None, steps: int, *names: str) -> tuple[int, dict]:
    """The last step of a run and its numbers, from `extra` of a checkpoint in `folder`; 0 and none
    if there is none.

    Raises InputError if `extra` is not {"step": n, "numbers": {"step": n, ...}} with numbers of
    these names, n is more than the `steps` that the run is to have, or just one of that run and
    this is GRPO's.
    """
    if extra is None:
        return 0, {}
    step = extra.get("step")
    numbers = extra.get("numbers")
    known = numbers if isinstance(numbers, dict) else {}
    if not (type(step) is int and step > 0 and known.get("step") == step):
        raise InputError(
            f"a checkpoint in {folder} holds the numbers of step {known.get('step')!r} as step {step!r}"
        )
    if step > steps:
        raise InputError(
            f"steps={steps}, but the run in {folder} has done {step} (use more, or another out_dir)"
        )
    if ("reward" in known) != ("reward" in names):  # which GRPO alone has
        task = "of task=grpo" if "reward" in known else "not of task=grpo"
        raise InputError(
            f"a checkpoint in {folder} is {task} (use another out_dir, or its run's task)"
        )
    for name in names:
        if type(known.get(name)) not in (int, float):
            raise InputError(
                f"a checkpoint in {folder} holds {name}={known.get(name)!r}, which is not a number"
            )
    return step, known


@contextmanager
def saved_despite_errors(wait: Callable[[], None]) -> Iterator[None]:
    """Before an error ends the run, `wait` for the checkpoint that is still being written; the
    error is raised then.
    """
    try:
        yield
    except (InputError, OSError):
        with suppress(Exception):  # the first error is the one to tell
            wait()
        raise


# ---------------------------------------------------------------------------------------------------- what is stored


def state_tensors(model: Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights and buffers by name, and optimizer state as `parameter name/key`:
    `norm.weight/exp_avg`.

    The weights come first: FSDP then frees what it has gathered, and its parameters are those that
    the optimizer knows.
    """
    tensors = changing(model)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = value
    return tensors


def frozen(model: Module) -> dict[str, Tensor]:
    """Weights that are not trained."""
    tensors = model.state_dict()
    return {
        name: tensors[name]
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }


def changing(model: Module) -> dict[str, Tensor]:
    """Weights that are trained, and buffers."""
    fixed = frozen(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in fixed}


def bit_sum(tensor: Tensor) -> int:
    """The sum of all elements' bits taken as whole numbers: the same in whatever order they are
    added.
    """
    whole_number = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        tensor.element_size()
    ]
    return tensor.contiguous().view(whole_number).sum(dtype=torch.int64).item()


def prepare_optimizer(optimizer: Optimizer, model: Module, saved: Saved) -> dict[str, Tensor]:
    """Replace the optimizer's state by empty tensors for all that is saved, and return them by
    `parameter name/key`.

    What has its parameter's shape is sharded like it, and of the type in
    `optimizer.defaults["states"]`, or else the parameter's, which reading converts to; the rest are
    scalars, such as Adam's step, which fused kernels read beside the weights.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
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
                tensor = torch.empty(
                    stored.size, dtype=stored.properties.dtype, device=parameter.device
                )
            tensors[entry] = optimizer.state[parameter][key] = tensor
    return tensors


def check_weights(folder: Path, saved: Saved, weights: dict[str, Tensor], names: set[str]) -> None:
    """Raises InputError if a checkpoint's weights are not exactly `weights`, or, on all ranks
    together, `names`.

    Or if an optimizer's state is neither of its weight's shape nor a scalar: it might take any
    amount of memory.
    """
    problem = f"checkpoint {folder} does not fit the model (use another out_dir, or its run's task and model):"
    for name, tensor in weights.items():
        if name not in saved:
            raise InputError(
                f"{problem} it has no {name}, which is {list(tensor.shape)} in the model"
            )
        if saved[name].size != tensor.shape:
            raise InputError(
                f"{problem} {name} is {list(saved[name].size)}, and {list(tensor.shape)} in the model"
            )
    for entry, stored in saved.items():
        name, _, key = entry.partition("/")
        if not key and name not in names:
            raise InputError(
                f"{problem} it has {name} {list(stored.size)}, which the model does not have"
            )
        if key and name in weights and stored.size not in (weights[name].shape, torch.Size()):
            raise InputError(
                f"{problem} its {entry} is {list(stored.size)}, and {name} {list(weights[name].shape)}"
            )


def check_origin(folder: Path, description: dict, optimizer: Optimizer, base: str) -> None:
    """Raises InputError if a checkpoint is of another kind of optimizer, or of adapters beside
    other frozen weights.
    """
    own = type(optimizer).__name__
    if description["optimizer"] != own:
        raise InputError(
            f"checkpoint {folder} holds the state of {description['optimizer']}, not of {own} (use its run's "
            f"optim.name, or another out_dir)"
        )
    if description["base"] != base:
        raise InputError(
            f"checkpoint {folder} was trained over another base model, or the same stored in another precision (use "
            f"that one, or another out_dir)"
        )
