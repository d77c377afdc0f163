"""Measure the steps of a run: tokens/s, FLOP/s, MFU, memory.

FLOPs are counted by `clean` (flops.py), as bench.py does. MFU refers to the GPU's published peak; if
none is known, to the rate of a large matmul measured on this machine.
"""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from minitrain.run.monitor.hardware import (
    compute_dtype,
    describe,
    measure_matmul,
    peak_flops,
    peak_memory_bytes,
)
from minitrain.settings import Config

# measured once per process
matmul_rate = cache(measure_matmul)


class Meter:
    """Measure the steps of a run on this rank's device. All ranks make one together.

    flops(tokens): returns the FLOPs per token of a step with this many tokens.
    """

    def __init__(self, config: Config, flops: Callable[[int], float], device: torch.device):
        self.flops = flops
        self.device = device
        dtype = compute_dtype(config)
        name = describe(self.device)["device"]
        peak = peak_flops(name, dtype)
        self.rate = peak or matmul_rate(self.device, dtype, shorter=10)
        origin = f"published of {name}" if peak else "of a large matmul here"
        rate, unit = (
            (self.rate / 1e12, "TFLOP/s") if self.rate >= 1e12 else (self.rate / 1e9, "GFLOP/s")
        )
        self.about = f"the {rate:.3g} {unit} {origin}"

    def measure(self, numbers: dict[str, Any]) -> dict[str, float]:
        """Return the measured numbers of the step that has just ended. numbers: those it has."""
        speed = numbers["tokens_per_sec"] / dist.get_world_size()
        rate = speed * self.flops(numbers["step_tokens"])
        return {
            "tokens_per_sec_per_gpu": speed,
            "tflops_per_gpu": rate / 1e12,
            "mfu": rate / self.rate,
            "peak_memory_gib": peak_memory_bytes(self.device) / 2**30,
            "wall_time_s": time.time(),
        }
