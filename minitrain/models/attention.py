"""Which query may see which key (`Mask`), the kernel that computes it (`attention`), and grouped-query attention.

Plain causal and full attention go to scaled_dot_product_attention, which is cuDNN on Hopper. Any other mask goes to
FlexAttention on CUDA, where a BlockMask skips the empty tiles; on CPU, where FlexAttention has no backward, the same mask
is made dense and given to scaled_dot_product_attention.
"""

from dataclasses import dataclass
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from minitrain.models.layers import apply_rotary


@dataclass(eq=False)
class Mask:
    """Query i sees key j if every condition that is set allows it.

    causal: j <= i. documents: int [batch, seq], i and j carry the same number (packed sequences).
    One Mask serves all layers of a forward pass, so its dense and block forms are built once.
    """

    causal: bool = True
    documents: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.documents is None

    def allows(self, batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Elementwise over broadcastable index tensors; FlexAttention calls it with scalars."""
        allowed = query >= key if self.causal else torch.ones_like(query >= key)
        if self.documents is not None:
            allowed = allowed & (self.documents[batch, query] == self.documents[batch, key])
        return allowed

    @cached_property
    def dense(self) -> Tensor:
        """bool [batch, 1, seq, seq], for scaled_dot_product_attention."""
        rows, length = self.documents.shape
        batch, index = (torch.arange(n, device=self.documents.device) for n in (rows, length))
        return self.allows(batch[:, None, None], index[:, None], index)[:, None]

    @cached_property
    def block(self) -> BlockMask:
        """The tiles that hold at least one allowed pair, for FlexAttention."""
        rows, length = self.documents.shape

        def mask_mod(batch, head, query, key):
            return self.allows(batch, query, key)

        return create_block_mask(mask_mod, rows, None, length, length, device=self.documents.device)


@cache
def _compiled_flex_attention():
    return torch.compile(flex_attention, dynamic=False)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """softmax(q k^T / sqrt(head_dim), over the keys that `mask` allows) v.

    q: [batch, heads, seq, head_dim]; k, v: [batch, kv_heads, seq, head_dim], where kv_heads divides heads. Returns q's shape.
    """
    grouped = q.shape[1] != k.shape[1]
    if mask.is_plain:
        return F.scaled_dot_product_attention(q, k, v, is_causal=mask.causal, enable_gqa=grouped)
    if q.is_cuda:
        return _compiled_flex_attention()(q, k, v, block_mask=mask.block, enable_gqa=grouped)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense, enable_gqa=grouped)


class GroupedQueryAttention(nn.Module):
    """Attention in which several query heads share one key/value head (Ainslie et al. 2023).

    qkv_bias: Qwen 2.5. qk_norm: an RMSNorm over each head of q and k before the rotation, Qwen 3.
    """

    def __init__(self, hidden, heads, kv_heads, head_dim, qkv_bias=False, qk_norm=False, norm_eps=1e-5):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """x: [batch, seq, hidden]; rotary: the tables of `rotary_tables`. Returns [batch, seq, hidden]."""
        split = (*x.shape[:2], -1, self.head_dim)  # -1: a tensor-parallel rank holds fewer heads
        q = apply_rotary(self.q_norm(self.q_proj(x).view(split)), *rotary)
        k = apply_rotary(self.k_norm(self.k_proj(x).view(split)), *rotary)
        v = self.v_proj(x).view(split)
        out = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))
