"""Measure this machine's rates (`bench.py --calibrate`), and simulate with them (`--system FILE`).

The rates of matrix products, attention and memory are measured on one GPU. Links, latencies and
memory size stay those of the system in systems.yaml that has this GPU.
"""

from dataclasses import replace
from pathlib import Path

import torch

from minitrain.bench.rows import constants
from minitrain.bench.tables import need_rates, result_lines
from minitrain.errors import InputError
from minitrain.run.monitor.hardware import (
    ATTENTION_LENGTH,
    MATMUL_SIZE,
    describe,
    measure_attention,
    measure_matmul,
    measure_memory,
)
from minitrain.settings import Config
from minitrain.simulator.timeline import System, load_system, own_system
from minitrain.simulator.trace import Event

# per element
BYTES = {"bf16": 2, "fp8": 1}
# bytes/s of fused kernels over bytes/s of a large addition, measured on the H200 of results/h200
FUSED_SHARE = 0.89


def calibrate(device: torch.device) -> dict:
    """Measure the rates of `device` and return them as a result: in bf16 and FP8, on CPUs in fp32.

    matmul: FLOP/s by precision. attention_forward, attention_backward: FLOP/s of causal attention,
    counting half of all pairs. memory: bytes/s.
    """
    on_gpu = device.type == "cuda"
    dtypes = {"bf16": torch.bfloat16} if on_gpu else {"fp32": torch.float32}
    if on_gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        dtypes["fp8"] = torch.float8_e4m3fn
    machine = describe(device)
    forward, backward = measure_attention(device, torch.bfloat16 if on_gpu else torch.float32)
    return {
        "row": "calibration",
        "mode": "calibration",
        "system": system_with(machine["device"]) if on_gpu else None,
        "matmul": {name: measure_matmul(device, dtype) for name, dtype in dtypes.items()},
        "attention_forward": forward,
        "attention_backward": backward,
        "memory": measure_memory(device),
        **machine,
    }


def system_with(device: str) -> str | None:
    """Return the system whose GPU's name is part of the device's name; of several, the longest."""
    names = {
        name.removeprefix("dgx-").replace("-", " ").upper(): name for name in constants("systems")
    }
    return names.get(max((gpu for gpu in names if gpu in device.upper()), key=len, default=""))


def chosen_system(config: Config, word: str | None) -> System:
    """Return the system that --system names; without it, the published row's. Raises InputError."""
    if word is None:
        return load_system(own_system(config), "reference.system")
    return find_system(word)


def find_system(word: str) -> System:
    """Return the system with this name, or with the rates of the last calibration in this file.

    Raises InputError for an unknown name, or for a file without a calibration of a known GPU.
    """
    if not Path(word).is_file():
        return load_system(word)
    found = [
        line for line in result_lines("--system", word) if line[1].get("mode") == "calibration"
    ]
    if not found or not found[-1][1].get("system"):
        raise InputError(
            f"--system={word} holds no calibration of a GPU that the simulator knows "
            f"({', '.join(constants('systems'))})"
        )
    where, outcome = found[-1]
    need_rates(where, outcome)
    return calibrated(load_system(outcome["system"]), outcome)


def calibrated(system: System, outcome: dict) -> System:
    """Return the system with rates that make it predict the measured times.

    The factor found for the causal attention kernel is applied to all attention kernels.
    """
    system = replace(
        system, name=f"{system.name} (calibrated)", memory=FUSED_SHARE * outcome["memory"]
    )
    rates = {}
    for name in BYTES.keys() & outcome["matmul"].keys():
        # the measured product of square matrices: two factors, and a bf16 result
        work = 2 * MATMUL_SIZE**3
        moved = (2 * BYTES[name] + 2) * MATMUL_SIZE**2
        square = Event(
            "mm",
            "gemm",
            work,
            [(0, moved)],
            [],
            sizes=(1, *[MATMUL_SIZE] * 3),
            element=BYTES[name],
        )
        seconds = work / outcome["matmul"][name] - system.beside * moved / system.memory
        rates[name] = getattr(system, name) * work / system.gemm_rate(square) / seconds
    causal = system.attention["causal"]
    length = 1 + causal.start / (ATTENTION_LENGTH / 2)
    forward = outcome["attention_forward"] * length / causal.forward
    backward = outcome["attention_backward"] * length / causal.backward
    kernels = {
        form: replace(
            kernel, forward=kernel.forward * forward, backward=kernel.backward * backward
        )
        for form, kernel in system.attention.items()
    }
    return replace(system, attention=kernels, **rates)
