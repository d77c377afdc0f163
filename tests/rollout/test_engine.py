"""The sampler against uncached full forward passes of the same model, and what it leaves of the model."""

import pytest
import torch

from minitrain import Sampler, SamplingParams
from minitrain.rollout import cpu as cpu_attention
from minitrain.rollout.steps import DecodingStep
from minitrain.settings import Rollout
from minitrain.training.language_modeling import LanguageModeling
from minitrain.training.loss import IGNORE
from tests.helpers.families import families
from tests.helpers.sampling import NEW, make, prompts_of, trainer_logprobs, uncached

pytestmark = pytest.mark.usefixtures("pack_everything")

# the other models have another rotary scaling, router or width of experts
FAMILIES = [name.removesuffix("-tiny") for name in families()]
FAMILIES += ["llama3.1-8b", "kimi-k2", "nemotron3-super-120b-a12b"]
SETTINGS = {
    "one at a time, in large pages": Rollout(slots=1, page_size=32, pages=2),
    "together, prompts shared": Rollout(slots=16, page_size=4, pages=200, steps=3),
    "interrupted, prompts in pieces": Rollout(slots=5, page_size=4, pages=12, chunk=7),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_without_a_cache(name):
    model, prompts = make(name), prompts_of()
    expected = [uncached(model, prompt, NEW) for prompt in prompts]
    assert len(set(map(tuple, expected))) == len(prompts)
    for setting, rollout in SETTINGS.items():
        sampler = Sampler(model, settings=rollout)
        n = 1 if rollout.slots == 1 else 3
        found = sampler.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW, n=n))
        assert [each.tokens for each in found] == [
            tokens for tokens in expected for _ in range(n)
        ], setting
        assert (sampler.scheduler.preemptions > 0) == setting.startswith("interrupted")
        for each, prompt in zip(
            found, [prompt for prompt in prompts for _ in range(n)], strict=True
        ):
            theirs = trainer_logprobs(model, prompt, each.tokens)
            torch.testing.assert_close(torch.tensor(each.logprobs), theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3-32b", "deepseek-v3", "gpt-oss-20b"])
def test_groups_that_read_their_prompt_once(name, monkeypatch):
    """Two groups and a sample of its own, whose prompts have 5, 4 and 2 full pages: 8 tokens are read together.

    Then the first of a group goes, whose row alone had them, and one from amid the other.
    """
    monkeypatch.setattr(cpu_attention, "MIN_SHARED_TOKENS", 1)
    model, prompts = make(name), prompts_of((21, 18, 9))
    sampler = Sampler(model, settings=Rollout(slots=16, page_size=4, pages=200))
    params = [SamplingParams(temperature=0, max_tokens=NEW, n=n) for n in (4, 3, 1)]
    samples = [
        sample for pair in zip(prompts, params, strict=True) for sample in sampler.submit(*pair)
    ]
    seen = set()
    while sampler.busy:
        sampler.step()
        step = sampler.caches.step
        if isinstance(step, DecodingStep):
            rows = torch.arange(8)
            seen.add(
                (
                    step.rows.shared,
                    tuple(tuple(rows[index].tolist()) for _, index in step.rows.groups),
                )
            )
            if len(samples[4].produced) == NEW // 2:
                sampler.cancel(samples[4], samples[1])
    assert {(8, ((0, 1, 2, 3), (4, 5, 6), (7,))), (12, ((0, 2, 3), (1, 5), (4,)))} <= seen
    expected = [uncached(model, prompt, NEW) for prompt in prompts]
    lengths = [NEW // 2 if i in (1, 4) else NEW for i in range(8)]
    expected = [
        expected[i][:length] for i, length in zip((0, 0, 0, 0, 1, 1, 1, 2), lengths, strict=True)
    ]
    assert [sample.produced for sample in samples] == expected
    for sample in samples:
        theirs = trainer_logprobs(model, sample.prompt, sample.produced)
        torch.testing.assert_close(torch.tensor(sample.logprobs), theirs, atol=1e-5, rtol=0)


def test_a_window_without_sinks():
    """Of 6 keys, of which a prompt has more, at once and in pieces. No model of the zoo has one."""
    model, (prompt,) = make("qwen3-32b", sliding_window=6), prompts_of((21,))
    expected = uncached(model, prompt, NEW)
    assert expected != uncached(make("qwen3-32b"), prompt, NEW)
    for rollout in SETTINGS.values():
        (found,) = Sampler(model, settings=rollout).generate(
            [prompt], SamplingParams(temperature=0, max_tokens=NEW)
        )
        assert found.tokens == expected
        theirs = trainer_logprobs(model, prompt, found.tokens)
        torch.testing.assert_close(torch.tensor(found.logprobs), theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_each_filter_alone_leaves_the_likeliest(params):
    model, (prompt,) = make("qwen3-32b"), prompts_of((6,))
    (found,) = Sampler(model).generate([prompt], SamplingParams(max_tokens=4, **params))
    assert found.tokens == uncached(model, prompt, 4) and found.logprobs == [0.0] * 4


def test_latents_are_kept_once():
    """[latent | k_rope] per token and layer, which are keys and values of all heads (DeepSeek-V2 paper, table 1)."""
    model = make("deepseek-v3")
    sampler = Sampler(model, settings=Rollout(page_size=4, pages=50))
    sampler.generate(prompts_of(), SamplingParams(max_tokens=2))
    config, kept = model.config, [pool for layer in sampler.caches.layers for pool in layer.pools]
    assert len(kept) == config.num_layers
    assert {pool.shape[1:] for pool in kept} == {
        (4, 1, config.kv_lora_rank + config.qk_rope_head_dim)
    }


@pytest.mark.parametrize("name", ["qwen3-32b", "nemotron3-nano-30b-a3b", "qwen3.5-9b"])
def test_samples_do_not_depend_on_the_batch(name):
    model, prompts = make(name), prompts_of()
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, max_tokens=NEW, n=3, seed=i)
        for i in range(len(prompts))
    ]
    runs = [
        Sampler(model, settings=rollout).generate(prompts, params)
        for rollout in SETTINGS.values()
    ]
    tokens = [[each.tokens for each in run] for run in runs]
    assert tokens[0] == tokens[1] == tokens[2] and len(set(map(tuple, tokens[0]))) == 3 * len(
        prompts
    )
    alone = Sampler(model, settings=SETTINGS["together, prompts shared"]).generate(
        prompts[2:3], params[2:3]
    )
    assert [each.tokens for each in alone] == tokens[0][6:9]


def test_logprobs_are_the_trainers():
    """Of drawn tokens: each one's at a temperature; all together, what the trainer's objective sums."""
    model, prompts = make("qwen3-32b"), prompts_of()
    for temperature in (0.7, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=NEW)
        for prompt, each in zip(prompts, Sampler(model).generate(prompts, params), strict=True):
            theirs = trainer_logprobs(model, prompt, each.tokens, temperature)
            torch.testing.assert_close(torch.tensor(each.logprobs), theirs, atol=1e-5, rtol=0)
    row, begin = torch.tensor([prompt + each.tokens]), len(prompt)
    labels = torch.where(torch.arange(row.shape[1]) < begin, IGNORE, row)[:, 1:]
    loss = LanguageModeling().loss(model, {"tokens": row[:, :-1], "labels": labels})
    assert sum(each.logprobs) == pytest.approx(-loss.item(), abs=1e-5 * NEW)


def test_new_weights_need_a_refresh_and_get_one():
    model, prompt = make("qwen3-32b"), prompts_of((20,))
    sampler, params = (
        Sampler(model, settings=Rollout(page_size=4, pages=50)),
        SamplingParams(max_tokens=5, n=2),
    )
    sampler.generate(prompt, params)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)

    def error():
        found = sampler.generate(prompt, params)
        theirs = torch.stack([trainer_logprobs(model, prompt[0], each.tokens) for each in found])
        return (
            (torch.tensor([each.logprobs for each in found]) - theirs).abs().exp().mean().item()
        )

    assert error() > 1.01  # token_mult_prob_error says so
    sampler.refresh()
    assert error() < 1.0001
    sampler.free()
    assert sampler.scheduler is None and error() < 1.0001


def test_graphs_are_dropped_only_with_matrices_made_of_the_weights():
    # absorbed matrices are made anew
    for name, kept in (("qwen3-32b", True), ("deepseek-v3", False)):
        sampler = Sampler(make(name), settings=Rollout(page_size=4, pages=50))
        sampler.generate([[1, 2]], SamplingParams(max_tokens=2))
        sampler.batches[1].captured["a graph"] = None
        sampler.refresh()
        assert bool(sampler.batches[1].captured) == kept
