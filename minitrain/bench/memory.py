"""How much memory a training step works with, apart from what lasts: weights, gradients, optimizer states.

On CUDA torch's allocator knows its peak. On CPU the resident set is far too coarse, but torch's profiler records every
allocation and release, compiled code and recomputation included: their running sum has an exact peak.
"""

import json
import os
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


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
