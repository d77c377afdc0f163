"""Encode videos and captions as latents and embeddings, and decode latents to videos, for Wan.

The networks are those of a published pipeline, run by diffusers and transformers. PyAV reads and
writes video files. Not supported: conditions of image-to-video models, and CLIP features of images.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minitrain.errors import InputError, as_input_error

# frames per second of Wan's videos
RATE = 16
# folders that a pipeline must have
PIPELINE_PARTS = "vae", "text_encoder", "tokenizer"
LACKING = "needs diffusers, transformers and av: pip install -e '.[video]'"


class Encoders:
    """The video autoencoder (fp32), text encoder (bf16) and tokenizer of a pipeline's folder."""

    def __init__(self, folder: str, device: torch.device):
        for part in PIPELINE_PARTS:
            if not Path(folder, part).is_dir():
                raise InputError(
                    f"--encoders {folder}: {part}/ is missing (name a download of Wan-AI/...-Diffusers)"
                )
        try:
            from diffusers import AutoencoderKLWan
            from diffusers.pipelines.wan.pipeline_wan import prompt_clean
            from transformers import AutoTokenizer, UMT5EncoderModel
        except ImportError:
            raise InputError(f"--encoders {LACKING}") from None
        self.clean = prompt_clean
        self.vae = AutoencoderKLWan.from_pretrained(folder, subfolder="vae").to(device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
        self.encoder = UMT5EncoderModel.from_pretrained(
            folder, subfolder="text_encoder", dtype=torch.bfloat16
        ).to(device)
        settings = self.vae.config
        mean, std = torch.tensor([settings.latents_mean, settings.latents_std], device=device)
        self.mean = mean.view(-1, 1, 1, 1)
        self.std = std.view(-1, 1, 1, 1)

    @torch.inference_mode()
    def encode_text(self, text: str, most: int = 512) -> Tensor:
        """Return the embeddings of a text's first `most` tokens, bf16 [tokens, text_dim]."""
        given = self.tokenizer(
            [self.clean(text)], max_length=most, truncation=True, return_tensors="pt"
        )
        ids = given.input_ids.to(self.encoder.device)
        return self.encoder(ids).last_hidden_state[0].cpu()

    @torch.inference_mode()
    def encode(self, video: Tensor) -> Tensor:
        """Return latents, fp32 [channels, frames, height, width], of uint8 [frames, 3, height, width]."""
        pixels = video.to(self.mean.device).transpose(0, 1)[None] / 127.5 - 1
        latents = self.vae.encode(pixels).latent_dist.mode()[0]
        return ((latents - self.mean) / self.std).cpu()

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        """Return the video of latents; the inverse of `encode`."""
        latents = latents.to(self.mean.device) * self.std + self.mean
        pixels = self.vae.decode(latents[None]).sample[0].transpose(0, 1)
        return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().cpu()


def read_frames(path: Path, size: list[int], most: int, rate: float = RATE) -> Tensor:
    """Read a video file at `rate` frames per second, or a folder of numbered frames (2 before 10).

    Returns uint8 [frames, 3, *size]: the first 1, 5, 9, ... frames, as Wan needs, but at most `most`.
    Each frame is scaled to cover `size` and cropped around its center.
    """
    from PIL import Image, ImageOps

    if path.is_dir():
        shown = path.glob("[!.]*")
        files = sorted(shown, key=lambda file: (len(file.stem), file.stem))[:most]
        pictures = map(open_picture, files)
    else:
        pictures = islice(sampled(path, rate), most)
    # PIL puts the width first
    shape = size[1], size[0]
    frames = [ImageOps.fit(each, shape, Image.Resampling.BICUBIC) for each in pictures]
    if not frames:
        raise InputError(f"{path} holds no frame")
    video = np.stack(frames[: 1 + (len(frames) - 1) // 4 * 4])
    return torch.from_numpy(video).movedim(-1, 1)


def open_picture(file: Path) -> Any:
    """Return a picture in RGB of 8 bits, rotated as its EXIF data says."""
    from PIL import Image, ImageOps

    with as_input_error(f"{file} cannot be read as a picture"):
        picture = ImageOps.exif_transpose(Image.open(file))
        # PIL would clip 16-bit values at 255
        if picture.mode.startswith("I"):
            picture = Image.fromarray((np.asarray(picture) / 257).round().astype(np.uint8))
        return picture.convert("RGB")


def sampled(path: Path, rate: float) -> Iterator[Any]:
    """Yield the pictures of a video at 0, 1 / rate, 2 / rate, ... seconds after its first frame."""
    av = load_av(path)
    try:
        with av.open(str(path)) as file:
            stream = file.streams.video[0]
            count = 0
            shown = None
            until = 0.0
            for begin, lasts, frame in timed(file, stream):
                # a picture is shown until the next one begins
                while shown and begin > count / rate + 1e-3:
                    yield upright(shown, stream)
                    count += 1
                shown = frame
                until = begin + max(lasts, 2e-3)
            while shown and until > count / rate + 1e-3:
                yield upright(shown, stream)
                count += 1
    except (av.FFmpegError, IndexError) as error:
        raise InputError(f"{path} cannot be read as a video: {error}") from None


def timed(file: Any, stream: Any) -> Iterator[tuple[float, float, Any]]:
    """Yield (seconds after the first frame, duration in seconds, frame) of a stream.

    Raw streams have no times; they follow from the frame rate.
    """
    first = None
    own = float(stream.guessed_rate or stream.average_rate or RATE)
    for number, frame in enumerate(file.decode(stream)):
        time = number / own if frame.time is None else frame.time
        first = time if first is None else first
        yield time - first, float((frame.duration or 0) * (frame.time_base or 0)), frame


def upright(frame: Any, stream: Any) -> Any:
    """Return a frame's picture as players show it: with square pixels, and rotated."""
    picture = frame.to_image()
    wide = float(stream.sample_aspect_ratio or 1)
    if wide != 1:
        picture = picture.resize((round(picture.width * wide), picture.height))
    # counterclockwise, in degrees
    return picture.rotate(frame.rotation, expand=True)


def write_mp4(path: Path, video: Tensor) -> None:
    """Write a video [frames, 3, height, width] of even height and width in H.264."""
    av = load_av(path)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=RATE)
        stream.height, stream.width = video.shape[2:]
        stream.pix_fmt = "yuv420p"
        for frame in video.permute(0, 2, 3, 1).contiguous().numpy():
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            file.mux(stream.encode(picture))
        file.mux(stream.encode())


def load_av(path: Path):
    try:
        import av
    except ImportError:
        raise InputError(f"{path} {LACKING}") from None
    return av
