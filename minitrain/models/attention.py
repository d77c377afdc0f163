"""Which query may see which key (`Mask`), the kernel that computes it (`attention`), and grouped-query attention.

Plain causal and full attention go to scaled_dot_product_attention, which is cuDNN on Hopper. Any other mask goes to
FlexAttention on CUDA, where a BlockMask skips the empty tiles; on CPU, where FlexAttention has no backward, the same
mask is made dense and given to scaled_dot_product_attention.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from minitrain.models.layers import apply_rotary


@dataclass(eq=False)
class Mask:
    """Query i sees key j if every condition that is set allows it.

    causal: j <= i. documents: int [batch, queries], i and j carry the same number (packed sequences).
    Keys are the queries' own unless key_documents [batch, keys] says otherwise. index [queries] and key_index [keys]
    are their places in the row, if those are not 0, 1, 2, ... (context parallel).
    One Mask serves all layers of a forward pass, so its dense and block forms are built once.
    """

    causal: bool = True
    documents: Tensor | None = None
    key_documents: Tensor | None = None
    index: Tensor | None = None
    key_index: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.documents is None and self.index is None

    def allows(self, batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Elementwise over broadcastable numbers of rows, queries and keys; FlexAttention calls it with scalars."""
        allowed = torch.ones_like(query == key)
        if self.causal and self.index is None:
            allowed = query >= key
        elif self.causal:
            allowed = self.index[query] >= self.key_index[key]
        if self.documents is not None:
            keys = self.documents if self.key_documents is None else self.key_documents
            allowed = allowed & (self.documents[batch, query] == keys[batch, key])
        return allowed

    def dense(self, q: Tensor, k: Tensor) -> Tensor:
        """bool [batch or 1, 1, queries, keys], for scaled_dot_product_attention."""
        if self._dense is None:
            rows = 1 if self.documents is None else len(q)
            batch, query, key = (torch.arange(n, device=q.device) for n in (rows, q.shape[2], k.shape[2]))
            self._dense = self.allows(batch[:, None, None], query[:, None], key)[:, None]
        return self._dense

    def block(self, q: Tensor, k: Tensor) -> BlockMask:
        """The tiles that hold at least one allowed pair, for FlexAttention."""
        if self._block is None:
            rows = None if self.documents is None else len(q)
            self._block = create_block_mask(self._mod, rows, None, q.shape[2], k.shape[2], device=q.device)
        return self._block

    def _mod(self, batch, head, query, key):
        return self.allows(batch, query, key)

    def __post_init__(self):
        self._dense = self._block = None


@cache
def _compiled_flex_attention():
    return torch.compile(flex_attention, dynamic=False)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """softmax(q k^T / sqrt(head_dim), over the keys that `mask` allows) v.

    q: [batch, heads, queries, head_dim]; k, v: [batch, kv_heads, keys, head_dim], where kv_heads divides heads.
    Returns q's shape.
    """
    grouped = q.shape[1] != k.shape[1]
    if mask.is_plain:
        return F.scaled_dot_product_attention(q, k, v, is_causal=mask.causal, enable_gqa=grouped)
    if q.is_cuda:
        return _compiled_flex_attention()(q, k, v, block_mask=mask.block(q, k), enable_gqa=grouped)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense(q, k), enable_gqa=grouped)


class GroupedQueryAttention(nn.Module):
    """Attention in which several query heads share one key/value head (Ainslie et al. 2023).

    qkv_bias: Qwen 2.5. qk_norm: an RMSNorm over each head of q and k before the rotation, Qwen 3.
    """

    def __init__(self, hidden, heads, kv_heads, head_dim, qkv_bias=False, qk_norm=False, norm_eps=1e-5):
        super().__init__()
        self.head_dim = head_dim
        self.attend = attention  # context parallelism puts its exchange of keys and values around it
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
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))
