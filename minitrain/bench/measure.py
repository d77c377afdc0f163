"""Time a config's real training steps and turn them into the figures of the published tables."""

import dataclasses
from functools import partial
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
from minitrain.run.config import load
from minitrain.run.flops import (
    automodel,
    clean,
    count_flops,
    nemo_pretrain,
    nemo_squad,
    visible_share,
)
from minitrain.run.hardware import (
    compute_dtype,
    describe,
    is_of_system,
    measure_matmul,
    peak_flops,
    peak_memory_bytes,
    reset_peak_memory,
    timed,
)
from minitrain.run.launch import make_trainer, pick_device
from minitrain.settings import Config
from minitrain.training.loop import Trainer, forward_backward

CONVENTIONS = {
    convention.__name__: convention for convention in (clean, automodel, nemo_pretrain, nemo_squad)
}


def measure(
    config: Config,
    row: str,
    meshes: Meshes,
    steps: int,
    warmup: int,
    profile: bool = False,
    traces: str | None = None,
) -> dict:
    """Run `warmup` + `steps` optimizer steps; returns one row: `result`, and what is added below.
    All ranks call it.

    profile: run one more, for `breakdown_s`, the first rank's; its trace goes to the folder
    `traces`, if that is given.
    """
    data, _ = open_dataset(config)
    device, matmul = prepare(config)
    torch.compiler.reset()  # an earlier config's graphs would count against the limit of recompilations
    compile_seconds = calculate_time_spent()["total_wall_time"]
    trainer = make_trainer(config, meshes)
    times = []
    graphs = []
    for step in progress(warmup + steps, row):
        times.append(timed(partial(trainer.step, data, step), device))
        graphs.append(counters["stats"]["unique_graphs"])
    matmul = max(
        matmul, measure_matmul(device, compute_dtype(config))
    )  # the first may have met a busy machine
    outcome = training_result(config, row, device, times[warmup:], matmul, visible_share(data)) | {
        "compile_s": calculate_time_spent()["total_wall_time"] - compile_seconds,
        "recompiles": graphs[-1] - graphs[min(1, len(graphs) - 1)],  # after the second step
        "activations_gib": activation_bytes(trainer, data) / 2**30,
    }
    if profile:
        outcome |= profiled(
            row, partial(trainer.step, data, warmup + steps), outcome["step_time_s"], device, traces
        )
    return outcome


def prepare(config: Config) -> tuple[torch.device, float]:
    """The device, whose peak of memory begins here, and its FLOP/s in large matrix products."""
    device = pick_device(config.device)
    matmul = measure_matmul(device, compute_dtype(config))
    reset_peak_memory(device)
    return device, matmul


def activation_bytes(trainer: Trainer, dataset) -> int:
    """The most memory that this rank's forward and backward passes of a step hold beyond weights
    and gradients.

    Activations, then: what is saved for the backward pass and what the running block and the loss
    need, with gathered weights. In the first pass gradients appear, so that the second, which is
    measured, only adds to them.
    """
    batches = trainer.micro_batches(dataset, 0)

    def passes():
        forward_backward(trainer.model, trainer.objective, batches, trainer.meshes, trainer.device)

    passes()
    held = working_memory(passes, trainer.device)
    trainer.optimizer.zero_grad(set_to_none=True)
    return held


def progress(steps: int, row: str):
    return tqdm(range(steps), desc=row, unit="step", leave=False, disable=dist.get_rank() != 0)


def training_result(
    config: Config,
    row: str,
    device: torch.device,
    times: list[float],
    matmul: float,
    visible: float = 1.0,
) -> dict:
    """See `result`. visible: as `visible_share` says."""
    tokens = config.batch.global_ * config.batch.seq_len / median(times) / dist.get_world_size()
    return result(config, row, device, times, matmul, tokens, *token_flops(config, visible))


def result(
    config: Config,
    row: str,
    device: torch.device,
    times: list[float],
    matmul: float,
    tokens: float,
    flops: float,
    table_flops: float,
) -> dict:
    """The figures of a row from the seconds of its timed steps; the rest as in `rates`, with
    `matmul` measured here.
    """
    machine = describe(device)
    peak = peak_flops(machine["device"], compute_dtype(config))
    return {
        "row": row,
        "system": None
        if "system" in config.reference.get("changed", ())
        else config.reference.get("system"),
        "mode": "measured",
        "proxy": False,
        "world_size": dist.get_world_size(),
        "step_time_s": median(times),
        "step_time_min_s": min(times),
        "step_time_max_s": max(times),
        "steps": len(times),
        **rates(config, tokens, matmul, flops, table_flops),
        "mfu_of_peak": tokens * flops / peak if peak else None,
        "matmul_tflops": matmul / 1e12,
        "peak_memory_gib": peak_memory_bytes(device) / 2**30,
        "reference": config.reference,
        "published_step_time_s": published_step_time(config),
        **machine,
    }


def rates(config: Config, tokens: float, matmul: float, flops: float, table_flops: float) -> dict:
    """What follows from `tokens` per second and GPU.

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
    """Our tokens/s over the published ones; where a table gives FLOP/s only, over what those imply.
    None for a run that does other work than the published one, or elsewhere: see `work` and
    `placed`."""
    if "changed" in published:
        return None
    if "tokens_per_sec_per_gpu" in published:
        return tokens / published.get(
            "corrected_tokens_per_sec_per_gpu", published["tokens_per_sec_per_gpu"]
        )
    return flops / 1e12 / published["tflops_per_gpu"] if "tflops_per_gpu" in published else None


def published_step_time(config: Config) -> float | None:
    """Seconds per optimizer step as published, or as FLOP/s imply where a table gives nothing
    else.
    """
    published = config.reference
    batch = config.batch
    if "changed" in published:
        return None
    if "tokens_per_sec_per_gpu" in published or not {"tflops_per_gpu", "gpus"} <= published.keys():
        return published.get("step_time_s")
    flops = batch.global_ * batch.seq_len * count_flops(config, table_convention(config))
    return flops / published["gpus"] / published["tflops_per_gpu"] / 1e12


def token_flops(config: Config, visible: float) -> tuple[float, float]:
    """FLOPs of a training step per token, by `clean` counting and by that of the row's table."""
    return count_flops(config, clean, visible), count_flops(
        config, table_convention(config), visible
    )


def table_convention(config: Config):
    """How the row's table counts FLOPs; `clean` for a config that stands in no table."""
    name = config.reference.get("convention", "clean")
    if name not in CONVENTIONS:
        raise InputError(f"reference.convention={name!r} is not one of {', '.join(CONVENTIONS)}")
    return CONVENTIONS[name]


def load_row(file: str | Path, overrides: list[str]) -> tuple[str, Config]:
    """Return the row's name and its config. `reference["changed"]` names the settings whose work is
    not the row's: nothing is compared with its published figures then. Layout and micro-batches are
    free."""
    config = load(file, overrides)
    row = row_name(file)
    config.reference = read_reference(config.reference)
    table_convention(config)  # before anything is measured
    if config.reference:
        own = CONFIGS / f"{row}.yaml"  # a copy in another configs/ may have been edited
        published = load(own if "/" in row and own.is_file() else file)
        theirs = work(published)
        ours = work(config)
        changed = [name for name in ours if ours[name] != theirs[name]]
        config.reference |= {"changed": changed} if changed else {}
        if (
            "mean_response" in config.reference
        ):  # the published tokens are those of so many responses
            config.reference |= {"responses": published.grpo.prompts * published.grpo.group}
    return row, config


def work(config: Config) -> dict:
    """Return the settings that fix what a step computes, by name."""
    data = config.data
    grpo = config.grpo
    settings = {
        "task": config.task,
        "model": config.model.config,
        "lora": config.lora,
        "precision": config.precision.removesuffix("-pure"),
        "optim.name": config.optim.name,
        "batch.global": config.batch.global_,
        "batch.seq_len": config.batch.seq_len,
        "data.kind": config.data.kind,
        "data": (data.packed, data.size, data.text_tokens),
    }
    if config.task != "grpo":
        return settings
    return settings | {
        "rollout.max_tokens": config.rollout.max_tokens,
        "grpo.prompts": grpo.prompts,
        "grpo.group": grpo.group,
        "grpo.generations": grpo.generations,
        "grpo.kl": grpo.kl > 0,  # a forward pass of the reference
        "grpo.lag": grpo.lag,
    }


def placed(config: Config, ranks: int, machine: str) -> Config:
    """Return the config of a run on so many GPUs of a machine, a system's or a device's name.

    `reference["changed"]` also names what these have other than the published run's: gpus, system.
    """
    published = config.reference
    same = {
        "gpus": ranks == published.get("gpus", ranks),
        "system": "system" not in published or is_of_system(machine, published["system"]),
    }
    changed = [name for name in same if not same[name]]
    if not changed:
        return config
    reference = published | {"changed": [*published.get("changed", ()), *changed]}
    return dataclasses.replace(config, reference=reference)


def row_name(path: str) -> str:
    """A config file's name within configs/, without the ending."""
    path = Path(path).with_suffix("")
    parts = path.parts
    return "/".join(parts[parts.index("configs") + 1 :]) if "configs" in parts else path.name
