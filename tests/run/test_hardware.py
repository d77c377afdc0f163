"""Peaks against the tables, the matmul rate against a clock driven by counted FLOPs, memory against allocations."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minitrain.run.monitor import hardware
from minitrain.run.monitor.hardware import (
    LINUX_STATUS,
    describe,
    measure_matmul,
    peak_flops,
    peak_memory_bytes,
)
from tests.helpers.published import ROWS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GB300", 2500e12),
    ],
)
def test_peaks_by_device_name(name, bf16):
    assert peak_flops(name, torch.bfloat16) == bf16
    assert (
        peak_flops(name, torch.float8_e4m3fn) == peak_flops(name, torch.float8_e5m2) == 2 * bf16
    )


@pytest.mark.parametrize(
    ("name", "units", "bf16", "fp32", "clock", "has_fp8"),
    [
        ("NVIDIA A100-SXM4-80GB", 108, 2048, 128, 1.41e9, False),
        ("NVIDIA A40", 84, 1024, 256, 1.74e9, False),
        ("NVIDIA A10", 72, 1024, 256, 1.695e9, False),
        ("NVIDIA RTX A6000", 84, 1024, 256, 1.8e9, False),
        ("NVIDIA GeForce RTX 3090", 82, 512, 256, 1.695e9, False),
        ("NVIDIA L4", 58, 1024, 256, 2.04e9, True),
        ("NVIDIA L40", 142, 512, 256, 2.49e9, True),
        ("NVIDIA L40S", 142, 1024, 256, 2.505e9, True),
        ("NVIDIA RTX 6000 Ada Generation", 142, 1024, 256, 2.505e9, True),
        ("NVIDIA GeForce RTX 4090", 128, 512, 256, 2.52e9, True),
        ("NVIDIA GeForce RTX 5090", 170, 512, 256, 2.407e9, True),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, 1024, 256, 2.617e9, True),
        ("AMD Instinct MI300X", 304, 2048, 256, 2.1e9, True),
        ("AMD Instinct MI325X", 304, 2048, 256, 2.1e9, True),
        ("AMD Instinct MI355X", 256, 4096, 256, 2.4e9, True),
    ],
)
def test_peaks_are_units_times_operations_times_clock(name, units, bf16, fp32, clock, has_fp8):
    """FLOPs per clock and multiprocessor, or compute unit, at the boost clock; FP8 doubles those of bf16."""

    def peak(operations):
        return pytest.approx(units * operations * clock, rel=0.03)

    assert peak_flops(name, torch.bfloat16) == peak(bf16)
    assert peak_flops(name, torch.float8_e4m3fn) == (peak(2 * bf16) if has_fp8 else None)
    assert peak_flops(name, torch.float32) == peak(fp32)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA RTX A4000",
        "NVIDIA A10G",
    ],
)
def test_other_gpus_with_alike_names_have_no_peak(name):
    assert peak_flops(name, torch.bfloat16) is None


def test_plain_fp32_peaks():
    """Hopper's SXM parts: 132 multiprocessors x 128 lanes x 2 FLOPs x 1.98 GHz, as the datasheet rounds it."""
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        assert peak_flops(name, torch.float32) == pytest.approx(132 * 128 * 2 * 1.98e9, rel=0.01)
    assert peak_flops("NVIDIA B200", torch.float32) is None


def test_unknown_devices_have_no_peak():
    assert peak_flops("AMD EPYC", torch.bfloat16) is None
    assert peak_flops("NVIDIA H200", torch.int8) is None


@pytest.mark.parametrize(
    "row", [row for row in ROWS.values() if "tflops_per_gpu" in row], ids=lambda row: row["id"]
)
def test_published_rows_reach_a_plausible_share_of_the_peak(row):
    fp8 = row.get("precision", "bf16").startswith("fp8")
    share = (
        row["tflops_per_gpu"]
        * 1e12
        / peak_flops(row["system"], torch.float8_e4m3fn if fp8 else torch.bfloat16)
    )
    assert 0.15 < share < 0.6


# one of 256 takes 17 ms; one of 1024, 0.11 s and 0.04 s
@pytest.mark.parametrize("rate", [2e9, 2e10, 6e10])
@pytest.mark.parametrize("stalls", [(), (2, 5)])
def test_matmul_rate_of_a_machine_with_a_known_rate(monkeypatch, rate, stalls):
    """The clock shows the FLOPs that torch has counted so far, over `rate`; some runs are held up for a second."""
    readings = []

    def perf_counter():
        readings.append(None)
        stalled = sum(len(readings) > 2 * run + 1 for run in stalls)
        return counter.get_total_flops() / rate + stalled

    monkeypatch.setattr(hardware, "time", SimpleNamespace(perf_counter=perf_counter))
    with FlopCounterMode(display=False) as counter:
        measured = measure_matmul(CPU, torch.float32)
    assert measured == pytest.approx(rate, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_matmul_rate_of_this_machine(dtype):
    assert 1e8 < measure_matmul(CPU, dtype) < 1e14


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not LINUX_STATUS.exists(), reason="needs Linux's /proc")
def test_peak_memory_rises_by_what_is_allocated_above_it_and_stays():
    held, slack = resident_bytes(), 2**23
    block = torch.ones(peak_memory_bytes(CPU) - held + 2**29, dtype=torch.uint8)
    # the kernel may take pages of libraries meanwhile
    least, most = (resident_bytes(), held + block.nbytes)
    assert block.nbytes < least and least - slack < peak_memory_bytes(CPU) < most + slack
    del block
    assert least - slack < peak_memory_bytes(CPU) < most + slack
    hardware.reset_peak_memory(CPU)
    assert peak_memory_bytes(CPU) < least - 2**28


@pytest.mark.skipif(not LINUX_STATUS.exists(), reason="needs Linux's /proc")
def test_peak_memory_leaves_out_the_process_that_started_this_one():
    """On Linux, getrusage charges a new program with the memory of the one that it was started from."""
    large = torch.ones(2**30, dtype=torch.uint8)
    code = "import torch, minitrain.run.monitor.hardware as here; print(here.peak_memory_bytes(torch.device('cpu')))"
    root = Path(hardware.__file__).parents[3]
    assert int(subprocess.check_output([sys.executable, "-c", code], cwd=root)) < large.nbytes


def test_peak_memory_elsewhere(monkeypatch):
    """getrusage(2) on macOS: ru_maxrss is in bytes."""
    monkeypatch.setattr(hardware, "LINUX_STATUS", Path("/does/not/exist"))
    monkeypatch.setattr(
        hardware.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3000)
    )
    assert peak_memory_bytes(CPU) == 3000


def test_describe_cpu():
    found = describe(CPU)
    assert found.keys() == {"device", "cores", "torch"}
    assert found["device"].strip() and found["torch"] == torch.__version__
    assert 1 <= found["cores"] <= os.cpu_count()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda():
    found = describe(CUDA)
    assert found["device"] == torch.cuda.get_device_name() and found["cores"] > 1
    rate, peak = measure_matmul(CUDA, torch.bfloat16), peak_flops(found["device"], torch.bfloat16)
    assert rate > 1e12 and (peak is None or rate < peak)
    torch.cuda.reset_peak_memory_stats()
    held = torch.empty(2**26, dtype=torch.uint8, device="cuda")
    assert held.nbytes <= peak_memory_bytes(CUDA) <= held.nbytes + torch.cuda.memory_allocated()
