"""Turn tokens per second into the figures of the published tables, and compare with them.

Both the stopwatch (measure.py) and the simulator use this accounting.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from minitrain.bench.tables import is_of_system
from minitrain.run.monitor import flops as conventions
from minitrain.run.monitor.flops import clean, count_flops
from minitrain.settings import Config


class TokenFlops(NamedTuple):
    """FLOPs per token of a training step, by two conventions."""

    # by `flops.clean`: attention within documents only, recomputation left out
    clean: float
    # by the convention of the row's published table
    table: float


def rates(config: Config, tokens: float, matmul: float, flops: float, table_flops: float) -> dict:
    """Return the figures that follow from `tokens` per second and GPU.

    matmul: a GPU's matmul rate in FLOP/s, the denominator of MFU. flops, table_flops: FLOPs per
    token, see `TokenFlops`.
    """
    return {
        "tokens_per_sec_per_gpu": tokens,
        "tflops_per_gpu": tokens * table_flops / 1e12,
        "clean_tflops_per_gpu": tokens * flops / 1e12,
        "mfu": tokens * flops / matmul,
        "ratio": compare(tokens, tokens * table_flops, config.reference),
    }


def compare(tokens: float, flops: float, published: dict) -> float | None:
    """Return our tokens/s over the published ones; FLOP/s, where the table gives only those.

    None if the run differs from the published one in its work (see `load_row`) or in its machine
    (see `placed`).
    """
    if "changed" in published:
        return None
    ours = {"tokens_per_sec_per_gpu": tokens, "tflops_per_gpu": flops / 1e12}
    for figure, value in ours.items():
        if figure in published:
            return value / published.get(f"corrected_{figure}", published[figure])
    return None


def published_step_time(config: Config) -> float | None:
    """Return the published seconds per optimizer step, derived from FLOP/s if only these exist."""
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


def token_flops(config: Config, visible: float = 1.0) -> TokenFlops:
    """Return FLOPs per token of a training step. visible: see `visible_share`."""
    table = count_flops(config, table_convention(config), visible)
    return TokenFlops(count_flops(config, clean, visible), table)


def table_convention(config: Config) -> Callable:
    """Return the function that counts FLOPs as the row's table does; `clean` without a table."""
    # rows.CONVENTIONS lists the names
    return getattr(conventions, config.reference.get("convention", "clean"))


def placed(config: Config, ranks: int, machine: str) -> Config:
    """Return the config with `gpus` or `system` in `reference["changed"]` where the run's differ.

    ranks: number of GPUs of this run. machine: name of a system or of a device.
    """
    reference = config.reference
    changed = list(reference.get("changed", ()))
    if reference.get("gpus", ranks) != ranks:
        changed.append("gpus")
    if "system" in reference and not is_of_system(machine, reference["system"]):
        changed.append("system")
    if changed:
        # without repeats, in order
        reference = reference | {"changed": list(dict.fromkeys(changed))}
    return dataclasses.replace(config, reference=reference)
