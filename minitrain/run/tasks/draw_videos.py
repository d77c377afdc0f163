"""Generate latents of videos, and draw those of a toy world."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from minitrain.data.toys import World, load_toy
from minitrain.data.video.latents import check_shapes, model_shapes
from minitrain.errors import InputError, located
from minitrain.models.wan import Wan
from minitrain.rollout.flow_sampling import SAMPLERS, guided, sigma_schedule


def generate(
    model: Wan,
    prompts: dict[str, Tensor],
    size: Sequence[int],
    sampler: str = "unipc",
    steps: int = 50,
    shift: float = 5.0,
    guidance: float = 5.0,
    seed: int = 0,
) -> Tensor:
    """Return fp32 latents [videos, channels, *size]; the noise does not depend on the device.

    All ranks of a sharded model call it.
    """
    device = model.proj_out.weight.device
    # a generator accepts seeds of up to 64 bits
    random = torch.Generator().manual_seed(seed % (1 << 64))
    noise = torch.randn(len(prompts["text"]), model.config.out_channels, *size, generator=random)
    known = {key: value.to(device) for key, value in prompts.items()}
    velocity = guided(model, scale=guidance, **known)
    return SAMPLERS[sampler](velocity, noise.to(device), sigma_schedule(steps, shift)).cpu()


def check_prompts(
    prompts: dict[str, Tensor], model: Wan, size: Sequence[int], source: str
) -> None:
    """Raise InputError for prompts that do not fit the model and latents of `size`."""
    wanted = {
        name: (len(prompts["text"]), *shape)
        for name, shape in model_shapes(model.config, size).items()
    }
    # latents are generated, not given
    del wanted["latents"]
    with located(f"--prompts {source}"):
        check_shapes({name: tuple(tensor.shape) for name, tensor in prompts.items()}, wanted)


def draw_world(
    model: Wan,
    name: str,
    path: str | Path,
    steps: int = 12,
    guidance: float = 4.0,
    write: bool = True,
    **way,
) -> str:
    """Write a picture of the model's videos for every prompt of a toy world; return their score.

    write: whether this rank writes the file. All ranks of a sharded model generate.
    """
    world: World = load_toy(name)()
    channels = model.config.out_channels
    if channels != world.channels:
        raise InputError(
            f"--prompts {name}: their latents have {world.channels} channels, the model's {channels}"
        )
    text = {"text": world.prompts()}
    check_prompts(text, model, world.size, name)
    latents = generate(model, text, world.size, steps=steps, guidance=guidance, **way)
    if write:
        world.draw(path, latents)
    score = [f"{what} {share:.0%}" for what, share in world.score(latents).items()]
    return f"{path}: right in {', '.join(score)}"
