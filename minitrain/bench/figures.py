"""Turn tokens per second into the figures of the published tables, and compare with them.

Accounting alone, whoever took the time: the stopwatch (measure.py) and the simulator call it alike.
"""

import dataclasses
from collections.abc import Callable

from minitrain.bench.tables import is_of_system
from minitrain.run.monitor import flops as conventions
from minitrain.run.monitor.flops import clean, count_flops
from minitrain.settings import Config


def rates(config: Config, tokens: float, matmul: float, flops: float, table_flops: float) -> dict:
    """Return what follows from `tokens` per second and GPU.

    matmul: FLOP/s of matrix products on a GPU, of which MFU is a share. flops, table_flops: of a
    token, counted as the work is, and as the published table counts.
    """
    return {
        "tokens_per_sec_per_gpu": tokens,
        "tflops_per_gpu": tokens * table_flops / 1e12,
        "clean_tflops_per_gpu": tokens * flops / 1e12,
        "mfu": tokens * flops / matmul,
        "ratio": compare(tokens, tokens * table_flops, config.reference),
    }


def compare(tokens: float, flops: float, published: dict) -> float | None:
    """Return our tokens/s over the published ones, or FLOP/s where a table gives those alone.

    None for a run that does other work than the published one, or elsewhere: see `load_row` and
    `placed`.
    """
    if "changed" in published:
        return None
    ours = {"tokens_per_sec_per_gpu": tokens, "tflops_per_gpu": flops / 1e12}
    for figure, value in ours.items():
        if figure in published:
            return value / published.get(f"corrected_{figure}", published[figure])
    return None


def published_step_time(config: Config) -> float | None:
    """Return seconds per optimizer step as published, or as FLOP/s imply where these are all."""
    published = config.reference
    batch = config.batch
    if "changed" in published:
        return None
    if (
        "tokens_per_sec_per_gpu" in published
        or not {"tflops_per_gpu", "gpus"} <= published.keys()
    ):
        return published.get("step_time_s")
    flops = batch.global_ * batch.seq_len * count_flops(config, table_convention(config))
    return flops / published["gpus"] / published["tflops_per_gpu"] / 1e12


def token_flops(config: Config, visible: float = 1.0) -> tuple[float, float]:
    """Return FLOPs of a training step per token, counted by `clean` and by the row's table.

    visible: see `visible_share`.
    """
    table = count_flops(config, table_convention(config), visible)
    return count_flops(config, clean, visible), table


def table_convention(config: Config) -> Callable:
    """Return how the row's table counts FLOPs; `clean` for a config that stands in no table."""
    # rows.py lists the names
    return getattr(conventions, config.reference.get("convention", "clean"))


def placed(config: Config, ranks: int, machine: str) -> Config:
    """Return the config of a run on so many GPUs of a machine, a system's or a device's name.

    `reference["changed"]` also names what these have other than the published run's: gpus, system.
    """
    reference = config.reference
    changed = list(reference.get("changed", ()))
    if reference.get("gpus", ranks) != ranks:
        changed.append("gpus")
    if "system" in reference and not is_of_system(machine, reference["system"]):
        changed.append("system")
    if changed:
        # each once
        reference = reference | {"changed": list(dict.fromkeys(changed))}
    return dataclasses.replace(config, reference=reference)
