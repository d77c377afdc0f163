"""Generate the latents of videos, and draw those of the toy world."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from minitrain.data.video import shapes
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
    """Return fp32 latents [videos, channels, *size], from the same noise on every device.

    All ranks of a sharded model call it.
    """
    device = model.proj_out.weight.device
    # which takes no larger ones
    random = torch.Generator().manual_seed(seed % (1 << 64))
    noise = torch.randn(len(prompts["text"]), model.config.out_channels, *size, generator=random)
    known = {key: value.to(device) for key, value in prompts.items()}
    velocity = guided(model, scale=guidance, **known)
    return SAMPLERS[sampler](velocity, noise.to(device), sigma_schedule(steps, shift)).cpu()


def check_prompts(
    prompts: dict[str, Tensor], model: Wan, size: Sequence[int], source: str
) -> None:
    """Raise InputError for prompts that are not what the model takes beside latents of `size`."""
    wanted = {
        name: (len(prompts["text"]), *shape)
        for name, shape in model_shapes(model.config, size).items()
    }
    # which are to be made
    del wanted["latents"]
    with located(f"--prompts {source}"):
        check_shapes({name: tuple(tensor.shape) for name, tensor in prompts.items()}, wanted)


def draw_shapes(
    model: Wan,
    path: str | Path,
    steps: int = 12,
    guidance: float = 4.0,
    write: bool = True,
    **way,
) -> str:
    """Write a PNG of what the model draws for every prompt of the toy world.

    Returns how much is right, in words.
    write: all ranks of a sharded model draw, but one is to write.
    """
    channels = model.config.out_channels
    if channels != shapes.CHANNELS:
        raise InputError(
            f"--prompts shapes: their latents have {shapes.CHANNELS} channels, the model's {channels}"
        )
    world = shapes.ShapesWorld()
    prompts = shapes.all_prompts()
    text = {"text": torch.stack([shapes.embed_text(words) for words in prompts])}
    size = shapes.FRAMES, shapes.SIZE // shapes.PATCH, shapes.SIZE // shapes.PATCH
    check_prompts(text, model, size, "shapes")
    videos = world.decode(generate(model, text, size, steps=steps, guidance=guidance, **way))
    if write:
        shapes.write_sheet(path, videos, [" ".join(words) for words in prompts])
    score = [f"{name} {share:.0%}" for name, share in world.judge(videos, prompts).items()]
    return f"{path}: right in {', '.join(score)}"
