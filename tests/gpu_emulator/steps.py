"""What the emulator runs: the package's own steps, in a world whose other ranks do not exist.

It imports no CUDA, so that tests/test_gpu_emulator.py runs the same on the CPU.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

from minitrain.bench.measure_sampling import make_prompts, sample
from minitrain.bench.proxy import make_proxy
from minitrain.bench.rows import load_row
from minitrain.data.datasets import open_dataset
from minitrain.rollout.engine import Sampler
from minitrain.run.launch.start import meshes_of
from minitrain.settings import Config
from minitrain.simulator.fake_world import fake_world
from minitrain.training.build import build_model
from minitrain.training.loop import Trainer

__all__ = ["fake_world", "make_step", "read_config"]


def read_config(file: str, overrides: list[str], layers: int | None) -> Config:
    """Return a config, or its proxy of so many layers."""
    _, config = load_row(file, overrides)
    return make_proxy(config, layers) if layers else config


def make_step(config: Config, device_type: str, generate: bool) -> Callable[[int], object]:
    """Return a function that runs step `number` of training, or samples all prompts to the end.

    Call it in a process group of the config's ranks.
    """
    meshes = meshes_of(config, device_type)
    if not generate:
        data, _ = open_dataset(config)
        return partial(Trainer(config, meshes).step, data)
    config = dataclasses.replace(config, precision="bf16-pure")
    length = config.batch.seq_len
    sampler = Sampler(
        build_model(config, meshes, trained=False),
        settings=config.rollout,
        samples=config.batch.global_ * config.grpo.group,
        longest=length,
    )

    def step(number: int) -> None:
        prompts = make_prompts(config, length - config.rollout.max_tokens, number)
        sample(sampler, config, prompts)

    return step
