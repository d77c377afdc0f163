"""generate as a conversation, and the sampler's texts: oracles are transformers' replies."""

import re

import pytest
import torch

import minitrain
from minitrain.data.tokenizer import ByteTokenizer
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from tests.commands import ROOT


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(3)
    minitrain.save_pretrained(Decoder(model_config("llama3-8b-tiny", num_layers=1, vocab_size=258)), tmp_path / "m")
    ByteTokenizer().save(tmp_path / "m")
    return tmp_path / "m"


def replies(folder, prompt: str | list[int], count: int = 6) -> str:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([list(prompt.encode()) if isinstance(prompt, str) else prompt])
    found = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    return ByteTokenizer().decode([token for token in found.tolist() if token != 257])


WORDS = ["--max-tokens", "6", "--temperature", "0", "--device", "cpu"]


def test_the_sampler_gives_text(folder):
    sampler = minitrain.Sampler(minitrain.load_pretrained(folder), minitrain.load_tokenizer(folder))
    params = minitrain.SamplingParams(max_tokens=6, temperature=0)
    expected = [replies(folder, prompt) for prompt in ("ab", "xyz")]
    assert sampler.generate_text(["ab", "xyz"], params) == expected
    pieces = list(sampler.stream("ab", params))
    assert "".join(pieces) == expected[0] and len(pieces) > 1
    assert not sampler.busy


def test_the_snippet_of_the_readme_runs(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir()
    folder.rename(tmp_path / "out" / "arithmetic")
    monkeypatch.chdir(tmp_path)
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[1]
    exec(snippet, {})
    assert (tmp_path / "copy" / "model.safetensors").exists() and capsys.readouterr().out
