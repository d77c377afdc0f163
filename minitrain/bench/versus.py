"""The same training step by another library, in turns with ours in one process: a noisy machine treats both alike."""

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from minitrain.bench.measure import median, progress, timed
from minitrain.config import Config
from minitrain.errors import InputError
from minitrain.models.config_hf import config_to_hf
from minitrain.parallel.mesh import Meshes
from minitrain.training.datasets import open_dataset
from minitrain.training.loop import Trainer, to_device
from minitrain.training.optim import clip_gradients, make_optimizer


def transformers_model(config: Config, device: torch.device):
    """The same shape as the config's model, with other weights, on `device`."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise InputError("--versus transformers needs the package: pip install 'minitrain[test]'") from None
    dtype = torch.bfloat16 if config.precision == "bf16-pure" else torch.float32
    hf_config = AutoConfig.for_model(**config_to_hf(config.model.config, dtype))
    with device:
        return AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation="sdpa")


class TransformersTrainer:
    """transformers' model and loss under the same optimizer, clipping, precision and micro-batches as `ours`."""

    def __init__(self, ours: Trainer):
        self.ours, config = ours, ours.config
        self.model = transformers_model(config, ours.device)
        if config.compile:
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)
        self.optimizer = make_optimizer(self.model, config.optim)

    def step(self, dataset, step: int) -> Tensor:
        config, device = self.ours.config, self.ours.device
        batches = self.ours.micro_batches(dataset, step)
        count = sum(self.ours.objective.count(batch) for batch in batches)
        bf16 = torch.autocast(device.type, torch.bfloat16) if config.precision == "bf16" else contextlib.nullcontext()
        for batch in batches:
            batch = to_device(batch, device)
            with bf16:
                loss = self.model(
                    input_ids=batch["tokens"], labels=batch["labels"], shift_labels=batch["labels"],
                    num_items_in_batch=count, use_cache=False,
                ).loss  # fmt: skip
            loss.backward()
        clip_gradients(list(self.model.parameters()), config.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def versus_transformers(config: Config, meshes: Meshes, row: str, steps: int, warmup: int) -> dict:
    """See `in_turns`."""
    return in_turns(config, meshes, row, steps, warmup, "transformers", TransformersTrainer)


def in_turns(
    config: Config, meshes: Meshes, row: str, steps: int, warmup: int, library: str, rival: Callable[[Trainer], object]
) -> dict:
    """Time `steps` training steps of both, alternating. A versus_ratio above 1 says that ours is faster.

    rival(ours): an object whose `step(dataset, step)` is what `ours` does, by `library`.
    """
    if dist.get_world_size() > 1:
        raise InputError(f"--versus {library} runs in one process, not in {dist.get_world_size()}")
    if config.precision == "fp8":
        raise InputError(f"--versus {library}: it does not train in FP8 (use precision=bf16)")
    data, _ = open_dataset(config)
    ours = Trainer(config, meshes)
    trainers = (ours, rival(ours))
    pairs = []
    for step in progress(warmup + steps, f"{row} versus {library}"):
        seconds = [timed(lambda t=trainer, step=step: t.step(data, step), ours.device) for trainer in trainers]
        if step >= warmup:
            pairs.append(seconds)
    ratios = [their_time / our_time for our_time, their_time in pairs]
    return {
        "versus": library,
        "versus_ratio": median(ratios),
        "versus_ratio_range": [min(ratios), max(ratios)],
        "versus_step_time_s": [median(column) for column in zip(*pairs, strict=True)],
    }
