"""How much memory a training step works with, apart from what lasts: weights, gradients, optimizer states.

On CUDA torch's allocator knows its peak. On CPU the resident set is far too coarse, but torch's profiler records every
allocation and release, compiled code and recomputation included: their running sum has an exact peak.

`estimate_memory` says before a run what it will take, from a step of the same program on fake tensors. It knows neither
what the allocator wastes nor the workspaces of kernels and of the communication library.
"""

from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity

from minitrain.bench.breakdown import recorded
from minitrain.settings import Config
from minitrain.simulator.fake_world import trace_step


def estimate_memory(config: Config, world_size: int) -> dict[str, float]:
    """GiB of rank 0 at the moment of a step when their sum is largest, by kind: parameters, gradients, ...

    To be called before a process group starts.
    """
    return {kind: size / 2**30 for kind, size in trace_step(config, world_size).peak.items()}


def working_memory(function: Callable[[], object], device: torch.device) -> int:
    """The most bytes on `device` that torch's allocator has lent during `function()`, beyond those lent before it."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    events = recorded(function, [ProfilerActivity.CPU], profile_memory=True)
    memory = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    return max(accumulate((event["args"]["Bytes"] for event in memory), initial=0))  # releases are below 0
