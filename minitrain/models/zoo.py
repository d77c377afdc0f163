"""Every model of the tables by name, and a tiny twin of each (NAME-tiny) with its quirks, for tests and laptops."""

import dataclasses
import difflib

from minitrain.errors import InputError
from minitrain.models.decoder import DecoderConfig

_LLAMA3 = dict(
    family="llama", vocab_size=128256, head_dim=128, num_key_value_heads=8, max_position_embeddings=8192,
    norm_eps=1e-5, rope_theta=500000.0, bos_token_id=128000, eos_token_id=128001,
)  # fmt: skip
_LLAMA3_8B = dict(hidden_size=4096, intermediate_size=14336, num_layers=32, num_attention_heads=32)
_LLAMA3_70B = dict(hidden_size=8192, intermediate_size=28672, num_layers=80, num_attention_heads=64)
_LLAMA3_405B = dict(hidden_size=16384, intermediate_size=53248, num_layers=126, num_attention_heads=128)
_LLAMA31 = _LLAMA3 | dict(
    max_position_embeddings=131072,
    rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
)
_QWEN25 = dict(
    family="qwen2", vocab_size=152064, head_dim=128, max_position_embeddings=131072, rope_theta=1e6, qkv_bias=True,
    bos_token_id=151643, eos_token_id=151643,
)  # fmt: skip
_NEMOTRON4 = dict(
    family="nemotron", vocab_size=256000, num_key_value_heads=8, max_position_embeddings=4096, norm="layernorm1p",
    mlp="relu2", partial_rotary_factor=0.5, bos_token_id=2, eos_token_id=3,
)  # fmt: skip

ZOO: dict[str, dict] = {
    "llama3-8b": _LLAMA3 | _LLAMA3_8B,
    "llama3-70b": _LLAMA3 | _LLAMA3_70B,
    "llama3.1-8b": _LLAMA31 | _LLAMA3_8B,
    "llama3.1-70b": _LLAMA31 | _LLAMA3_70B,
    "llama3.1-405b": _LLAMA31 | _LLAMA3_405B,
    "qwen2.5-7b": _QWEN25
    | dict(
        hidden_size=3584, intermediate_size=18944, num_layers=28, num_attention_heads=28, num_key_value_heads=4,
        norm_eps=1e-6,
    ),
    "qwen2.5-32b": _QWEN25
    | dict(
        hidden_size=5120, intermediate_size=27648, num_layers=64, num_attention_heads=40, num_key_value_heads=8,
        norm_eps=1e-5,
    ),
    "qwen3-32b": dict(
        family="qwen3", vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_layers=64,
        num_attention_heads=64, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, norm_eps=1e-6,
        rope_theta=1e6, qk_norm=True, bos_token_id=151643, eos_token_id=151645,
    ),
    "nemotron4-15b": _NEMOTRON4
    | dict(
        hidden_size=6144, intermediate_size=24576, num_layers=32, num_attention_heads=48, head_dim=128,
        initializer_range=0.0134,
    ),
    "nemotron4-340b": _NEMOTRON4
    | dict(
        hidden_size=18432, intermediate_size=73728, num_layers=96, num_attention_heads=96, head_dim=192,
        initializer_range=0.0063,
    ),
}  # fmt: skip

_TINY = dict(
    vocab_size=512, hidden_size=64, intermediate_size=192, num_layers=4, num_attention_heads=8, num_key_value_heads=4,
    head_dim=16, bos_token_id=256, eos_token_id=257,
)  # fmt: skip


def tiny(fields: dict) -> dict:
    """The same family and quirks at toy width; a scaled context shrinks with it, so that the scaling still acts."""
    scaling = fields.get("rope_scaling")
    if scaling is not None:
        scaling = scaling | dict(original_max_position_embeddings=64)
    return fields | _TINY | dict(rope_scaling=scaling, initializer_range=0.02)


def model_config(name: str, **overrides) -> DecoderConfig:
    """The config of the model called `name`, with some fields replaced. Raises InputError for an unknown name."""
    fields = ZOO.get(name.removesuffix("-tiny"))
    if fields is None:
        known = [n for base in ZOO for n in (base, base + "-tiny")]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0)
        names = ", ".join(ZOO)
        raise InputError(f"model {name!r} is unknown (nearest: {near[0]!r}; known: {names}, each also with -tiny)")
    if name.endswith("-tiny"):
        fields = tiny(fields)
    return dataclasses.replace(DecoderConfig(**fields), **overrides)
