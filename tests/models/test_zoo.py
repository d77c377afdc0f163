"""The zoo against published totals and published config.json files; the tiny twins against their families."""

import dataclasses
import json
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minitrain import InputError
from minitrain.formats.hf import read_config
from minitrain.models.decoder import Decoder
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.layers import LayerNorm1P, RMSNorm1P, rotary_frequencies
from minitrain.models.zoo import ZOO, model_config
from minitrain.training.build import initialize
from tests.helpers.hf_models import PUBLISHED_PARAMETERS

# As on the hub, without what says nothing about the shape (use_cache, transformers_version, ...).
PUBLISHED_CONFIGS = {
    "llama3.1-8b": dict(
        architectures=["LlamaForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=128000,
        eos_token_id=128001,
        hidden_act="silu",
        hidden_size=4096,
        initializer_range=0.02,
        intermediate_size=14336,
        max_position_embeddings=131072,
        mlp_bias=False,
        model_type="llama",
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_scaling=dict(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
            rope_type="llama3",
        ),
        rope_theta=500000.0,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        vocab_size=128256,
    ),
    "qwen2.5-7b": dict(
        architectures=["Qwen2ForCausalLM"],
        attention_dropout=0.0,
        bos_token_id=151643,
        eos_token_id=151643,
        hidden_act="silu",
        hidden_size=3584,
        initializer_range=0.02,
        intermediate_size=18944,
        max_position_embeddings=131072,
        max_window_layers=28,
        model_type="qwen2",
        num_attention_heads=28,
        num_hidden_layers=28,
        num_key_value_heads=4,
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        sliding_window=131072,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        use_sliding_window=False,
        vocab_size=152064,
    ),
    "qwen3-32b": dict(
        architectures=["Qwen3ForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=151643,
        eos_token_id=151645,
        head_dim=128,
        hidden_act="silu",
        hidden_size=5120,
        initializer_range=0.02,
        intermediate_size=25600,
        max_position_embeddings=40960,
        max_window_layers=64,
        model_type="qwen3",
        num_attention_heads=64,
        num_hidden_layers=64,
        num_key_value_heads=8,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        use_sliding_window=False,
        vocab_size=151936,
    ),
    "smollm3-3b": dict(
        architectures=["SmolLM3ForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=128000,
        eos_token_id=128012,
        hidden_act="silu",
        hidden_size=2048,
        initializer_range=0.02,
        intermediate_size=11008,
        max_position_embeddings=65536,
        mlp_bias=False,
        model_type="smollm3",
        no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9,
        num_attention_heads=16,
        num_hidden_layers=36,
        num_key_value_heads=4,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=5000000.0,
        sliding_window=None,
        use_sliding_window=False,
        vocab_size=128256,
    ),
    "olmo3-7b": dict(
        architectures=["Olmo3ForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        eos_token_id=100257,
        hidden_act="silu",
        hidden_size=4096,
        initializer_range=0.02,
        intermediate_size=11008,
        layer_types=[*["sliding_attention"] * 3, "full_attention"] * 8,
        max_position_embeddings=65536,
        model_type="olmo3",
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=32,
        pad_token_id=100277,
        rms_norm_eps=1e-06,
        rope_scaling=dict(
            attention_factor=1.2079441541679836,
            beta_fast=32.0,
            beta_slow=1.0,
            factor=8.0,
            original_max_position_embeddings=8192,
            rope_type="yarn",
        ),
        rope_theta=500000,
        sliding_window=4096,
        tie_word_embeddings=False,
        vocab_size=100278,
    ),
    "glm-4.5-air": dict(
        architectures=["Glm4MoeForCausalLM"],
        attention_bias=True,
        attention_dropout=0.0,
        eos_token_id=[151329, 151336, 151338],
        first_k_dense_replace=1,
        head_dim=128,
        hidden_act="silu",
        hidden_size=4096,
        initializer_range=0.02,
        intermediate_size=10944,
        max_position_embeddings=131072,
        model_type="glm4_moe",
        moe_intermediate_size=1408,
        n_group=1,
        n_routed_experts=128,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_attention_heads=96,
        num_experts_per_tok=8,
        num_hidden_layers=46,
        num_key_value_heads=8,
        num_nextn_predict_layers=1,
        pad_token_id=151329,
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=1000000,
        routed_scaling_factor=1.0,
        tie_word_embeddings=False,
        topk_group=1,
        torch_dtype="bfloat16",
        use_qk_norm=False,
        vocab_size=151552,
    ),
    "minimax-m2": dict(
        architectures=["MiniMaxM2ForCausalLM"],
        attention_dropout=0.0,
        attn_type_list=[1] * 62,
        bos_token_id=200034,
        eos_token_id=200020,
        head_dim=128,
        hidden_act="silu",
        hidden_size=3072,
        initializer_range=0.02,
        intermediate_size=1536,
        max_position_embeddings=196608,
        model_type="minimax_m2",
        num_attention_heads=48,
        num_experts_per_tok=8,
        num_hidden_layers=62,
        num_key_value_heads=8,
        num_local_experts=256,
        num_mtp_modules=3,
        qk_norm_type="per_layer",
        quantization_config=dict(
            activation_scheme="dynamic",
            fmt="float8_e4m3fn",
            modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"],
            quant_method="fp8",
            weight_block_size=[128, 128],
        ),
        rms_norm_eps=1e-06,
        rope_theta=5000000,
        rotary_dim=64,
        router_jitter_noise=0.0,
        scoring_func="sigmoid",
        shared_intermediate_size=0,
        tie_word_embeddings=False,
        use_mtp=True,
        use_qk_norm=True,
        use_routing_bias=True,
        vocab_size=200064,
    ),
    "mixtral-8x7b": dict(
        architectures=["MixtralForCausalLM"],
        attention_dropout=0.0,
        bos_token_id=1,
        eos_token_id=2,
        hidden_act="silu",
        hidden_size=4096,
        initializer_range=0.02,
        intermediate_size=14336,
        max_position_embeddings=32768,
        model_type="mixtral",
        num_attention_heads=32,
        num_experts_per_tok=2,
        num_hidden_layers=32,
        num_key_value_heads=8,
        num_local_experts=8,
        output_router_logits=False,
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.02,
        sliding_window=None,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        vocab_size=32000,
    ),
    "qwen3-30b-a3b": dict(
        architectures=["Qwen3MoeForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=151643,
        decoder_sparse_step=1,
        eos_token_id=151645,
        head_dim=128,
        hidden_act="silu",
        hidden_size=2048,
        initializer_range=0.02,
        intermediate_size=6144,
        max_position_embeddings=40960,
        max_window_layers=48,
        mlp_only_layers=[],
        model_type="qwen3_moe",
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_key_value_heads=4,
        output_router_logits=False,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.001,
        sliding_window=None,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        use_sliding_window=False,
        vocab_size=151936,
    ),
    "deepseek-v3": dict(
        architectures=["DeepseekV3ForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        aux_loss_alpha=0.001,
        bos_token_id=0,
        eos_token_id=1,
        ep_size=1,
        first_k_dense_replace=3,
        hidden_act="silu",
        hidden_size=7168,
        initializer_range=0.02,
        intermediate_size=18432,
        kv_lora_rank=512,
        max_position_embeddings=163840,
        model_type="deepseek_v3",
        moe_intermediate_size=2048,
        moe_layer_freq=1,
        n_group=8,
        n_routed_experts=256,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_attention_heads=128,
        num_experts_per_tok=8,
        num_hidden_layers=61,
        num_key_value_heads=128,
        num_nextn_predict_layers=1,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        quantization_config=dict(
            activation_scheme="dynamic",
            fmt="e4m3",
            quant_method="fp8",
            weight_block_size=[128, 128],
        ),
        rms_norm_eps=1e-06,
        rope_scaling=dict(
            beta_fast=32,
            beta_slow=1,
            factor=40,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=4096,
            type="yarn",
        ),
        rope_theta=10000,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        seq_aux=True,
        tie_word_embeddings=False,
        topk_group=4,
        topk_method="noaux_tc",
        torch_dtype="bfloat16",
        v_head_dim=128,
        vocab_size=129280,
    ),
    "qwen3-next-80b-a3b": dict(
        architectures=["Qwen3NextForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=151643,
        decoder_sparse_step=1,
        eos_token_id=151645,
        full_attention_interval=4,
        head_dim=256,
        hidden_act="silu",
        hidden_size=2048,
        initializer_range=0.02,
        intermediate_size=5120,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_value_head_dim=128,
        max_position_embeddings=262144,
        mlp_only_layers=[],
        model_type="qwen3_next",
        moe_intermediate_size=512,
        norm_topk_prob=True,
        num_attention_heads=16,
        num_experts=512,
        num_experts_per_tok=10,
        num_hidden_layers=48,
        num_key_value_heads=2,
        output_router_logits=False,
        partial_rotary_factor=0.25,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=10000000,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=512,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        use_sliding_window=False,
        vocab_size=151936,
    ),
    "qwen3.5-35b-a3b": dict(
        architectures=["Qwen3_5MoeForConditionalGeneration"],
        image_token_id=248056,
        model_type="qwen3_5_moe",
        text_config=dict(
            attention_bias=False,
            attention_dropout=0.0,
            attn_output_gate=True,
            bos_token_id=None,
            dtype="bfloat16",
            eos_token_id=248044,
            full_attention_interval=4,
            head_dim=256,
            hidden_act="silu",
            hidden_size=2048,
            initializer_range=0.02,
            layer_types=[*["linear_attention"] * 3, "full_attention"] * 10,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=128,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_value_head_dim=128,
            mamba_ssm_dtype="float32",
            max_position_embeddings=262144,
            model_type="qwen3_5_moe_text",
            moe_intermediate_size=512,
            mtp_num_hidden_layers=1,
            mtp_use_dedicated_embeddings=False,
            num_attention_heads=16,
            num_experts=256,
            num_experts_per_tok=8,
            num_hidden_layers=40,
            num_key_value_heads=2,
            output_router_logits=False,
            pad_token_id=None,
            partial_rotary_factor=0.25,
            rms_norm_eps=1e-06,
            rope_parameters=dict(
                mrope_interleaved=True,
                mrope_section=[11, 11, 10],
                partial_rotary_factor=0.25,
                rope_theta=10000000,
                rope_type="default",
            ),
            router_aux_loss_coef=0.001,
            shared_expert_intermediate_size=512,
            tie_word_embeddings=False,
            vocab_size=248320,
        ),
        tie_word_embeddings=False,
        vision_config=dict(model_type="qwen3_5_moe"),
    ),
    "gpt-oss-20b": dict(
        architectures=["GptOssForCausalLM"],
        attention_bias=True,
        attention_dropout=0.0,
        bos_token_id=199998,
        eos_token_id=200002,
        experts_per_token=4,
        head_dim=64,
        hidden_act="silu",
        hidden_size=2880,
        initial_context_length=4096,
        initializer_range=0.02,
        intermediate_size=2880,
        layer_types=["sliding_attention", "full_attention"] * 12,
        max_position_embeddings=131072,
        model_type="gpt_oss",
        num_attention_heads=64,
        num_experts_per_tok=4,
        num_hidden_layers=24,
        num_key_value_heads=8,
        num_local_experts=32,
        pad_token_id=199999,
        quantization_config=dict(
            modules_to_not_convert=["model.embed_tokens", "lm_head"], quant_method="mxfp4"
        ),
        rms_norm_eps=1e-05,
        rope_scaling=dict(
            beta_fast=32.0,
            beta_slow=1.0,
            factor=32.0,
            original_max_position_embeddings=4096,
            rope_type="yarn",
            truncate=False,
        ),
        rope_theta=150000,
        router_aux_loss_coef=0.9,
        sliding_window=128,
        swiglu_limit=7.0,
        tie_word_embeddings=False,
        vocab_size=201088,
    ),
}
QUIRKS = {
    field.name for field in dataclasses.fields(DecoderConfig) if field.type in (bool, str, float)
}
QUIRKS = QUIRKS - {"layer_pattern", "initializer_range"} - {
    # which follow from widths
    "attention_multiplier",
    "embedding_multiplier",
} | {"max_position_embeddings", "conv_kernel"}


def build_meta(name: str) -> Decoder:
    with torch.device("meta"):
        return Decoder(model_config(name))


def count(model: Decoder) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def kinds_of_parameters(name: str) -> set[str]:
    """Their names, whatever the layer."""
    return {
        re.sub(r"layers\.\d+\.", "layers.N.", key)
        for key, _ in build_meta(name).named_parameters()
    }


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
    grouped = [config.num_attention_heads > config.num_key_value_heads for config in (tiny, full)]
    assert grouped[0] == grouped[1]
    assert set(tiny.layer_pattern) == set(full.layer_pattern)
    for key in (
        "attention_multiplier",
        "embedding_multiplier",
        "moe_latent_size",
        "kv_lora_rank",
        "sliding_window",
        "num_experts",
        "first_k_dense_replace",
        "shared_expert_intermediate_size",
    ):
        assert bool(getattr(tiny, key)) == bool(getattr(full, key)), key
    assert (tiny.n_group > 1) == (full.n_group > 1)
    assert tiny.num_experts % 4 == 0
    for key in ("num_layers", "num_attention_heads", "num_key_value_heads"):
        assert getattr(tiny, key) % 4 == 0
    assert kinds_of_parameters(name + "-tiny") == kinds_of_parameters(name)
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
    initialize(model, seed=0)
    tokens = torch.randint(0, 512, (2, 17), generator=torch.Generator().manual_seed(0))
    logits = model(tokens[:, :-1])
    assert logits.shape == (2, 16, 512)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    # an untrained model is nearly uniform
    assert abs(loss.item() - torch.log(torch.tensor(512.0)).item()) < 0.2
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.norm() > 0, key


def test_overrides_and_unknown_names():
    config = model_config("qwen3-32b", num_layers=2)
    assert config == dataclasses.replace(model_config("qwen3-32b"), num_layers=2)
    with pytest.raises(InputError, match=r"'llama3-8' is unknown \(nearest: 'llama3-8b'"):
        model_config("llama3-8")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama3-8b", {}),
        ("nemotron4-15b", {}),
        ("gpt-oss-20b", {}),
        ("gpt3-175b", {}),
        ("gemma3-1b", {}),
        ("qwen3-32b", {"norm": "layernorm1p"}),
        ("deepseek-v3", {"norm": "layernorm1p"}),
        ("deepseek-v3", {"norm": "rmsnorm1p"}),
    ],
)
def test_norms_start_as_the_identity_and_biases_at_zero(name, fields):
    """Nemotron-4 stores a norm's weight less 1; biases of experts have two dimensions, as matrices have."""
    model = Decoder(model_config(f"{name}-tiny", **fields))
    initialize(model, seed=0)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            around_0 = isinstance(module, LayerNorm1P | RMSNorm1P)
            assert (module.weight == float(not around_0)).all(), module
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            assert (parameter == 0).all(), key
