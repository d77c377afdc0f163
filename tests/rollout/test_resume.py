"""Samples that stop and go on behind given tokens: what they draw, and what is computed for it."""

from collections import Counter
from functools import cache

import pytest
import torch

from minitrain import Sampler, SamplingParams
from minitrain.errors import InputError
from minitrain.settings import Rollout
from tests.helpers.sampling import make, prompts_of, trainer_logprobs

PARAMS = SamplingParams(temperature=0.8, max_tokens=40, n=2, stop_tokens=tuple(range(90)))
TURNS = 3
MODELS = {
    "qwen3-32b": {},
    # latents; sinks and windows; states, which no page holds
    "deepseek-v3": {},
    "gpt-oss-20b": {},
    "nemotron3-nano-30b-a3b": {},
}


def given(sample) -> list[int]:
    """What a sample is told when it has stopped: 1 to 7 tokens that depend on what it has said."""
    number = sum(sample.tokens) % 7 + 1
    return [(sum(sample.produced) + 11 * i) % 512 for i in range(number)]


def talk(sampler: Sampler, prompts, wait: int = 0, keep: bool = True) -> list[list]:
    """Each sample's turns, the samples of it that have stopped, told something `wait` steps later, and the last."""
    chats, resting = [], {}
    for number, prompt in enumerate(prompts):
        new = sampler.submit(prompt, PARAMS, number, keep=keep)
        chats += [[sample] for sample in new]
    while sampler.busy or resting:
        sampler.step()
        for chat in chats:
            sample = chat[-1]
            if sample.finish_reason != "stop":
                continue
            if len(chat) == TURNS or len(sample.tokens + given(sample)) >= sample.limit:
                sampler.cancel(sample)
            elif resting.setdefault(id(sample), wait) == 0:
                del resting[id(sample)]
                chat.append(sampler.resume(sample, given(sample)))
            else:
                resting[id(sample)] -= 1
    return chats


@cache
def model_of(name):
    return make(name, **MODELS[name])


@cache
def alone(name: str):
    """What is drawn if every turn is a request of its own: (context, tokens, log-probabilities)."""
    sampler = Sampler(model_of(name), settings=Rollout(slots=4, page_size=4, pages=60))
    found = []
    for number, prompt in enumerate(prompts_of()):
        for first in range(PARAMS.n):
            context, turns = prompt, []
            limit = len(prompt) + PARAMS.max_tokens
            for _ in range(TURNS):
                params = SamplingParams(
                    temperature=PARAMS.temperature,
                    max_tokens=limit - len(context),
                    stop_tokens=PARAMS.stop_tokens,
                )
                (sample,) = sampler.submit(context, params, number, first)
                while sampler.busy:
                    sampler.step()
                turns.append((context, sample.produced, sample.logprobs))
                context = sample.tokens + given(sample)
                if sample.finish_reason != "stop" or len(context) >= limit:
                    break
            found.append(turns)
    return found


def check_same(chats, name):
    expected = alone(name)
    assert [len(chat) for chat in chats] == [len(turns) for turns in expected]
    assert max(map(len, chats)) == TURNS
    for chat, turns in zip(chats, expected, strict=True):
        for sample, (context, tokens, logprobs) in zip(chat, turns, strict=True):
            assert (sample.prompt, sample.produced) == (context, tokens)
            assert sample.logprobs == pytest.approx(logprobs, abs=2e-5)


@pytest.mark.parametrize("wait", [0, 5])
@pytest.mark.parametrize("name", MODELS)
def test_turns_are_what_they_would_be_alone_and_computed_once(name, wait, monkeypatch):
    """The tokens of full requests, the log-probabilities of the trainer, and no token of a prompt twice."""
    model = model_of(name)
    sampler = Sampler(model, settings=Rollout(slots=3, page_size=4, pages=200, chunk=9))
    computed, prefill = [], sampler._prefill
    monkeypatch.setattr(
        sampler,
        "_prefill",
        lambda chunks: (computed.extend(n for _, n in chunks), prefill(chunks)),
    )
    chats = talk(sampler, prompts_of(), wait)
    check_same(chats, name)
    for sample in (sample for chat in chats for sample in chat):
        own = trainer_logprobs(model, sample.prompt, sample.produced, PARAMS.temperature)
        torch.testing.assert_close(torch.tensor(sample.logprobs), own, atol=3e-5, rtol=0)
    replies = sum(len(given(sample)) for chat in chats for sample in chat[:-1])
    prompts = sum(len(prompt) - 1 for prompt in prompts_of())
    # states are no pages: a row that others need costs the oldest one's
    if sampler.scheduler.reuse:
        assert sum(computed) <= prompts + replies and not sampler.scheduler.preemptions
    assert sampler.idle and sampler.scheduler.pages.available == 200


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "settings",
    [
        # a pool that has room for one and a half samples; the same with several steps at once, beyond ends
        Rollout(slots=4, page_size=4, pages=22, chunk=5),
        Rollout(slots=4, page_size=4, pages=22, chunk=5, steps=5),
        Rollout(slots=8, page_size=4, pages=200, steps=8),
    ],
    ids=["small", "small-steps", "steps"],
)
def test_turns_in_little_memory_and_in_many_steps(name, settings):
    sampler = Sampler(model_of(name), settings=settings)
    check_same(talk(sampler, prompts_of(), wait=3), name)
    assert sampler.idle and sampler.scheduler.pages.available == settings.pages


def test_held_sample_is_preempted_and_recomputed():
    sampler = Sampler(model_of("qwen3-32b"), settings=Rollout(slots=4, page_size=4, pages=22))
    (held,) = sampler.submit(
        [1, 2, 3] * 9, SamplingParams(stop_tokens=tuple(range(512)), max_tokens=9), keep=True
    )
    while sampler.busy:
        sampler.step()
    assert (
        held.finish_reason == "stop" and len(held.pages) == 7 and sampler.scheduler.held == [held]
    )
    with pytest.raises(RuntimeError, match="unfinished requests"):
        sampler.refresh()
    sampler.generate([[7] * 40], SamplingParams(max_tokens=48))  # needs all pages
    assert not held.pages and sampler.idle
    sampler.refresh()
    after = sampler.resume(held, [5, 6])
    while sampler.busy:
        sampler.step()
    (fresh,) = sampler.submit(
        after.prompt, SamplingParams(stop_tokens=tuple(range(512)), max_tokens=1)
    )
    while sampler.busy:
        sampler.step()
    assert fresh.produced == after.produced
    sampler.cancel(after)
    assert sampler.idle


def test_resuming_a_sample_that_cannot_go_on_is_one_line():
    sampler = Sampler(model_of("qwen3-32b"), settings=Rollout(slots=2, page_size=4, pages=22))
    (sample,) = sampler.submit(
        [1, 2], SamplingParams(stop_tokens=tuple(range(512)), max_tokens=4), keep=True
    )
    with pytest.raises(InputError, match="only a sample that has stopped can be resumed"):
        sampler.resume(sample, [1])
    while sampler.busy:
        sampler.step()
    with pytest.raises(InputError, match="a prompt of 6 tokens: use 1 to 5"):
        sampler.resume(sample, [1, 2, 3])
    with pytest.raises(InputError, match="the token 512"):
        sampler.resume(sample, [512])
    # none of this has cost it anything
    assert sampler.scheduler.held == [sample] and sample.pages
    (cut,) = sampler.submit([1, 2], SamplingParams(max_tokens=2), keep=True)
    while sampler.busy:
        sampler.step()
    assert cut.finish_reason == "length" and not cut.pages
    sampler.cancel(sample)
    assert sampler.idle and Counter(sampler.scheduler.pages.ref_count) == {0: 22}
