"""The training step of diffusion by diffusers, in turns with ours: see versus.py."""

import contextlib

import torch

from minitrain.bench.versus import in_turns
from minitrain.config import Config
from minitrain.errors import InputError
from minitrain.models.checkpoint_wan import config_to_json
from minitrain.parallel.mesh import Meshes
from minitrain.training.loop import Trainer, to_device
from minitrain.training.optim import clip_gradients, make_optimizer


class DiffusersTrainer:
    """diffusers' Wan with the objective, optimizer, clipping, precision and micro-batches of `ours`."""

    def __init__(self, ours: Trainer):
        try:
            from diffusers import WanTransformer3DModel
        except ImportError:
            raise InputError("--versus diffusers needs the package: pip install 'minitrain[test]'") from None
        self.ours, config = ours, ours.config
        with ours.device:
            self.model = WanTransformer3DModel.from_config(config_to_json(config.model.config))
        if config.precision == "bf16-pure":
            self.model.to(torch.bfloat16)
        if config.recompute == "full":
            self.model.enable_gradient_checkpointing()
        if config.compile:
            for block in self.model.blocks:
                block.compile(dynamic=False)
        self.optimizer = make_optimizer(self.model, config.optim)

    def step(self, dataset, step: int) -> None:
        config, device, objective = self.ours.config, self.ours.device, self.ours.objective
        batches = self.ours.micro_batches(dataset, step)
        count = sum(objective.count(batch) for batch in batches)
        bf16 = torch.autocast(device.type, torch.bfloat16) if config.precision == "bf16" else contextlib.nullcontext()
        for batch in batches:
            batch = to_device(batch, device)
            with bf16:
                loss = objective.loss(self.velocity, batch) / count
            loss.backward()
        clip_gradients(list(self.model.parameters()), config.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def velocity(self, latents, timestep, text, image=None):
        return self.model(latents, timestep, text, encoder_hidden_states_image=image, return_dict=False)[0]


def versus_diffusers(config: Config, meshes: Meshes, row: str, steps: int, warmup: int) -> dict:
    """See `in_turns`. Raises InputError for a language model, and for what diffusers cannot recompute."""
    if config.task != "diffusion":
        raise InputError(f"--versus diffusers is for task=diffusion, not {config.task} (use transformers)")
    if config.recompute not in ("none", "full"):
        raise InputError(f"--versus diffusers: diffusers has no recompute={config.recompute} (use none or full)")
    return in_turns(config, meshes, row, steps, warmup, "diffusers", DiffusersTrainer)
