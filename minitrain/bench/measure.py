"""Time a config's real training steps: the stopwatch."""

from functools import partial
from itertools import pairwise
from statistics import median_high

import torch
import torch.distributed as dist

# torch has no public names for compile time and the number of compiled graphs
from torch._dynamo.utils import calculate_time_spent, counters
from tqdm import tqdm

from minitrain.bench.breakdown import profiled, working_memory
from minitrain.bench.figures import TokenFlops, published_step_time, rates, token_flops
from minitrain.data.datasets import open_dataset
from minitrain.parallel.mesh import Meshes
from minitrain.run.config.environment import rank, world_size
from minitrain.run.launch.start import pick_device
from minitrain.run.monitor.flops import visible_share
from minitrain.run.monitor.hardware import (
    compute_dtype,
    describe,
    measure_matmul,
    peak_flops,
    peak_memory_bytes,
    reset_peak_memory,
)
from minitrain.run.tasks.initial_weights import make_trainer
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
    """Run `warmup` + `steps` optimizer steps on all ranks and return their result.

    profile: run one extra step under the profiler and add the first rank's `breakdown_s`. traces:
    folder for the profiler's trace, if it is to be kept.
    """
    data, _ = open_dataset(config)
    device, matmul = prepare(config)
    flops = token_flops(config, visible_share(data))
    announce_time(config, row, device, matmul, step_tokens(config) * flops.clean)
    # graphs of an earlier config would count toward the recompile limit
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
        # wait for the step before, as a run does, which reads its numbers while the next step runs
        moments[-2].wait()
    times = [after.since(before) for before, after in pairwise(moments)]
    # measured again, because the machine may have been busy the first time
    matmul = max(matmul, measure_matmul(device, compute_dtype(config)))
    outcome = result(config, row, device, times[warmup:], matmul, flops) | {
        "compile_s": calculate_time_spent()["total_wall_time"] - compile_seconds,
        # graphs that were compiled after the second step
        "recompiles": graphs[-1] - graphs[:2][-1],
        "activations_gib": activation_bytes(trainer, data) / 2**30,
    }
    if profile:
        step = partial(trainer.step, data, warmup + steps)
        outcome |= profiled(row, step, outcome["step_time_s"], device, traces)
    return outcome


def prepare(config: Config) -> tuple[torch.device, float]:
    """Reset the device's peak memory; return the device and its matmul rate in FLOP/s."""
    device = pick_device(config.device)
    matmul = measure_matmul(device, compute_dtype(config))
    reset_peak_memory(device)
    return device, matmul


def announce_time(
    config: Config, row: str, device: torch.device, matmul: float, flops: float
) -> None:
    """Print how long a step will take at least, where a row of a GPU runs on a CPU.

    flops: of a step, of all ranks. matmul: this machine's FLOP/s.
    """
    if device.type != "cpu" or "system" not in config.reference or rank() != 0:
        return
    hours = flops / world_size() / matmul / 3600
    print(
        f"{row}: a step will take {hours:.2g} hours or more at the {matmul / 1e12:.2g} TFLOP/s of this CPU "
        f"(--shrink: toy width; --simulate: none of it)",
        flush=True,
    )


def step_tokens(config: Config) -> int:
    return config.batch.global_ * config.batch.seq_len


def activation_bytes(trainer: Trainer, dataset) -> int:
    """Return the peak bytes of activations on this rank, during forward and backward passes.

    This is all memory beyond weights and gradients: tensors saved for the backward pass, temporary
    ones of the running block and of the loss, and gathered weights.
    """
    batches = trainer.micro_batches(dataset, 0)

    def passes():
        forward_backward(
            trainer.model, trainer.objective, batches, trainer.meshes, trainer.device
        )

    # allocates the gradients; the second call only adds to them
    passes()
    held = working_memory(passes, trainer.device)
    trainer.optimizer.zero_grad(set_to_none=True)
    return held


def progress(steps: int, row: str):
    """Return a progress bar over the steps, shown by rank 0."""
    return tqdm(range(steps), desc=row, unit="step", leave=False, disable=dist.get_rank() != 0)


def result(
    config: Config,
    row: str,
    device: torch.device,
    times: list[float],
    matmul: float,
    flops: TokenFlops,
    tokens: float | None = None,
) -> dict:
    """Return the result of a row from the seconds of its timed steps.

    matmul: FLOP/s measured on this GPU. tokens: per second and GPU; by default, the tokens of
    training batches over the median step time.
    """
    # the higher median is a time that was measured, not the mean of two
    seconds = median_high(times)
    if tokens is None:
        tokens = step_tokens(config) / seconds / dist.get_world_size()
    machine = describe(device)
    peak = peak_flops(machine["device"], compute_dtype(config))
    reference = config.reference
    on_system = "system" not in reference.get("changed", ())
    return {
        "row": row,
        "system": reference.get("system") if on_system else None,
        "mode": "measured",
        "proxy": False,
        "world_size": dist.get_world_size(),
        "step_time_s": seconds,
        "step_time_min_s": min(times),
        "step_time_max_s": max(times),
        "steps": len(times),
        **rates(config, tokens, matmul, *flops),
        "mfu_of_peak": tokens * flops.clean / peak if peak else None,
        "matmul_tflops": matmul / 1e12,
        "peak_memory_gib": peak_memory_bytes(device) / 2**30,
        "reference": reference,
        "published_step_time_s": published_step_time(config),
        **machine,
    }
