"""How decoding samples attend to the pool on CUDA, with a kernel's stand-in on the CPU that computes its definition."""

from types import SimpleNamespace

import pytest
import torch

from minitrain.errors import InputError
from minitrain.models.zoo import model_config
from minitrain.rollout import kv_cache
from minitrain.rollout.caches import Caches
from minitrain.rollout.capacity import check_page_size
from minitrain.rollout.cpu import RowsCache
from minitrain.rollout.steps import DecodingStep
from minitrain.settings import Rollout

PAGE, PAGES, DIM = 128, 8, 16
POSITIONS, TABLE = torch.tensor([5, 126, 300]), torch.tensor([[6, 0, 0], [1, 2, 0], [3, 4, 5]])


def attention_by_lists(q, k, v, block_mask, return_aux, kernel_options):
    """FlexAttention's definition: of the keys in a row's listed blocks, those that the mask allows."""
    query, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    scores = torch.einsum("rhqd,hkd->rhqk", q, k[0]) / q.shape[3] ** 0.5
    for row in range(len(q)):
        listed = block_mask.kv_indices[row, 0, 0, : block_mask.kv_num_blocks[row, 0, 0]]
        allowed = torch.isin(key // PAGE, listed) & block_mask.mask_mod(row, 0, query, key)
        scores[row].masked_fill_(~allowed, -torch.inf)
    out = torch.einsum("rhqk,hkd->rhqd", scores.softmax(-1), v[0])
    return out, SimpleNamespace(lse=scores.logsumexp(-1) if return_aux.lse else None)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("window", [None, 100, 1])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "sinks", "latent"),
    [
        (4, 4, False, False),
        (6, 2, False, False),
        (8, 2, True, False),
        (7, 1, True, False),
        (5, 1, False, True),
    ],
)
def test_samples_attend_to_their_pages(
    monkeypatch, heads, kv_heads, sinks, latent, window, width
):
    """Any number of heads may share keys; of latents, the values are the first channels. With drafts, tokens of a row
    lie in two pages."""
    monkeypatch.setattr(kv_cache, "compiled_flex_attention", lambda: attention_by_lists)
    positions = (POSITIONS[:, None] + torch.arange(width)).flatten()
    step = DecodingStep(positions, TABLE, torch.arange(3), PAGE, PAGES)
    step.begin()
    owner = Caches(model_config("llama3-8b-tiny"), PAGES - 1, PAGE, slots=3)
    owner.step, layer = step, kv_cache.PagedKVCache(owner, last=False, window=window)
    layer.pools = [torch.randn(PAGES, PAGE, kv_heads, DIM) for _ in range(1 if latent else 2)]
    q, bias = torch.randn(1, heads, 3 * width, DIM), torch.randn(heads) if sinks else None
    out = layer.attend_to_pool(q, 12 if latent else DIM, bias)
    for token, position in enumerate(positions.tolist()):
        row = token // width
        seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
        keys, values = (
            pool[TABLE[row]].flatten(0, 1)[seen] for pool in (layer.pools[0], layer.pools[-1])
        )
        for head in range(heads):
            of_head = head * kv_heads // heads
            scores = keys[:, of_head] @ q[0, head, token] / DIM**0.5
            weights = (
                torch.cat([scores, bias[head, None]]).softmax(0)[:-1]
                if sinks
                else scores.softmax(0)
            )
            expected = weights @ values[:, of_head, : 12 if latent else DIM]
            torch.testing.assert_close(out[0, head, token], expected)


def test_frequencies_are_those_of_what_is_asked_for():
    """theta ** (-2i / dim), for two bases and two dims in turn, as a model with local and global layers asks."""
    owner = Caches(model_config("llama3-8b-tiny"), 2, 16, slots=2)
    for dim, theta in 2 * [(16, 1e6), (16, 1e4), (8, 1e4)]:
        expected = [theta ** (-2 * i / dim) for i in range(dim // 2)]
        found = owner.frequencies(dim, theta, None, torch.device("cpu"))
        torch.testing.assert_close(found, torch.tensor(expected))


def test_pages_of_the_default_size_are_read_on_cuda():
    """FlexAttention's tiles are 128 keys: pages of 64 would be refused there, and the CPU takes any."""
    config = model_config("llama3-8b")
    check_page_size(Rollout().page_size, config, tp=1)
    with pytest.raises(InputError, match="page_size=64 must be a multiple of 128 on CUDA"):
        check_page_size(64, config, tp=1)
    # 128 heads read the same latents, and 4 query heads the same keys, for each of several tokens
    latents = model_config("deepseek-v3")
    check_page_size(128, latents, tp=4, width=4)
    check_page_size(128, config, tp=8, width=32)
    with pytest.raises(InputError, match="page_size=128 must be .* at least 256 for this model"):
        check_page_size(128, latents, tp=2, width=4)
    with pytest.raises(InputError, match="page_size=128 must be .* at least 256 for this model"):
        check_page_size(128, config, tp=8, width=33)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_decoding_on_the_cpu_writes_each_vector_to_its_place(kv_heads, width):
    """And not by torch's indexing, which would wake all threads."""
    positions = (POSITIONS[:, None] + torch.arange(width)).flatten()
    step = DecodingStep(positions, TABLE, torch.arange(3), PAGE, PAGES)
    step.begin()
    owner = Caches(model_config("llama3-8b-tiny"), PAGES - 1, PAGE, slots=3)
    owner.step, layer = step, RowsCache(owner, False, None)
    layer.pools = [torch.zeros(PAGES, PAGE, kv_heads, DIM) for _ in range(2)]
    new = [torch.randn(kv_heads, 3 * width, DIM) for _ in range(2)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer.write(new)
    for pool, x in zip(layer.pools, new, strict=True):
        expected = torch.zeros_like(pool)
        for token, position in enumerate(positions.tolist()):
            page = TABLE[token // width, position // PAGE]
            expected[page, position % PAGE] = x[:, token]
        assert torch.equal(pool, expected)
    assert not [event for event in profile.key_averages() if "index_put" in event.key]
