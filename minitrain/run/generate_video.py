"""Generate latents of videos: what python -m minitrain.generate --task diffusion does."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain.data import shapes
from minitrain.data.latents import TEXTS, check_shapes, model_shapes, read_video
from minitrain.errors import InputError, located
from minitrain.formats.peft import load_merged
from minitrain.formats.tensor_files import write_tensors
from minitrain.models.wan import Wan
from minitrain.rollout.flow_sampling import SAMPLERS, guided, sigma_schedule
from minitrain.run import cli
from minitrain.run.launch import pick_device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run(options: Namespace) -> None:
    """Write what the model makes of --prompts to --out."""
    if not Path(options.out).parent.is_dir():  # before minutes of work
        raise InputError(
            f"--out {options.out}: the folder {Path(options.out).parent} does not exist"
        )
    if (
        Path(options.out).exists() and not Path(options.out).is_file()
    ):  # /dev/null would become a file
        raise InputError(f"--out {options.out} is a folder or a device (name a file)")
    cli.check_writable("out", options.out)
    if options.prompts != "shapes" and not Path(options.prompts).is_file():
        raise InputError(f"--prompts {options.prompts} is neither a file nor shapes")
    device = pick_device(options.device)
    model = load_merged(options.model, options.adapter, DTYPES.get(options.dtype), device)
    if not isinstance(model, Wan):
        raise InputError(
            f"--model {options.model} is not a Wan model (python -m minitrain.generate continues texts)"
        )
    way = {
        name: getattr(options, name) for name in ("sampler", "steps", "shift", "guidance", "seed")
    }
    if options.prompts == "shapes":
        print(draw_shapes(model, options.out, **way))
        return
    if options.size is None:
        raise InputError(
            "--size is missing: frames, height and width of the latents, such as 21 60 104"
        )
    prompts = read_prompts(Path(options.prompts), options.text_tokens)
    check_prompts(prompts, model, options.size, options.prompts)
    latents = generate(model, prompts, options.size, **way)
    if not latents.isfinite().all():
        raise InputError("the latents are not finite (use less --guidance, or another --model)")
    write_tensors({"latents": latents}, options.out)


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
    """fp32 latents [videos, channels, *size]; the same noise on every device. All ranks of a
    sharded model call it.
    """
    device = model.proj_out.weight.device
    random = torch.Generator().manual_seed(seed % (1 << 64))  # which takes no larger ones
    noise = torch.randn(len(prompts["text"]), model.config.out_channels, *size, generator=random)
    velocity = guided(
        model, scale=guidance, **{key: value.to(device) for key, value in prompts.items()}
    )
    return SAMPLERS[sampler](velocity, noise.to(device), sigma_schedule(steps, shift)).cpu()


def read_prompts(path: Path, text_tokens: int) -> dict[str, Tensor]:
    """Read what the file holds of text, negative, condition and image, in fp32, texts padded with
    zeros.
    """
    prompts = read_video(path, [*TEXTS, "condition", "image"])
    if "text" not in prompts or prompts["text"].ndim != 3 or not len(prompts["text"]):
        raise InputError(
            f"{path} must hold a tensor `text` [videos, tokens, text_dim], of one video at least"
        )
    for name in TEXTS:
        if name in prompts and prompts[name].ndim == 3:
            missing = text_tokens - prompts[name].shape[1]
            if missing < 0:
                raise InputError(
                    f"{path}: {name} has {prompts[name].shape[1]} tokens, more than --text-tokens {text_tokens}"
                )
            prompts[name] = F.pad(prompts[name], (0, 0, 0, missing))
    if "negative" in prompts and prompts["negative"].shape[:1] == (1,):
        prompts["negative"] = prompts["negative"].expand(
            len(prompts["text"]), *prompts["negative"].shape[1:]
        )
    return prompts


def check_prompts(prompts: dict[str, Tensor], model: Wan, size: Sequence[int], source: str) -> None:
    """Raises InputError for prompts that are not what the model takes beside latents of `size`."""
    wanted = {
        name: (len(prompts["text"]), *shape)
        for name, shape in model_shapes(model.config, size).items()
    }
    del wanted["latents"]  # which are to be made
    with located(f"--prompts {source}"):
        check_shapes({name: tuple(tensor.shape) for name, tensor in prompts.items()}, wanted)


def draw_shapes(
    model: Wan, path: str | Path, steps: int = 12, guidance: float = 4.0, write: bool = True, **way
) -> str:
    """Write a PNG of what the model draws for every prompt of the toy world; returns how much is
    right, in words.

    write: all ranks of a sharded model draw, but one is to write.
    """
    if model.config.out_channels != shapes.CHANNELS:
        channels = model.config.out_channels
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
        shapes.write_sheet(path, videos)
    score = world.judge(videos, prompts)
    return f"{path}: right in " + ", ".join(f"{name} {share:.0%}" for name, share in score.items())
