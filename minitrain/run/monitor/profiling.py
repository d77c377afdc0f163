"""Record profiles of a run on request, in out_dir/profile, one file per rank.

profile.steps=[10,12]: the operators and kernels of steps 10 to 12, as a Chrome trace rank-N.json for
ui.perfetto.dev. profile.memory=true: all allocations on the GPU with their stack traces, until the
last of these steps, the run's end, or a failure such as running out of memory, as
memory-rank-N.pickle for pytorch.org/memory_viz. Steps that are not recorded are not slowed down.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import profile

from minitrain.settings import Profile

# number of allocations that are kept, the last ones
ALLOCATIONS = 100_000


def recorded_steps(
    steps: Iterator[dict[str, Any]], settings: Profile, folder: Path, done: int
) -> Iterator[dict[str, Any]]:
    """Yield the numbers of `steps`, and meanwhile record as `settings` say.

    done: number of steps that were done before.
    """
    first, last = settings.steps or (0, 0)
    folder = folder / "profile"
    with ExitStack() as recordings:
        if settings.memory and (done < last or not last):
            recordings.enter_context(recorded_memory(folder))
        if first <= done + 1 <= last:
            recordings.enter_context(recorded_operations(folder))
        for numbers in steps:
            if numbers["step"] + 1 == first:
                recordings.enter_context(recorded_operations(folder))
            elif numbers["step"] == last:
                recordings.close()
            yield numbers


@contextmanager
def recorded_operations(folder: Path) -> Iterator[None]:
    """Record the operations inside a `with` statement, on host and GPU, as a Chrome trace."""
    profiler = profile()
    profiler.start()
    try:
        yield
    finally:
        profiler.stop()
        profiler.export_chrome_trace(own_file(folder, "rank-{}.json"))


@contextmanager
def recorded_memory(folder: Path) -> Iterator[None]:
    """Record allocations on the GPU inside a `with` statement, also if an error ends it."""
    # these functions are documented, although their names are private
    memory = torch.cuda.memory
    # otherwise torch runs addr2line, and fails if it is not installed
    os.environ.setdefault("TORCH_SYMBOLIZE_MODE", "dladdr")
    memory._record_memory_history(max_entries=ALLOCATIONS)
    try:
        yield
    finally:
        memory._dump_snapshot(own_file(folder, "memory-rank-{}.pickle"))
        memory._record_memory_history(enabled=None)


def own_file(folder: Path, name: str) -> str:
    """Return this rank's file; remove files of higher ranks, from an earlier recording."""
    folder.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        later = (folder / name.format(rank) for rank in count(dist.get_world_size()))
        for file in takewhile(Path.exists, later):
            file.unlink()
    return str(folder / name.format(dist.get_rank()))
