"""Tiny transformers models of every family, with nothing at its default: the oracles of the parity tests."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, NemotronConfig, Qwen2Config, Qwen3Config

_SIZES = dict(
    vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
# Within 64 positions the 4 frequencies of an 8-wide head turn 10.2, 1.02, 0.102 and 0.01 times, so these factors keep
# the first, interpolate the second and divide the others.
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=0.5, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip


def _theta(theta: float) -> dict:
    return dict(rope_type="default", rope_theta=theta)


CONFIGS = {
    "llama3": lambda: LlamaConfig(**_SIZES, rms_norm_eps=1e-5, rope_parameters=_theta(500.0)),
    "llama3.1": lambda: LlamaConfig(**_SIZES, rms_norm_eps=1e-5, rope_parameters=dict(LLAMA3_ROPE)),
    "llama3-tied": lambda: LlamaConfig(**_SIZES, rms_norm_eps=1e-5, tie_word_embeddings=True),
    "qwen2.5": lambda: Qwen2Config(**_SIZES, rms_norm_eps=1e-6, rope_parameters=_theta(1000.0)),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16, rms_norm_eps=1e-6, rope_parameters=_theta(1000.0)),
    "qwen3-tied": lambda: Qwen3Config(**_SIZES, head_dim=16, rms_norm_eps=1e-6, tie_word_embeddings=True),
    "nemotron": lambda: NemotronConfig(**_SIZES, norm_eps=1e-5, partial_rotary_factor=0.5),
}


def build(family: str, seed: int = 0, **changes):
    """The transformers model in fp32 with eager attention, every parameter random."""
    config = CONFIGS[family]()
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


def reload(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", **options).eval()


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, _SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))
