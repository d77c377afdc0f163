"""The shapes of published models whose MLPs are all dense."""

from minitrain.models.shapes import size

_LLAMA3 = dict(
    family="llama",
    vocab_size=128256,
    head_dim=128,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    norm_eps=1e-5,
    rope_theta=500000.0,
    bos_token_id=128000,
    eos_token_id=128001,
)
_LLAMA3_8B = size(4096, 14336, 32, 32)
_LLAMA3_70B = size(8192, 28672, 80, 64)
_LLAMA3_405B = size(16384, 53248, 126, 128)
_LLAMA31 = _LLAMA3 | dict(
    max_position_embeddings=131072,
    rope_scaling=dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
)
_QWEN25 = dict(
    family="qwen2",
    vocab_size=152064,
    head_dim=128,
    max_position_embeddings=131072,
    rope_theta=1e6,
    qkv_bias=True,
    bos_token_id=151643,
    eos_token_id=151643,
)
_NEMOTRON4 = dict(
    family="nemotron",
    vocab_size=256000,
    num_key_value_heads=8,
    max_position_embeddings=4096,
    norm="layernorm1p",
    mlp="relu2",
    partial_rotary_factor=0.5,
    bos_token_id=2,
    eos_token_id=3,
)
_OLMO3 = dict(
    family="olmo3",
    vocab_size=100278,
    head_dim=128,
    max_position_embeddings=65536,
    norm_eps=1e-6,
    norm_position="after",
    qk_norm=True,
    qk_norm_over_heads=True,
    rope_theta=500000.0,
    window_rope_theta=500000.0,
    rope_scaling=dict(
        rope_type="yarn",
        factor=8.0,
        original_max_position_embeddings=8192,
        beta_fast=32.0,
        beta_slow=1.0,
    ),
    sliding_window=4096,
    sliding_window_pattern=4,
    bos_token_id=None,
    eos_token_id=100257,
)

_GEMMA3 = dict(
    family="gemma3_text",
    vocab_size=262208,
    head_dim=256,
    max_position_embeddings=131072,
    norm="rmsnorm1p",
    norm_eps=1e-6,
    norm_position="both",
    mlp="geglu",
    qk_norm=True,
    attention_multiplier=1 / 16,
    rope_theta=1e6,
    rope_scaling=dict(rope_type="linear", factor=8.0),
    window_rope_theta=10000.0,
    sliding_window=1024,
    sliding_window_pattern=6,
    tie_word_embeddings=True,
    bos_token_id=2,
    eos_token_id=[1, 106],
)

DENSE: dict[str, dict] = {
    "llama3-8b": _LLAMA3 | _LLAMA3_8B,
    "llama3-70b": _LLAMA3 | _LLAMA3_70B,
    "llama3.1-8b": _LLAMA31 | _LLAMA3_8B,
    "llama3.1-70b": _LLAMA31 | _LLAMA3_70B,
    "llama3.1-405b": _LLAMA31 | _LLAMA3_405B,
    "qwen2.5-7b": _QWEN25 | size(3584, 18944, 28, 28, num_key_value_heads=4, norm_eps=1e-6),
    "qwen2.5-32b": _QWEN25 | size(5120, 27648, 64, 40, num_key_value_heads=8, norm_eps=1e-5),
    "qwen3-32b": size(5120, 25600, 64, 64)
    | dict(
        family="qwen3",
        vocab_size=151936,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        norm_eps=1e-6,
        rope_theta=1e6,
        qk_norm=True,
        bos_token_id=151643,
        eos_token_id=151645,
    ),
    "smollm3-3b": _LLAMA3
    | size(2048, 11008, 36, 16, num_key_value_heads=4, norm_eps=1e-6)
    | dict(
        family="smollm3",
        max_position_embeddings=65536,
        rope_theta=5e6,
        no_rope_layer_interval=4,
        tie_word_embeddings=True,
        eos_token_id=128012,
    ),
    "olmo3-7b": _OLMO3 | size(4096, 11008, 32, 32, num_key_value_heads=32),
    "olmo3-32b": _OLMO3 | size(5120, 27648, 64, 40, num_key_value_heads=8),
    "gemma3-1b": _GEMMA3
    | size(1152, 6912, 26, 4, num_key_value_heads=1, embedding_multiplier=1152**0.5)
    | dict(
        vocab_size=262144, max_position_embeddings=32768, rope_scaling=None, sliding_window=512
    ),
    "gemma3-4b": _GEMMA3
    | size(2560, 10240, 34, 8, num_key_value_heads=4, embedding_multiplier=2560**0.5),
    "gemma3-12b": _GEMMA3
    | size(3840, 15360, 48, 16, num_key_value_heads=8, embedding_multiplier=3840**0.5),
    "gemma3-27b": _GEMMA3
    | size(5376, 21504, 62, 32, num_key_value_heads=16, embedding_multiplier=5376**0.5)
    | dict(head_dim=128, attention_multiplier=168**-0.5),
    "granite-3.3-8b": size(4096, 12800, 40, 32)
    | dict(
        family="granite",
        vocab_size=49159,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope_theta=1e7,
        embedding_multiplier=12.0,
        attention_multiplier=1 / 128,
        residual_multiplier=0.22,
        logits_scaling=16.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "nemotron4-15b": _NEMOTRON4
    | size(6144, 24576, 32, 48, head_dim=128, initializer_range=0.0134),
    "nemotron4-340b": _NEMOTRON4
    | size(18432, 73728, 96, 96, head_dim=192, initializer_range=0.0063),
    "gpt3-175b": size(12288, 49152, 96, 96)
    | dict(
        family="gpt2",
        vocab_size=50257,
        num_key_value_heads=96,
        head_dim=128,
        max_position_embeddings=2048,
        norm="layernorm",
        norm_eps=1e-5,
        mlp="gelu",
        qkv_bias=True,
        o_bias=True,
        position_embedding="learned",
        tie_word_embeddings=True,
        scaled_residual_init=True,
        bos_token_id=50256,
        eos_token_id=50256,
    ),
}
