"""The abilities of a machine: published peaks of known GPUs, the rates of this one, its memory peak, its
name.

A share of a published peak compares with other people's tables. A share of what a large matmul
sustains here says how much is left to gain on any machine, a laptop too. Not here: network
bandwidth.
"""

import os
import platform
import re
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import ceil
from pathlib import Path

import torch
import torch.nn.functional as F

from minitrain.models import cpu
from minitrain.models.fp8 import choose_scaled_mm
from minitrain.settings import Config

# (part of the name, dense bf16, plain fp32) in FLOP/s, from NVIDIA's datasheets. The first match
# counts, so GB200 stands before B200. Blackwell's fp32 is left out: its datasheets say 75 to 90
# TFLOP/s.
PEAKS = (
    ("H100 PCIe", 756e12, 51e12),
    ("H100 NVL", 835e12, 60e12),
    ("H200 NVL", 835e12, 60e12),
    ("H100", 989e12, 67e12),
    ("H200", 989e12, 67e12),
    ("GB300", 2500e12, None),
    ("GB200", 2500e12, None),
    ("B200", 2250e12, None),
)

OTHER_FORMS = {
    "pcie",
    "nvl",
    "mig",
}  # words in the names of GPUs that are slower than a system's, or parts of them

ATTENTION_LENGTH = 8192  # tokens of the attention that is timed on CUDA
MATMUL_SIZE = 8192  # rows, columns and depth of the product that is timed on CUDA
RUN = 0.1  # seconds for which something is repeated to measure its rate
LINUX_STATUS = Path("/proc/self/status")


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak dense FLOP/s of the GPU whose device or system name is `name`, if known.

    Tensor cores for bf16 and fp8 (twice bf16), without sparsity; fp32 without TF32.
    """
    for part, bf16, fp32 in PEAKS:
        if part in name:
            rates = {
                torch.bfloat16: bf16,
                torch.float8_e4m3fn: 2 * bf16,
                torch.float8_e5m2: 2 * bf16,
                torch.float32: fp32,
            }
            return rates.get(dtype)
    return None


def compute_dtype(config: Config) -> torch.dtype:
    return {"fp32": torch.float32, "fp8": torch.float8_e4m3fn}.get(
        config.precision, torch.bfloat16
    )


def is_of_system(machine: str, system: str) -> bool:
    """Return whether `machine`, a system's or a device's name, belongs to a published system."""
    words = set(machine.lower().split())
    name = system.lower()
    return not words.isdisjoint({name, name.removeprefix("dgx-")}) and words.isdisjoint(
        OTHER_FORMS
    )


def measure_matmul(device: torch.device, dtype: torch.dtype, shorter: float = 1) -> float:
    """Measure the FLOP/s of a large square matmul here: the best of five runs, each RUN / shorter.

    dtype: a floating type that `@` takes, or e4m3, whose products are summed up fast. fp32 on CUDA
    uses TF32 or not, as torch is set.
    """
    if device.type == "cuda":
        return _matmul_rate(MATMUL_SIZE, device, dtype, shorter)
    rate = _matmul_rate(256, device, dtype, shorter)
    # as of bf16 on CPUs without instructions for it
    slow = rate < 3e9
    return rate if slow else _matmul_rate(1024, device, dtype, shorter)


def _matmul_rate(size: int, device: torch.device, dtype: torch.dtype, shorter: float) -> float:
    """Measure the FLOP/s of a product of two matrices with so many rows and columns."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        matmul = partial(choose_scaled_mm(a), a, b.t(), one, one, torch.bfloat16, True)
    else:
        matmul = partial(cpu.matmul, a, b)
    return 2 * size**3 / _seconds_per_call(matmul, device, shorter)


def measure_attention(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Measure the FLOP/s of causal attention, forward and backward.

    It has 32 heads of 128 channels and 8192 tokens, on CPUs 8 heads and 512 tokens. Half of the
    square counts; the backward pass is 2.5 times the forward (five matrix products instead of two).
    """
    heads, length, width = (32, ATTENTION_LENGTH, 128) if device.type == "cuda" else (8, 512, 128)
    shape = 1, heads, length, width
    q, k, v = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    out = attend()
    back = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
    flops = 2 * heads * length**2 * width
    return flops / _seconds_per_call(attend, device), 2.5 * flops / _seconds_per_call(
        back, device
    )


def measure_memory(device: torch.device) -> float:
    """Measure the bytes/s of an addition of two large tensors into a third."""
    size = 2**29 if device.type == "cuda" else 2**25  # elements: beyond what caches hold
    a, b, out = (torch.ones(size, device=device) for _ in range(3))
    return 3 * a.nbytes / _seconds_per_call(partial(torch.add, a, b, out=out), device)


def _seconds_per_call(function: Callable, device: torch.device, shorter: float = 1) -> float:
    """Take the best of five runs of about RUN / shorter seconds each."""
    timed(function, device)  # the first call loads and tunes kernels
    count = ceil(RUN / shorter / timed(function, device))
    return min(timed(function, device, count) for _ in range(5)) / count


def timed(function: Callable, device: torch.device, count: int = 1) -> float:
    """Return the seconds for `count` calls of `function`, the device idle before and after."""
    synchronize = (
        partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    )
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        function()
    synchronize()
    return time.perf_counter() - start


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most bytes held at once so far.

    They are those of torch's allocator on CUDA, of the whole process (resident set) on CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (
        LINUX_STATUS.exists()
    ):  # getrusage would count the memory of the process that started this one, up to its exec
        return int(re.search(r"VmHWM:\s+(\d+) kB", LINUX_STATUS.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: in bytes


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory_bytes` begin anew; on macOS, and where a sandbox forbids it, it cannot."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        LINUX_STATUS.with_name("clear_refs").write_text("5")


def describe(device: torch.device) -> dict[str, str | int]:
    """Return the device's name, its size, and torch's version.

    The size is a GPU's multiprocessors, or the CPU cores that this process may use.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = properties.name
        cores = properties.multi_processor_count
    else:
        found = re.search(r"model name\s*: (.*)", cpu.read_cpuinfo())  # where Linux tells
        name = found[1].strip() if found else platform.processor() or platform.machine()
        cores = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        )
    return {"device": name, "cores": cores, "torch": torch.__version__}
