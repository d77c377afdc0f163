"""Norms, MLPs and rotary embeddings of a decoder.

How LoRA, FP8, parallelism and the sampler change a model, in three ways: see the head of variants.py.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.models.variants import has_hooks
from minitrain.models.video import upcast


def identity(x: Tensor) -> Tensor:
    """Return x [...]: the default of an exchange point, on one rank."""
    return x


def project(x: Tensor, *linears: nn.Linear) -> Sequence[Tensor]:
    """Return the outputs [..., out] of Linears for the same x [..., in].

    A variant computes all of them at once, if it has a method `together` that does not return None.
    """
    variants = [linear.together for linear in linears if hasattr(linear, "together")]
    # `together` would skip the hooks of a Linear
    if variants and not any(map(has_hooks, linears)):
        for together in variants:
            outputs = together(linears, x)
            if outputs is not None:
                return outputs
    return [linear(x) for linear in linears]


class LayerNorm1P(nn.LayerNorm):
    """LayerNorm of Nemotron-4, its weight stored around 0: normalize(x) (weight + 1) + bias."""

    def forward(self, x: Tensor) -> Tensor:
        # [..., hidden], as the result
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class RMSNorm1P(nn.RMSNorm):
    """RMSNorm in fp32, its weight stored around 0: normalize(x) (weight + 1) (Gemma, Qwen3-Next)."""

    def forward(self, x: Tensor) -> Tensor:
        # [..., hidden], as the result
        weight = upcast(self.weight) + 1
        return F.rms_norm(upcast(x), self.normalized_shape, weight, self.eps).to(x.dtype)


# GELU with tanh in place of the error function
gelu_tanh = partial(F.gelu, approximate="tanh")


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), or another activation. x: [batch, seq, hidden], as the result."""

    # the sampler computes them as one product
    same_input = ("gate_proj", "up_proj")

    def __init__(self, hidden: int, intermediate: int, activation: Callable = F.silu):
        super().__init__()
        self.activation = activation
        # exchange points of tensor parallelism
        self.gather = self.reduce = identity
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # [batch, seq, intermediate] each; intermediate / tp under tensor parallelism
        gate, up = project(self.gather(x), self.gate_proj, self.up_proj)
        return self.reduce(self.down_proj(self.activation(gate) * up))


class MLP(nn.Module):
    """down(activation(up(x))), without a gate. x: [batch, seq, hidden]."""

    def __init__(self, activation: Callable, bias: bool, hidden: int, intermediate: int):
        super().__init__()
        # exchange points of tensor parallelism
        self.gather = self.reduce = identity
        self.activation = activation
        self.up_proj = nn.Linear(hidden, intermediate, bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        # [batch, seq, hidden], as the result
        return self.reduce(self.down_proj(self.activation(self.up_proj(self.gather(x)))))


def squared_relu(x: Tensor) -> Tensor:
    """Return relu(x) ** 2 of x [...], in its shape (Primer, So et al. 2021; Nemotron)."""
    return F.relu(x).square()


NORMS = {
    "rmsnorm": nn.RMSNorm,
    "rmsnorm1p": RMSNorm1P,
    "layernorm": nn.LayerNorm,
    "layernorm1p": LayerNorm1P,
}
MLPS = {
    "swiglu": GatedMLP,
    "geglu": partial(GatedMLP, activation=gelu_tanh),
    "relu2": partial(MLP, squared_relu, False),
    "gelu": partial(MLP, gelu_tanh, True),
}


# --- rotary embeddings


def rotary_frequencies(
    dim: int, theta: float, scaling: dict | None = None, device=None
) -> Tensor:
    """Return the angle per position of each rotated pair of channels, in radians, fp32 [dim / 2].

    dim: how many channels of a head are rotated.
    scaling: `rope_scaling` of a Hugging Face config, with a `rope_type` of KEEPS; None: the
    angles are theta ** (-2i / dim).
    """
    frequencies = theta ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    if scaling is None:
        return frequencies
    kept = KEEPS[scaling["rope_type"]](frequencies, theta, scaling)
    # a blend of the frequency and the frequency / factor
    return frequencies * (kept + (1 - kept) / scaling["factor"])


def attention_factor(scaling: dict | None) -> float:
    """Return YaRN's factor on cosines and sines, thus on queries and on keys; 1 without YaRN."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    factor = scaling["factor"]
    mscale = scaling.get("mscale")
    all_dim = scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)


def rotary_tables(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return factor x cosines and sines for `apply_rotary`, fp32 [batch or 1, seq, 1, dim].

    positions: [batch or 1, seq]; frequencies: [dim / 2]. The two channels of a pair, dim / 2 apart,
    have the same cosine, and the sine with opposite signs.
    """
    # [batch or 1, seq, 1, dim / 2]
    angles = (positions[..., None].float() * frequencies)[..., None, :]
    cos = angles.cos() * factor
    sin = angles.sin() * factor
    cos = torch.cat([cos, cos], dim=-1)
    sin = torch.cat([-sin, sin], dim=-1)
    return cos, sin


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel i against channel i + dim / 2 ("rotate half"), in fp32; return x's shape.

    x: [batch, seq, heads, head_dim]; cos, sin: from `rotary_tables`. Of a head, only the first
    `dim` channels are rotated.
    """
    dim = cos.shape[-1]
    x_rot, x_pass = x.split([dim, x.shape[-1] - dim], dim=-1)
    x_rot = RotateHalf.apply(x_rot, cos, sin)
    return torch.cat([x_rot, x_pass], dim=-1) if x_pass.shape[-1] else x_rot


class RotateHalf(torch.autograd.Function):
    """`rotate_half` with a gradient that is rotated back: backward keeps cos and sin alone."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotate_half(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return rotate_half(grad, cos, -sin), None, None


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x cos + (x with its halves swapped) sin, in x's shape. x: [batch, seq, heads, dim]."""
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    rotated = torch.addcmul(x * cos, swapped, sin)
    # compiled by torch 2.11, a Function that ends in a `to` that changes nothing gives no gradient
    return rotated if rotated.dtype == x.dtype else rotated.to(x.dtype)


# --- context extension: which frequencies each kind keeps, and which it slows down


def linear_keep(frequencies: Tensor, theta: float, scaling: dict) -> Tensor:
    """Return 0, [dim / 2]: every frequency is divided by `factor` (Chen et al. 2023; Gemma 3)."""
    return torch.zeros_like(frequencies)


def llama3_keep(frequencies: Tensor, theta: float, scaling: dict) -> Tensor:
    """Return how much of each frequency Llama 3.1's context extension keeps, [dim / 2].

    1: fast rotations stay; 0: slow ones are divided by `factor`; between them it is linear.
    Source: Llama 3 paper, section 3.4; transformers, modeling_rope_utils.py.
    """
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    # full turns within the original context
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)


def yarn_keep(frequencies: Tensor, theta: float, scaling: dict) -> Tensor:
    """Return how much of each frequency YaRN's context extension keeps, [dim / 2].

    1: pairs that turn more than beta_fast times within the original context stay; 0: those below
    beta_slow turns are divided by `factor`; between them it is linear in the pair's index.
    Source: Peng et al. 2023, section 3.2; DeepSeek-V3, GPT-OSS.
    """
    dim = 2 * len(frequencies)
    original = scaling["original_max_position_embeddings"]

    # the index of the pair that turns this number of times within the original context
    def find_correction_dim(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = find_correction_dim(scaling.get("beta_fast", 32.0))
    high = find_correction_dim(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    index = torch.arange(dim // 2, device=frequencies.device, dtype=torch.float32)
    # 0.001 as in transformers, where both ends are the same
    return 1 - ((index - low) / (high - low or 0.001)).clamp(0, 1)


KEEPS = {"linear": linear_keep, "llama3": llama3_keep, "yarn": yarn_keep}


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's mscale, whose square multiplies attention scores (Peng et al. 2023, 3.3)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
