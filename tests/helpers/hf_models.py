"""Build tiny transformers models of every family, without default values: the oracles of the parity tests.

Also edit checkpoints, and check the errors of wrong ones.
"""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo3Config,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

from minitrain import InputError, load_pretrained

_SIZES = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
)
# within 64 positions the 4 frequencies of an 8-wide head turn 10.2, 1.02, 0.102 and 0.01 times, so these factors keep
# the first, interpolate the second and divide the others
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=0.5,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


def theta_of(theta: float) -> dict:
    return dict(rope_type="default", rope_theta=theta)


_MULTIPLIERS = dict(
    embedding_multiplier=3.0,
    attention_multiplier=0.2,
    residual_multiplier=0.6,
    logits_scaling=2.5,
)
CONFIGS = {
    "llama3": lambda: LlamaConfig(**_SIZES, rms_norm_eps=1e-3, rope_parameters=theta_of(500.0)),
    "llama3.1": lambda: LlamaConfig(
        **_SIZES, rms_norm_eps=1e-3, rope_parameters=dict(LLAMA3_ROPE)
    ),
    "llama3-tied": lambda: LlamaConfig(**_SIZES, rms_norm_eps=1e-3, tie_word_embeddings=True),
    "qwen2.5": lambda: Qwen2Config(**_SIZES, rms_norm_eps=1e-3, rope_parameters=theta_of(1000.0)),
    "qwen3": lambda: Qwen3Config(
        **_SIZES, head_dim=16, rms_norm_eps=1e-3, rope_parameters=theta_of(1000.0)
    ),
    "qwen3-tied": lambda: Qwen3Config(
        **_SIZES, head_dim=16, rms_norm_eps=1e-3, tie_word_embeddings=True
    ),
    "smollm3": lambda: SmolLM3Config(
        **_SIZES,
        rms_norm_eps=1e-3,
        no_rope_layer_interval=2,
        tie_word_embeddings=False,
        rope_parameters=theta_of(1000.0),
        pad_token_id=None,
    ),
    "granite": lambda: GraniteConfig(
        **_SIZES, **_MULTIPLIERS, rms_norm_eps=1e-3, rope_parameters=theta_of(1000.0)
    ),
    "nemotron": lambda: NemotronConfig(**_SIZES, norm_eps=1e-3, partial_rotary_factor=0.5),
}

_MOE = dict(num_experts_per_tok=3, moe_intermediate_size=32)
# of the 4 pairs of an 8-wide head, 2 turn at least once in 32 positions and stay, one is mixed, and the last is divided
YARN = dict(
    rope_type="yarn",
    rope_theta=100.0,
    factor=8.0,
    original_max_position_embeddings=32,
    beta_fast=1.0,
    beta_slow=0.2,
)
_DEEPSEEK = _SIZES | dict(
    num_hidden_layers=3,
    num_key_value_heads=6,
    rms_norm_eps=1e-3,
    n_routed_experts=16,
    n_shared_experts=2,
    num_experts_per_tok=4,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    q_lora_rank=40,
    kv_lora_rank=32,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
)
# layers with a window have rotary settings of their own
WINDOW_CONFIGS = {
    "olmo3": lambda: Olmo3Config(
        **_SIZES | dict(num_hidden_layers=5),
        rms_norm_eps=1e-3,
        sliding_window=8,
        rope_parameters=dict(full_attention=YARN, sliding_attention=theta_of(1000.0)),
        pad_token_id=None,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES | dict(num_hidden_layers=5),
        head_dim=16,
        rms_norm_eps=1e-3,
        sliding_window=8,
        sliding_window_pattern=3,
        query_pre_attn_scalar=24,
        rope_parameters=dict(
            full_attention=theta_of(1000.0) | dict(rope_type="linear", factor=4.0),
            sliding_attention=theta_of(100.0),
        ),
        pad_token_id=None,
    ),
}
MOE_CONFIGS = {
    "mixtral": lambda: MixtralConfig(
        **_SIZES,
        num_local_experts=8,
        num_experts_per_tok=2,
        rms_norm_eps=1e-3,
        rope_parameters=theta_of(500.0),
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_SIZES,
        **_MOE,
        num_experts=8,
        norm_topk_prob=True,
        head_dim=16,
        rms_norm_eps=1e-3,
        rope_parameters=theta_of(1000.0),
    ),
    "deepseek-v3": lambda: DeepseekV3Config(
        **_DEEPSEEK,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=1.0),
    ),
    "kimi-k2": lambda: DeepseekV3Config(
        **_DEEPSEEK,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        rope_parameters=YARN | dict(beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
    ),
    "glm-4.5": lambda: Glm4MoeConfig(
        **_SIZES | _MOE | dict(num_hidden_layers=3),
        head_dim=16,
        n_routed_experts=16,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        attention_bias=True,
        use_qk_norm=True,
        rms_norm_eps=1e-3,
        rope_parameters=theta_of(1000.0) | dict(partial_rotary_factor=0.25),
    ),
    "glm-4.5-air": lambda: Glm4MoeConfig(
        **_SIZES | _MOE,
        head_dim=16,
        n_routed_experts=8,
        attention_bias=True,
        rms_norm_eps=1e-3,
        norm_topk_prob=False,
    ),
    "minimax-m2": lambda: MiniMaxM2Config(
        **_SIZES,
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=3,
        rms_norm_eps=1e-3,
        rope_parameters=theta_of(1000.0) | dict(partial_rotary_factor=0.25),
    ),
    "gpt-oss": lambda: GptOssConfig(
        **_SIZES | dict(num_hidden_layers=3),
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=8,
        rms_norm_eps=1e-3,
        rope_parameters=YARN | dict(truncate=False),
    ),
}


_HYBRID = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    layers_block_type=[
        "linear_attention",
        "moe",
        "full_attention",
        "mlp",
        "linear_attention",
        "moe",
    ],
    max_position_embeddings=256,
    ssm_state_size=16,
    mamba_num_heads=8,
    mamba_head_dim=12,
    conv_kernel=3,
    chunk_size=32,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=56,
    routed_scaling_factor=2.5,
    bos_token_id=1,
    eos_token_id=2,
    time_step_min=1e-30,
)
_GRANITE4 = (
    _SIZES
    | _MULTIPLIERS
    | dict(
        num_hidden_layers=3,
        shared_intermediate_size=56,
        mamba_n_heads=8,
        mamba_d_head=12,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_d_conv=3,
        mamba_chunk_size=32,
        rms_norm_eps=1e-3,
    )
)
# transformers 5.24 uses time_step_min only
BOUNDED = dict(time_step_min=0.6, time_step_limit=(0.6, math.inf))
_DELTA = _SIZES | dict(
    num_hidden_layers=3,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=3,
    rms_norm_eps=1e-3,
    rope_parameters=theta_of(1000.0) | dict(partial_rotary_factor=0.5),
)
_DELTA_MOE = _DELTA | _MOE | dict(num_experts=8, shared_expert_intermediate_size=56)
HYBRID_CONFIGS = {
    "qwen3-next": lambda: Qwen3NextConfig(
        **_DELTA_MOE, full_attention_interval=2, norm_topk_prob=False
    ),
    "qwen3.5": lambda: Qwen3_5TextConfig(**_DELTA, full_attention_interval=3),
    "qwen3.5-moe": lambda: Qwen3_5MoeTextConfig(**_DELTA_MOE, full_attention_interval=2),
    "nemotron_h": lambda: NemotronHConfig(**_HYBRID, n_groups=2, layer_norm_epsilon=1e-3),
    "nemotron_h-latent": lambda: NemotronHConfig(
        **_HYBRID, n_groups=4, moe_latent_size=24, n_group=2, topk_group=1
    ),
    "nemotron_h-least-dt": lambda: NemotronHConfig(
        **_HYBRID | BOUNDED, n_groups=2, norm_topk_prob=False
    ),
    "nemotron_h-wide-heads": lambda: NemotronHConfig(**_HYBRID | dict(head_dim=128), n_groups=2),
    "granite-4": lambda: GraniteMoeHybridConfig(
        **_GRANITE4,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=8,
        num_experts_per_tok=3,
    ),
    "granite-4-dense": lambda: GraniteMoeHybridConfig(
        **_GRANITE4,
        layer_types=["full_attention"] * 3,
        num_local_experts=0,
        position_embedding_type="rope",
        rope_parameters=theta_of(1000.0),
    ),
    "granite-4-least-dt": lambda: GraniteMoeHybridConfig(
        **_GRANITE4,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=0,
        time_step_limit=(0.6, math.inf),
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=96,
        n_embd=48,
        n_layer=3,
        n_head=16,
        n_positions=64,
        n_inner=80,
        layer_norm_epsilon=1e-3,
    ),
}


# parameters of each model of the zoo, from the hub or its report
PUBLISHED_PARAMETERS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-32b": 32_762_123_264,
    "smollm3-3b": 3_075_098_624,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    # the hub's files of 4b to 27b have a vision tower and its projection too
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 4_300_079_472 - 416_866_032 - 2_949_120 - 1_152,
    "gemma3-12b": 12_187_325_040 - 416_866_032 - 4_423_680 - 1_152,
    "gemma3-27b": 27_432_406_640 - 416_866_032 - 6_193_152 - 1_152,
    "granite-3.3-8b": 8_170_864_640,
    "nemotron4-15b": 15_628_775_424,
    "nemotron4-340b": 341_029_195_776,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_404_352,
    "kimi-k2": 1_026_408_209_408,
    # with a layer of multi-token prediction, its copies of embedding and head, and the selection biases
    # they are the hub's 358,337,791,296 and 110,468,824,832; MiniMax-M2's have biases, 228,689,764,864
    "glm-4.5": 352_797_814_784,
    "glm-4.5-air": 106_852_245_504,
    "glm-4.7": 352_797_814_784,
    "minimax-m2": 228_689_748_992,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "nemotron3-nano-30b-a3b": 31_577_937_344,
    "nemotron3-super-120b-a12b": 120_668_687_360,
    "granite-4.0-h-tiny": 6_939_037_248,
    "granite-4.0-h-small": 32_207_337_984,
    "granite-4.0-h-micro": 3_191_396_096,
    "granite-4.0-micro": 3_402_836_480,
    # with a layer of multi-token prediction 81,324,862,720, the hub's
    "qwen3-next-80b-a3b": 79_674_391_296,
    # without the vision tower and the layer of multi-token prediction
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "gpt3-175b": 174_604_259_328,
}


def build(family: str, seed: int = 0, auto: type = AutoModelForCausalLM, **changes):
    """Return the transformers model in fp32 with eager attention and random parameters.

    auto: which of transformers' automatic classes makes it.
    """
    config = (CONFIGS | WINDOW_CONFIGS | MOE_CONFIGS | HYBRID_CONFIGS)[family]()
    config.update(changes)
    # transformers draws Mamba's initial dt_bias from this generator
    torch.manual_seed(seed)
    options = dict(
        attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    model = auto.from_config(config, **options).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
        for name, parameter in model.named_parameters():
            # so that some activations are clamped
            if config.model_type == "gpt_oss" and name.endswith("gate_up_proj"):
                parameter.mul_(4)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.4, generator=generator)
    return model


def reload(path, **options):
    """Load a checkpoint in transformers."""
    options = dict(attn_implementation="eager", experts_implementation="eager") | options
    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


def compare_with_transformers(folder):
    """Check that transformers and we compute the same logits from a checkpoint."""
    tokens = random_tokens(2, 60)
    with torch.no_grad():
        torch.testing.assert_close(
            load_pretrained(folder)(tokens), reload(folder)(tokens).logits, atol=1e-4, rtol=0
        )


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, _SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed)
    )


def packed(theirs, tokens, rows):
    """Return the logits of each document run alone, and the document ids and positions of `tokens`.

    rows: for each row of `tokens`, the lengths of its documents.
    """
    document_ids = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]
    )
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    pieces = [piece for i, row in enumerate(rows) for piece in tokens[i].split(row)]
    expected = torch.cat([theirs(piece[None]).logits[0] for piece in pieces]).view(
        *tokens.shape, -1
    )
    return expected, document_ids, positions


def compare_and_differentiate(found, expected):
    """Check that logits agree, then differentiate the same random combination of them in both models."""
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected.backward(cotangent)
    found.backward(cotangent)


# --- checkpoints


def edit_json(file, **changes):
    """Set keys of a JSON file; None removes one."""
    tree = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


def edit_weights(folder, **changes):
    """Set tensors of model.safetensors; None removes one."""
    tensors = {
        name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()
    } | changes
    save_file(
        {name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors"
    )


def call_refused(call, *parts):
    """Check that `call` raises an InputError of one line that contains all `parts`."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message, message


# names of norms that other families have in another place: transformers' -> ours
OUR_NAMES = {
    "olmo3": {
        "post_attention_layernorm": "mixer_output_norm",
        "post_feedforward_layernorm": "mlp_output_norm",
    }
}
OUR_NAMES["gemma3_text"] = OUR_NAMES["olmo3"] | {
    "pre_feedforward_layernorm": "post_attention_layernorm"
}


def in_our_layout(name, gradient, kind):
    """Return our name and layout of transformers' gradient. kind: its `model_type`.

    transformers stacks experts too: GPT-OSS's transposed, the others with all gate rows before all up rows.
    """
    gpt_oss = kind == "gpt_oss"
    name = name.replace(".router.", ".gate.")
    parts = [OUR_NAMES.get(kind, {}).get(part, part) for part in name.split(".")]
    name = ".".join(parts)
    if gpt_oss and name.endswith(("gate_up_proj", "down_proj")):
        gradient = gradient.transpose(1, 2)
    if not gpt_oss and "gate_up_proj" in name:
        gradient = torch.stack(gradient.chunk(2, dim=1), dim=2).flatten(1, 2)
    return name, gradient


def assert_same(found, expected, ours, theirs):
    """Check that logits and all gradients agree."""
    compare_and_differentiate(found, expected)
    kind = theirs.config.model_type
    expected = dict(in_our_layout(name, p.grad, kind) for name, p in theirs.named_parameters())
    found = {name: p.grad for name, p in ours.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (found[name] - gradient).norm() <= 1e-3 * gradient.norm(), name
