"""What a sampler may be asked, and what it refuses in a line."""

import pytest
import torch

from minitrain import Sampler, SamplingParams, generate, save_pretrained
from minitrain.data.tokenizer import ByteTokenizer
from minitrain.errors import InputError
from minitrain.run.config import load as configs
from minitrain.settings import Rollout
from tests.helpers.sampling import make, prompts_of, uncached

pytestmark = pytest.mark.usefixtures("pack_everything")


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
