"""Weights and cached values that are not finite: an error in a line, and nothing for later samples."""

import dataclasses

import pytest
import torch

from minitrain import Sampler, SamplingParams
from minitrain.errors import InputError
from minitrain.settings import Rollout
from tests.helpers.sampling import make, prompts_of

pytestmark = pytest.mark.usefixtures("pack_everything")


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite(value, params):
    """Of one row of the head, as a broken update leaves them: no token is drawn from what is no distribution."""
    model = make("qwen3-32b")
    model.lm_head.weight[3] = value
    sampler = Sampler(model, settings=Rollout(page_size=4, pages=20))
    with pytest.raises(InputError, match="the model's logits are not finite"):
        sampler.generate([[1, 2]], SamplingParams(max_tokens=2, **params))
    assert not sampler.busy


@pytest.mark.parametrize(
    "family", ["qwen3-32b", "deepseek-v3", "gpt-oss-20b", "nemotron3-nano-30b-a3b"]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_values_in_the_cache_spoil_no_later_sample(value, family):
    """Masked keys and values count with a weight of 0, and 0 times NaN is NaN."""
    model, (long, short) = make(family, tie_word_embeddings=False), prompts_of((20, 3))
    sampler, params = (
        Sampler(model, settings=Rollout(slots=4, page_size=4, pages=40)),
        SamplingParams(max_tokens=6),
    )
    expected = sampler.generate([short, long], params)
    known = {
        token
        for tokens in (short, long, *(answer.tokens for answer in expected))
        for token in tokens
    }
    bad = next(token for token in range(512) if token not in known)
    model.model.embed_tokens.weight[bad] = value
    with pytest.raises(InputError, match="the model's logits are not finite"):
        sampler.generate([[bad] * 20, [bad] * 19], params)
    assert sampler.generate([short, long], params) == expected


def test_tokens_computed_after_a_samples_end_spoil_no_later_one():
    """Of several steps at once the last ones may be for nothing, but their tokens are in the caches."""
    model, settings = (
        make("qwen3-32b", tie_word_embeddings=False),
        Rollout(slots=4, page_size=4, pages=12, steps=8),
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    prompts = prompts_of((10, 5))
    first, second, third = (
        Sampler(model, settings=settings).generate([[5, 6, 7]], greedy)[0].tokens[:3]
    )
    expected = Sampler(model, settings=settings).generate(prompts, greedy)
    assert (
        len(
            {
                first,
                second,
                third,
                *prompts[0],
                *prompts[1],
                *expected[0].tokens,
                *expected[1].tokens,
            }
        )
        > 3
    )
    sampler = Sampler(model, settings=settings)
    kept = model.model.embed_tokens.weight[third].clone()
    model.model.embed_tokens.weight[third] = torch.nan
    ended = sampler.generate([[5, 6, 7]] * 3, dataclasses.replace(greedy, stop_tokens=(second,)))
    assert [answer.tokens for answer in ended] == [[first, second]] * 3
    model.model.embed_tokens.weight[third] = kept
    assert sampler.generate(prompts, greedy) == expected
