"""What a run records about itself on request, below out_dir/profile, one file per rank.

profile.steps=[10,12]: the operations of steps 10, 11 and 12, as numbered in the log, on host and GPU, with times:
rank-N.json, a Chrome trace for ui.perfetto.dev. profile.memory=true: every allocation on the GPU and where it was made,
up to the last of those steps, the run's end or a failure such as running out of memory: memory-rank-N.pickle for
pytorch.org/memory_viz. What is not asked for costs nothing, and steps that are not recorded run as fast as ever.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from minitrain.config import Profile

ALLOCATIONS = 100_000  # that are remembered, the last ones


def recorded_steps(
    steps: Iterator[dict[str, Any]], settings: Profile, folder: Path, done: int
) -> Iterator[dict[str, Any]]:
    """The numbers of `steps`, of which `done` had been before; meanwhile what `settings` asks for is recorded."""
    recorder = Recorder(settings, folder)
    try:
        recorder.after(done)
        for numbers in steps:
            recorder.after(numbers["step"])
            yield numbers
    finally:
        recorder.stop()


class Recorder:
    """Begins and ends the recordings between steps."""

    def __init__(self, settings: Profile, folder: Path):
        self.first, self.last = settings.steps or (0, 0)
        self.folder, self.profiler, self.memory = folder / "profile", None, settings.memory
        if self.memory:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)  # documented, but not public in name

    def after(self, step: int) -> None:
        if self.profiler is None and self.first <= step + 1 <= self.last:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self.profiler = profile(activities=activities)
            self.profiler.start()
        elif step >= self.last > 0:
            self.stop()

    def stop(self) -> None:
        """Write what is being recorded, if anything is."""
        (profiler, self.profiler), (memory, self.memory) = (self.profiler, None), (self.memory, False)
        if profiler or memory:
            self.folder.mkdir(parents=True, exist_ok=True)
        if profiler:
            profiler.stop()
            profiler.export_chrome_trace(str(self.folder / f"rank-{dist.get_rank()}.json"))
        if memory:
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory-rank-{dist.get_rank()}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
