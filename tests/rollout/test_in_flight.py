"""Weights that change between decoding steps: which version drew each token, and with which keys and values."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from minitrain import Sampler, SamplingParams, save_pretrained
from minitrain.settings import Rollout
from tests.helpers.sampling import check_books, make, prompts_of, trainer_logprobs

PARAMS = SamplingParams(temperature=0.8, max_tokens=20, n=2)
VERSIONS = 4
# tokens after which the next version comes
TOKENS = 25


def decode(sampler, prompts, weights, keep):
    """Sample with one version after the other; return the samples, and the version of each token.

    They are counted here, whatever the sampler says of them. Versions are numbered from 7 on.
    """
    samples = []
    for number, prompt in enumerate(prompts):
        samples += sampler.submit(prompt, PARAMS, number)
    drawn = {id(sample): [] for sample in samples}
    version = sampler.version = 7
    while sampler.busy:
        for sample, tokens in sampler.step():
            drawn[id(sample)] += [version] * len(tokens)
        if sum(map(len, drawn.values())) > TOKENS * (version - 6) and version < 6 + VERSIONS:
            paused = [] if keep else sampler.pause()
            assert keep or sampler.idle
            version = sampler.version = version + 1
            sampler.model.load_state_dict(weights[version - 7])
            sampler.refresh(keep)
            # a new prompt that begins like an old one
            samples += sampler.submit(prompts[-1] + [version], PARAMS, version)
            drawn |= {id(sample): [] for sample in samples[-PARAMS.n :]}
            sampler.go_on(paused)
    return samples, [drawn[id(sample)] for sample in samples]


def versions_of(sample):
    """The version of each token, from where they change."""
    found = []
    for (first, version), end in zip(
        sample.versions, [n for n, _ in sample.versions[1:]] + [len(sample.produced)], strict=True
    ):
        assert len(found) == first < end
        found += [version] * (end - first)
    return found


@pytest.mark.parametrize(
    "rollout",
    [
        Rollout(slots=16, page_size=4, pages=200),
        # with preemption, prompts in chunks, and samples that wait for a row
        Rollout(slots=5, page_size=4, pages=30, chunk=9, steps=3),
    ],
    ids=["all", "small"],
)
@pytest.mark.parametrize(
    "name", ["qwen3-32b", "deepseek-v3", "gpt-oss-20b", "nemotron3-nano-30b-a3b"]
)
def test_with_caches_computed_again_tokens_are_of_full_passes(name, rollout):
    """Of the version that each was drawn with, over all that stood before it."""
    models = [make(name, seed) for seed in range(VERSIONS)]
    model = make(name)
    sampler = Sampler(model, settings=rollout)
    weights = [each.state_dict() for each in models]
    samples, drawn = decode(sampler, prompts_of(), weights, keep=False)
    mixed = 0
    for sample, versions in zip(samples, drawn, strict=True):
        assert versions_of(sample) == versions and len(versions) == PARAMS.max_tokens
        mixed += len(set(versions)) > 1
        for version in set(versions):
            own = trainer_logprobs(models[version - 7], sample.prompt, sample.produced, 0.8)
            chosen = torch.tensor(versions) == version
            found = torch.tensor(sample.logprobs)[chosen]
            torch.testing.assert_close(found, own[chosen], atol=5e-5, rtol=0)
    assert mixed >= 4
    check_books(sampler.scheduler.pages, [])


def test_kept_caches_are_of_the_versions_that_computed_them(tmp_path):
    """As transformers has them, whose cache goes from one model to the next; later prompts do not find them."""
    theirs = []
    for seed in range(VERSIONS):
        save_pretrained(make("qwen3-32b", seed), tmp_path / str(seed))
        theirs.append(AutoModelForCausalLM.from_pretrained(tmp_path / str(seed)))
    model = make("qwen3-32b")
    sampler = Sampler(model, settings=Rollout(slots=16, page_size=4, pages=200))
    weights = [make("qwen3-32b", seed).state_dict() for seed in range(VERSIONS)]
    samples, drawn = decode(sampler, prompts_of((5, 21)), weights, keep=True)
    different = 0
    for number, (sample, versions) in enumerate(zip(samples, drawn, strict=True)):
        assert versions_of(sample) == versions and len(versions) == PARAMS.max_tokens
        # prompts are computed when they come: the first two before any change, then one by one
        began = 7 + max(0, number // PARAMS.n - 1)
        assert versions[0] == began
        cache = DynamicCache()
        with torch.no_grad():
            theirs[began - 7](torch.tensor([sample.prompt[:-1]]), past_key_values=cache)
            last = sample.prompt[-1]
            for token, version, logprob in zip(
                sample.produced, versions, sample.logprobs, strict=True
            ):
                logits = theirs[version - 7](torch.tensor([[last]]), past_key_values=cache).logits
                expected = (logits[0, -1] / 0.8).log_softmax(-1)[token].item()
                assert logprob == pytest.approx(expected, abs=5e-5)
                last = token
        version = versions[-1]
        fresh = trainer_logprobs(
            make("qwen3-32b", version - 7), sample.prompt, sample.produced, 0.8
        )
        different += abs(fresh[-1].item() - sample.logprobs[-1]) > 1e-3
    # what was drawn last is not what new keys and values would have given
    assert different >= 4
    check_books(sampler.scheduler.pages, [])


def test_a_pause_changes_no_token():
    """At any moment: samples that wait, are half computed, run, or are held for an answer."""
    model = make("qwen3-32b")
    settings = Rollout(slots=3, page_size=4, pages=40, chunk=7)
    stops = SamplingParams(temperature=0.8, max_tokens=20, n=2, stop_tokens=tuple(range(60)))

    def talk(pauses):
        sampler = Sampler(model, settings=settings)
        samples = []
        for number, prompt in enumerate(prompts_of()):
            samples += sampler.submit(prompt, stops, number, keep=True)
        # by the sample that has stopped, the one that goes on behind what it is told
        told = {}
        steps = 0
        while sampler.busy:
            sampler.step()
            steps += 1
            if pauses and steps % pauses == 0:
                paused = sampler.pause()
                assert sampler.idle and not any(sample.pages for sample in samples)
                sampler.free()
                sampler.go_on(paused)
            for sample in samples:
                if sample.finish_reason == "stop" and sample not in told:
                    told[sample] = sampler.resume(sample, [7, 8])
        return [(s.produced, told[s].produced if s in told else None) for s in samples]

    whole = talk(pauses=0)
    assert sum(said is not None for _, said in whole) > 2
    # seldom enough that a prompt can be computed in between
    for pauses in (25, 31):
        assert talk(pauses) == whole
