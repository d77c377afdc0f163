"""Predict a published run that differs from its row's config by the keys of `reference.recipe`.

    compile         whether element-wise kernels become one
    attention       the kernel of all attention, by its name in systems.yaml
    micro_batches   so many go through a pipeline until it drains; it fills several times in a step
    stack           the software it ran on, by its name in systems.yaml: other kernels, and what it
                    costs besides

The config is our form of the row, and is predicted as it is, with our kernels. The simulator's
error is that of the prediction made here.
"""

from dataclasses import replace

from minitrain.bench.rows import constants
from minitrain.settings import Config
from minitrain.simulator.simulate import Simulation, record, simulated_figures, time_traces
from minitrain.simulator.simulate_policy import Stack, policy_figures, training_config
from minitrain.simulator.timeline import System, rates_of

PREDICTED = (
    "step_time_s",
    "tokens_per_sec_per_gpu",
    "tflops_per_gpu",
    "peak_memory_gib",
    "ratio",
)


def as_published(config: Config, row: str, system: System, simulation: Simulation) -> dict:
    """Return the figures that differ from the config's own, whose simulation is given."""
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
    told = stack | recipe
    if "masks" in stack:
        kernels["flex"] = kernels[stack["masks"]]
    if "narrow" in stack:
        kernels["flex"] = replace(kernels["flex"], narrow=stack["narrow"])
    if "attention" in told:
        kernels = rates_of({"attention": dict.fromkeys(kernels, told["attention"])})["attention"]
    return replace(system, attention=kernels, **rates_of(stack.get("rates", {})))
