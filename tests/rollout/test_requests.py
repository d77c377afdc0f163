"""Requests that come and go: rows and pages that others had, failures, interrupts."""

import dataclasses
import itertools

import pytest
import torch

from minitrain import Sampler, SamplingParams
from minitrain.data.tokenizer import ByteTokenizer
from minitrain.errors import InputError
from minitrain.rollout.caches import StateCache
from minitrain.settings import Rollout
from tests.helpers.sampling import NEW, make, prompts_of, uncached

pytestmark = pytest.mark.usefixtures("pack_everything")


def test_a_request_may_fill_the_pool():
    """6 + 11 tokens, of which the last is not kept, are 4 pages of 4, and 4 times 3 steps are more than 11."""
    model, prompt = make("llama3-8b"), list(range(6))
    sampler = Sampler(model, settings=Rollout(slots=2, page_size=4, pages=4, steps=3))
    [sample] = sampler.submit(prompt, SamplingParams(temperature=0.0, max_tokens=11))
    for _ in range(6):  # the prompt, then the steps, and one too many
        sampler.step()
    assert sample.produced == uncached(model, prompt, 11) and sampler.scheduler.preemptions == 0


def test_rows_that_outgrow_their_buffers():
    """Which have room for twice as many tokens as when they were made: full amid the third time of three steps."""
    model = make("qwen3-32b")
    sampler = Sampler(model, settings=Rollout(page_size=4, pages=50, steps=3))
    (found,) = sampler.generate([[1]], SamplingParams(temperature=0, max_tokens=20))
    assert found.tokens == uncached(model, [1], 20)
    # no longer ones
    several = sampler.generate([[1], [2], [3]], SamplingParams(temperature=0, max_tokens=4))
    assert [each.tokens for each in several] == [uncached(model, [n], 4) for n in (1, 2, 3)]


def test_a_sample_that_comes_back_to_its_row():
    """Which other tokens have filled up meanwhile: its prompt is computed again in pieces, with steps in between."""
    model, (prompt,) = make("qwen3-32b"), prompts_of((9,))
    sampler = Sampler(model, settings=Rollout(slots=4, page_size=4, pages=50, chunk=4))
    samples = sampler.submit(prompt, SamplingParams(temperature=0, max_tokens=NEW, n=4))
    while len(samples[3].produced) < 3:
        sampler.step()
    sampler.scheduler.reuse = False
    sampler.scheduler._preempt()
    while sampler.busy:
        sampler.step()
    assert [sample.produced for sample in samples] == [uncached(model, prompt, NEW)] * 4


def test_states_are_kept_in_fp32():
    """Whatever the model computes in: what a scan adds up over a thousand tokens would be lost in bf16.

    And one more than samples and a waiting prefill can have, for rows that only fill up.
    """
    sampler = Sampler(
        make("nemotron3-nano-30b-a3b").bfloat16(), settings=Rollout(page_size=4, pages=20)
    )
    sampler.generate([[1, 2]], SamplingParams(max_tokens=2))
    states = [layer.states for layer in sampler.caches.layers if isinstance(layer, StateCache)]
    assert {(conv.dtype, scan.dtype) for conv, scan in states} == {
        (torch.bfloat16, torch.float32)
    }
    assert {len(each) for pair in states for each in pair} == {len(sampler.scheduler.slots) + 1}


def test_requests_come_and_go():
    """Submitted while others run, and cancelled: waiting, running, and one of a group."""
    model, prompts = make("qwen3-32b"), prompts_of((9, 5, 7))
    sampler = Sampler(model, settings=Rollout(slots=2, page_size=4, pages=30))
    params = SamplingParams(temperature=0, max_tokens=NEW)
    (first,) = sampler.submit(prompts[0], params)
    while len(first.produced) < 3:
        news = sampler.step()
    assert news == [(first, first.produced[-1:])]
    group = sampler.submit(prompts[1], dataclasses.replace(params, n=3))
    (last,) = sampler.submit(prompts[2], params)
    while not group[0].produced:
        sampler.step()
    for sample in (first, group[2], last):
        sampler.cancel(sample)
    with pytest.raises(RuntimeError, match="unfinished requests"):
        sampler.refresh()
    while sampler.busy:
        sampler.step()
    assert [s.finish_reason for s in (first, *group, last)] == [
        "cancelled",
        "length",
        "length",
        "cancelled",
        "cancelled",
    ]
    assert (
        group[0].produced == group[1].produced == uncached(model, prompts[1], NEW)
        and not last.produced
    )
    assert first.produced == uncached(model, prompts[0], NEW)[: len(first.produced)]
    assert sampler.scheduler.pages.available == 30
    sampler.free()
    sampler.cancel(first, *group)  # those who left long ago


def test_nothing_stays_queued_after_a_failure(monkeypatch):
    model, prompts, params = (
        make("qwen3-32b"),
        prompts_of((9, 5)),
        SamplingParams(temperature=0, max_tokens=4),
    )
    sampler = Sampler(model, settings=Rollout(slots=2, page_size=4, pages=30, chunk=7))
    with pytest.raises(InputError, match="2 prompts and 1 SamplingParams"):
        sampler.generate(prompts, [params])
    assert not sampler.busy
    forward = model.forward
    for passes in range(4):  # in prompts, then in decoding
        left = iter(range(passes))

        def interrupted(*args, **named):
            if next(left, None) is None:  # noqa: B023
                raise KeyboardInterrupt
            return forward(*args, **named)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(model, "forward", interrupted)
            sampler.generate(prompts, params)
        assert not sampler.busy and sampler.scheduler.pages.available == 30
    found = sampler.generate(prompts, params)
    assert [each.tokens for each in found] == [uncached(model, prompt, 4) for prompt in prompts]


def test_text_that_is_given_up_leaves_nothing_queued():
    """Oracle: an idle sampler with all pages free, and the text of the tokens without a cache."""
    model = make("qwen3-32b", vocab_size=258)
    tokenizer = ByteTokenizer()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    sampler = Sampler(model, tokenizer, settings=Rollout(slots=2, page_size=4, pages=30, chunk=7))

    def check_idle() -> None:
        assert not sampler.busy
        assert sampler.scheduler is None or sampler.scheduler.pages.available == 30
        sampler.refresh()

    # the second prompt is refused when the first one is queued already
    for wrong in (None, [], [999]):
        with pytest.raises(InputError, match="a prompt"):
            sampler.generate_text([[5, 6, 7], wrong], params)
        check_idle()
    with pytest.raises(InputError, match="prompts must be a list"):
        sampler.generate_text("123", params)
    with pytest.raises(InputError, match="n=2: a stream is the text of one sample"):
        next(sampler.stream("123", dataclasses.replace(params, n=2)))
    check_idle()
    # streams that are left before the first piece, and after it
    unread = sampler.stream("123", params)
    begun = sampler.stream("123", params)
    next(begun)
    assert sampler.busy
    begun.close()
    check_idle()
    del unread
    check_idle()
    # without a tokenizer there is no text
    mute = Sampler(model, settings=sampler.settings)
    with pytest.raises(InputError, match="needs a sampler with a tokenizer"):
        mute.generate_text([[5, 6, 7]], params)
    assert not mute.busy
    # another reader goes on
    left = sampler.stream("456", params)
    next(left)
    expected = tokenizer.decode(uncached(model, [*b"123"], 6))
    assert "".join(sampler.stream("123", params)) == expected
    left.close()
    assert sampler.generate_text(["123"], params) == [expected]
    check_idle()


def test_an_interrupted_step_counts_for_nothing():
    """Neither what layers before the interrupt have kept of its tokens, of a prompt's chunk or of decoding samples."""
    model, prompts = make("nemotron3-nano-30b-a3b"), prompts_of((9, 6))
    sampler = Sampler(model, settings=Rollout(slots=3, page_size=4, pages=30, chunk=4))
    params, passes, interrupts = SamplingParams(temperature=0, max_tokens=6), itertools.count(), 0

    def interrupt(*args):
        if next(passes) in (1, 5, 8):
            raise KeyboardInterrupt

    model.blocks[-1].register_forward_pre_hook(interrupt)
    samples = [sample for prompt in prompts for sample in sampler.submit(prompt, params)]
    while sampler.busy:
        try:
            sampler.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 3 and [s.produced for s in samples] == [
        uncached(model, prompt, 6) for prompt in prompts
    ]
