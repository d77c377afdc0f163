"""Toy worlds: generated data, whose code is in examples/ and is loaded by its dotted path."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torch import Tensor

from minitrain.user_code import load_from

# name -> package.module:name
TOYS = {
    # for task=grpo with data.kind=mock: (digits) -> problems
    "reversal": "minitrain.examples.reversal:reversals",
    # a data.kind for task=diffusion: (seed) -> World
    "shapes": "minitrain.examples.shapes:ShapesWorld",
}


class World(Protocol):
    """A dataset of latents and texts that can also draw and score generated latents."""

    channels: int
    # frames, height, width of latents
    size: tuple[int, int, int]

    def __len__(self) -> int: ...

    def row(self, n: int) -> dict[str, Tensor]: ...

    def prompts(self) -> Tensor:
        """Return the embeddings of all prompts, [prompts, tokens, text_dim]."""

    def draw(self, path: str | Path, latents: Tensor) -> None:
        """Draw the latents of all prompts into a picture."""

    def score(self, latents: Tensor) -> dict[str, float]:
        """Return the shares of correct properties, by name, in the latents of all prompts."""


def load_toy(name: str) -> Callable:
    return load_from(TOYS[name])
