"""The published models by name, and a tiny twin of each (NAME-tiny) for tests and laptops."""

import dataclasses
import difflib
from typing import TYPE_CHECKING

from minitrain.errors import InputError, hub_hint
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.wan_config import WanConfig

if TYPE_CHECKING:
    from minitrain.models.decoder import Decoder
    from minitrain.models.wan import Wan


_SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_attention_heads")


def _size(*sizes: int, **others) -> dict:
    return dict(zip(_SIZES, sizes, strict=True)) | others


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
_LLAMA3_8B = _size(4096, 14336, 32, 32)
_LLAMA3_70B = _size(8192, 28672, 80, 64)
_LLAMA3_405B = _size(16384, 53248, 126, 128)
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
_MIXTRAL = dict(
    family="mixtral",
    vocab_size=32000,
    head_dim=128,
    num_key_value_heads=8,
    norm_eps=1e-5,
    rope_theta=1e6,
    num_experts=8,
    num_experts_per_tok=2,
    bos_token_id=1,
    eos_token_id=2,
)
_QWEN3_MOE = dict(
    family="qwen3_moe",
    vocab_size=151936,
    num_key_value_heads=4,
    head_dim=128,
    max_position_embeddings=40960,
    norm_eps=1e-6,
    rope_theta=1e6,
    qk_norm=True,
    num_experts=128,
    num_experts_per_tok=8,
    bos_token_id=151643,
    eos_token_id=151645,
)
_DEEPSEEK_V3 = dict(
    family="deepseek_v3",
    hidden_size=7168,
    intermediate_size=18432,
    num_layers=61,
    norm_eps=1e-6,
    head_dim=192,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    shared_expert_intermediate_size=2048,
    scoring_func="sigmoid",
)
_DEEPSEEK_YARN = dict(
    rope_type="yarn",
    original_max_position_embeddings=4096,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)
_GPT_OSS = dict(
    family="gpt_oss",
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    norm_eps=1e-5,
    mlp="clamped_swiglu",
    qkv_bias=True,
    o_bias=True,
    rope_theta=150000.0,
    sliding_window=128,
    sinks=True,
    num_experts_per_tok=4,
    moe_intermediate_size=2880,
    expert_bias=True,
    bos_token_id=199998,
    eos_token_id=200002,
    rope_scaling=dict(
        rope_type="yarn",
        factor=32.0,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
    ),
)
_NEMOTRON3 = dict(
    family="nemotron_h",
    vocab_size=131072,
    num_attention_heads=32,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=262144,
    norm_eps=1e-5,
    mlp="relu2",
    position_embedding="none",
    mamba_head_dim=64,
    mamba_n_groups=8,
    ssm_state_size=128,
    scoring_func="sigmoid",
    scaled_residual_init=True,
    bos_token_id=1,
    eos_token_id=2,
)

# every fourth layer has attention, the others gated DeltaNet
_QWEN3_NEXT = dict(
    family="qwen3_next",
    vocab_size=151936,
    num_key_value_heads=2,
    head_dim=256,
    max_position_embeddings=262144,
    norm="rmsnorm1p",
    norm_eps=1e-6,
    rope_theta=1e7,
    partial_rotary_factor=0.25,
    qk_norm=True,
    attn_output_gate=True,
    full_attention_interval=4,
    bos_token_id=151643,
    eos_token_id=151645,
)
_QWEN35 = _QWEN3_NEXT | dict(
    family="qwen3_5_text", vocab_size=248320, bos_token_id=None, eos_token_id=248044
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

_GLM45 = dict(
    family="glm4_moe",
    vocab_size=151552,
    num_attention_heads=96,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    norm_eps=1e-5,
    rope_theta=1e6,
    partial_rotary_factor=0.5,
    qkv_bias=True,
    num_experts_per_tok=8,
    scoring_func="sigmoid",
    bos_token_id=None,
    eos_token_id=[151329, 151336, 151338],
)
_GLM45_355B = dict(
    hidden_size=5120,
    intermediate_size=12288,
    num_layers=92,
    qk_norm=True,
    num_experts=160,
    moe_intermediate_size=1536,
    shared_expert_intermediate_size=1536,
    first_k_dense_replace=3,
    routed_scaling_factor=2.5,
)

ZOO: dict[str, dict] = {
    "llama3-8b": _LLAMA3 | _LLAMA3_8B,
    "llama3-70b": _LLAMA3 | _LLAMA3_70B,
    "llama3.1-8b": _LLAMA31 | _LLAMA3_8B,
    "llama3.1-70b": _LLAMA31 | _LLAMA3_70B,
    "llama3.1-405b": _LLAMA31 | _LLAMA3_405B,
    "qwen2.5-7b": _QWEN25 | _size(3584, 18944, 28, 28, num_key_value_heads=4, norm_eps=1e-6),
    "qwen2.5-32b": _QWEN25 | _size(5120, 27648, 64, 40, num_key_value_heads=8, norm_eps=1e-5),
    "qwen3-32b": _size(5120, 25600, 64, 64)
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
    | _size(2048, 11008, 36, 16, num_key_value_heads=4, norm_eps=1e-6)
    | dict(
        family="smollm3",
        max_position_embeddings=65536,
        rope_theta=5e6,
        no_rope_layer_interval=4,
        tie_word_embeddings=True,
        eos_token_id=128012,
    ),
    "olmo3-7b": _OLMO3 | _size(4096, 11008, 32, 32, num_key_value_heads=32),
    "olmo3-32b": _OLMO3 | _size(5120, 27648, 64, 40, num_key_value_heads=8),
    "nemotron4-15b": _NEMOTRON4
    | _size(6144, 24576, 32, 48, head_dim=128, initializer_range=0.0134),
    "nemotron4-340b": _NEMOTRON4
    | _size(18432, 73728, 96, 96, head_dim=192, initializer_range=0.0063),
    "mixtral-8x7b": _MIXTRAL
    | _size(4096, 14336, 32, 32, max_position_embeddings=32768, moe_intermediate_size=14336),
    "mixtral-8x22b": _MIXTRAL
    | _size(6144, 16384, 56, 48, max_position_embeddings=65536, moe_intermediate_size=16384),
    "qwen3-30b-a3b": _QWEN3_MOE | _size(2048, 6144, 48, 32, moe_intermediate_size=768),
    "qwen3-235b-a22b": _QWEN3_MOE | _size(4096, 12288, 94, 64, moe_intermediate_size=1536),
    "deepseek-v3": _DEEPSEEK_V3
    | dict(
        vocab_size=129280,
        num_attention_heads=128,
        num_key_value_heads=128,
        max_position_embeddings=163840,
        rope_theta=10000.0,
        rope_scaling=_DEEPSEEK_YARN | dict(factor=40.0, beta_fast=32.0),
        num_experts=256,
        first_k_dense_replace=3,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        bos_token_id=0,
        eos_token_id=1,
    ),
    "kimi-k2": _DEEPSEEK_V3
    | dict(
        vocab_size=163840,
        num_attention_heads=64,
        num_key_value_heads=64,
        max_position_embeddings=131072,
        rope_theta=50000.0,
        rope_scaling=_DEEPSEEK_YARN | dict(factor=32.0, beta_fast=1.0),
        num_experts=384,
        first_k_dense_replace=1,
        routed_scaling_factor=2.827,
        bos_token_id=163584,
        eos_token_id=163585,
    ),
    "glm-4.5": _GLM45 | _GLM45_355B,
    "glm-4.5-air": _GLM45
    | dict(
        hidden_size=4096,
        intermediate_size=10944,
        num_layers=46,
        num_experts=128,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=1408,
        first_k_dense_replace=1,
    ),
    "glm-4.7": _GLM45 | _GLM45_355B | dict(max_position_embeddings=202752),
    "minimax-m2": _size(3072, 1536, 62, 48)
    | dict(
        family="minimax_m2",
        vocab_size=200064,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=196608,
        norm_eps=1e-6,
        rope_theta=5e6,
        partial_rotary_factor=0.5,
        qk_norm=True,
        qk_norm_over_heads=True,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        scoring_func="sigmoid",
        bos_token_id=200034,
        eos_token_id=200020,
    ),
    "gpt-oss-20b": _GPT_OSS | dict(num_layers=24, num_experts=32),
    "gpt-oss-120b": _GPT_OSS | dict(num_layers=36, num_experts=128),
    "nemotron3-nano-30b-a3b": _NEMOTRON3
    | dict(
        hidden_size=2688,
        intermediate_size=1856,
        num_layers=52,
        mamba_num_heads=64,
        layer_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        num_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
    ),
    "nemotron3-super-120b-a12b": _NEMOTRON3
    | dict(
        hidden_size=4096,
        intermediate_size=2688,
        num_layers=88,
        mamba_num_heads=128,
        layer_pattern="MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
        "EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        num_experts=512,
        num_experts_per_tok=22,
        moe_intermediate_size=2688,
        shared_expert_intermediate_size=5376,
        moe_latent_size=1024,
        routed_scaling_factor=5.0,
    ),
    "qwen3-next-80b-a3b": _QWEN3_NEXT
    | _size(2048, 5120, 48, 16)
    | dict(
        linear_fused_proj=True,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        shared_expert_gate=True,
    ),
    "qwen3.5-9b": _QWEN35 | _size(4096, 12288, 32, 16, num_key_value_heads=4),
    "qwen3.5-27b": _QWEN35
    | _size(5120, 17408, 64, 24, num_key_value_heads=4, linear_num_value_heads=48),
    "qwen3.5-35b-a3b": _QWEN35
    | _size(2048, 512, 40, 16)
    | dict(
        family="qwen3_5_moe_text",
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        shared_expert_gate=True,
    ),
    "gpt3-175b": _size(12288, 49152, 96, 96)
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

WAN: dict[str, dict] = {
    "wan2.1-14b": dict(num_attention_heads=40, ffn_dim=13824, num_layers=40),
    "wan2.1-1.3b": dict(num_attention_heads=12, ffn_dim=8960, num_layers=30),
}

_TINY = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=192,
    num_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    bos_token_id=256,
    eos_token_id=257,
)

TINY_WAN = dict(
    num_attention_heads=4,
    attention_head_dim=16,
    ffn_dim=192,
    num_layers=4,
    text_dim=64,
    freq_dim=64,
    embedder_std=0.1,
)
_TINY_MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)
_TINY_GROUPS = dict(num_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2)
_TINY_LATENT = dict(
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    head_dim=24,
)
_TINY_HYBRID = dict(
    mamba_num_heads=8,
    mamba_head_dim=16,
    mamba_n_groups=4,
    ssm_state_size=16,
    mamba_chunk_size=16,
    shared_expert_intermediate_size=96,
)


_TINY_DELTA = dict(
    full_attention_interval=2,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
)


def tiny(fields: dict, num_layers: int = 4) -> dict:
    """Return the fields of the tiny twin: the same family and quirks at toy width.

    A scaled context shrinks with it, so that the scaling still acts.
    """
    small = _TINY | dict(num_layers=num_layers, initializer_range=0.02)
    if fields.get("rope_scaling") is not None:
        small["rope_scaling"] = fields["rope_scaling"] | dict(original_max_position_embeddings=64)
    if fields["num_key_value_heads"] == fields["num_attention_heads"]:
        small["num_key_value_heads"] = small["num_attention_heads"]
    if fields.get("num_experts"):
        small |= _TINY_MOE | (_TINY_GROUPS if fields.get("n_group", 1) > 1 else {})
        if fields["moe_intermediate_size"] == fields["intermediate_size"]:
            small["intermediate_size"] = small["moe_intermediate_size"]
    if fields.get("kv_lora_rank"):
        small |= _TINY_LATENT
    if fields.get("first_k_dense_replace"):
        small["first_k_dense_replace"] = 1
    if fields.get("shared_expert_intermediate_size"):
        small["shared_expert_intermediate_size"] = small["moe_intermediate_size"]
    if fields.get("sliding_window"):
        small["sliding_window"] = 16
    if fields.get("layer_pattern"):
        small |= _TINY_HYBRID | dict(layer_pattern=("ME*E" * num_layers)[:num_layers])
    if fields.get("full_attention_interval"):
        small |= _TINY_DELTA
    if fields.get("moe_latent_size"):
        small["moe_latent_size"] = 32
    if fields["family"] == "gpt2":
        small["head_dim"] = small["hidden_size"] // small["num_attention_heads"]
    return fields | small


def is_known(name: str) -> bool:
    """Return whether this is the name of a model here, or of its tiny twin."""
    return name.removesuffix("-tiny") in ZOO | WAN


def model_config(name: str, **overrides) -> DecoderConfig | WanConfig:
    """Return the config of the model called `name`, with `overrides` of its fields.

    bos and eos become None if a smaller vocabulary does not hold them. Raise InputError for an
    unknown name.
    """
    base = name.removesuffix("-tiny")
    shrunk = name.endswith("-tiny")
    if base in WAN:
        return WanConfig(**WAN[base] | (TINY_WAN if shrunk else {}) | overrides)
    if "/" in name:
        raise InputError(f"model {name!r} is no folder{hub_hint(name, 'model=')}")
    fields = ZOO.get(base)
    if fields is None:
        known = [n for base in (*ZOO, *WAN) for n in (base, base + "-tiny")]
        near = "".join(
            f"nearest: {like!r}; " for like in difflib.get_close_matches(name, known, n=1)
        )
        names = ", ".join((*ZOO, *WAN))
        raise InputError(
            f"model {name!r:.100} is unknown ({near}known: {names}, each also with -tiny, all with random weights; for "
            "others: hf download ORG/NAME --local-dir DIR, then model=DIR)"
        )
    if shrunk:
        fields = tiny(fields)
    config = DecoderConfig(**fields | overrides)
    beyond = []
    for key in ("bos_token_id", "eos_token_id"):
        ids = fields[key] if isinstance(fields[key], list) else [fields[key]]
        if any(token is not None and token >= config.vocab_size for token in ids):
            beyond.append(key)
    return dataclasses.replace(config, **{key: None for key in beyond if key not in overrides})


def empty_model(config: DecoderConfig | WanConfig, **stage) -> "Decoder | Wan":
    """Return a config's model on the meta device, or one pipeline stage of it (see `Decoder`)."""
    # imported here, since torch takes seconds to load: names and keys are checked without it
    from torch import device

    from minitrain.models.decoder import Decoder
    from minitrain.models.wan import Wan

    with device("meta"):
        return (Wan if isinstance(config, WanConfig) else Decoder)(config, **stage)
