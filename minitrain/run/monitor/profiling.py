"""Record profiles of a run on request, below out_dir/profile, one file per rank.

profile.steps=[10,12]: the operations of steps 10, 11 and 12, as numbered in the log, on host and
GPU, with times: rank-N.json, a Chrome trace for ui.perfetto.dev. profile.memory=true: every
allocation on the GPU and where it was made, up to the last of those steps, the run's end or a
failure such as running out of memory: memory-rank-N.pickle for pytorch.org/memory_viz. What is not
asked for costs nothing, and steps that are not recorded run as fast as ever.
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

# that are remembered, the last ones
ALLOCATIONS = 100_000


def recorded_steps(
    steps: Iterator[dict[str, Any]], settings: Profile, folder: Path, done: int
) -> Iterator[dict[str, Any]]:
    """Yield the numbers of `steps`, and record what `settings` asks for meanwhile.

    done: how many steps there were before.
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
    """Record allocations on the GPU inside a `with` statement, whatever ends it."""
    # whose functions are documented, but not public in name
    memory = torch.cuda.memory
    # else torch runs addr2line, and fails where there is none
    os.environ.setdefault("TORCH_SYMBOLIZE_MODE", "dladdr")
    memory._record_memory_history(max_entries=ALLOCATIONS)
    try:
        yield
    finally:
        memory._dump_snapshot(own_file(folder, "memory-rank-{}.pickle"))
        memory._record_memory_history(enabled=None)


def own_file(folder: Path, name: str) -> str:
    """Return this rank's file of that name.

    Those of earlier recordings on more ranks go: they are none of this one's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        later = (folder / name.format(rank) for rank in count(dist.get_world_size()))
        for file in takewhile(Path.exists, later):
            file.unlink()
    return str(folder / name.format(dist.get_rank()))
