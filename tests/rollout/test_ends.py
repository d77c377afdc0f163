"""What ends a sample: tokens of the model and of its tokenizer, and strings."""

import dataclasses
import itertools

import pytest
import torch

from minitrain import Sampler, SamplingParams, save_pretrained
from minitrain.data.tokenizer import ByteTokenizer, load_tokenizer
from minitrain.errors import InputError
from minitrain.settings import Rollout
from tests.helpers.sampling import make, prompts_of, uncached

pytestmark = pytest.mark.usefixtures("pack_everything")


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
