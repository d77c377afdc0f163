"""The sampler against uncached full forward passes of the same model, and what it leaves of the model."""

import dataclasses
import gc
import itertools
import weakref
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minitrain import Sampler, SamplingParams, generate, save_pretrained
from minitrain.data.tokenizer import ByteTokenizer, load_tokenizer
from minitrain.errors import InputError
from minitrain.models.zoo import model_config
from minitrain.rollout import caches, capacity
from minitrain.rollout import cpu as cpu_attention
from minitrain.rollout.caches import MambaCache
from minitrain.rollout.scheduler import Scheduler
from minitrain.rollout.steps import DecodingStep
from minitrain.run.config import load as configs
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


def pages_of(sampler: Sampler) -> int:
    return capacity.page_count(sampler.cached, sampler.settings, sampler.rows, sampler.longest)


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


@pytest.mark.parametrize("name", ["qwen3-32b", "nemotron3-nano-30b-a3b"])
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


@pytest.mark.parametrize("name", ["qwen3-32b", "nemotron3-nano-30b-a3b"])
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


def test_ends():
    model, tokenizer = make("qwen3-32b", vocab_size=258), ByteTokenizer()
    sampler, prompt = (
        Sampler(model, tokenizer, Rollout(page_size=4, pages=50, steps=4)),
        [5, 6, 7],
    )
    whole = sampler.generate([prompt], SamplingParams(temperature=0, max_tokens=20))[0]
    assert whole.finish_reason == "length" and len(whole.tokens) == 20
    first = next(i for i in range(3, 20) if whole.tokens[i] not in whole.tokens[:i])
    for most in (20, first + 1):  # a stop token at the very end is one too
        params = SamplingParams(0, max_tokens=most, stop_tokens=(whole.tokens[first],))
        (stopped,) = sampler.generate([prompt], params)
        assert stopped.finish_reason == "stop" and stopped.tokens == whole.tokens[: first + 1]
        assert stopped.logprobs == pytest.approx(whole.logprobs[: first + 1], abs=1e-5)

    model.lm_head.weight[128:].fill_(-1)  # ASCII from here on
    sampler.refresh()
    whole = sampler.generate([prompt], SamplingParams(0.8, max_tokens=20))[0]
    text = tokenizer.decode(whole.tokens)
    stop = text[6:8]
    cut = sampler.generate([prompt], SamplingParams(0.8, max_tokens=20, stop=("never", stop)))[0]
    assert (
        cut.finish_reason == "stop"
        and tokenizer.decode(cut.tokens) == text[: text.index(stop) + 2]
    )
    with pytest.raises(InputError, match="needs a sampler with a tokenizer"):
        Sampler(model).generate([prompt], SamplingParams(stop=("x",)))


def test_a_stop_string_of_characters_of_several_tokens():
    sampler = Sampler(
        make("qwen3-32b", vocab_size=258), ByteTokenizer(), Rollout(page_size=4, pages=50)
    )
    (sample,) = sampler.submit([1], SamplingParams(stop=("\N{SNOWMAN}\N{PILE OF POO}",)))
    tokens = list("a\N{SNOWMAN}\N{PILE OF POO}b".encode())
    assert sampler._end(sample, tokens) == (len(tokens) - 1, "stop")


def test_a_stop_string_that_begins_with_a_space():
    class Words:
        """Its decoder drops the space before the first word, as Llama 2's does."""

        eos_id = None

        def decode(self, ids, special=False):
            return "".join(f" {chr(token)}" for token in ids).removeprefix(" ")

    sampler = Sampler(make("qwen3-32b", vocab_size=258), Words(), Rollout(page_size=4, pages=50))
    (sample,) = sampler.submit([*b"b"], SamplingParams(stop=(" a",)))
    assert sampler._end(sample, [*b"ab"]) == (1, "stop")
    assert sampler._end(sample, [*b"cbbbbbbbbbbbbbbbbbbbbbb", *b"ab"]) == (24, "stop")


@pytest.mark.parametrize(
    "stop, written",
    [
        ("<|eos|>", [*b"abc", 257]),
        ("c<|eos|>", [*b"abc", 257]),
        ("<|eos|>d", [*b"abc", 257, *b"d"]),
        ("s|>", [256]),
        ("<|bos|><|eos|>", [*b"a", 256, 257]),
        ("ab", [*b"a", 256, *b"b"]),
    ],
)
def test_stop_strings_of_special_tokens(stop, written):
    """Also in part; and special tokens, which are not shown, do not divide a string of others."""
    sampler = Sampler(
        make("qwen3-32b", vocab_size=258), ByteTokenizer(), Rollout(page_size=4, pages=50)
    )
    (sample,) = sampler.submit([1], SamplingParams(stop=("never", stop), ignore_eos=True))
    assert sampler._end(sample, [*written, *b"efg"]) == (len(written), "stop")


def test_stop_strings_of_a_hugging_face_tokenizer(tmp_path):
    from tokenizers import AddedToken, Tokenizer, decoders, models

    words = Tokenizer(models.BPE({"a": 0, "b": 1, "\u0120": 2, "\u010a": 3}, []))
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    words.save(str(tmp_path / "tokenizer.json"))
    sampler = Sampler(make("qwen3-32b"), load_tokenizer(tmp_path), Rollout(page_size=4, pages=50))
    for stop, count in (
        ("<|im_end|>", 4),
        ("<|im_end|>\n", 5),
        ("b <|im", 4),
        ("b \n", 5),
        ("\n\n", 6),
    ):
        (sample,) = sampler.submit([0], SamplingParams(stop=[stop]))
        assert sampler._end(sample, [0, 1, 2, 4, 3, 3, 0]) == (count, "stop")


@pytest.mark.parametrize("in_generation_config", [False, True])
def test_the_models_own_end(in_generation_config, tmp_path):
    """Against transformers, which stops there, too, and pads."""
    from transformers import AutoModelForCausalLM

    model, prompts = make("qwen3-32b"), prompts_of((5, 5, 5))
    free = [uncached(model, prompt, 12) for prompt in prompts]
    ends, pad = [free[0][3], free[1][0]], min({*range(512)} - {*itertools.chain(*free)})
    own = (
        {"generation_config": {"eos_token_id": ends}}
        if in_generation_config
        else {"eos_token_id": ends}
    )
    model.config = dataclasses.replace(model.config, **own)
    save_pretrained(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    padded = theirs.generate(
        torch.tensor(prompts), max_new_tokens=12, do_sample=False, pad_token_id=pad
    )[:, 5:]
    greedy = SamplingParams(0, max_tokens=12)
    samples = Sampler(model).generate(prompts, greedy)
    assert [sample.tokens for sample in samples] == [
        [t for t in row if t != pad] for row in padded.tolist()
    ]
    assert [sample.finish_reason for sample in samples][:2] == ["stop", "stop"] and len(
        samples[1].tokens
    ) == 1
    samples = Sampler(model).generate(prompts, dataclasses.replace(greedy, ignore_eos=True))
    assert [sample.tokens for sample in samples] == free
    tokenizer = ByteTokenizer()
    tokenizer.eos_id = free[2][1]  # the tokenizer's counts, too
    assert Sampler(model, tokenizer).generate(prompts, greedy)[2].tokens == free[2][:2]


@pytest.mark.parametrize(
    "name", ["qwen3-32b", "deepseek-v3", "gpt-oss-20b", "nemotron3-nano-30b-a3b"]
)
def test_first_use_in_inference_mode(name):
    """What the sampler keeps is of use outside, where the model trains on."""
    model, params = make(name).requires_grad_(), SamplingParams(0, max_tokens=6)
    expected = [uncached(model, prompt, 6) for prompt in prompts_of((5, 9))]
    sampler = Sampler(model, settings=Rollout(page_size=4, pages=50))
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert [
                sample.tokens for sample in sampler.generate(prompts_of((5, 9)), params)
            ] == expected
            sampler.submit([1, 2], params)
            while sampler.busy:
                sampler.step()
    model(torch.tensor([[1, 2, 3]])).sum().backward()


def test_prompts_that_are_text():
    sampler = Sampler(make("qwen3-32b", vocab_size=258), ByteTokenizer())
    params = SamplingParams(0, max_tokens=5)
    assert sampler.generate(["123", "a"], params) == sampler.generate(
        [[*b"123"], [*b"a"]], params
    )
    tokens = torch.tensor([*b"123"])
    assert (
        sampler.generate([tokens, tokens.numpy()], params)[1]
        == sampler.generate(["123"], params)[0]
    )


@pytest.mark.parametrize(
    "prompts, params, line",
    [
        (
            ["123"],
            SamplingParams(),
            "the prompt '123' is text, which needs a sampler with a tokenizer",
        ),
        ("123", SamplingParams(), "prompts must be a list, of texts or of lists of token ids"),
        (
            [["1", "2"]],
            SamplingParams(),
            r"a prompt is .'1', '2'.: give a list of token ids, or text",
        ),
        (
            [[1.5, 2]],
            SamplingParams(),
            r"a prompt is .1.5, 2.: give a list of token ids, or text",
        ),
        ([1, 2, 3], SamplingParams(), "a prompt is 1: give a list of token ids, or text"),
        ([None], SamplingParams(), "a prompt is None: give"),
        ([b"123"], SamplingParams(), "a prompt is b'123': give a list of token ids, or text"),
        ([[1]], {"max_tokens": 3}, "params={'max_tokens': 3} must be SamplingParams"),
        ([[1]], [{"max_tokens": 3}], "params={'max_tokens': 3} must be SamplingParams"),
        ([[1]], None, "params=None must be SamplingParams"),
        (
            [[1]],
            [SamplingParams()] * 2,
            "1 prompts and 2 SamplingParams: give one, or one per prompt",
        ),
    ],
)
def test_prompts_that_are_none(prompts, params, line):
    with pytest.raises(InputError, match=line):
        Sampler(make("qwen3-32b")).generate(prompts, params)


def test_the_models_last_position():
    for name in ("gpt3-175b", "qwen3-32b"):
        model = make(name, max_position_embeddings=16)
        sampler = Sampler(model, settings=Rollout(page_size=4, steps=7))
        # the second one makes steps go on beyond the first one's end
        found = sampler.generate(
            prompts_of((12, 3)), SamplingParams(temperature=0, max_tokens=20)
        )[0]
        assert (
            found.tokens == uncached(model, prompts_of((12,))[0], 4)
            and found.finish_reason == "length"
        )
        with pytest.raises(InputError, match="a prompt of 16 tokens: use 1 to 15"):
            sampler.generate(prompts_of((3, 16)), SamplingParams())
        assert not sampler.busy  # the first one does not stay behind


@pytest.mark.parametrize("token", [512, -1])
def test_tokens_that_no_model_knows(token):
    sampler = Sampler(make("qwen3-32b"), settings=Rollout(page_size=4, pages=20))
    with pytest.raises(InputError, match=f"a prompt holds the token {token}: use 0 to 511"):
        sampler.generate([[1, 2], [3, token, 4]], SamplingParams(max_tokens=2))
    assert not sampler.busy


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


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ({"temperature": 1e-9}, "rollout.temperature=1e-09 must be 0, or at least 1e-06"),
        ({"slots": 0}, "rollout.slots=0 must be between 1 and 1,048,576"),
        ({"pages": -1}, "rollout.pages=-1 must be between 0 and 16,777,216"),
        (
            {"pages": 2**63 - 1},
            "rollout.pages=9223372036854775807 must be between 0 and 16,777,216",
        ),
        (
            {"steps": 2**63 - 1},
            "rollout.steps=9223372036854775807 must be between 0 and 1,048,576",
        ),
        ({"memory": 0}, "rollout.memory=0.0 must be above 0 and at most 1"),
        ({"memory": 1.5}, "rollout.memory=1.5 must be above 0 and at most 1"),
    ],
)
def test_settings_that_make_no_sense(setting, line):
    with pytest.raises(InputError, match=line):
        configs.from_dict({"rollout": setting})


def test_the_command_line_shows_all_samples(tmp_path, capsys, monkeypatch):
    # as Llama's has bos
    monkeypatch.setattr(ByteTokenizer, "encode_prompt", lambda self, text: [256, *text.encode()])
    model = make("qwen3-32b", vocab_size=258)
    save_pretrained(model, tmp_path)
    ByteTokenizer().save(tmp_path)
    generate.main(
        f"--model {tmp_path} --prompt ab --n 2 --max-tokens 8 --temperature 0.9 --top-k 50 --top-p 0.95 --min-p 0.01 "
        f"--stop zz --stop yy --seed 3 --device cpu".split()
    )
    params = SamplingParams(0.9, 50, 0.95, 0.01, 8, 2, (257,), ("zz", "yy"), 3)
    samples = Sampler(model, ByteTokenizer()).generate([[256, *b"ab"]], params)
    texts = ["ab" + ByteTokenizer().decode(sample.tokens) for sample in samples]
    shown = capsys.readouterr().out
    assert (
        shown == f"--- sample 1 of 2\n{texts[0]}\n--- sample 2 of 2\n{texts[1]}\n"
        and texts[0] != texts[1]
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--prompt", "ab\udcff"], "--prompt is not UTF-8: .* in position 2"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", "ab", "--stop", ""], "none of them empty"),
        (["--prompt", "ab", "--top-p", "0"], "top_p=0.0 must be above 0"),
    ],
)
def test_the_command_line_refuses_before_it_reads_the_weights(options, line, tmp_path):
    save_pretrained(make("qwen3-32b", vocab_size=258), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    ByteTokenizer().save(tmp_path)
    with pytest.raises(InputError, match=line):
        generate.main(["--model", str(tmp_path), "--device", "cpu", *options])
    with pytest.raises(InputError, match="--model .*nothing is no folder"):
        generate.main(["--model", str(tmp_path / "nothing"), *options])


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
    states = [layer.states for layer in sampler.caches.layers if isinstance(layer, MambaCache)]
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


def test_pages_that_cuda_can_read():
    # of 64 heads and of 128
    dense, latent = (model_config("qwen3-32b"), model_config("deepseek-v3"))
    for size, config, tp in ((128, dense, 1), (256, dense, 8), (128, latent, 1)):
        capacity.check_page_size(size, config, tp)
    latent = dataclasses.replace(latent, num_attention_heads=256, num_key_value_heads=256)
    capacity.check_page_size(128, latent, 2)
    for size, config, least in ((64, dense, 128), (128, latent, 256)):
        with pytest.raises(
            InputError,
            match=f"rollout.page_size={size} must be a multiple of 128 .* at least {least}",
        ):
            capacity.check_page_size(size, config, 1)


# ------------------------------------------------------------------------------------------------------ page lists


@pytest.mark.parametrize("window", [None, 1, 4, 6, 9])
def test_page_lists_name_what_a_sample_sees(window):
    """Every key of the pool that the lists and the rule let through, for all lengths; what CUDA's kernel reads."""
    size, width, pool = 4, 6, 30
    generator, positions = torch.Generator().manual_seed(0), torch.arange(size * width)
    table = torch.stack([torch.randperm(pool, generator=generator)[:width] for _ in positions])
    step = DecodingStep(
        torch.zeros_like(positions), table, torch.zeros_like(positions), size, pool
    )
    step.begin()
    blocks = step.page_mask(window)  # made once, then brought up to date in place
    step.positions.copy_(positions)
    step.begin()
    assert step.page_mask(window) is blocks
    for row, own in enumerate(positions.tolist()):
        pages = blocks.kv_indices[row, 0, 0, : blocks.kv_num_blocks[row, 0, 0]].tolist()
        assert len(pages) == len(set(pages)) and blocks.full_kv_indices is None
        keys = [
            k
            for page in pages
            for k in range(page * size, (page + 1) * size)
            if blocks.mask_mod(row, 0, 0, k)
        ]
        seen = range(max(0, own - window + 1) if window else 0, own + 1)
        assert sorted(keys) == sorted(int(table[row, i // size]) * size + i % size for i in seen)


class Kernels(TorchDispatchMode):
    """Counts operations that are not just views of what there is."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        self.count += not function.is_view
        return out


def test_a_step_finds_its_pages_in_few_kernels():
    """Each takes microseconds to start, in every step."""
    positions, table = torch.arange(8), torch.arange(48).view(8, 6)
    step = DecodingStep(positions, table, torch.zeros_like(positions), 4, 48)
    step.begin()
    step.page_mask(None)
    with Kernels() as kernels:
        step.begin()
    assert kernels.count <= 9


@pytest.mark.parametrize("name", ["llama3.1-8b", "deepseek-v3"])
def test_frequencies_are_computed_once(name):
    model, (prompt,) = make(name), prompts_of((5,))
    expected = uncached(model, prompt, 6)
    with mock.patch.object(
        caches, "rotary_frequencies", wraps=caches.rotary_frequencies
    ) as computed:
        (found,) = Sampler(model, settings=Rollout(slots=2, page_size=4, pages=20)).generate(
            [prompt], SamplingParams(temperature=0, max_tokens=6)
        )
    assert computed.call_count == 1 and found.tokens == expected
