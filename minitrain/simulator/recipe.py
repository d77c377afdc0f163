"""Predict a published run that differs from its row's config: `reference.recipe` says in what, key by key.

    compile         whether element-wise kernels become one
    attention       the kernels of attention, by their name in systems.yaml
    micro_batches   for so many of them a pipeline fills and drains, several times in a step
    stack           what GRPO runs on, by its name in systems.yaml

The config is our form of the row, and is predicted as it is; a published figure is compared with this one.
"""

import dataclasses

from minitrain.bench.rows import constants
from minitrain.settings import Config
from minitrain.simulator.simulate import Simulation, figures, record, timed
from minitrain.simulator.simulate_policy import Stack, policy_figures
from minitrain.simulator.timeline import System

PREDICTED = ("step_time_s", "tokens_per_sec_per_gpu", "tflops_per_gpu", "peak_memory_gib", "ratio")


def as_published(config: Config, row: str, system: System, simulation: Simulation) -> dict:
    """What differs from the config's own figures, whose simulation is given."""
    recipe = config.reference["recipe"]
    if "stack" in recipe:
        return policy_figures(config, system, simulation, Stack(**constants("stacks")[recipe["stack"]]))
    traces = simulation.traces
    if recipe.get("compile", config.compile) != config.compile:
        config = dataclasses.replace(config, compile=recipe["compile"])
        traces = record(config)
    if "attention" in recipe:
        system = dataclasses.replace(system, **constants("attention")[recipe["attention"]])
    predicted = figures(config, row, system, timed(config, traces, system, recipe.get("micro_batches", 0)))
    return {key: predicted[key] for key in PREDICTED}
