"""The zoo against published totals and published config.json files; the tiny twins against their families."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F

from minitrain import InputError
from minitrain.models.checkpoint_hf import read_config
from minitrain.models.decoder import Decoder
from minitrain.models.layers import rotary_frequencies
from minitrain.models.zoo import ZOO, model_config

PUBLISHED_PARAMETERS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-32b": 32_762_123_264,
    "nemotron4-15b": 15_628_775_424,
    "nemotron4-340b": 341_029_195_776,
}
# As on the hub, without what says nothing about the shape (use_cache, transformers_version, ...).
PUBLISHED_CONFIGS = {
    "llama3.1-8b": dict(
        architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=128000,
        eos_token_id=128001, hidden_act="silu", hidden_size=4096, initializer_range=0.02, intermediate_size=14336,
        max_position_embeddings=131072, mlp_bias=False, model_type="llama", num_attention_heads=32,
        num_hidden_layers=32, num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05,
        rope_scaling=dict(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192,
            rope_type="llama3",
        ),
        rope_theta=500000.0, tie_word_embeddings=False, torch_dtype="bfloat16", vocab_size=128256,
    ),
    "qwen2.5-7b": dict(
        architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=151643, eos_token_id=151643,
        hidden_act="silu", hidden_size=3584, initializer_range=0.02, intermediate_size=18944,
        max_position_embeddings=131072, max_window_layers=28, model_type="qwen2", num_attention_heads=28,
        num_hidden_layers=28, num_key_value_heads=4, rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=131072,
        tie_word_embeddings=False, torch_dtype="bfloat16", use_sliding_window=False, vocab_size=152064,
    ),
    "qwen3-32b": dict(
        architectures=["Qwen3ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=151643,
        eos_token_id=151645, head_dim=128, hidden_act="silu", hidden_size=5120, initializer_range=0.02,
        intermediate_size=25600, max_position_embeddings=40960, max_window_layers=64, model_type="qwen3",
        num_attention_heads=64, num_hidden_layers=64, num_key_value_heads=8, rms_norm_eps=1e-06, rope_scaling=None,
        rope_theta=1000000, sliding_window=None, tie_word_embeddings=False, torch_dtype="bfloat16",
        use_sliding_window=False, vocab_size=151936,
    ),
}  # fmt: skip
QUIRKS = ("family", "norm", "norm_eps", "mlp", "qkv_bias", "qk_norm", "rope_theta", "partial_rotary_factor",
          "tie_word_embeddings", "max_position_embeddings")  # fmt: skip


def build_meta(name: str) -> Decoder:
    with torch.device("meta"):
        return Decoder(model_config(name))


def count(model: Decoder) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_model_has_a_published_total():
    assert PUBLISHED_PARAMETERS.keys() == ZOO.keys()


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameter_counts(name):
    assert count(build_meta(name)) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED_CONFIGS)
def test_published_config_files(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_CONFIGS[name]))
    assert read_config(tmp_path) == model_config(name)


@pytest.mark.parametrize("name", ZOO)
def test_tiny_twin_is_small_and_keeps_the_quirks(name):
    full, tiny = model_config(name), model_config(name + "-tiny")
    assert 100_000 <= count(build_meta(name + "-tiny")) <= 1_000_000
    assert [getattr(tiny, key) for key in QUIRKS] == [getattr(full, key) for key in QUIRKS]
    assert tiny.num_attention_heads > tiny.num_key_value_heads
    for key in ("num_layers", "num_attention_heads", "num_key_value_heads"):
        assert getattr(tiny, key) % 4 == 0
    names, tiny_names = ({n for n, _ in build_meta(n).named_parameters()} for n in (name, name + "-tiny"))
    assert tiny_names <= names
    assert {n for n in names if "layers.0." in n or "layers" not in n} <= tiny_names
    assert (tiny.rope_scaling is None) == (full.rope_scaling is None)


def test_tiny_twin_of_a_scaled_context_scales_in_all_zones():
    config = model_config("llama3.1-8b-tiny")
    plain = rotary_frequencies(config.rotary_dim, config.rope_theta)
    ratio = rotary_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling) / plain
    assert ratio.max() == 1
    assert ratio.min() == 1 / config.rope_scaling["factor"]
    assert ((ratio > ratio.min() * 1.01) & (ratio < 0.99)).any()


@pytest.mark.parametrize("name", ZOO)
def test_tiny_twin_runs_forward_and_backward(name):
    model = Decoder(model_config(name + "-tiny"))
    for i, (key, parameter) in enumerate(model.named_parameters()):
        model.initialize_parameter(key, parameter, torch.Generator().manual_seed(i))
    tokens = torch.randint(0, 512, (2, 17), generator=torch.Generator().manual_seed(0))
    logits = model(tokens[:, :-1])
    assert logits.shape == (2, 16, 512)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(loss.item() - torch.log(torch.tensor(512.0)).item()) < 0.2  # an untrained model is nearly uniform
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.norm() > 0, key


def test_overrides_and_unknown_names():
    config = model_config("qwen3-32b", num_layers=2)
    assert config == dataclasses.replace(model_config("qwen3-32b"), num_layers=2)
    with pytest.raises(InputError, match=r"'llama3-8' is unknown \(nearest: 'llama3-8b'"):
        model_config("llama3-8")
