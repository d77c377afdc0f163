"""How much memory a training step works with, apart from what lasts: weights, gradients, optimizer states.

On CUDA torch's allocator knows its peak. On CPU the resident set is far too coarse, but torch's profiler records every
allocation and release, compiled code and recomputation included: their running sum has an exact peak.

`estimate_memory` says before a run what it will take, from a step of the same program on fake tensors. It knows neither
what the allocator wastes nor the workspaces of kernels and of the communication library.
"""

import json
import os
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from minitrain.bench.fake_world import trace_step
from minitrain.config import Config


def estimate_memory(config: Config, world_size: int) -> dict[str, float]:
    """GiB of rank 0 at the moment of a step when their sum is largest, by kind: parameters, gradients, ...

    To be called before a process group starts.
    """
    return {kind: size / 2**30 for kind, size in trace_step(config, world_size).peak.items()}


def working_memory(function: Callable[[], object], device: torch.device) -> int:
    """The most bytes on `device` that torch's allocator has lent during `function()`, beyond those lent before it."""
    if device.type == "cuda":
        return _cuda_peak(function, device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler announces its start on the terminal
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    return max(accumulate(_allocations(profiler), initial=0))


def _cuda_peak(function: Callable[[], object], device: torch.device) -> int:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    return torch.cuda.max_memory_allocated(device) - before


def _allocations(profiler: profile) -> list[int]:
    """Bytes allocated, and released as negative numbers, in the order of time."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    memory = [event for event in events if event["name"] == "[memory]"]
    return [event["args"]["Bytes"] for event in sorted(memory, key=lambda event: event["ts"])]
