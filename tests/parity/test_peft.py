"""Adapters against peft on transformers and diffusers: logits, gradients, and both ways of the files."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from minitrain import InputError, load_adapter, load_pretrained, merge_adapters
from minitrain.models.checkpoint_hf import read_config
from minitrain.models.checkpoint_peft import read_adapter_config, save_adapter
from minitrain.models.lora import Lora, add_adapters, is_adapter
from tests.parity import hf_models, test_hybrid
from tests.parity.hf_models import compare_and_differentiate, random_tokens, reload

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CASES = {  # family: Linears, parameters
    "llama3-tied": (LINEARS, None),
    "qwen2.5": (["q_proj", "self_attn.v_proj"], None),
    "mixtral": (["q_proj"], EXPERTS),
    "gpt-oss": ([], EXPERTS),
    "qwen3-moe": (["o_proj"], ["mlp.experts.down_proj"]),
    "deepseek-v3": (["kv_a_proj_with_mqa", "q_b_proj"], ["experts.gate_up_proj"]),
    "nemotron_h-latent": (["q_proj", "in_proj", "fc1_latent_proj"], ["experts.up_proj", "experts.down_proj"]),
}


def their_model(family, monkeypatch):
    if family in test_hybrid.CONFIGS:
        monkeypatch.setattr(hf_models, "CONFIGS", test_hybrid.CONFIGS)
        return test_hybrid.build(family)
    return hf_models.build(family)


def randomize(parameters):
    """B starts at zero, and would hide all mistakes."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(0, 0.1, generator=generator)


@pytest.fixture(params=CASES)
def pair(request, tmp_path, monkeypatch):
    """An adapted model in peft, and the same here: the base and the adapters through files."""
    modules, parameters = CASES[request.param]
    base = their_model(request.param, monkeypatch)
    base.save_pretrained(tmp_path / "base")
    settings = dict(target_modules=modules, target_parameters=parameters, use_rslora=request.param == "qwen2.5")
    theirs = get_peft_model(base, LoraConfig(r=8, lora_alpha=12, **settings)).eval()
    randomize(p for p in theirs.parameters() if p.requires_grad)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load_pretrained(tmp_path / "base")
    load_adapter(ours, tmp_path / "adapter")
    return theirs, ours


def save_ours(model, tensors, path, source):
    save_adapter(tensors, model.config, read_adapter_config(source), path)


def test_logits_gradients_and_files(pair, tmp_path):
    """Gradients are written as if they were adapters, so that the file says which of peft's each belongs to."""
    theirs, ours = pair
    tokens = random_tokens(2, 24)
    compare_and_differentiate(ours(tokens), theirs(tokens).logits)
    adapters = {name: p for name, p in ours.named_parameters() if is_adapter(name)}
    assert {name for name, p in ours.named_parameters() if p.requires_grad} == set(adapters)
    assert all(p.grad is None for name, p in ours.named_parameters() if name not in adapters)
    save_ours(ours, ((name, p.grad) for name, p in adapters.items()), tmp_path / "gradients", tmp_path / "adapter")
    save_ours(ours, adapters.items(), tmp_path / "ours", tmp_path / "adapter")
    found = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    expected = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert expected[name].norm() > 0
        torch.testing.assert_close(gradient, expected[name], atol=2e-5 * expected[name].abs().max().item(), rtol=2e-4)
    again = PeftModel.from_pretrained(reload(tmp_path / "base"), tmp_path / "ours").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=0)
        adapted = ours(tokens)
        merge_adapters(ours)
        assert not any(is_adapter(name) for name in ours.state_dict())
        torch.testing.assert_close(ours(tokens), adapted, atol=1e-4, rtol=0)
