"""Latents of videos as tokens: patches, and rotary embeddings in three dimensions.

Plain functions; the network that uses them is in wan.py.
"""

import math

import torch
from torch import Tensor

# the base of frequencies, of the rotations and of the timestep's sinusoids
THETA = 10000.0


def patch_grid(latents: Tensor, patch: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the number of patches along each of [..., frames, height, width]."""
    frames, height, width = (size // p for size, p in zip(latents.shape[-3:], patch, strict=True))
    return frames, height, width


def patchify(latents: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """Cut latents into patches, frame by frame and row by row: [batch, tokens, channels x patch].

    latents: [batch, channels, frames, height, width].
    """
    batch, channels = latents.shape[:2]
    f, h, w = patch_grid(latents, patch)
    pf, ph, pw = patch
    # [batch, f, h, w, channels, pf, ph, pw]
    pieces = latents.reshape(batch, channels, f, pf, h, ph, w, pw)
    pieces = pieces.permute(0, 2, 4, 6, 1, 3, 5, 7)
    return pieces.reshape(batch, f * h * w, channels * pf * ph * pw)


def unpatchify(x: Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int]) -> Tensor:
    """Join patches x [batch, tokens, patch x channels] to [batch, channels, frames, height, width].

    Channels come last here, but first in `patchify`, as in Wan.
    """
    frames, height, width = (n * p for n, p in zip(grid, patch, strict=True))
    # [batch, channels, f, pf, h, ph, w, pw]
    pieces = x.unflatten(-1, (*patch, -1))
    pieces = pieces.unflatten(1, grid)
    pieces = pieces.permute(0, 7, 1, 4, 2, 5, 3, 6)
    return pieces.reshape(len(x), -1, frames, height, width)


def rotary_tables_3d(grid: tuple[int, int, int], head_dim: int, device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of a video's tokens, fp32 [1, tokens, 1, head_dim].

    They are for `rotate_pairs`: the two channels of a pair have the same cosine, and the sine with
    opposite signs.
    """
    # [tokens, head_dim / 2]
    angles = grid_angles(grid, head_dim, device)
    cos = angles.cos().float()
    sin = angles.sin().float()
    cos = torch.stack([cos, cos], -1).flatten(1)[None, :, None]
    sin = torch.stack([-sin, sin], -1).flatten(1)[None, :, None]
    return cos, sin


def grid_angles(grid: tuple[int, int, int], head_dim: int, device) -> Tensor:
    """Return the angle of each token and pair of channels, in radians, fp64 [tokens, head_dim / 2].

    The last third of the pairs, rounded down, encodes the column, as many before it the row, and
    the rest, first, the frame.
    """
    third = head_dim // 6
    columns = []
    for axis, pairs in enumerate((head_dim // 2 - 2 * third, third, third)):
        exponents = torch.arange(pairs, dtype=torch.float64, device=device) / pairs
        positions = torch.arange(grid[axis], dtype=torch.float64, device=device)
        shape = [1, 1, 1, pairs]
        shape[axis] = grid[axis]
        # [positions along this axis, pairs], then for the whole grid
        angles = torch.outer(positions, THETA**-exponents)
        columns.append(angles.view(shape).expand(*grid, pairs))
    return torch.cat(columns, dim=-1).flatten(0, 2)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel 2i against 2i + 1, in fp32; return x's shape and type.

    x: [batch, seq, heads, head_dim]; cos, sin: from `rotary_tables_3d`.
    """
    # channels 1 0 3 2 ...
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin).type_as(x)


def timestep_sinusoids(timestep: Tensor, dim: int) -> Tensor:
    """Return cosines, then sines, of `timestep` [batch] at dim / 2 frequencies, fp32 [batch, dim].

    Frequencies go from 1 down to almost 1 / 10000.
    """
    exponents = torch.arange(dim // 2, dtype=torch.float32, device=timestep.device) / (dim // 2)
    angles = timestep.float()[:, None] * torch.exp(-math.log(THETA) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def upcast(x: Tensor) -> Tensor:
    """Return x [...] in fp32, or unchanged if it is fp64."""
    return x if x.dtype == torch.float64 else x.float()
