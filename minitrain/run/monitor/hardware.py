"""Published peaks of known GPUs, and measured rates, memory and name of this machine.

MFU by a published peak can be compared with other tables. MFU by the measured rate of a large matmul
shows how much is left to gain, on any machine. Network bandwidth is not measured.
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

# (words of the GPU's or system's name, dense bf16, FP8 and fp32 without TF32) in FLOP/s: the vendors'
# datasheets, and for GeForce and RTX the appendices of NVIDIA's architecture whitepapers, all with
# accumulation in fp32. The first match counts. None: the GPU has no FP8, or, of Blackwell's fp32,
# datasheets differ, from 75 to 90 TFLOP/s. The simulator uses rates that kernels reach instead, see
# bench/systems.yaml.
PEAKS = (
    ("H100 PCIe|H800 PCIe", 756e12, 1512e12, 51e12),
    ("H100 NVL|H200 NVL", 835e12, 1670e12, 60e12),
    ("H100|H200|H800|GH200", 989e12, 1978e12, 67e12),
    ("H20", 148e12, 296e12, 44e12),
    ("GB200|GB300", 2500e12, 5000e12, None),
    ("B200|B300", 2250e12, 4500e12, None),
    ("A100|A800", 312e12, None, 19.5e12),
    ("A40", 149.7e12, None, 37.4e12),
    ("A10", 125e12, None, 31.2e12),
    ("L40S", 362e12, 733e12, 91.6e12),
    ("L40", 181e12, 362e12, 90.5e12),
    ("L4", 121e12, 242.5e12, 30.3e12),
    ("RTX PRO 6000 Blackwell Workstation Edition", 503.8e12, 1007.6e12, 126e12),
    ("RTX 6000 Ada Generation", 364.2e12, 728.5e12, 91.1e12),
    ("RTX A6000", 154.8e12, None, 38.7e12),
    # not their laptop and D versions
    ("RTX 5090$", 209.5e12, 419e12, 104.8e12),
    ("RTX 4090$", 165.2e12, 330.3e12, 82.6e12),
    ("RTX 3090$", 71e12, None, 35.6e12),
    ("MI300X|MI325X", 1307.4e12, 2614.9e12, 163.4e12),
    ("MI355X", 2516.6e12, 5033.2e12, 157.3e12),
)

# sequence length of the attention that is timed on CUDA
ATTENTION_LENGTH = 8192
# rows and columns of the square matrices whose product is timed on CUDA
MATMUL_SIZE = 8192
# seconds of one timing
RUN = 0.1
LINUX_STATUS = Path("/proc/self/status")


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak dense FLOP/s of a GPU by the name of the device or system; None if unknown.

    fp32's is without TF32.
    """
    for words, bf16, fp8, fp32 in PEAKS:
        if re.search(rf"\b({words})\b", name):
            rates = {
                torch.bfloat16: bf16,
                torch.float8_e4m3fn: fp8,
                torch.float8_e5m2: fp8,
                torch.float32: fp32,
            }
            return rates.get(dtype)
    return None


def compute_dtype(config: Config) -> torch.dtype:
    """Return the dtype of a config's matrix products."""
    return {"fp32": torch.float32, "fp8": torch.float8_e4m3fn}.get(
        config.precision, torch.bfloat16
    )


def measure_matmul(device: torch.device, dtype: torch.dtype, shorter: float = 1) -> float:
    """Measure the FLOP/s of a large square matmul: the best of five timings of RUN / shorter seconds.

    dtype: a floating dtype, or e4m3, with fast accumulation. fp32 on CUDA uses TF32 if torch is set
    to.
    """
    if device.type == "cuda":
        return _matmul_rate(MATMUL_SIZE, device, dtype, shorter)
    rate = _matmul_rate(256, device, dtype, shorter)
    # such as bf16 on a CPU without instructions for it: a larger product would take too long
    slow = rate < 3e9
    return rate if slow else _matmul_rate(1024, device, dtype, shorter)


def _matmul_rate(size: int, device: torch.device, dtype: torch.dtype, shorter: float) -> float:
    """Measure the FLOP/s of a product of two square matrices of this size."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        matmul = partial(choose_scaled_mm(a), a, b.t(), one, one, torch.bfloat16, True)
    else:
        matmul = partial(cpu.matmul, a, b)
    return 2 * size**3 / _seconds_per_call(matmul, device, shorter)


def measure_attention(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Measure the FLOP/s of causal attention, forward and backward.

    It has 32 heads of 128 channels and 8192 tokens; on CPUs, 8 heads and 512 tokens. Half of all pairs
    count. The backward pass has 2.5 times the FLOPs (five matrix products instead of two).
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
    forward = flops / _seconds_per_call(attend, device)
    backward = 2.5 * flops / _seconds_per_call(back, device)
    return forward, backward


def measure_memory(device: torch.device) -> float:
    """Measure the bytes/s of adding two large tensors into a third."""
    # number of elements, too large for caches
    size = 2**29 if device.type == "cuda" else 2**25
    a, b, out = (torch.ones(size, device=device) for _ in range(3))
    return 3 * a.nbytes / _seconds_per_call(partial(torch.add, a, b, out=out), device)


def _seconds_per_call(function: Callable, device: torch.device, shorter: float = 1) -> float:
    """Return the best of five timings of about RUN / shorter seconds each."""
    # the first call loads and tunes kernels
    timed(function, device)
    count = ceil(RUN / shorter / timed(function, device))
    return min(timed(function, device, count) for _ in range(5)) / count


def timed(function: Callable, device: torch.device, count: int = 1) -> float:
    """Return the seconds of `count` calls of `function`, including all work on the device."""
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
    """Return the peak bytes so far: of torch's allocator on CUDA, else the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # not getrusage, which also counts the parent process's memory before exec
    if LINUX_STATUS.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", LINUX_STATUS.read_text())[1]) * 1024
    # macOS gives bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of `peak_memory_bytes`; without effect on macOS and in some sandboxes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        LINUX_STATUS.with_name("clear_refs").write_text("5")


def describe(device: torch.device) -> dict[str, str | int]:
    """Return the device's name, its number of cores, and torch's version.

    cores: a GPU's multiprocessors, or the CPU cores that this process may use.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = properties.name
        cores = properties.multi_processor_count
    else:
        # only Linux has this file
        found = re.search(r"model name\s*: (.*)", cpu.read_cpuinfo())
        name = found[1].strip() if found else platform.processor() or platform.machine()
        cores = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        )
    return {"device": name, "cores": cores, "torch": torch.__version__}
