"""A toy world of video with text: a colored shape that moves, for training Wan on a laptop.

4 colors x 3 shapes x 4 directions, each from 9 places: 432 clips of 4 frames, 16 x 16 pixels, all
known, so that a generated video can be judged by the clip nearest to it. In place of an
autoencoder stands a principal component analysis of 4 x 4 pixels, in place of a text encoder a
fixed random vector for each word.
"""

import hashlib
import itertools
import string
import struct
import zlib
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain.hashing import nth

COLORS = {
    "red": (1, 0.15, 0.1),
    "green": (0.1, 0.9, 0.2),
    "blue": (0.15, 0.3, 1),
    "yellow": (1, 0.9, 0.1),
}
SHAPES = ("square", "ring", "cross")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
FRAMES = 4
SIZE = 16
PATCH = 4
# of a sheet of pictures
COLUMNS = 5
LETTERS = " " + string.ascii_lowercase
# letters of 3 x 5 pixels: a digit for each row, whose bits are pixels
FONT = (
    "000002575565656344436555674647746443455355755722271115255655444475775565555"
    "255526564425563656553421672222555535552255775552555522271247"
)
CHANNELS = 8
TEXT_DIM = 64
# in pixels per frame
SPEED = 2
# in pixels
RADIUS = 3.4


class Clip(NamedTuple):
    # color, shape, direction
    words: tuple[str, str, str]
    # of the center, in the first frame
    x: float
    y: float


def all_prompts() -> list[tuple[str, str, str]]:
    return list(itertools.product(COLORS, SHAPES, DIRECTIONS))


def all_clips() -> list[Clip]:
    """Return every prompt, on paths whose middles lie within one pixel of the center."""
    clips = []
    back = SPEED * (FRAMES - 1) / 2
    for words, dx, dy in itertools.product(all_prompts(), (-1, 0, 1), (-1, 0, 1)):
        vx, vy = DIRECTIONS[words[2]]
        clips.append(Clip(words, SIZE / 2 + dx - vx * back, SIZE / 2 + dy - vy * back))
    return clips


def render(clip: Clip) -> np.ndarray:
    """Return fp32 [frames, height, width, 3] between 0 and 1, with soft edges, on black."""
    color, shape, direction = clip.words
    pixels = np.arange(SIZE) + 0.5
    frames = []
    for t in range(FRAMES):
        dx = np.abs(pixels[None, :] - clip.x - DIRECTIONS[direction][0] * SPEED * t)
        dy = np.abs(pixels[:, None] - clip.y - DIRECTIONS[direction][1] * SPEED * t)
        covered = np.clip(0.5 - distance(shape, dx, dy), 0, 1)
        frames.append(covered[..., None] * np.array(COLORS[color]))
    return np.stack(frames).astype(np.float32)


def distance(shape: str, dx: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Return the signed distance in pixels of a point dx, dy from the shape's edge, negative inside."""
    if shape == "square":
        return np.maximum(dx, dy) - 0.9 * RADIUS
    if shape == "ring":
        return np.abs(np.hypot(dx, dy) - 0.85 * RADIUS) - 0.25 * RADIUS
    return np.maximum(np.minimum(dx, dy) - 0.25 * RADIUS, np.maximum(dx, dy) - 1.2 * RADIUS)


def embed_text(words: tuple[str, ...]) -> Tensor:
    """Return fp32 [words, TEXT_DIM]: each word's own normal vector."""
    seeds = [int.from_bytes(hashlib.sha256(word.encode()).digest()[:4]) for word in words]
    vectors = np.stack([np.random.default_rng(seed).standard_normal(TEXT_DIM) for seed in seeds])
    return torch.from_numpy(vectors).float()


class ShapesWorld:
    """All clips, as a dataset of latents and texts, and as the judge of generated latents."""

    channels = CHANNELS
    size = FRAMES, SIZE // PATCH, SIZE // PATCH

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.clips = all_clips()
        self.videos = torch.from_numpy(np.stack([render(clip) for clip in self.clips]))
        patches = self._cut(self.videos).flatten(0, 3).double()
        self.mean = patches.mean(0)
        variances, axes = torch.linalg.eigh(torch.cov((patches - self.mean).T))
        axes = axes[:, -CHANNELS:]
        self.scale = variances[-CHANNELS:].sqrt()
        largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
        # eigh leaves the sign open
        self.axes = axes * largest.sign()

    def __len__(self) -> int:
        return len(self.clips)

    def row(self, n: int) -> dict[str, Tensor]:
        """Return latents [CHANNELS, frames, 4, 4] of unit variance per channel, and text [3, TEXT_DIM]."""
        _, number = nth(n, len(self), self.seed)
        return {"latents": self.latents[number], "text": embed_text(self.clips[number].words)}

    @cached_property
    def latents(self) -> Tensor:
        return self.encode(self.videos)

    def encode(self, videos: Tensor) -> Tensor:
        """Encode [batch, frames, height, width, 3].

        Returns fp32 [batch, CHANNELS, frames, height / PATCH, width / PATCH].
        """
        values = (self._cut(videos).double() - self.mean) @ self.axes / self.scale
        return values.permute(0, 4, 1, 2, 3).float().contiguous()

    def decode(self, latents: Tensor) -> Tensor:
        """Undo `encode`, up to the components left out; clipped to 0 to 1."""
        values = latents.permute(0, 2, 3, 4, 1).double()
        values = values * self.scale
        values = values @ self.axes.T + self.mean
        pixels = F.pixel_shuffle(values.movedim(-1, 2), PATCH)
        pixels = pixels.movedim(2, -1)
        return pixels.clamp(0, 1).float()

    def prompts(self) -> Tensor:
        """Return fp32 [48, 3, TEXT_DIM]: the texts of `all_prompts`."""
        return torch.stack([embed_text(words) for words in all_prompts()])

    def draw(self, path: str | Path, latents: Tensor) -> None:
        """Write the videos of latents [48, ...], one for each prompt, as a sheet of pictures."""
        write_sheet(path, self.decode(latents), [" ".join(words) for words in all_prompts()])

    def score(self, latents: Tensor) -> dict[str, float]:
        """Return what `judge` says of latents [48, ...], one for each prompt."""
        return self.judge(self.decode(latents), all_prompts())

    def judge(self, videos: Tensor, prompts: list[tuple[str, str, str]]) -> dict[str, float]:
        """Return the share of prompts whose color, shape, direction the nearest clip has.

        videos: [prompts, frames, ...].
        """
        nearest = torch.cdist(videos.flatten(1), self.videos.flatten(1)).argmin(1)
        found = [self.clips[i].words for i in nearest.tolist()]
        # [prompts, 3]
        right = np.array(found) == np.array(prompts)
        return dict(zip(("color", "shape", "direction"), right.mean(0).tolist(), strict=True))

    def _cut(self, videos: Tensor) -> Tensor:
        """Cut [batch, frames, height, width, 3] to [batch, frames, rows, columns, 3 * PATCH * PATCH]."""
        return F.pixel_unshuffle(videos.movedim(-1, 2), PATCH).movedim(2, -1)


# --- pictures


def write_sheet(path: str | Path, videos: Tensor, captions: list[str]) -> None:
    """Write videos [n, frames, height, width, 3] between 0 and 1 as a PNG: a grid of strips.

    Also write them as a grid that moves, an animated PNG with the suffix .apng.
    """
    # a gray line right of each frame
    strips = F.pad(videos, (0, 0, 0, 1), value=0.35)
    strips = strips.transpose(1, 2).flatten(2, 3)
    write_png(path, grid(strips, captions, 3))
    moving = [grid(frame, captions, 4) for frame in videos.unbind(1)]
    write_png(Path(path).with_suffix(".apng"), *moving)


def grid(pictures: Tensor, captions: list[str], zoom: int) -> np.ndarray:
    """Return pictures [n, height, width, 3] with captions below, uint8 [height, width, 3]."""
    letters = torch.stack([write_line(caption) for caption in captions])
    pictures = pictures.repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)
    width = 4 + max(letters.shape[2], pictures.shape[2])
    sized = [F.pad(x, (0, 0, 0, width - x.shape[2], 0, 3)) for x in (pictures, letters)]
    cells = torch.cat(sized, 1)
    cells = F.pad(cells, (0, 0, 0, 0, 0, 0, 0, -len(cells) % COLUMNS))
    # [rows, height, columns, width, 3]
    cells = cells.unflatten(0, (-1, COLUMNS)).transpose(1, 2)
    sheet = cells.flatten(2, 3).flatten(0, 1)
    return (sheet * 255).byte().numpy()


def write_line(text: str) -> Tensor:
    """Return a text of at most 22 letters of 3 x 5 pixels, [height, width, 3]."""
    rows = []
    for row in range(5):
        digits = [int(FONT[5 * LETTERS.index(letter) + row]) for letter in text.ljust(22)]
        rows.append([0.7 * (digit >> bit & 1) for digit in digits for bit in (3, 2, 1, 0)])
    # 3, the first bit, is the space between letters
    pixels = torch.tensor(rows)[..., None].expand(-1, -1, 3)
    return pixels.repeat_interleave(2, 0).repeat_interleave(2, 1)


def write_png(path: str | Path, *pictures: np.ndarray) -> None:
    """Write uint8 pixels [height, width, 3] as a PNG (W3C specification), filter 0 on every line.

    Several are an animation, four of them a second.
    """
    height, width = pictures[0].shape[:2]
    moves = len(pictures) > 1
    # 8 bits, RGB
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))]
    if moves:
        # for ever
        chunks.append((b"acTL", struct.pack(">II", len(pictures), 0)))
    numbers = itertools.count()
    for pixels in pictures:
        lines = b"".join(b"\0" + line.tobytes() for line in pixels)
        data = zlib.compress(lines, 9)
        if moves:
            place = next(numbers), width, height, 0, 0
            chunks.append((b"fcTL", struct.pack(">IIIIIHHBB", *place, 1, 4, 0, 0)))
        if pixels is pictures[0]:
            chunks.append((b"IDAT", data))
        else:
            chunks.append((b"fdAT", struct.pack(">I", next(numbers)) + data))
    chunks.append((b"IEND", b""))
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + body)
