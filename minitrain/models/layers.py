"""Norms, MLPs and rotary embeddings of a decoder, and how a model is changed.

Models are plain modules, whose parameters have the names of Hugging Face checkpoints. LoRA, FP8,
parallelism and the sampler change them in place, in three ways:

    way                            who uses it
    (a) a variant: a subclass      Fp8Linear, Fp8Experts (fp8.py), CpuLinear (cpu.py),
        that holds the same        LoraLinear, LoraExperts (lora.py), around any of these;
        parameters. `set_variant`  VocabParallelEmbedding, LocalPositions, RMSNormOverHeads
                                   (parallel/tensor*.py); Recomputing, of a block
                                   (parallel/recompute.py); the sampler's JoinedLinear, and its
                                   blocks (rollout/weights.py, compiled.py)
    (b) an exchange point: a       gather, reduce, split: tensor parallelism
        function that a module     dispatch: expert and tensor parallelism
        calls, and names in its    attend, mix, make_mask, split_cp, gather (Wan's): context
        constructor with a         parallelism
        default for one rank       split_tp, gather (Wan's): tensor parallelism
                                   sum_counts: balancing of experts over ranks
    (c) a hook of torch            FSDP's own; parallel/parts.py: `use_local_tensors` runs before a
                                   block, and lets a rank's plain tensors hide the DTensor
                                   parameters of the same names; LoRA's, on the embedding

The sampler's variants last no longer than sampling: training goes on with the classes it had.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.models.rope_scaling import llama3_keep, yarn_keep, yarn_mscale


class KeepsFP32(nn.Module):
    """A holder of parameters that stay in fp32 when the model is cast to bf16, too coarse for them.

    It is never called: other modules read its parameters, and parallel/fsdp.py casts none of them.
    """

    def _apply(self, fn, recurse=True):
        # torch calls this for .to(), .bfloat16(), .cuda() and the like
        def keep(tensor: Tensor) -> Tensor:
            """Apply `fn` to a parameter [...], but not below fp32."""
            changed = fn(tensor)
            if changed.dtype.itemsize >= 4:
                return changed
            return tensor.to(changed.device, torch.float32)

        return super()._apply(keep, recurse)


def identity(x: Tensor) -> Tensor:
    """Return x [...]: the default of an exchange point, on one rank."""
    return x


# --- variants of a module


def base_class(module: nn.Module) -> type:
    """Return the module's class, without the adapters that may be around it."""
    kind = type(module)
    # an adapted class has bases (LoraLinear or LoraExperts, the class inside): see lora.py
    return kind.__bases__[-1] if hasattr(kind, "around") else kind


def set_variant(module: nn.Module, variant: type) -> None:
    """Turn a module into a `variant` of its class, in place: way (a).

    Parameters, their names, hooks and adapters stay.
    """
    # an adapted class makes one of the same adapters around the variant
    around = getattr(type(module), "around", None)
    module.__class__ = around(variant) if around else variant


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


def in_tuples(kind: type, flat: Sequence) -> list:
    """Return NamedTuples of a `kind` from their fields, which stand one after the other in `flat`.

    An autograd.Function of several Linears takes its tensors so.
    """
    size = len(kind._fields)
    return [kind(*flat[start : start + size]) for start in range(0, len(flat), size)]


def has_hooks(module: nn.Module) -> bool:
    """Return True if calling the module does more than its `forward`."""
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)


# --- norms and MLPs


class LayerNorm1P(nn.LayerNorm):
    """LayerNorm of Nemotron-4, its weight stored around 0: normalize(x) (weight + 1) + bias."""

    def forward(self, x: Tensor) -> Tensor:
        # [..., hidden], as the result
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). x: [batch, seq, hidden], as the result."""

    # the sampler computes them as one product
    same_input = ("gate_proj", "up_proj")

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        # exchange points of tensor parallelism
        self.gather = self.reduce = identity
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # [batch, seq, intermediate] each; intermediate / tp under tensor parallelism
        gate, up = project(self.gather(x), self.gate_proj, self.up_proj)
        return self.reduce(self.down_proj(F.silu(gate) * up))


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


NORMS = {"rmsnorm": nn.RMSNorm, "layernorm": nn.LayerNorm, "layernorm1p": LayerNorm1P}
MLPS = {
    "swiglu": GatedMLP,
    "relu2": partial(MLP, squared_relu, False),
    # GPT-2 and GPT-3: tanh in place of the error function
    "gelu": partial(MLP, partial(F.gelu, approximate="tanh"), True),
}


# --- rotary embeddings


def rotary_frequencies(
    dim: int, theta: float, scaling: dict | None = None, device=None
) -> Tensor:
    """Return the angle per position of each rotated pair of channels, in radians, fp32 [dim / 2].

    dim: how many channels of a head are rotated.
    scaling: `rope_scaling` of a Hugging Face config, with `rope_type` llama3 or yarn; None: the
    angles are theta ** (-2i / dim).
    """
    frequencies = theta ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    if scaling is None:
        return frequencies
    keep = yarn_keep if scaling["rope_type"] == "yarn" else llama3_keep
    kept = keep(frequencies, theta, scaling)
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
