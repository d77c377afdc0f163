"""Predict a config of any task, and the published run where it differed (`reference.recipe`).

A config is predicted as written, with our kernels. If the published run used other software, a recipe
describes it, and the simulator's error is that of the prediction by the recipe. Keys of a recipe:

    compile         whether the run fused element-wise kernels
    attention       the kernel of all attention, a name in systems.yaml
    micro_batches   how many micro-batches pass through the pipeline before it drains; it then fills
                    and drains several times per step
    stack           the run's software, a name in systems.yaml: other kernels and additional costs
"""

import time
from dataclasses import replace

import torch

from minitrain.bench.figures import placed, published_step_time, rates, token_flops
from minitrain.bench.rows import constants
from minitrain.data.datasets import open_dataset
from minitrain.run.config.ranks import stated_ranks
from minitrain.run.monitor.flops import visible_share
from minitrain.settings import Config
from minitrain.simulator.simulate import Simulation, record, time_traces
from minitrain.simulator.simulate_policy import (
    Stack,
    memory_besides_steps,
    policy_figures,
    rollouts_of,
    training_config,
    updates_of,
)
from minitrain.simulator.timeline import System, own_system, peak_rate, rates_of

# keys of the published run's prediction that are kept
PREDICTED = (
    "step_time_s",
    "tokens_per_sec_per_gpu",
    "tflops_per_gpu",
    "peak_memory_gib",
    "ratio",
)


def predict(config: Config, row: str, system: System) -> tuple[Simulation, dict]:
    """Return `predicted_row`; with a recipe, the result has the published run as `as_published`.

    The published run is predicted only on the row's own system.
    """
    simulation, outcome = predicted_row(config, row, system)
    is_published = "recipe" in config.reference and "layout" not in config.reference
    if is_published and system.name == own_system(config) and outcome["ratio"] is not None:
        outcome["as_published"] = as_published(config, row, system, simulation)
    return simulation, outcome


def predicted_row(config: Config, row: str, system: System) -> tuple[Simulation, dict]:
    """Return the simulation of an optimizer step, and the config's result.

    FLOPs and collectives of a GRPO step are those of its optimizer steps only, because sampling and
    log-probabilities are not traced.
    """
    began = time.perf_counter()
    config = placed(config, stated_ranks(config), system.name)
    if config.task == "grpo":
        trainer = training_config(config)
        simulation = time_traces(trainer, record(trainer), system)
        peaks = [
            trace.peak | memory_besides_steps(config, trace.peak)
            for trace in simulation.traces.values()
        ]
        found = counted_result(config, row, system, simulation, peaks, updates_of(config))
        found |= policy_figures(config, system, simulation, None) | {
            "response_tokens": rollouts_of(config).mean
        }
    else:
        simulation = time_traces(config, record(config), system)
        found = simulated_figures(config, row, system, simulation)
    return simulation, found | {"simulated_in_s": time.perf_counter() - began}


def as_published(config: Config, row: str, system: System, simulation: Simulation) -> dict:
    """Return the figures of the published run. simulation: that of the config itself."""
    recipe = config.reference["recipe"]
    traces = simulation.traces
    stack = constants("stacks")[recipe["stack"]] if "stack" in recipe else {}
    system = published_system(system, recipe, stack)
    if config.task == "grpo":
        simulation = time_traces(training_config(config), traces, system)
        return policy_figures(config, system, simulation, Stack(**stack["policy"]))
    if recipe.get("compile", config.compile) != config.compile:
        config = replace(config, compile=recipe["compile"])
        traces = record(config)
    predicted = simulated_figures(
        config, row, system, time_traces(config, traces, system, recipe.get("micro_batches", 0))
    )
    return {key: predicted[key] for key in PREDICTED}


def published_system(system: System, recipe: dict, stack: dict) -> System:
    """Return the system with the rates of the published run's kernels."""
    kernels = dict(system.attention)
    both = stack | recipe
    if "masks" in stack:
        kernels["flex"] = kernels[stack["masks"]]
    if "narrow" in stack:
        kernels["flex"] = replace(kernels["flex"], narrow=stack["narrow"])
    if "attention" in both:
        kernels = rates_of({"attention": dict.fromkeys(kernels, both["attention"])})["attention"]
    return replace(system, attention=kernels, **rates_of(stack.get("rates", {})))


# --- the figures


def simulated_figures(config: Config, row: str, system: System, simulation: Simulation) -> dict:
    """Return a training step's result, with the keys of a measured one; rank 0's breakdown."""
    tokens = config.batch.global_ * config.batch.seq_len / simulation.step / stated_ranks(config)
    flops = token_flops(config, visible_share(open_dataset(config)[0]))
    peaks = [trace.peak for trace in simulation.traces.values()]
    return counted_result(config, row, system, simulation, peaks) | {
        "step_time_s": simulation.step,
        **rates(config, tokens, peak_rate(config, system), *flops),
        "breakdown_s": simulation.breakdown(),
        "timeline": simulation.pipeline and simulation.pipeline.lanes(simulation.step),
    }


def counted_result(
    config: Config,
    row: str,
    system: System,
    simulation: Simulation,
    peaks: list[dict[str, int]],
    steps: int = 1,
) -> dict:
    """Return the part of a result that is counted exactly, without the figures that involve time.

    FLOPs and collectives are rank 0's; memory is that of the rank with the most.
    peaks: peak bytes of each rank, by kind. steps: number of optimizer steps to count.
    """
    peak = max(peaks, key=lambda peak: sum(peak.values()))
    size = sum(peak.values())
    times = simulation.times()
    return {
        "row": row,
        "system": system.name,
        "device": system.name,
        "mode": "simulated",
        "proxy": False,
        "world_size": stated_ranks(config),
        "matmul_tflops": peak_rate(config, system) / 1e12,
        "executed_flops_per_gpu": steps * simulation.traces[0].flops(times),
        "collectives": {
            name: [steps * n for n in counts]
            for name, counts in simulation.traces[0].collectives(times).items()
        },
        "peak_memory_gib": size / 2**30,
        "memory_gib": {kind: part / 2**30 for kind, part in peak.items()},
        "activations_gib": peak["activations"] / 2**30,
        # on the host, of a rank
        "host_activations_gib": max(t.host_peak for t in simulation.traces.values()) / 2**30,
        "fits": size <= system.capacity,
        "capacity_gib": system.capacity / 2**30,
        "reference": config.reference,
        "published_step_time_s": published_step_time(config),
        "torch": torch.__version__,
    }
