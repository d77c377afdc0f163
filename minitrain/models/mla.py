"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads come from one small
latent per token.

    latent, k_rope = kv_a_proj_with_mqa(x)                 kv_lora_rank and qk_rope_head_dim channels
    k_nope, v      = kv_b_proj(norm(latent))               for each head
    q              = q_b_proj(norm(q_a_proj(x)))           for each head, [nope | rope]
    score          = q_nope . k_nope + q_rope . k_rope     only the rope parts are rotated; k_rope serves all heads

In training, latents are expanded to full keys and values. With a cache they are what is kept, and
kv_b_proj = [W_k W_v] is folded into its neighbours: q_nope . W_k latent = (W_k^T q_nope) . latent.
So all heads attend to the latents themselves, [latent | k_rope] as the one key and latent as the
one value, and W_v comes after the sum over tokens.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from minitrain.models.attention import Mask, attention
from minitrain.models.layers import apply_rotary, yarn_mscale

if TYPE_CHECKING:
    from minitrain.models.decoder_config import DecoderConfig


class LatentAttention(nn.Module):
    """Heads of qk_nope_head_dim + qk_rope_head_dim channels in queries and keys, and of v_head_dim
    in values.
    """

    same_input = ("q_a_proj", "kv_a_proj_with_mqa")

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
        self.scale = score_scale(config.rope_scaling)
        # context parallelism puts its exchange of keys and values around it
        self.attend = attention
        self.q_a_proj = nn.Linear(hidden, q_rank, bias=False)
        # whatever the other norms use
        self.q_a_layernorm = nn.RMSNorm(q_rank, eps=1e-6)
        self.q_b_proj = nn.Linear(q_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, kv_rank + rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(kv_rank, eps=1e-6)
        self.kv_b_proj = nn.Linear(kv_rank, heads * (nope + v_dim), bias=False)
        self.o_proj = nn.Linear(heads * v_dim, hidden, bias=False)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Mask | None, cache=None
    ) -> Tensor:
        """x: [batch, seq, hidden]; rotary: the tables of `rotary_tables`. Returns [batch, seq,
        hidden].

        cache: in place of a mask, what holds the latents of earlier tokens (rollout/caches.py).
        """
        # here, where q is narrow
        q = self.q_a_layernorm(self.q_a_proj(x)) * self.scale
        # [batch, seq, heads, nope + rope]
        q = self.q_b_proj(q).unflatten(-1, (-1, self.nope + self.rope))
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(
            [self.kv_a_layernorm.weight.shape[0], self.rope], dim=-1
        )
        latent = self.kv_a_layernorm(latent)
        q_rope, k_rope = (
            apply_rotary(pairs_to_halves(r), *rotary) for r in (q_rope, k_rope.unsqueeze(2))
        )
        if cache is not None:
            return self.o_proj(self.attend_to_latents(q_nope, q_rope, latent, k_rope, cache))
        kv = self.kv_b_proj(latent).unflatten(-1, (-1, self.nope + self.v_dim))
        k_nope, v = kv.split([self.nope, self.v_dim], dim=-1)
        q = torch.cat([q_nope, q_rope], dim=-1)
        k = torch.cat([k_nope, k_rope.expand_as(q_rope)], dim=-1)
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def attend_to_latents(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, cache
    ) -> Tensor:
        """What the heads get from the tokens so far: [batch, seq, heads v_dim].

        q_nope, q_rope: [batch, seq, heads, nope or rope]; latent: [batch, seq, rank]; k_rope:
        [batch, seq, 1, rope].
        """
        w_k, w_v = cache.once(self.absorbed)
        key = torch.cat([latent.unsqueeze(2), k_rope], dim=-1)
        q = torch.cat([torch.einsum("bshn,hnr->bshr", q_nope, w_k), q_rope], dim=-1)
        # attention divides by the root of what it sees
        q = q * (key.shape[-1] / (self.nope + self.rope)) ** 0.5
        key = key.transpose(1, 2)
        # [batch, heads, seq, rank]
        out = cache.attend(q.transpose(1, 2), key, latent.shape[-1])
        return torch.einsum("bhsr,hvr->bshv", out, w_v).flatten(2)

    def absorbed(self) -> tuple[Tensor, Tensor]:
        """W_k [heads, nope, rank] and W_v [heads, v_dim, rank], asked of the module: it may have
        adapters.
        """
        weight = self.kv_b_proj.weight
        rows = self.kv_b_proj(
            torch.eye(self.kv_a_layernorm.weight.shape[0], dtype=weight.dtype, device=weight.device)
        )
        return rows.T.unflatten(0, (-1, self.nope + self.v_dim)).split(
            [self.nope, self.v_dim], dim=1
        )


def score_scale(scaling: dict | None) -> float:
    """The factor on the scores beside 1 / sqrt(head_dim): 1 without yarn, or where that has no
    mscale_all_dim.
    """
    if scaling is None or scaling["rope_type"] != "yarn" or not scaling.get("mscale_all_dim"):
        return 1.0
    return yarn_mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2


def pairs_to_halves(x: Tensor) -> Tensor:
    """Channels 0 2 4 ... 1 3 5 ...: DeepSeek rotates neighbours, `apply_rotary` channels half a
    head apart.
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
