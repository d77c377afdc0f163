"""Generate latents of videos: what python -m minitrain.generate --task diffusion does."""

from argparse import Namespace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain.data.faults.wording import OPTIONS
from minitrain.data.text_files import lines_of
from minitrain.data.video.encoders import Encoders, load_av, write_mp4
from minitrain.data.video.latents import TEXTS, read_video
from minitrain.errors import InputError
from minitrain.formats.peft import load_merged
from minitrain.formats.tensor_files import write_tensors
from minitrain.models.wan import Wan
from minitrain.run.launch import cli
from minitrain.run.launch.start import pick_device
from minitrain.run.tasks.draw_videos import check_prompts, draw_world, generate

VIDEO_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def generate_videos(options: Namespace) -> None:
    """Write what the model makes of --prompts to --out."""
    out = Path(options.out)
    prompts_file = Path(options.prompts)
    # before minutes of work
    if not out.parent.is_dir():
        raise InputError(f"--out {options.out}: the folder {out.parent} does not exist")
    # /dev/null would become a file
    if out.exists() and not out.is_file():
        raise InputError(f"--out {options.out} is a folder or a device (name a file)")
    cli.check_writable("out", options.out)
    if options.prompts != "shapes" and not prompts_file.is_file():
        raise InputError(f"--prompts {options.prompts} is neither a file nor shapes")
    if bool(options.encoders) != options.out.endswith(".mp4"):
        raise InputError(
            f"--out {options.out}: with --encoders it is an .mp4 file, of prompts in lines of text"
        )
    if options.prompts != "shapes" and options.size is None:
        raise InputError(
            "--size is missing: frames, height and width of the latents, such as 21 60 104"
        )
    device = pick_device(options.device)
    encoders = None
    if options.encoders:
        # before minutes of work
        load_av(options.out)
        encoders = Encoders(options.encoders, device)
    model = load_merged(options.model, options.adapter, VIDEO_DTYPES.get(options.dtype), device)
    if not isinstance(model, Wan):
        raise InputError(
            f"--model {options.model} is not a Wan model (python -m minitrain.generate continues texts)"
        )
    settings = {
        name: getattr(options, name) for name in ("sampler", "steps", "shift", "guidance", "seed")
    }
    if options.prompts == "shapes":
        print(draw_world(model, "shapes", options.out, **settings))
        print(f"next: open {out.with_suffix('.apng')} in a browser: they move")
        return
    if encoders:
        prompts = embed_lines(encoders, prompts_file, options.negative, options.text_tokens)
    else:
        prompts = read_prompts(prompts_file, options.text_tokens)
    check_prompts(prompts, model, options.size, options.prompts)
    latents = generate(model, prompts, options.size, **settings)
    if not latents.isfinite().all():
        raise InputError("the latents are not finite (use less --guidance, or another --model)")
    if encoders:
        for number, video in enumerate(latents, 1):
            file = out
            if len(latents) > 1:
                file = out.with_stem(f"{out.stem}-{number}")
            write_mp4(file, encoders.decode(video))
            print(f"wrote {file}: open it in a player of videos")
    else:
        write_tensors({"latents": latents}, options.out)
        print(f"{options.out} holds latents of {len(latents)} videos")
        print("next: the same command with --encoders makes an .mp4 file of lines of text")


def embed_lines(
    encoders: Encoders, path: Path, negative: str, text_tokens: int
) -> dict[str, Tensor]:
    """Return the embeddings of a file's lines, and of what guidance leads away from, fp32."""
    lines = [*lines_of(path, OPTIONS), negative]
    texts = [encoders.encode_text(line, text_tokens).float() for line in lines]
    *each, hidden = [F.pad(text, (0, 0, 0, text_tokens - len(text))) for text in texts]
    return {"text": torch.stack(each), "negative": hidden.expand(len(each), -1, -1)}


def read_prompts(path: Path, text_tokens: int) -> dict[str, Tensor]:
    """Read text, negative, condition and image from a file, in fp32.

    Texts are padded with zeros.
    """
    prompts = read_video(path, [*TEXTS, "condition", "image"])
    text = prompts.get("text")
    if text is None or text.ndim != 3 or not len(text):
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
    negative = prompts.get("negative")
    if negative is not None and negative.shape[:1] == (1,):
        prompts["negative"] = negative.expand(len(text), *negative.shape[1:])
    return prompts
