"""Save and load checkpoints from which a run continues exactly, on any number of ranks.

A checkpoint is a folder `step-00000100` that all ranks see. Each rank writes the parts of weights and
optimizer state that it holds, through torch.distributed.checkpoint (DCP), which can load them into
any other layout. `extra.json` holds everything that is not a tensor, and the checksums of the files.
The folder is called `step-00000100.tmp` until all is on disk. So a folder with its final name is
complete, and if the run is killed, the previous checkpoint is still there. Before a checkpoint is
loaded, its files are checked (checkpoint_files.py); if one is damaged, the previous checkpoint is
loaded instead.

Not stored: learning rates, data position and random state, which are functions of the config and the
step; and the frozen weights of a run with adapters, of which only a digest is stored, to notice other
ones. Dropout's random state also depends on the layout (training/loop.py): with lora.dropout, another
number of ranks draws other masks.
"""

import shutil
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from minitrain.errors import InputError
from minitrain.parallel.agreement import gather, lead, together
from minitrain.run.checkpoint.checkpoint_files import (
    INDEX,
    FileSum,
    find_damage,
    measure,
    read_description,
    write_description,
)
from minitrain.run.checkpoint.checkpoint_folders import (
    await_file,
    clean_up,
    complete_steps,
    delete,
    make_empty,
    remove,
    set_aside,
    tolerated,
)
from minitrain.run.checkpoint.checkpoint_index import IndexedReader, Writer, first_failure
from minitrain.run.checkpoint.checkpoint_state import (
    changing,
    check_origin,
    check_weights,
    frozen_digest,
    prepare_optimizer,
    state_tensors,
)
from minitrain.run.checkpoint.durable import sync_folder
from minitrain.settings import Config
from minitrain.training.loop import Trainer


class Checkpointer:
    """Save checkpoints to a folder, and load the newest. All ranks call it, and its methods, together.

    keep: number of checkpoints to keep on disk.
    group: the ranks that hold the model, including rank 0; a gloo group that is used by nothing else.
    asynchronous: save() returns when the state is copied to host memory, and a thread writes the copy.
    Raises InputError on all ranks if some see another folder under this name, such as one on a disk
    of their own node.
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
        # not the default group, which training uses while the thread writes
        self.group = dist.new_group(backend="gloo") if group is None else group
        self.thread = ThreadPoolExecutor(1) if asynchronous else None
        self.pending: Future | None = None
        # a step whose checkpoint is kept in addition to the newest ones
        self.pinned: int | None = None
        # model -> digest of its frozen weights
        self.bases: dict[Module, str] = {}
        name, node = lead(self.group, clean_up, self.folder)
        probe = self.folder / name
        try:
            together(self.group, await_file, probe, node)
        finally:
            probe.unlink(missing_ok=True)

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint; None if there is none."""
        return max(complete_steps(self.folder), default=None)

    def save(self, step: int, model: Module, optimizer: Optimizer, extra: dict) -> None:
        """Write a checkpoint of `step`, and replace an existing one of the same step.

        extra: stored as JSON. Raises OSError if this write or the pending one fails; earlier
        checkpoints stay.
        """
        self.wait()
        tensors = state_tensors(model, optimizer)
        description = {
            "optimizer": type(optimizer).__name__,
            "base": self._base(model),
            "extra": extra,
        }
        if self.thread:
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            self.pending = self.thread.submit(self._write, step, tensors, description)
        else:
            self._write(step, tensors, description)

    def pin(self, step: int) -> None:
        """Keep the checkpoint of this step in addition to the newest ones, and no longer an earlier one."""
        self.wait()
        self.pinned = step
        lead(self.group, self._remove_old, step)

    def wait(self) -> None:
        """Return when no save is pending. Raises OSError if the pending one failed."""
        pending = self.pending
        self.pending = None
        if pending:
            pending.result()

    def load(self, model: Module, optimizer: Optimizer) -> dict | None:
        """Fill model and optimizer from the newest undamaged checkpoint; return its `extra`, or None.

        Newer, damaged checkpoints are renamed to `step-00000100.damaged`, with a warning. Raises
        InputError, with nothing changed, if the checkpoint is of another model or optimizer, or if
        all are damaged.
        """
        self.wait()
        step = self._newest_whole()
        if step is None:
            return None
        folder = self._path(step)
        description = together(self.group, read_description, folder)
        reader = together(self.group, IndexedReader, folder, description["files"])
        saved = reader.index.state_dict_metadata
        weights = changing(model)
        # a pipeline rank has only some of the weights
        names = set().union(*gather(list(weights), self.group))
        together(self.group, check_weights, folder, saved, weights, names)
        check_origin(folder, description, optimizer, self._base(model))
        tensors = weights | prepare_optimizer(optimizer, model, saved)
        try:
            dcp.load(tensors, storage_reader=reader, process_group=self.group)
        except dcp.CheckpointException as error:
            raise InputError(
                f"checkpoint {folder} cannot be read: {first_failure(error)}"
            ) from error
        return description["extra"]

    def _newest_whole(self) -> int | None:
        """Return the step of the newest undamaged checkpoint; None if there are no checkpoints.

        Each rank checks its share of the files. If all checkpoints are damaged they keep their names,
        so that a restart does not begin from scratch.
        """
        damaged = {}
        group = self.group
        for step in reversed(lead(group, complete_steps, self.folder)):
            path = self._path(step)
            problem = together(group, find_damage, path, group.rank(), group.size())
            problems = list(filter(None, gather(problem, group)))
            if not problems:
                lead(group, set_aside, damaged)
                return step
            damaged[path] = problems[0]
        if damaged:
            problems = "; ".join(f"{path.name}: {problem}" for path, problem in damaged.items())
            raise InputError(f"no checkpoint in {self.folder} is whole: {problems}")
        return None

    def _write(self, step: int, tensors: dict[str, Tensor], description: dict) -> None:
        """Write a whole checkpoint, or, on failure, leave nothing of it."""
        temporary = self._path(step).with_suffix(".tmp")
        try:
            lead(self.group, make_empty, temporary)
            files = self._write_parts(temporary, tensors)
            lead(self.group, self._publish, step, temporary, description | {"files": files})
        except OSError:
            # free the space on a full disk. All ranks wait for this, because a rank that ends would
            # end the leader too
            lead(self.group, shutil.rmtree, temporary, True)
            raise

    def _write_parts(self, folder: Path, tensors: dict[str, Tensor]) -> dict[str, FileSum]:
        """Write all ranks' tensors; return the size and the checksum of each file.

        The rank that wrote a file computes its checksum.
        """
        writer = Writer(folder)
        try:
            dcp.save(tensors, storage_writer=writer, process_group=self.group)
        except dcp.CheckpointException as error:
            raise OSError(
                f"checkpoint {folder} cannot be written: {first_failure(error)}"
            ) from error
        names = writer.files
        if dist.get_rank() == 0:
            names.add(INDEX)
        sums = together(self.group, lambda: {name: measure(folder / name) for name in names})
        return dict(ChainMap(*gather(sums, self.group)))

    def _publish(self, step: int, temporary: Path, description: dict) -> None:
        """Give a complete folder its final name, then remove checkpoints no longer kept."""
        write_description(temporary, description)
        sync_folder(temporary)
        final = self._path(step)
        replaced = final.with_suffix(".old")
        if final.exists():
            # if the run is killed before the next line, `clean_up` renames it back
            final.replace(replaced)
        temporary.replace(final)
        sync_folder(self.folder)
        with tolerated(replaced):
            delete(replaced)
        self._remove_old(step)

    def _remove_old(self, step: int) -> None:
        """Remove the checkpoints up to `step` that are no longer kept."""
        for old in [n for n in complete_steps(self.folder) if n <= step][: -self.keep]:
            if old != self.pinned:
                remove(self._path(old))

    def _base(self, model: Module) -> str:
        """Return the digest of the frozen weights."""
        if model not in self.bases:
            self.bases[model] = frozen_digest(model, self.group)
        return self.bases[model]

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"


def checkpoint_group(config: Config, ranks: Iterable[int]) -> dist.ProcessGroup:
    """Make a group for `ranks` to write checkpoints.

    Its timeout is at least half an hour, because ranks wait there for each other's disks.
    """
    timeout = timedelta(seconds=max(1800, config.timeout_s))
    return dist.new_group(list(ranks), timeout=timeout, backend="gloo")


def resume(
    checkpointer: Checkpointer, config: Config, trainer: Trainer
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Load the newest checkpoint, if there is one.

    Returns the last step that is done, its numbers, and the checkpoint's `extra` (see `save_step`);
    0 and empty dicts without a checkpoint. Raises InputError if there is one and
    checkpoint.resume=false.
    """
    folder = checkpointer.folder
    if lead(checkpointer.group, checkpointer.latest) is None:
        return 0, {}, {}
    if not config.checkpoint.resume:
        raise InputError(
            f"checkpoint.resume=false, but {folder} holds checkpoints (use another out_dir)"
        )
    extra = checkpointer.load(trainer.model, trainer.optimizer)
    counted = "reward" if config.task == "grpo" else "tokens"
    point = resume_point(folder, extra, config.steps, "loss", "tokens_per_sec", counted)
    return *point, extra or {}


def save_step(
    checkpointer: Checkpointer, numbers: dict[str, Any], trainer: Trainer, **more: Any
) -> None:
    """Write the checkpoint of a step, from which `resume` continues.

    numbers: of the step. more: stored in `extra` too, as JSON.
    """
    step = numbers["step"]
    # copied, because validation will add to the numbers
    extra = {"step": step, "numbers": dict(numbers), **more}
    checkpointer.save(step, trainer.model, trainer.optimizer, extra)


def resume_point(folder: Path, extra: dict | None, steps: int, *names: str) -> tuple[int, dict]:
    """Return the last step that is done and its numbers, from `extra` of a checkpoint; 0, {} for None.

    Raises InputError if `extra` is not {"step": n, "numbers": {"step": n, ...}} with numbers of these
    names, if n exceeds the run's `steps`, or if only one of the checkpoint and this run is GRPO's.
    """
    if extra is None:
        return 0, {}
    step = extra.get("step")
    numbers = extra.get("numbers")
    known = numbers if isinstance(numbers, dict) else {}
    held = f"a checkpoint in {folder}"
    if type(step) is not int or step < 1 or known.get("step") != step:
        raise InputError(
            f"{held} holds the numbers of step {known.get('step')!r} as step {step!r}"
        )
    if step > steps:
        raise InputError(
            f"steps={steps}, but the run in {folder} has done {step} (use more, or another out_dir)"
        )
    # only GRPO's numbers include a reward
    if ("reward" in known) != ("reward" in names):
        task = "of task=grpo" if "reward" in known else "not of task=grpo"
        raise InputError(f"{held} is {task} (use another out_dir, or its run's task)")
    for name in names:
        value = known.get(name)
        if type(value) not in (int, float):
            raise InputError(f"{held} holds {name}={value!r}, which is not a number")
    return step, known


@contextmanager
def saved_despite_errors(wait: Callable[[], None]) -> Iterator[None]:
    """Call `wait`, for a checkpoint that is still being written, before an error ends the run."""
    try:
        yield
    except (InputError, OSError):
        # report the first error
        with suppress(Exception):
            wait()
        raise
