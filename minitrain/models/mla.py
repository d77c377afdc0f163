"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values come from one latent per token.

    latent, k_rope = kv_a_proj_with_mqa(x)              kv_lora_rank and qk_rope_head_dim channels
    k_nope, v      = kv_b_proj(norm(latent))            for each head
    q              = q_b_proj(norm(q_a_proj(x)))        for each head, [nope | rope]
    score          = q_nope . k_nope + q_rope . k_rope  k_rope serves all heads

Only the rope parts are rotated by positions.

Training expands latents to full keys and values. Decoding keeps latents in the KV cache and attends
to them. For that it splits kv_b_proj into W_k and W_v, of each head, and absorbs W_k into the
query: q_nope . (W_k latent) = (W_k^T q_nope) . latent. Then all heads share one key,
[latent | k_rope], and one value, latent. W_v multiplies the output.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from minitrain.models.attention import Mask, attention
from minitrain.models.layers import apply_rotary, identity, yarn_mscale

if TYPE_CHECKING:
    from minitrain.models.decoder_config import DecoderConfig


class LatentAttention(nn.Module):
    """Attention with nope + rope channels per head in queries and keys, v_head_dim in values."""

    def __init__(self, config: "DecoderConfig"):
        super().__init__()
        hidden = config.hidden_size
        heads = config.num_attention_heads
        q_rank = config.q_lora_rank
        kv_rank = config.kv_lora_rank
        nope = config.qk_nope_head_dim
        rope = config.qk_rope_head_dim
        v_dim = config.v_head_dim
        self.nope = nope
        self.rope = rope
        self.v_dim = v_dim
        self.scale = score_scale(config.rope_scaling) * config.query_factor(nope + rope)
        # exchange points: context parallelism exchanges keys and values; tensor parallelism gathers
        # latents and reduces outputs
        self.attend = attention
        self.gather = self.reduce = identity
        self.q_a_proj = nn.Linear(hidden, q_rank, bias=False)
        # 1e-6 whatever norm_eps is
        self.q_a_layernorm = nn.RMSNorm(q_rank, eps=1e-6)
        self.q_b_proj = nn.Linear(q_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, kv_rank + rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(kv_rank, eps=1e-6)
        self.kv_b_proj = nn.Linear(kv_rank, heads * (nope + v_dim), bias=False)
        self.o_proj = nn.Linear(heads * v_dim, hidden, bias=False)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Mask | None, cache=None
    ) -> Tensor:
        """Return [batch, seq, hidden]. x: [batch, seq, hidden]; rotary: from `rotary_tables`.

        cache: the cache of latents, in place of a mask (rollout/caches.py).
        """
        # scaled here, where q is narrow: [batch, seq, q_rank], gathered under tensor parallelism
        q = self.q_a_layernorm(self.gather(self.q_a_proj(x))) * self.scale
        # [batch, seq, heads, nope + rope]
        q = self.q_b_proj(q).unflatten(-1, (-1, self.nope + self.rope))
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        # [batch, seq, rank], [batch, seq, rope]
        kv = self.gather(self.kv_a_proj_with_mqa(x))
        latent, k_rope = kv.split([kv.shape[-1] - self.rope, self.rope], dim=-1)
        latent = self.kv_a_layernorm(latent)
        q_rope = apply_rotary(pairs_to_halves(q_rope), *rotary)
        # [batch, seq, 1, rope]
        k_rope = apply_rotary(pairs_to_halves(k_rope.unsqueeze(2)), *rotary)
        if cache is not None:
            out = self.attend_to_latents(q_nope, q_rope, latent, k_rope, cache)
            return self.reduce(self.o_proj(out))
        # [batch, seq, heads, nope + v_dim]
        kv = self.kv_b_proj(latent).unflatten(-1, (-1, self.nope + self.v_dim))
        k_nope, v = kv.split([self.nope, self.v_dim], dim=-1)
        q = torch.cat([q_nope, q_rope], dim=-1)
        k = torch.cat([k_nope, k_rope.expand_as(q_rope)], dim=-1)
        # [batch, heads, seq, nope + rope or v_dim]
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        out = self.attend(q, k, v, mask)
        return self.reduce(self.o_proj(out.transpose(1, 2).flatten(2)))

    def attend_to_latents(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, cache
    ) -> Tensor:
        """Return the heads' outputs over all cached tokens, [batch, seq, heads x v_dim].

        q_nope: [batch, seq, heads, nope]; q_rope: [batch, seq, heads, rope].
        latent: [batch, seq, rank]; k_rope: [batch, seq, 1, rope].
        """
        # once per set of weights
        w_k, w_v = cache.once(self.absorbed)
        # [batch, seq, 1, rank + rope]
        key = torch.cat([latent.unsqueeze(2), k_rope], dim=-1)
        q = torch.cat([torch.einsum("bshn,hnr->bshr", q_nope, w_k), q_rope], dim=-1)
        # attention divides by sqrt(rank + rope) in place of sqrt(nope + rope)
        q = q * (key.shape[-1] / (self.nope + self.rope)) ** 0.5
        key = key.transpose(1, 2)
        # [batch, heads, seq, rank]
        out = cache.attend(q.transpose(1, 2), key, latent.shape[-1])
        return torch.einsum("bhsr,hvr->bshv", out, w_v).flatten(2)

    def absorbed(self) -> tuple[Tensor, Tensor]:
        """Return W_k [heads, nope, rank] and W_v [heads, v_dim, rank].

        They are kv_b_proj's outputs for the identity, adapters included.
        """
        rank = self.kv_a_layernorm.weight.shape[0]
        weight = self.kv_b_proj.weight
        rows = self.kv_b_proj(torch.eye(rank, dtype=weight.dtype, device=weight.device))
        # [heads, nope + v_dim, rank]
        heads = rows.T.unflatten(0, (-1, self.nope + self.v_dim))
        return heads.split([self.nope, self.v_dim], dim=1)


def score_scale(scaling: dict | None) -> float:
    """Return the factor on scores beside 1 / sqrt(head_dim): 1 without yarn's mscale_all_dim."""
    if scaling is None or scaling["rope_type"] != "yarn" or not scaling.get("mscale_all_dim"):
        return 1.0
    return yarn_mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2


def pairs_to_halves(x: Tensor) -> Tensor:
    """Reorder channels to 0 2 4 ... 1 3 5 ..., in x's shape [..., channels].

    DeepSeek rotates neighboring channels, `apply_rotary` those half a head apart.
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
