"""What decoding reads, against published sizes and against what the sampler really holds."""

import pytest

from minitrain import Sampler, SamplingParams
from minitrain.bench.decoding import Reads, bytes_read, model_reads
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.rollout.caches import StateCache
from minitrain.rollout.kv_cache import PagedKVCache
from minitrain.settings import Rollout


def test_of_a_published_model():
    """Llama 3.1 8B: 8.030 billion parameters, of which an embedding row a token; 8 heads of 128 in 32 layers."""
    config = model_config("llama3.1-8b")
    reads = model_reads(config)
    assert reads.shared == pytest.approx(2 * (8.030e9 - 128256 * 4096), rel=1e-3)
    assert (reads.expert, reads.token, reads.heads, reads.states) == (0, 2 * 2 * 8 * 128, 8, 0)
    assert bytes_read(reads, config, samples=3, context=100) == (
        reads.shared,
        3 * 100 * 32 * reads.token,
    )


@pytest.mark.parametrize(
    "name",
    [
        "llama3-8b",
        "gpt-oss-20b",
        "deepseek-v3",
        "nemotron3-nano-30b-a3b",
        "qwen3-next-80b-a3b",
        "gpt3-175b",
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_is_what_the_sampler_holds(name, tied):
    config = model_config(f"{name}-tiny", tie_word_embeddings=tied)
    model = Decoder(config).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.02)
    sampler = Sampler(model, settings=Rollout(slots=2, page_size=4, pages=8))
    sampler.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    reads = model_reads(config, itemsize=4)
    looked_up = (
        ("embed_positions.weight",) if tied else ("embed_positions.weight", "embed_tokens.weight")
    )
    read = sum(p.nbytes for name, p in model.named_parameters() if not name.endswith(looked_up))
    assert reads.shared + config.num_experts * reads.expert == read
    caches, states = sampler.caches, 0.0
    for layer in caches.layers:
        if isinstance(layer, PagedKVCache):
            assert (
                sum(pool.nbytes for pool in layer.pools)
                == reads.token * caches.pages * caches.page_size
            )
        elif isinstance(layer, StateCache):
            states += sum(state.nbytes for state in layer.states) / caches.slots
    assert reads.states == states


def test_windows_experts_and_ranks():
    """GPT-OSS: every other layer sees a window. Of 8 experts, of which a token chooses 2, three miss each with (3/4)^3.
    Two heads cannot be split over four ranks, states can, which are read and written."""
    config = model_config(
        "gpt-oss-20b-tiny", num_layers=4, sliding_window=8, num_experts=8, num_experts_per_tok=2
    )
    reads = Reads(shared=1000, expert=100, token=1, heads=2, states=6)
    weights, caches = bytes_read(reads, config, samples=3, context=20)
    assert weights == pytest.approx(1000 + 8 * (1 - (3 / 4) ** 3) * 100) and caches == 3 * (
        2 * 8 + 2 * 20 + 2 * 6
    )
    ranks = bytes_read(reads, config, samples=3, context=20, tp=4)
    assert ranks == (pytest.approx(weights / 4), 3 * ((2 * 8 + 2 * 20) / 2 + 2 * 6 / 4))
