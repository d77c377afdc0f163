"""The Wan 2.1 video diffusion transformer: predict a velocity from noisy latents and conditions.

The conditions are timestep, text and, in image-to-video models, an image. The latents of a video
are cut into patches, one token each. Each block has self-attention over all tokens,
cross-attention to the text, and an MLP. The timestep shifts, scales and gates the first and the
last ("adaLN", Peebles & Xie 2022). Image-to-video models see the first frame twice: as 20 more
input channels, which the caller adds, and as CLIP features in a second cross-attention. Wan 2.2's
A14B models are two such networks, one per range of timesteps.

Timesteps, modulation, norms and rotations are computed in fp32 whatever the weights' type: in bf16,
timestep 998.4 would be 1000. Parameter names are those of diffusers.

Left out: the video autoencoder, text and image encoders, first-and-last-frame models, and the 5B
model of Wan 2.2, whose timesteps differ between tokens.
Sources: Wan-Video/Wan2.1, wan/modules/model.py; diffusers, transformer_wan.py.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.errors import InputError
from minitrain.models.attention import Mask, attention, make_mask
from minitrain.models.layers import identity
from minitrain.models.variants import KeepsFP32
from minitrain.models.video import (
    patch_grid,
    patchify,
    rotary_tables_3d,
    rotate_pairs,
    timestep_sinusoids,
    unpatchify,
    upcast,
)
from minitrain.models.wan_config import WanConfig


class Wan(nn.Module):
    """The network. `blocks` are the units of recomputation, compilation and sharding."""

    def __init__(self, config: WanConfig):
        super().__init__()
        self.config = config
        # exchange points: context parallelism makes masks of all tokens, and splits tokens along
        # dim 1; tensor parallelism splits them further; at the end both gather
        self.make_mask = make_mask
        self.split_cp = self.split_tp = self.gather = identity
        self.patch_embedding = PatchEmbedding(
            config.in_channels, config.dim, config.patch_size, config.patch_size
        )
        self.condition_embedder = ConditionEmbedder(config)
        self.blocks = nn.ModuleList(WanBlock(config) for _ in range(config.num_layers))
        self.proj_out = nn.Linear(config.dim, config.out_channels * math.prod(config.patch_size))
        self.adaln = AdaLN(2, config.dim)

    def forward(
        self, latents: Tensor, timestep: Tensor, text: Tensor, image: Tensor | None = None
    ) -> Tensor:
        """Return the velocity, noise - data, fp32 [batch, out_channels, frames, height, width].

        latents: [batch, in_channels, frames, height, width].
        timestep: [batch], 0 (data) to 1000 (noise), not rounded.
        text: [batch, tokens, text_dim]; padding is seen.
        image: [batch, tokens, image_dim], for image-to-video models only.
        Raise InputError for latents that the patches do not divide, and for an image that the model
        lacks or does not take.
        """
        patch = self.config.patch_size
        self._check(latents, image)
        grid = patch_grid(latents, patch)
        # [batch, tokens of this rank, dim]
        x = self.patch_embedding(self.split_tp(self.split_cp(patchify(latents, patch))))
        # [1, tokens / cp, 1, head_dim]: attention sees all tokens of the tensor-parallel ranks
        tables = rotary_tables_3d(grid, self.config.attention_head_dim, x.device)
        rotary = tuple(map(self.split_cp, tables))
        embedding, modulation, text, image = self.condition_embedder(timestep, text, image)
        mask = self.make_mask(rotary[0].shape[1], x.device, None, causal=False)
        for block in self.blocks:
            x = block(x, modulation, rotary, mask, text, image)
        # [batch, 1, dim] each
        shift, scale = unbind_rows(self.adaln.scale_shift_table + embedding[:, None])
        # [batch, tokens of this rank, channels of a patch]
        x = self.proj_out(modulate(x, shift, scale, self.config.eps))
        x = self.gather(upcast(x))
        return unpatchify(x, grid, patch)

    def _check(self, latents: Tensor, image: Tensor | None) -> None:
        """Raise InputError for latents [..., frames, height, width] or an image that do not fit."""
        sizes = tuple(latents.shape[-3:])
        patch = self.config.patch_size
        if any(size % p for size, p in zip(sizes, patch, strict=True)):
            raise InputError(
                f"latents of {list(sizes)} frames, rows, columns do not divide into patches {patch}"
            )
        if (image is None) != (self.config.image_dim is None):
            needs = "needs an image" if image is None else "has image_dim=None: it takes no image"
            raise InputError(f"this Wan model {needs}")

    @torch.no_grad()
    def initialize_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill a full parameter [...] by its name, as Wan's code does.

        The last layer starts at 0, so that an untrained model predicts no velocity.
        """
        if name.endswith("scale_shift_table"):
            tensor.normal_(0, self.config.dim**-0.5, generator=generator)
        elif name.startswith("proj_out.") or name.endswith("bias"):
            tensor.zero_()
        elif "text_embedder" in name or "time_embedder" in name:
            tensor.normal_(0, self.config.embedder_std, generator=generator)
        elif tensor.ndim == 1:
            # a norm's weight
            tensor.fill_(1)
        else:
            nn.init.xavier_uniform_(tensor.flatten(1), generator=generator)


class WanBlock(nn.Module):
    """Self-attention, cross-attention and MLP, each with a residual; the first and last gated."""

    def __init__(self, config: WanConfig):
        super().__init__()
        self.eps = config.eps
        self.attn1 = SelfAttention(config.dim, config.num_attention_heads, config.eps)
        self.attn2 = CrossAttention(
            config.dim, config.num_attention_heads, config.eps, config.image_dim is not None
        )
        self.norm2 = FP32Norm(config.dim)
        self.ffn = FeedForward(config.dim, config.ffn_dim, config.dim, approximate="tanh")
        self.adaln = AdaLN(6, config.dim)

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Mask,
        text: Tensor,
        image: Tensor | None,
    ) -> Tensor:
        """Return [batch, seq, dim], as x.

        modulation: fp32 [batch, 6, dim], from the timestep. rotary: from `rotary_tables_3d`.
        text, image: [batch, tokens, dim].
        """
        # [batch, 1, dim] each
        rows = unbind_rows(self.adaln.scale_shift_table + modulation)
        attention_shift, attention_scale, attention_gate, mlp_shift, mlp_scale, mlp_gate = rows
        # [batch, seq, dim]
        out = self.attn1(modulate(x, attention_shift, attention_scale, self.eps), rotary, mask)
        # gates are in fp32, and so is this sum
        x = torch.addcmul(x, out, attention_gate).type_as(x)
        x = x + self.attn2(layer_norm(self.norm2, x, self.eps), text, image)
        out = self.ffn(modulate(x, mlp_shift, mlp_scale, self.eps))
        return torch.addcmul(x, out, mlp_gate).type_as(x)


class SelfAttention(nn.Module):
    """Full attention; queries and keys are normalized over all heads together, then rotated."""

    def __init__(self, dim: int, heads: int, eps: float):
        super().__init__()
        self.head_dim = dim // heads
        # exchange points: context parallelism exchanges keys and values; tensor parallelism gathers
        # tokens and reduces outputs
        self.attend = attention
        self.gather = self.reduce = identity
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.norm_q = nn.RMSNorm(dim, eps)
        self.norm_k = nn.RMSNorm(dim, eps)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """Return [batch, seq, dim], as x. rotary: from `rotary_tables_3d`."""
        x = self.gather(x)
        # [batch, seq, heads, head_dim]; -1, since a tensor-parallel rank holds fewer heads
        split = (*x.shape[:2], -1, self.head_dim)
        q = rotate_pairs(self.norm_q(self.to_q(x)).view(split), *rotary)
        k = rotate_pairs(self.norm_k(self.to_k(x)).view(split), *rotary)
        v = self.to_v(x).view(split)
        # [batch, heads, seq, head_dim]
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        out = self.attend(q, k, v, mask)
        return self.reduce(self.to_out[0](out.transpose(1, 2).flatten(2)))


class CrossAttention(nn.Module):
    """Attention to the text, plus attention to the image by the same queries, without rotations."""

    def __init__(self, dim: int, heads: int, eps: float, image: bool):
        super().__init__()
        self.head_dim = dim // heads
        # exchange points of tensor parallelism, and of the simulator: a text is whole on every rank
        self.gather = self.reduce = identity
        self.attend_text = attention
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.norm_q = nn.RMSNorm(dim, eps)
        self.norm_k = nn.RMSNorm(dim, eps)
        if image:
            self.add_k_proj = nn.Linear(dim, dim)
            self.add_v_proj = nn.Linear(dim, dim)
            self.norm_added_k = nn.RMSNorm(dim, eps)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])

    def forward(self, x: Tensor, text: Tensor, image: Tensor | None) -> Tensor:
        """Return [batch, seq, dim], as x. text, image: [batch, tokens, dim]."""
        # [batch, seq, dim / tp], this rank's heads
        q = self.norm_q(self.to_q(self.gather(x)))
        out = self._look(q, self.norm_k(self.to_k(text)), self.to_v(text))
        if image is not None:
            keys = self.norm_added_k(self.add_k_proj(image))
            out = out + self._look(q, keys, self.add_v_proj(image))
        return self.reduce(self.to_out[0](out))

    def _look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return full attention of q [batch, seq, dim] to k, v [batch, tokens, dim], as q."""
        # [batch, heads, seq or tokens, head_dim]
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self.attend_text(q, k, v, Mask(causal=False)).transpose(1, 2).flatten(2)


class AdaLN(KeepsFP32):
    """The learned part of shifts, scales and gates, [1, rows, dim], beside the timestep's."""

    def __init__(self, rows: int, dim: int):
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.randn(1, rows, dim) / dim**0.5)


class FP32Norm(KeepsFP32):
    """The parameters of `layer_norm`, kept in fp32."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))


class FP32Linear(KeepsFP32):
    """The parameters of `wide_linear`, kept in fp32."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight, self.bias = nn.Linear(inputs, outputs).parameters()


class ConditionEmbedder(nn.Module):
    """The embeddings of timestep, text and image features."""

    def __init__(self, config: WanConfig):
        super().__init__()
        self.freq_dim = config.freq_dim
        self.time_embedder = two_linears(FP32Linear, config.freq_dim, config.dim)
        self.time_proj = FP32Linear(config.dim, 6 * config.dim)
        self.text_embedder = two_linears(nn.Linear, config.text_dim, config.dim)
        self.image_embedder = (
            None if config.image_dim is None else ImageEmbedder(config.image_dim, config.dim)
        )

    def forward(self, timestep: Tensor, text: Tensor, image: Tensor | None):
        """Return the timestep's embedding and modulation, and the embeddings of text and image.

        timestep: [batch]; text: [batch, tokens, text_dim]; image: [batch, tokens, image_dim] or
            None.
        Returns fp32 [batch, dim], fp32 [batch, 6, dim], then [batch, tokens, dim] each; without an
        image, None.
        """
        time = self.time_embedder
        dtype = self.text_embedder.linear_1.weight.dtype
        # the timestep in fp32: [batch, dim]
        hidden = F.silu(wide_linear(time.linear_1, timestep_sinusoids(timestep, self.freq_dim)))
        embedding = wide_linear(time.linear_2, hidden)
        modulation = wide_linear(self.time_proj, F.silu(embedding)).unflatten(1, (6, -1))
        # text and image in the compute type: [batch, tokens, dim]
        hidden = F.gelu(self.text_embedder.linear_1(text.to(dtype)), approximate="tanh")
        text = self.text_embedder.linear_2(hidden)
        if image is not None:
            image = self.image_embedder(image.to(dtype))
        return embedding, modulation, text, image


class ImageEmbedder(nn.Module):
    """Embed CLIP features: [batch, tokens, inputs] -> [batch, tokens, dim]."""

    def __init__(self, inputs: int, dim: int):
        super().__init__()
        self.norm1 = FP32Norm(inputs)
        self.ff = FeedForward(inputs, inputs, dim, approximate="none")
        self.norm2 = FP32Norm(dim)

    def forward(self, image: Tensor) -> Tensor:
        # [batch, tokens, inputs] -> [batch, tokens, dim]
        return layer_norm(self.norm2, self.ff(layer_norm(self.norm1, image)))


class PatchEmbedding(nn.Conv3d):
    """The checkpoints' convolution as a Linear on patches: its stride is its kernel."""

    def forward(self, patches: Tensor) -> Tensor:
        # [batch, tokens, channels x patch] -> [batch, tokens, dim]
        return F.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class FeedForward(nn.Module):
    """down(gelu(up(x))), with the names of diffusers."""

    def __init__(self, inputs: int, hidden: int, outputs: int, approximate: str):
        super().__init__()
        # exchange points of tensor parallelism
        self.gather = self.reduce = identity
        self.approximate = approximate
        first = nn.ModuleDict({"proj": nn.Linear(inputs, hidden)})
        self.net = nn.ModuleDict({"0": first, "2": nn.Linear(hidden, outputs)})

    def forward(self, x: Tensor) -> Tensor:
        # [batch, seq, inputs] -> [batch, seq, outputs]
        hidden = self.net["0"]["proj"](self.gather(x))
        return self.reduce(self.net["2"](F.gelu(hidden, approximate=self.approximate)))


def two_linears(kind: type, inputs: int, dim: int) -> nn.ModuleDict:
    return nn.ModuleDict({"linear_1": kind(inputs, dim), "linear_2": kind(dim, dim)})


def wide_linear(layer: FP32Linear, x: Tensor) -> Tensor:
    """Return x W^T + b in the layer's type, [..., out]. x: [..., in]."""
    return F.linear(x.to(layer.weight.dtype), layer.weight, layer.bias)


def layer_norm(norm: FP32Norm, x: Tensor, eps: float = 1e-5) -> Tensor:
    """Return LayerNorm of x [..., dim] in x's type, computed in that of the norm."""
    wide = x.to(norm.weight.dtype)
    return F.layer_norm(wide, x.shape[-1:], norm.weight, norm.bias, eps).type_as(x)


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return normalize(x) * (1 + scale) + shift in x's type, computed in fp32.

    x: [batch, seq, dim]; shift, scale: [batch, 1, dim].
    """
    normed = F.layer_norm(upcast(x), x.shape[-1:], eps=eps)
    return torch.addcmul(shift, normed, 1 + scale).type_as(x)


def unbind_rows(table: Tensor) -> list[Tensor]:
    """Return the rows of table [batch, rows, dim], each [batch, 1, dim].

    Not chunk: its backward pass, compiled by torch 2.11 to 2.13, leaves gradients unwritten
    (#193061).
    """
    return [row[:, None] for row in table.unbind(1)]
