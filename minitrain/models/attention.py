"""Which query may see which key (`make_mask`), the kernel that computes it (`attention`), and
grouped-query attention.

Plain causal and full attention go to scaled_dot_product_attention, which is cuDNN on Hopper. Any
other mask goes to FlexAttention on CUDA, where a BlockMask skips the empty tiles; on CPU, where
FlexAttention has no backward, the same mask is made dense and given to
scaled_dot_product_attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.layers import apply_rotary

# One kernel per kind and size of mask, of the trainer's and the sampler's together. Uncompiled,
# flex_attention computes all scores and ignores block lists, by which alone the sampler's
# BlockMasks hide other samples' pages: better fail.
COMPILING = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}
# queries and keys of a BlockMask's tiles
TILE = 128
# a byte each: so many are looked at at once while it is made
PAIRS = 1 << 27


@dataclass(frozen=True, eq=False)
class Mask:
    """What a query may see: with `pairs` just those, else keys up to its own (causal), else all.

    pairs: bool [rows or 1, 1, queries, keys], or the same as a BlockMask; built once, for all
    layers of a forward pass.
    """

    causal: bool = True
    pairs: Tensor | BlockMask | None = None


def make_mask(
    length: int,
    device: torch.device,
    documents: Tensor | None = None,
    causal: bool = True,
    places: Tensor | None = None,
    window: int | None = None,
    plain: bool = True,
) -> Mask:
    """Query i sees key j of the same row if every condition allows it. length: the number of keys.

    causal: j <= i. documents: int [rows, length]; i and j have the same number there (packed
    sequences).
    places: int [queries]; each query's index among the keys, if they are not 0, 1, 2, ... (context
    parallelism).
    window: i - j < window, so many keys with the query's own.
    plain: no pairs where causal or full attention says it all, so that SDPA's own kernel runs;
    attention with sinks
        needs them.
    """
    if plain and documents is None and window is None and (places is None or not causal):
        return Mask(causal)

    def allows(row, head, query, key):
        if places is not None:
            query = places[query]
        # all, until a condition forbids some
        allowed = key >= 0
        if causal:
            allowed = allowed & (key <= query)
        if window is not None:
            # query - key would be an int64 of [queries, keys]
            allowed = allowed & (key > query - window)
        if documents is not None:
            allowed = allowed & (documents[row, query] == documents[row, key])
        return allowed

    rows = 1 if documents is None else len(documents)
    queries = length if places is None else len(places)
    return Mask(causal, allowed_pairs(allows, rows, queries, length, device))


def allowed_pairs(
    allows: Callable, rows: int, queries: int, keys: int, device: torch.device
) -> Tensor | BlockMask:
    """allows(row, head, query, key), with tensors of numbers: bool. Returns what a `Mask` has for
    this device.
    """
    build = block_pairs if device.type == "cuda" else dense_pairs
    return build(allows, rows, queries, keys, device)


def dense_pairs(
    allows: Callable, rows: int, queries: int, keys: int, device: torch.device
) -> Tensor:
    """bool [rows, 1, queries, keys], for scaled_dot_product_attention."""
    return pairs_of(torch.arange(queries, device=device), allows, rows, keys)


def pairs_of(query: Tensor, allows: Callable, rows: int, keys: int) -> Tensor:
    """bool [rows, 1, queries, keys], for the queries of these numbers."""
    row, key = (torch.arange(n, device=query.device) for n in (rows, keys))
    return allows(row[:, None, None], 0, query[:, None], key).expand(rows, len(query), keys)[
        :, None
    ]


def block_pairs(
    allows: Callable, rows: int, queries: int, keys: int, device: torch.device
) -> BlockMask:
    """The tiles that hold at least one allowed pair, for FlexAttention, which calls `allows` only
    in mixed tiles.

    What torch's create_block_mask returns, which holds all pairs at once: 17 GB a time for 131,072
    tokens.
    """
    stretch = TILE * max(1, PAIRS // (rows * keys * TILE))
    stretches = torch.arange(queries, device=device).split(stretch)
    allowed = torch.cat(
        [count_in_tiles(pairs_of(query, allows, rows, keys)) for query in stretches], dim=2
    )
    full = allowed == TILE * TILE
    mixed = (allowed > 0) & ~full
    return BlockMask.from_kv_blocks(
        *listed(mixed), *listed(full), BLOCK_SIZE=TILE, mask_mod=allows, seq_lengths=(queries, keys)
    )


def count_in_tiles(pairs: Tensor) -> Tensor:
    """bool [..., queries, keys] -> int64 [..., tiles of queries, tiles of keys]: how many of its
    pairs are true.
    """
    queries, keys = pairs.shape[-2:]
    padded = F.pad(pairs, (0, -keys % TILE, 0, -queries % TILE))
    return padded.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE)).sum((-3, -1))


def listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """bool [..., tiles] -> how many are true, int32 [...], and their numbers first, int32 [...,
    tiles].
    """
    return tiles.sum(-1, dtype=torch.int32), tiles.int().argsort(
        dim=-1, descending=True, stable=True
    ).int()


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask | None, **options):
    """Compiled flex_attention. Below 128 queries torch picks its decoding kernel, whose tile must
    hold the queries of all heads that share a key/value head; where they do not fit it fails to
    compile, and we ask for the usual one."""
    flex = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
    group = q.shape[1] // k.shape[1]
    if q.shape[2] < 128 < q.shape[2] * group:
        options["kernel_options"] = {"BACKEND": "TRITON"}
    return flex(q, k, v, block_mask=blocks, enable_gqa=group > 1, **options)


@cache
def compiled_flex_attention() -> Callable:
    from torch._dynamo import config  # takes seconds to import

    return config.patch(COMPILING)(torch.compile(flex_attention, dynamic=False))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(head_dim), over the keys that `mask` allows) v.

    q: [batch, heads, queries, head_dim]; k, v: [batch, kv_heads, keys, head_dim], where kv_heads
    divides heads. The heads of v may have another width. sinks: [heads], see
    `attention_with_sinks`. Returns [batch, heads, queries, v's head_dim].
    """
    if sinks is not None:
        return attention_with_sinks(sinks, q, k, v, mask)
    if isinstance(mask.pairs, BlockMask):
        return _flex_attention(q, k, v, mask.pairs)
    return _dot_product_attention(q, k, v, mask.pairs, causal=mask.causal and mask.pairs is None)


def _dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool = False
) -> Tensor:
    """scaled_dot_product_attention. CUDA's kernels for shared key/value heads take half precision,
    up to 256 channels and no bias; other calls get copies of the heads, since torch would fall back
    to one that holds all scores."""
    group = q.shape[1] // k.shape[1]
    if (
        q.is_cuda
        and group > 1
        and (bias is not None or q.dtype == torch.float32 or q.shape[3] > 256)
    ):
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        group = 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=group > 1
    )


def attention_with_sinks(sinks: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """`attention` whose softmax has one more term in its denominator, exp(sinks[head]): weights add
    up to less than 1.

    mask: with pairs. sinks: [heads]. If l is the log of the sum of all other terms, that is a
    factor sigmoid(l - sink) on the output.
    """
    if q.is_cuda and not isinstance(mask.pairs, Tensor):
        out, aux = _flex_attention(q, k, v, mask.pairs, return_aux=AuxRequest(lse=True))
        return apply_sinks(out, aux.lse, sinks[:, None])
    # A key of zeros, whose score is the bias alone, with a value of zeros.
    scores = torch.zeros(mask.pairs.shape, dtype=q.dtype, device=q.device).masked_fill(
        ~mask.pairs, -torch.inf
    )
    scores = scores.expand(*q.shape[:3], -1)
    bias = torch.cat([scores, sinks.to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)], dim=-1)
    return _dot_product_attention(q, F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), bias)


def apply_sinks(out: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    """`out` [..., head_dim] of attention without sinks, as it is with them. log_sum: [...]; sinks:
    any shape that broadcasts to it."""
    return out * torch.sigmoid(log_sum - sinks.float())[..., None].to(out.dtype)


class GroupedQueryAttention(nn.Module):
    """Attention in which several query heads share one key/value head (Ainslie et al. 2023).

    Biases on q, k, v: Qwen 2.5; on all: GPT-3. qk_norm, an RMSNorm over each head of q and k before
    the rotation: Qwen 3. Sinks, see `attention_with_sinks`: GPT-OSS.
    """

    same_input = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: DecoderConfig):
        super().__init__()
        hidden = config.hidden_size
        head_dim = config.head_dim
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads
        self.head_dim = head_dim
        # context parallelism puts its exchange of keys and values around it
        self.attend = attention
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=config.o_bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.empty(heads)) if config.sinks else None

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """q, k and v before they are split into heads; replaceable, as `GatedMLP.project` is."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: Mask | None, cache=None
    ) -> Tensor:
        """x: [batch, seq, hidden]; rotary: the tables of `rotary_tables`, or None. Returns [batch,
        seq, hidden].

        cache: in place of a mask, what holds the keys and values of earlier tokens
        (rollout/caches.py).
        """
        # -1: a tensor-parallel rank holds fewer heads
        split = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (heads.view(split) for heads in self.project(x))
        q = self.q_norm(q)
        k = self.k_norm(k)
        if rotary is not None:
            q = apply_rotary(q, *rotary)
            k = apply_rotary(k, *rotary)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        out = (
            self.attend(q, k, v, mask, self.sinks)
            if cache is None
            else cache.attend(q, k, v, self.sinks)
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))
