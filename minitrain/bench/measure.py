"""Time a config's real training steps and turn them into the figures of the published tables."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm

from minitrain.bench.flops import CLEAN, CONVENTIONS, flops_per_token
from minitrain.bench.hardware import describe, measure_matmul, peak_memory_bytes
from minitrain.config import Config
from minitrain.parallel.mesh import pick_device
from minitrain.training.data import open_data
from minitrain.training.loop import Trainer


def measure(config: Config, row: str, mesh: DeviceMesh, steps: int, warmup: int) -> dict:
    """Run `warmup` + `steps` optimizer steps and return one result row; keys as in the README. All ranks call it."""
    data, _ = open_data(config.data, config.batch.seq_len, config.model.config.vocab_size, config.seed)
    device = pick_device(config.device)
    matmul = measure_matmul(device, compute_dtype(config))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(config, mesh)
    times = []
    for step in progress(warmup + steps, row):
        elapsed = timed(lambda step=step: trainer.step(data, step), device)
        if step >= warmup:
            times.append(elapsed)
    return result(config, row, device, mesh.size(), times, matmul)


def timed(function, device: torch.device) -> float:
    """Seconds that `function` takes until the device has finished its work."""
    synchronize(device)
    began = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def progress(steps: int, row: str):
    return tqdm(range(steps), desc=row, unit="step", leave=False, disable=dist.get_rank() != 0)


def compute_dtype(config: Config) -> torch.dtype:
    return torch.float32 if config.precision == "fp32" else torch.bfloat16


def result(config: Config, row: str, device: torch.device, ranks: int, times: list[float], matmul: float) -> dict:
    """The figures of a row from the seconds of its timed steps; `matmul` is the measured FLOP/s of one device."""
    published = config.reference
    step_time = sorted(times)[len(times) // 2]
    tokens = config.batch.global_ * config.batch.seq_len / step_time / ranks
    table = CONVENTIONS[published["convention"]] if "convention" in published else CLEAN
    clean = tokens * flops_per_token(config.model.config, config.batch.seq_len, CLEAN)
    return {
        "row": row,
        "system": published.get("system"),
        "mode": "measured",
        "proxy": False,
        "world_size": ranks,
        "step_time_s": step_time,
        "step_time_min_s": min(times),
        "steps": len(times),
        "tokens_per_sec_per_gpu": tokens,
        "tflops_per_gpu": tokens * flops_per_token(config.model.config, config.batch.seq_len, table) / 1e12,
        "clean_tflops_per_gpu": clean / 1e12,
        "mfu": clean / matmul,
        "matmul_tflops": matmul / 1e12,
        "peak_memory_gib": peak_memory_bytes(device) / 2**30,
        "reference": published,
        "ratio": tokens / published["tokens_per_sec_per_gpu"] if "tokens_per_sec_per_gpu" in published else None,
        **describe(device),
    }


def row_name(path: str) -> str:
    """A config file's name within configs/, without the ending."""
    path = Path(path).with_suffix("")
    parts = path.parts
    return "/".join(parts[parts.index("configs") + 1 :]) if "configs" in parts else path.name
