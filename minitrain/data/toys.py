"""Toy worlds: made-up data, whose code stands among the examples and is known by its place alone."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Protocol

from torch import Tensor

# as package.module:name, like a reward of one's own
TOYS = {
    # of task=grpo, with data.kind=mock: (digits) -> problems
    "reversal": "minitrain.examples.reversal:reversals",
    # data.kind of task=diffusion: (seed) -> World
    "shapes": "minitrain.examples.shapes:ShapesWorld",
}


class World(Protocol):
    """A dataset of latents and texts that also knows what a video shows. size: of latents."""

    channels: int
    size: tuple[int, int, int]

    def __len__(self) -> int: ...
    def row(self, n: int) -> dict[str, Tensor]: ...
    def prompts(self) -> Tensor: ...  # [prompts, tokens, text_dim], all there are
    def draw(self, path: str | Path, latents: Tensor) -> None: ...  # of all prompts
    def score(self, latents: Tensor) -> dict[str, float]: ...  # shares that are right, by name


def load_toy(name: str) -> Callable:
    return load_from(TOYS[name])


def load_from(place: str) -> Callable:
    """Return what a place, package.module:name, has; its module is imported only now."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
