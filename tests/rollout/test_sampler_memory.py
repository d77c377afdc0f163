"""What a sampler holds: pages for the samples that are expected, and nothing when it is gone."""

import gc
import weakref

import pytest
import torch

from minitrain import Sampler, SamplingParams
from minitrain.errors import InputError
from minitrain.rollout import capacity
from minitrain.rollout.scheduler import Scheduler
from minitrain.rollout.steps import DecodingStep
from minitrain.settings import Rollout
from tests.helpers.sampling import make, prompts_of

pytestmark = pytest.mark.usefixtures("pack_everything")


def pages_of(sampler: Sampler) -> int:
    return capacity.page_count(sampler.cached, sampler.settings, sampler.rows, sampler.longest)


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", ["qwen3-32b", "deepseek-v3", "nemotron3-nano-30b-a3b"])
def test_memory_is_free_at_once(name, no_collector):
    """And not when Python next looks for cycles: until then a trainer could not have it."""
    sampler = Sampler(make(name), settings=Rollout(page_size=4, pages=50))
    sampler.generate(prompts_of((6,)), SamplingParams(max_tokens=3))
    layers = [layer for layer in sampler.caches.layers if layer is not None]
    held = [
        layer.pools + layer.buffers if hasattr(layer, "pools") else layer.states
        for layer in layers
    ]
    tensors = [tensor for each in held for tensor in each]
    tensors += [matrix for matrix, *_ in sampler.weights.packed.values()]
    alive = [weakref.ref(each) for each in (*tensors, *sampler.batches.values())]
    del layers, held, tensors
    sampler.free()
    assert alive and not any(ref() is not None for ref in alive)


def test_page_lists_are_free_at_once(no_collector):
    step = DecodingStep(
        torch.zeros(2).long(), torch.zeros(2, 3).long(), torch.zeros(2).long(), 4, 6
    )
    step.begin()
    lists = weakref.ref(step.page_mask(None).kv_indices)
    assert lists() is not None
    del step
    assert lists() is None


def test_a_pool_keeps_its_size_while_that_fits(monkeypatch):
    """Kernels are compiled for it, and a trainer's optimizer takes memory after the first step."""
    # bytes: tokens, keys and values, heads, channels, layers, fp32
    free, page = (10**6, 4 * 2 * 4 * 16 * 4 * 4)
    model = make("qwen3-32b", num_key_value_heads=4, head_dim=16, num_layers=4)
    monkeypatch.setattr(capacity, "free_memory", lambda device: free)
    sampler, counts = Sampler(model, settings=Rollout(page_size=4, memory=0.5)), []
    for free in (10**6, 6 * 10**5, 10**7, 4 * 10**5):  # noqa: B007
        sampler.generate([[1, 2]], SamplingParams(max_tokens=1))
        counts.append(sampler.scheduler.pages.count)
        sampler.free()
    assert counts == [5 * 10**5 // page] * 3 + [2 * 10**5 // page]


@pytest.mark.parametrize("name", ["nemotron3-nano-30b-a3b", "qwen3-next-80b-a3b"])
def test_pages_leave_room_for_the_states_of_recurrent_layers(monkeypatch, name):
    """Those that the caches hold after a step, for 8 samples, one that waits and the null slot."""
    sampler = Sampler(make(name), settings=Rollout(page_size=4, pages=50), samples=8)
    sampler.generate(prompts_of((6,)), SamplingParams(max_tokens=3))
    layers = sampler.caches.layers
    states = sum(x.nbytes for layer in layers for x in getattr(layer, "states", ()))
    # of 50 pages and the null page
    page = sum(pool.nbytes for layer in layers for pool in getattr(layer, "pools", ())) // 51
    monkeypatch.setattr(capacity, "free_memory", lambda device: states + 7 * page)
    assert states and capacity.fitting_pages(sampler.cached, 4, 1.0, sampler.rows) == 7


def test_pages_that_memory_has_no_room_for(monkeypatch):
    page = 4 * 2 * 4 * 16 * 4 * 4  # bytes, as above
    model = make("qwen3-32b", num_key_value_heads=4, head_dim=16, num_layers=4)
    monkeypatch.setattr(capacity, "free_memory", lambda device: 20 * page)
    Sampler(model, settings=Rollout(page_size=4, pages=20)).generate(
        [[1, 2]], SamplingParams(max_tokens=1)
    )
    with pytest.raises(
        InputError,
        match=r"^rollout.pages=21 are more than .* has room for \(use at most 20, or 0\)",
    ):
        Sampler(model, settings=Rollout(page_size=4, pages=21)).generate(
            [[1, 2]], SamplingParams(max_tokens=1)
        )


def test_pools_of_one_cpu_fit_it_together(monkeypatch):
    """Of three ranks, which make their pools one after the other."""
    page = 4 * 2 * 4 * 16 * 4 * 4  # bytes, as above
    model = make("qwen3-32b", num_key_value_heads=4, head_dim=16, num_layers=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    sampler = Sampler(model, settings=Rollout(page_size=4, memory=0.9))
    counts = []
    monkeypatch.setattr(capacity, "free_memory", lambda device: (60 - sum(counts)) * page)
    for _ in range(3):
        counts.append(pages_of(sampler))
    assert counts == [18, 12, 9]


def test_steps_in_a_row_take_buffers_for_no_more_than_there_are_positions():
    sampler = Sampler(
        make("qwen3-32b", max_position_embeddings=16),
        settings=Rollout(page_size=4, steps=1 << 20),
    )
    sampler.generate([[1, 2]], SamplingParams(max_tokens=3))
    assert sampler.batches[1].new_tokens.shape == (16, 1)


@pytest.mark.parametrize("name", ["qwen3-32b", "nemotron3-nano-30b-a3b"])
def test_memory_is_for_the_samples_that_are_expected(name):
    """More of them than that take turns, as more than slots do."""
    params = [SamplingParams(max_tokens=9, n=2, seed=i) for i in range(3)]
    prompts, settings = [[1, 2, 3], [4], [5, 6]], Rollout(slots=8, page_size=4, pages=50)
    roomy, small = (
        Sampler(make(name), settings=settings),
        Sampler(make(name), settings=settings, samples=2),
    )
    found, expected = (
        [each.tokens for each in s.generate(prompts, params)] for s in (small, roomy)
    )
    assert found == expected
    assert [max(sampler.batches) for sampler in (roomy, small)] == [8, 2]
    assert [sampler.caches.slots - 2 for sampler in (roomy, small)] == [8, 2]
    roomy, small = (
        Sampler(make(name), settings=Rollout(page_size=4, slots=n), samples=2) for n in (8, 1)
    )
    assert [pages_of(sampler) * 4 for sampler in (roomy, small)] == [
        2 * roomy.config.max_position_embeddings + 4,
        small.config.max_position_embeddings + 4,
    ]


@pytest.mark.parametrize("name", ["qwen3-32b", "nemotron3-nano-30b-a3b"])
def test_memory_is_for_samples_as_long_as_expected(name):
    """But for their last tokens, which nothing is predicted from."""
    params = [SamplingParams(max_tokens=count, n=2, seed=count) for count in (6, 8)]
    prompts, settings = [[1, 2, 3], [4]], Rollout(slots=4, page_size=4, steps=4)
    roomy, short = (
        Sampler(make(name), settings=settings),
        Sampler(make(name), settings=settings, longest=9),
    )
    found, expected = (
        [each.tokens for each in s.generate(prompts, params)] for s in (short, roomy)
    )
    assert found == expected
    assert [short.page_count, short.columns] == [4 * 2 + 1, 2 + 1]
    with pytest.raises(
        InputError, match="a prompt of 9 tokens: use 1 to 8, there are 9 positions"
    ):
        short.submit([1] * 9, params[0])
    (last,) = short.generate([[1] * 8], SamplingParams(max_tokens=5))
    assert len(last.tokens) == 1 and last.finish_reason == "length"


@pytest.mark.parametrize("name", ["qwen3-32b", "nemotron3-nano-30b-a3b", "qwen3.5-9b"])
def test_a_prompt_is_computed_once_for_samples_that_take_turns(name, monkeypatch):
    """Also where those that are decoded fill all pages of theirs: what they copy from has one more."""
    lengths, computed = [], Scheduler.prefilled
    monkeypatch.setattr(
        Scheduler,
        "prefilled",
        lambda self, *what: computed(self, *what) or lengths.append(what[1]),
    )
    sampler = Sampler(make(name), settings=Rollout(slots=2, page_size=16), longest=16)
    sampler.generate([[1] * 10], SamplingParams(max_tokens=6, n=5))
    assert lengths == [9] and sampler.scheduler.preemptions == 0


def test_a_pool_has_no_more_elements_than_a_kernel_can_index(monkeypatch):
    monkeypatch.setattr(capacity, "free_memory", lambda device: 10**15)
    # keys' channels of a token
    for name, width in (("qwen3-32b", 4 * 16), ("deepseek-v3", 32 + 8)):
        sampler = Sampler(make(name), settings=Rollout(slots=10**6))
        pages = pages_of(sampler) + 1  # one is for what only fills up
        assert pages * 128 * width < 2**31 <= (pages + 1) * 128 * width
