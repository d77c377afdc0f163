"""Time a config's real training steps: the stopwatch."""

from functools import partial
from itertools import pairwise
from statistics import median_high as median

import torch
import torch.distributed as dist

# no public names for what the compiler has done
from torch._dynamo.utils import calculate_time_spent, counters
from tqdm import tqdm

from minitrain.bench.breakdown import profiled, working_memory
from minitrain.bench.figures import published_step_time, rates, token_flops
from minitrain.data.datasets import open_dataset
from minitrain.parallel.mesh import Meshes
from minitrain.run.launch.start import make_trainer, pick_device
from minitrain.run.monitor.flops import visible_share
from minitrain.run.monitor.hardware import (
    compute_dtype,
    describe,
    measure_matmul,
    peak_flops,
    peak_memory_bytes,
    reset_peak_memory,
)
from minitrain.settings import Config
from minitrain.training.loop import Trainer, forward_backward
from minitrain.training.stopwatch import Moment


def measure(
    config: Config,
    row: str,
    meshes: Meshes,
    steps: int,
    warmup: int,
    profile: bool = False,
    traces: str | None = None,
) -> dict:
    """Run `warmup` + `steps` optimizer steps on all ranks, and return one row: see `result`.

    profile: run one more, for `breakdown_s`, the first rank's; its trace goes to the folder
    `traces`, if that is given.
    """
    data, _ = open_dataset(config)
    device, matmul = prepare(config)
    # an earlier config's graphs would count against the limit of recompilations
    torch.compiler.reset()
    compile_seconds = calculate_time_spent()["total_wall_time"]
    trainer = make_trainer(config, meshes)
    trainer.prepare(data, warmup + steps + 1)
    moments = [Moment(device)]
    graphs = []
    for step in progress(warmup + steps, row):
        trainer.step(data, step)
        moments.append(Moment(device))
        graphs.append(counters["stats"]["unique_graphs"])
        # as a run does, which reads a step's numbers while the device has the next one
        moments[-2].wait()
    times = [after.since(before) for before, after in pairwise(moments)]
    # the first measurement may have met a busy machine
    matmul = max(matmul, measure_matmul(device, compute_dtype(config)))
    flops = token_flops(config, visible_share(data))
    outcome = result(config, row, device, times[warmup:], matmul, flops) | {
        "compile_s": calculate_time_spent()["total_wall_time"] - compile_seconds,
        # after the second step
        "recompiles": graphs[-1] - graphs[:2][-1],
        "activations_gib": activation_bytes(trainer, data) / 2**30,
    }
    if profile:
        step = partial(trainer.step, data, warmup + steps)
        outcome |= profiled(row, step, outcome["step_time_s"], device, traces)
    return outcome


def prepare(config: Config) -> tuple[torch.device, float]:
    """Return the device, whose peak of memory begins here, and its matmul rate in FLOP/s."""
    device = pick_device(config.device)
    matmul = measure_matmul(device, compute_dtype(config))
    reset_peak_memory(device)
    return device, matmul


def activation_bytes(trainer: Trainer, dataset) -> int:
    """Return the most memory that a step's passes hold on this rank beyond weights and gradients.

    These are activations: what is saved for the backward pass and what the running block and the
    loss need, with gathered weights. In the first pass gradients appear, so that the second, which
    is measured, only adds to them.
    """
    batches = trainer.micro_batches(dataset, 0)

    def passes():
        forward_backward(
            trainer.model, trainer.objective, batches, trainer.meshes, trainer.device
        )

    passes()
    held = working_memory(passes, trainer.device)
    trainer.optimizer.zero_grad(set_to_none=True)
    return held


def progress(steps: int, row: str):
    return tqdm(range(steps), desc=row, unit="step", leave=False, disable=dist.get_rank() != 0)


def result(
    config: Config,
    row: str,
    device: torch.device,
    times: list[float],
    matmul: float,
    flops: tuple[float, float],
    tokens: float | None = None,
) -> dict:
    """Return the figures of a row from the seconds of its timed steps.

    matmul, flops: as `rates` takes them, measured here. tokens: per second and GPU, by default those
    of training batches.
    """
    seconds = median(times)
    if tokens is None:
        tokens = config.batch.global_ * config.batch.seq_len / seconds / dist.get_world_size()
    machine = describe(device)
    peak = peak_flops(machine["device"], compute_dtype(config))
    reference = config.reference
    is_there = "system" not in reference.get("changed", ())
    return {
        "row": row,
        "system": reference.get("system") if is_there else None,
        "mode": "measured",
        "proxy": False,
        "world_size": dist.get_world_size(),
        "step_time_s": seconds,
        "step_time_min_s": min(times),
        "step_time_max_s": max(times),
        "steps": len(times),
        **rates(config, tokens, matmul, *flops),
        "mfu_of_peak": tokens * flops[0] / peak if peak else None,
        "matmul_tflops": matmul / 1e12,
        "peak_memory_gib": peak_memory_bytes(device) / 2**30,
        "reference": reference,
        "published_step_time_s": published_step_time(config),
        **machine,
    }
