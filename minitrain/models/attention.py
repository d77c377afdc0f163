"""Masks (`make_mask`), the kernel for each of them (`attention`), and grouped-query attention.

    mask                on CUDA                                         on CPU
    causal, or full     scaled_dot_product_attention (cuDNN on Hopper)  the same
    causal, with sinks  cuDNN's kernels merged (merged_attention.py)    the same, of CPU kernels
    or of some chunks
    any other           FlexAttention: its BlockMask skips empty tiles  the first, with a dense mask

FlexAttention has no backward on CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from minitrain.models.flex import block_mask, evaluate_mask, run_flex_attention
from minitrain.models.layers import RMSNorm1P, apply_rotary, identity, project
from minitrain.models.merged_attention import merged_attention, takes_parts

if TYPE_CHECKING:
    from minitrain.models.decoder_config import DecoderConfig


@dataclass(frozen=True, eq=False)
class Mask:
    """The keys that a query sees: those up to its own position (causal), or all.

    attn_mask: if there is one, it alone decides: bool [batch or 1, 1, queries, keys], or the
        same as a BlockMask. It is built once for all layers of a forward pass.
    chunks: where the rule is j <= i alone, the numbers of the equal chunks of the keys' sequence
        that the queries are; (0,): all of it. Context parallelism sets those of its ranks.
    """

    causal: bool = True
    attn_mask: Tensor | BlockMask | None = None
    chunks: tuple[int, ...] | None = None


def make_mask(
    length: int,
    device: torch.device,
    document_ids: Tensor | None = None,
    causal: bool = True,
    q_positions: Tensor | None = None,
    window: int | None = None,
    plain: bool = True,
) -> Mask:
    """Return the Mask in which query i sees key j if every given condition allows it.

    length: the number of keys.
    causal: j <= i.
    document_ids: int [batch, length], equal at i and j (packed sequences).
    q_positions: int [queries], the index of each query among the keys, where they are not 0, 1, 2,
        ... (context parallelism).
    window: i - j < window: that many keys, the query's own included.
    plain: return no attn_mask where causal or full attention suffices, so that SDPA's fast kernel
        runs. Attention with sinks needs one, where its kernel does not take chunks.
    """
    needs_mask = document_ids is not None or window is not None
    if plain and not needs_mask and (q_positions is None or not causal):
        return Mask(causal)
    # those of other `q_positions` are for the caller to say
    whole = causal and not needs_mask and q_positions is None

    # indices that broadcast: torch's interface, of BlockMasks too
    def mask_mod(sequence, head, query, key):
        if q_positions is not None:
            query = q_positions[query]
        allowed = key >= 0
        if causal:
            allowed = allowed & (key <= query)
        if window is not None:
            # not query - key: that would be an int64 of [queries, keys]
            allowed = allowed & (key > query - window)
        if document_ids is not None:
            allowed = allowed & (document_ids[sequence, query] == document_ids[sequence, key])
        return allowed

    batch = 1 if document_ids is None else len(document_ids)
    queries = length if q_positions is None else len(q_positions)
    build = block_mask if device.type == "cuda" else dense_mask
    attn_mask = build(mask_mod, batch, queries, length, device)
    return Mask(causal, attn_mask, chunks=(0,) if whole else None)


class KeptMasks:
    """A `make_mask` that builds masks without tensors in their rule once, not in each micro-batch.

    It keeps those of the last MOST lengths and rules.
    """

    MOST = 8

    def __init__(self):
        self.kept: dict[tuple, Mask] = {}

    def __call__(
        self, length: int, device: torch.device, document_ids: Tensor | None = None, **rule
    ) -> Mask:
        """Return the mask that `make_mask` makes of these arguments; kept if no rows have their own."""
        if document_ids is not None or rule.get("q_positions") is not None:
            return make_mask(length, device, document_ids, **rule)
        key = length, device, *sorted(rule.items())
        if key not in self.kept:
            if len(self.kept) == self.MOST:
                self.kept.pop(next(iter(self.kept)))
            # autograd saves it, whoever asks first
            with torch.inference_mode(False):
                self.kept[key] = make_mask(length, device, **rule)
        return self.kept[key]


def dense_mask(
    mask_mod: Callable, batch: int, queries: int, keys: int, device: torch.device
) -> Tensor:
    """Return mask_mod of all pairs, bool [batch, 1, queries, keys], for SDPA."""
    return evaluate_mask(mask_mod, batch, torch.arange(queries, device=device), keys)


# --- kernels


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor | None = None) -> Tensor:
    """Return softmax(q k^T / sqrt(head_dim)) v over the keys that `mask` allows.

    q: [batch, heads, queries, head_dim].
    k, v: [batch, kv_heads, keys, head_dim]; kv_heads divides heads, and v's head_dim may differ.
    sinks: [heads], see `attention_with_sinks`.
    Returns [batch, heads, queries, v's head_dim].
    """
    # Modules name it as an exchange point, where the simulator replaces it; parallel/recompute.py
    # lists its kernels by name.
    if mask.chunks and mask.attn_mask is not None and takes_parts(q, v):
        return merged_attention(q, k, v, mask.chunks, sinks)
    if sinks is not None:
        return attention_with_sinks(q, k, v, mask, sinks)
    if isinstance(mask.attn_mask, BlockMask):
        return run_flex_attention(q, k, v, mask.attn_mask)
    causal = mask.causal and mask.attn_mask is None
    return _dot_product_attention(q, k, v, mask.attn_mask, causal)


def _dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool = False
) -> Tensor:
    """Call scaled_dot_product_attention. Shapes as in `attention`.

    bias: bool or of q's type, [batch or 1, heads or 1, queries, keys], or None.
    """
    # query heads per key/value head
    group = q.shape[1] // k.shape[1]
    # CUDA's kernels for shared key/value heads take half precision, up to 256 channels and no bias.
    # For other calls torch would fall back to one that materializes all scores: copy the heads.
    unsupported = bias is not None or q.dtype == torch.float32 or q.shape[3] > 256
    if q.is_cuda and group > 1 and unsupported:
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        group = 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=group > 1
    )


def attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor) -> Tensor:
    """Return `attention` with one more term in each softmax's denominator: exp(sinks[head]).

    Weights then sum to less than 1 (GPT-OSS). mask: one with an attn_mask; sinks: [heads].
    """
    allowed = mask.attn_mask
    if q.is_cuda and not isinstance(allowed, Tensor):
        out, aux = run_flex_attention(q, k, v, allowed, return_aux=AuxRequest(lse=True))
        return apply_sinks(out, aux.lse, sinks[:, None])
    # Add a key and a value of zeros for the sink: its score is its bias, and it adds 0 to outputs.
    # [batch, heads, queries, keys], then keys + 1
    bias = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device)
    bias = bias.masked_fill(~allowed, -torch.inf).expand(*q.shape[:3], -1)
    sink = sinks.to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
    bias = torch.cat([bias, sink], dim=-1)
    k = F.pad(k, (0, 0, 0, 1))
    v = F.pad(v, (0, 0, 0, 1))
    return _dot_product_attention(q, k, v, bias)


def apply_sinks(out: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    """Return the output with sinks from `out` [..., head_dim] without them.

    log_sum: [...], the log of the sum of exp(scores); sinks: broadcastable to it.
    """
    return out * torch.sigmoid(log_sum - sinks.float())[..., None].to(out.dtype)


class GroupedQueryAttention(nn.Module):
    """Attention in which several query heads share one key/value head (Ainslie et al. 2023).

    Biases on q, k, v: Qwen 2.5; on all: GPT-3. qk_norm, an RMSNorm of q and k before rotary
    embeddings, over each head: Qwen 3; over all heads of a token together: OLMo 3. Sinks: GPT-OSS.
    attn_output_gate, a gate of each output channel, which q_proj makes too: Qwen3-Next.
    """

    # the sampler computes them as one product
    same_input = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: "DecoderConfig"):
        super().__init__()
        hidden = config.hidden_size
        head_dim = config.head_dim
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads
        self.head_dim = head_dim
        self.query_factor = config.query_factor(head_dim)
        # exchange points: keys and values of context-parallel ranks; tokens of tensor-parallel ones
        self.attend = attention
        self.gather = self.reduce = identity
        self.output_gate = config.attn_output_gate
        queries = heads * head_dim * (2 if self.output_gate else 1)
        self.q_proj = nn.Linear(hidden, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=config.o_bias)
        self.normalizes_over_heads = config.qk_norm_over_heads

        kind = RMSNorm1P if config.norm == "rmsnorm1p" else nn.RMSNorm

        def norm(count: int) -> nn.Module:
            width = count * head_dim if config.qk_norm_over_heads else head_dim
            return kind(width, eps=config.norm_eps) if config.qk_norm else nn.Identity()

        self.q_norm = norm(heads)
        self.k_norm = norm(kv_heads)
        self.sinks = nn.Parameter(torch.empty(heads)) if config.sinks else None

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: Mask | None, cache=None
    ) -> Tensor:
        """Return [batch, seq, hidden]. x: [batch, seq, hidden]; rotary: from `rotary_tables`.

        cache: the KV cache, in place of a mask (rollout/caches.py).
        """
        x = self.gather(x)
        # [batch, seq, heads, head_dim]; -1, since a tensor-parallel rank holds fewer heads
        split = (*x.shape[:2], -1, self.head_dim)
        # [batch, seq, channels of all heads] each
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        if self.output_gate:
            # a head's queries, then its gates
            q, gate = q.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        if not self.normalizes_over_heads:
            q, k, v = (x.view(split) for x in (q, k, v))
        # over the last dimension
        q = self.q_norm(q).view(split)
        if self.query_factor != 1:
            q = q * self.query_factor
        k = self.k_norm(k).view(split)
        v = v.view(split)
        if rotary is not None:
            q = apply_rotary(q, *rotary)
            k = apply_rotary(k, *rotary)
        # [batch, heads, seq, head_dim]
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        # out: [batch, heads, seq, head_dim]
        if cache is None:
            out = self.attend(q, k, v, mask, self.sinks)
        else:
            out = cache.attend(q, k, v, self.sinks)
        # [batch, seq, heads, head_dim]
        out = out.transpose(1, 2)
        if self.output_gate:
            out = out * torch.sigmoid(gate)
        return self.reduce(self.o_proj(out.flatten(2)))
