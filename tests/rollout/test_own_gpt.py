"""rollout/ taken home: the sampler for a GPT that knows nothing of minitrain but the sizes it tells."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain import Sampler, SamplingParams
from minitrain.models.decoder_config import DecoderConfig
from minitrain.rollout import compiled
from minitrain.settings import Rollout

VOCAB, WIDTH, HEADS, LAYERS, LENGTH = 64, 32, 4, 2, 48
PROMPTS = [[5, 9, 2, 33, 7, 1, 60, 12, 3], [8], [4, 4, 31, 17, 50]]
NEW = 12


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache=None) -> Tensor:
        q, k, v = (
            part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2)
        )
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = cache.attend(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm1, self.norm2 = (
            Attention(),
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH),
        )
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, cache=None) -> Tensor:
        x = x + self.attention(self.norm1(x), cache)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = DecoderConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            num_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=WIDTH // HEADS,
            max_position_embeddings=LENGTH,
        )
        self.embedding, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head_weight = nn.Parameter(torch.randn(VOCAB, WIDTH))

    def forward(self, tokens: Tensor, positions=None, head=None, cache=None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1])[None]
        x = self.embedding(tokens) + self.places(positions)
        for i, block in enumerate(self.blocks):
            x = block(x, cache=None if cache is None else cache[i])
        x = self.norm(x)
        return F.linear(x, self.head_weight) if head is None else head(x, self.head_weight, None)


@torch.no_grad()
def continued(model: GPT, prompt: list[int]) -> list[int]:
    """The likeliest tokens by full forward passes."""
    tokens = list(prompt)
    for _ in range(NEW):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("compile", [False, True])
def test_the_sampler_continues_a_model_of_ones_own(compile, monkeypatch):
    """In pages of 4 and pieces of prompts, two samples of each; compiled, each layer is one graph per kind of step."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled.compiled_forward.cache_clear()
    torch.manual_seed(0)
    model = GPT()
    settings = Rollout(slots=6, page_size=4, pages=60, chunk=7, compile=compile)
    params = SamplingParams(temperature=0, max_tokens=NEW, n=2)
    found = Sampler(model, settings=settings).generate(PROMPTS, params)
    expected = [continued(model, prompt) for prompt in PROMPTS]
    assert len(set(map(tuple, expected))) == len(PROMPTS)
    assert [each.tokens for each in found] == [tokens for tokens in expected for _ in range(2)]
    assert bool(compiled.compiled_forward.cache_info().currsize) == compile
    compiled.compiled_forward.cache_clear()
    torch.compiler.reset()
