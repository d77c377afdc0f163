"""The parts of a decoder block other than attention: norms, rotary embeddings, MLPs.

Everything takes and returns plain tensors, and module names are those of the Hugging Face checkpoints.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm1P(nn.LayerNorm):
    """LayerNorm whose weight is stored around zero: y = normalise(x) * (weight + 1) + bias (Nemotron-4)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). x: [..., hidden]."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SquaredReluMLP(nn.Module):
    """down(relu(up(x)) ** 2), without a gate (Primer, So et al. 2021; Nemotron). x: [..., hidden]."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())


def rotary_frequencies(dim: int, theta: float, scaling: dict | None = None, device=None) -> Tensor:
    """Angle per position of each rotated pair: theta ** (-2i / dim), rescaled where `scaling` says so.

    dim: how many channels of a head are rotated. Returns fp32 [dim / 2].
    `scaling` is the `rope_scaling` of a Hugging Face config; `rope_type: llama3` is the only kind so far (Llama 3.1).
    """
    frequencies = theta ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    return frequencies if scaling is None else llama3_scaled(frequencies, scaling)


def llama3_scaled(frequencies: Tensor, scaling: dict) -> Tensor:
    """Llama 3.1's context extension (Llama 3 paper, section 3.4; transformers modeling_rope_utils.py).

    Fast rotations stay, slow ones are divided by `factor`, those between are interpolated.
    """
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rotations = original * frequencies / (2 * math.pi)  # full turns within the original context
    keep = ((rotations - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling["factor"])


def rotary_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, in fp32: [batch or 1, seq] -> 2 x [batch or 1, seq, 1, dim / 2]."""
    angles = (positions[..., None].float() * frequencies)[..., None, :]
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel i against channel i + dim / 2 (the "rotate half" pairing of Llama and most others).

    x: [batch, seq, heads, head_dim]; cos, sin: [batch or 1, seq, 1, dim / 2]. Only a head's first `dim` channels turn.
    """
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*(part.to(x.dtype) for part in rotated), rest], dim=-1)
