"""The parts of a decoder block other than attention: norms, rotary embeddings, MLPs.

Everything takes and returns plain tensors, and module names are those of the Hugging Face
checkpoints.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KeepsFP32(nn.Module):
    """Holds parameters that stay in fp32 when the model is cast to bf16, which would round them too
    coarsely.

    A holder is never called: other modules read what it holds, and parallel/fsdp.py leaves its
    parameters as they are.
    """

    def _apply(self, fn, recurse=True):
        def keep(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            return (
                changed if changed.dtype.itemsize >= 4 else tensor.to(changed.device, torch.float32)
            )

        return super()._apply(keep, recurse)


class LayerNorm1P(nn.LayerNorm):
    """LayerNorm whose weight is stored around zero: y = normalise(x) * (weight + 1) + bias
    (Nemotron-4).
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). x: [..., hidden]."""

    same_input = ("gate_proj", "up_proj")

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """The outputs of `same_input`'s Linears. LoRA, FP8 and the sampler put in its place what
        computes them at once."""
        return self.gate_proj(x), self.up_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x)
        return self.down_proj(F.silu(gate) * up)


class SquaredReluMLP(nn.Module):
    """down(relu(up(x)) ** 2), without a gate (Primer, So et al. 2021; Nemotron). x: [...,
    hidden].
    """

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())


class GeluMLP(nn.Module):
    """down(gelu(up(x))) with biases, and tanh in place of the error function (GPT-2, GPT-3). x:
    [..., hidden].
    """

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.up_proj = nn.Linear(hidden, intermediate)
        self.down_proj = nn.Linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))


def has_hooks(module: nn.Module) -> bool:
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)


NORMS = {"rmsnorm": nn.RMSNorm, "layernorm": nn.LayerNorm, "layernorm1p": LayerNorm1P}
MLPS = {"swiglu": GatedMLP, "relu2": SquaredReluMLP, "gelu": GeluMLP}


def rotary_frequencies(dim: int, theta: float, scaling: dict | None = None, device=None) -> Tensor:
    """Angle per position of each rotated pair: theta ** (-2i / dim), rescaled where `scaling` says
    so.

    dim: how many channels of a head are rotated. Returns fp32 [dim / 2].
    `scaling` is the `rope_scaling` of a Hugging Face config: `rope_type` llama3 or yarn.
    """
    frequencies = theta ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "yarn":
        return yarn_scaled(frequencies, theta, scaling)
    return llama3_scaled(frequencies, scaling)


def llama3_scaled(frequencies: Tensor, scaling: dict) -> Tensor:
    """Llama 3.1's context extension (Llama 3 paper, section 3.4; transformers
    modeling_rope_utils.py).

    Fast rotations stay, slow ones are divided by `factor`, those between are interpolated.
    """
    original = scaling["original_max_position_embeddings"]
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    # full turns within the original context
    rotations = original * frequencies / (2 * math.pi)
    keep = ((rotations - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling["factor"])


def yarn_scaled(frequencies: Tensor, theta: float, scaling: dict) -> Tensor:
    """YaRN's context extension (Peng et al. 2023, section 3.2; DeepSeek-V3, GPT-OSS).

    Pairs that turn more than beta_fast times within the original context stay, those below
    beta_slow are divided by `factor`, and between these two the share that stays falls linearly
    with the pair's number.
    """
    dim = 2 * len(frequencies)
    original = scaling["original_max_position_embeddings"]

    def number_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = number_of(scaling.get("beta_fast", 32.0))
    high = number_of(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    numbers = torch.arange(dim // 2, device=frequencies.device, dtype=torch.float32)
    divided = ((numbers - low) / (high - low or 0.001)).clamp(0, 1)
    return frequencies * ((1 - divided) + divided / scaling["factor"])


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature: scores over a longer context are multiplied by its square (Peng et al.
    2023, section 3.3).
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_magnitude(scaling: dict | None) -> float:
    """The factor on cosines and sines: on rotated queries and keys alike. 1 without yarn."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    factor = scaling["factor"]
    mscale = scaling.get("mscale")
    all_dim = scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
    return yarn_magnitude(factor)


def rotary_tables(
    positions: Tensor, frequencies: Tensor, magnitude: float
) -> tuple[Tensor, Tensor]:
    """magnitude x cosines and sines, in fp32, for `apply_rotary`: [batch or 1, seq] -> 2 x [batch
    or 1, seq, 1, dim].

    A pair of channels has twice the same cosine, and the sine with both signs.
    """
    angles = (positions[..., None].float() * frequencies)[..., None, :]
    cos = angles.cos() * magnitude
    sin = angles.sin() * magnitude
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel i against channel i + dim / 2 (the "rotate half" pairing of Llama and most
    others), in fp32.

    x: [batch, seq, heads, head_dim]; cos, sin: from `rotary_tables`. Only a head's first `dim`
    channels turn.
    """
    dim = cos.shape[-1]
    turning, rest = x.split([dim, x.shape[-1] - dim], dim=-1)
    rotated = Rotation.apply(turning, cos, sin)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


class Rotation(torch.autograd.Function):
    """The gradient of a rotation is rotated back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    turned = torch.addcmul(x * cos, swapped, sin)
    # compiled by torch 2.11, a Function that ends in a `to` that changes nothing gives no gradient
    return turned if turned.dtype == x.dtype else turned.to(x.dtype)
