"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads come from one small latent per token.

    latent, k_rope = kv_a_proj_with_mqa(x)                 kv_lora_rank and qk_rope_head_dim channels
    k_nope, v      = kv_b_proj(norm(latent))               for each head
    q              = q_b_proj(norm(q_a_proj(x)))           for each head, [nope | rope]
    score          = q_nope . k_nope + q_rope . k_rope     only the rope parts are rotated; k_rope serves all heads

Written as trained: latents are expanded to full keys and values. Left out: the decoding form, which caches latents and
folds kv_b_proj into the neighbouring matrices.
"""

import torch
from torch import Tensor, nn

from minitrain.models.attention import Mask, attention
from minitrain.models.layers import apply_rotary


class LatentAttention(nn.Module):
    """scale: a factor on the scores beside 1 / sqrt(head_dim), as yarn has it."""

    def __init__(self, hidden: int, heads: int, q_rank: int, kv_rank: int, nope: int, rope: int, v_dim: int,
                 scale: float = 1.0):  # fmt: skip
        super().__init__()
        self.nope, self.rope, self.v_dim, self.scale = nope, rope, v_dim, scale
        self.attend = attention  # context parallelism puts its exchange of keys and values around it
        self.q_a_proj = nn.Linear(hidden, q_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(q_rank, eps=1e-6)  # whatever the other norms use
        self.q_b_proj = nn.Linear(q_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, kv_rank + rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(kv_rank, eps=1e-6)
        self.kv_b_proj = nn.Linear(kv_rank, heads * (nope + v_dim), bias=False)
        self.o_proj = nn.Linear(heads * v_dim, hidden, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """x: [batch, seq, hidden]; rotary: the tables of `rotary_tables`. Returns [batch, seq, hidden]."""
        q = self.q_a_layernorm(self.q_a_proj(x)) * self.scale  # here, where q is narrow
        q = self.q_b_proj(q).unflatten(-1, (-1, self.nope + self.rope))  # [batch, seq, heads, nope + rope]
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.kv_a_layernorm.weight.shape[0], self.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, self.nope + self.v_dim))
        k_nope, v = kv.split([self.nope, self.v_dim], dim=-1)
        q_rope, k_rope = (apply_rotary(pairs_to_halves(r), *rotary) for r in (q_rope, k_rope.unsqueeze(2)))
        q = torch.cat([q_nope, q_rope], dim=-1)
        k = torch.cat([k_nope, k_rope.expand_as(q_rope)], dim=-1)
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def pairs_to_halves(x: Tensor) -> Tensor:
    """Channels 0 2 4 ... 1 3 5 ...: DeepSeek rotates neighbours, `apply_rotary` channels half a head apart."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
