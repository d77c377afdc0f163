"""FlexAttention on CUDA: build the BlockMask of any mask, and call the compiled kernel.

A BlockMask lists the tiles in which a query sees a key at all, so the kernel skips the others.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import config
from torch.nn.attention.flex_attention import BlockMask, flex_attention

# Trainer and sampler together compile one kernel per kind and size of mask. It must not fall back
# to eager flex_attention, which computes all scores and ignores a BlockMask's lists of blocks: the
# only thing that hides other samples' pages from the sampler's queries.
COMPILING = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}
# queries and keys of a BlockMask's tile
BLOCK_SIZE = 128
# query-key pairs evaluated at a time while a BlockMask is built, one byte each
MAX_PAIRS = 1 << 27


def evaluate_mask(mask_mod: Callable, batch: int, query: Tensor, keys: int) -> Tensor:
    """Return mask_mod for queries of the indices `query` [n], bool [batch, 1, n, keys]."""
    sequence = torch.arange(batch, device=query.device)[:, None, None]
    key = torch.arange(keys, device=query.device)
    # [batch, queries, keys]
    allowed = mask_mod(sequence, 0, query[:, None], key).expand(batch, len(query), keys)
    return allowed[:, None]


def block_mask(
    mask_mod: Callable, batch: int, queries: int, keys: int, device: torch.device
) -> BlockMask:
    """Return mask_mod as a BlockMask of tiles [BLOCK_SIZE, BLOCK_SIZE], for FlexAttention.

    The result is that of torch's create_block_mask, which materializes the full mask: 17 GB for
    131,072 tokens.
    """
    at_a_time = BLOCK_SIZE * max(1, MAX_PAIRS // (batch * keys * BLOCK_SIZE))
    parts = torch.arange(queries, device=device).split(at_a_time)
    # eager, 12 kernels read and write 10 bytes per pair: 60 ms for 131,072 tokens (one H100)
    is_long = len(parts) > 1 and device.type == "cuda"
    count = compiled_count() if is_long else count_pairs
    counts = [count(mask_mod, batch, part, keys) for part in parts]
    # [batch, 1, query tiles, key tiles]
    allowed = torch.cat(counts, dim=2)
    full = allowed == BLOCK_SIZE * BLOCK_SIZE
    partial = (allowed > 0) & ~full
    return BlockMask.from_kv_blocks(
        *true_first(partial),
        *true_first(full),
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=mask_mod,
        seq_lengths=(queries, keys),
    )


@cache
def compiled_count() -> Callable:
    return torch.compile(count_pairs, dynamic=False)


def count_pairs(mask_mod: Callable, batch: int, query: Tensor, keys: int) -> Tensor:
    """Count the allowed pairs of each tile, int64 [batch, 1, query tiles, key tiles].

    Arguments are those of `evaluate_mask`.
    """
    allowed = evaluate_mask(mask_mod, batch, query, keys)
    # up to whole tiles, with pairs that are not allowed
    padded = F.pad(allowed, (0, -keys % BLOCK_SIZE, 0, -len(query) % BLOCK_SIZE))
    tiles = padded.unflatten(-1, (-1, BLOCK_SIZE))
    tiles = tiles.unflatten(-3, (-1, BLOCK_SIZE))
    return tiles.sum((-3, -1))


def true_first(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many tiles are true, int32 [...], and all indices, int32 [..., tiles].

    The indices of true tiles come first. tiles: bool [..., tiles].
    """
    indices = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), indices.int()


def run_flex_attention(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask | None, **options):
    """Call flex_attention, compiled. q: [batch, heads, queries, head_dim]; k, v: see `attention`.

    Returns [batch, heads, queries, v's head_dim], and what `options` ask for.
    """
    # inside of a compiled block it is compiled with the block
    flex = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
    group = q.shape[1] // k.shape[1]
    # Below 128 queries torch picks its decoding kernel, which fails to compile if its tile cannot
    # hold the queries of all heads that share a key/value head. Then ask for the usual kernel.
    if q.shape[2] < 128 < q.shape[2] * group:
        options["kernel_options"] = {"BACKEND": "TRITON"}
    return flex(q, k, v, block_mask=blocks, enable_gqa=group > 1, **options)


@cache
def compiled_flex_attention() -> Callable:
    return config.patch(COMPILING)(torch.compile(flex_attention, dynamic=False))
