"""Time a config's real training steps and turn them into the figures of the published tables."""

import dataclasses
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median_high as median

import torch
import torch.distributed as dist
from torch._dynamo.utils import (  # no public names for what the compiler has done
    calculate_time_spent,
    counters,
)
from tqdm import tqdm

from minitrain.bench.breakdown import profiled, working_memory
from minitrain.bench.rows import CONFIGS, read_reference
from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.parallel.mesh import Meshes
from minitrain.run.config.load import load
from minitrain.run.launch.start import make_trainer, pick_device
from minitrain.run.monitor.flops import (
    automodel,
    clean,
    count_flops,
    nemo_pretrain,
    nemo_squad,
    visible_share,
)
from minitrain.run.monitor.hardware import (
    compute_dtype,
    describe,
    is_of_system,
    measure_matmul,
    peak_flops,
    peak_memory_bytes,
    reset_peak_memory,
    timed,
)
from minitrain.settings import Config
from minitrain.training.loop import Trainer, forward_backward

CONVENTIONS = {each.__name__: each for each in (clean, automodel, nemo_pretrain, nemo_squad)}

# settings that fix what a step computes; of GRPO also those below
WORK = ("task", "lora", "optim.name", "batch.global_", "batch.seq_len", "data.kind")
POLICY_WORK = ("rollout.max_tokens", "grpo.prompts", "grpo.group", "grpo.generations", "grpo.lag")


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
    times = []
    graphs = []
    for step in progress(warmup + steps, row):
        times.append(timed(partial(trainer.step, data, step), device))
        graphs.append(counters["stats"]["unique_graphs"])
    # the first measurement may have met a busy machine
    matmul = max(matmul, measure_matmul(device, compute_dtype(config)))
    flops = token_flops(config, visible_share(data))
    outcome = result(config, row, device, times[warmup:], matmul, flops) | {
        "compile_s": calculate_time_spent()["total_wall_time"] - compile_seconds,
        "recompiles": graphs[-1] - graphs[:2][-1],  # after the second step
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


def table_convention(config: Config):
    """Return how the row's table counts FLOPs; `clean` for a config that stands in no table."""
    name = config.reference.get("convention", "clean")
    if name not in CONVENTIONS:
        raise InputError(f"reference.convention={name!r} is not one of {', '.join(CONVENTIONS)}")
    return CONVENTIONS[name]


def load_row(file: str | Path, overrides: list[str]) -> tuple[str, Config]:
    """Return the row's name and its config.

    `reference["changed"]` names the settings whose work is not the row's: nothing is compared with
    its published figures then. Layout and micro-batches are free.
    """
    config = load(file, overrides)
    row = row_name(file)
    config.reference = read_reference(config.reference)
    table_convention(config)  # before anything is measured
    if config.reference:
        own = CONFIGS / f"{row}.yaml"  # a copy in another configs/ may have been edited
        published = load(own if "/" in row and own.is_file() else file)
        theirs = work(published)
        if changed := [name for name, ours in work(config).items() if ours != theirs[name]]:
            config.reference["changed"] = changed
        if "mean_response" in config.reference:  # the published tokens are of so many responses
            config.reference["responses"] = published.grpo.prompts * published.grpo.group
    return row, config


def work(config: Config) -> dict:
    """Return the settings that fix what a step computes, by name."""
    is_policy = config.task == "grpo"
    names = WORK + POLICY_WORK if is_policy else WORK
    settings = {name.rstrip("_"): attrgetter(name)(config) for name in names}
    settings["model"] = config.model.config
    settings["precision"] = config.precision.removesuffix("-pure")
    settings["data"] = config.data.packed, config.data.size, config.data.text_tokens
    settings["grpo.kl"] = is_policy and config.grpo.kl > 0  # a forward pass of the reference
    return settings


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
        reference = reference | {"changed": changed}
    return dataclasses.replace(config, reference=reference)


def row_name(path: str) -> str:
    """Return a config file's name within configs/, without the ending."""
    path = Path(path).with_suffix("")
    parts = path.parts
    return "/".join(parts[parts.index("configs") + 1 :]) if "configs" in parts else path.name
