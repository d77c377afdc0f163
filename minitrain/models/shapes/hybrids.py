"""The shapes of published hybrids: attention, and layers that carry a state."""

from minitrain.models.shapes import size

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
_GRANITE4 = dict(
    family="granitemoehybrid",
    vocab_size=100352,
    max_position_embeddings=131072,
    norm_eps=1e-5,
    initializer_range=0.1,
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    mamba_head_dim=64,
    mamba_n_groups=1,
    ssm_state_size=128,
    mamba_chunk_size=256,
    tie_word_embeddings=True,
    bos_token_id=100257,
    eos_token_id=100257,
)
_GRANITE4_HYBRID = _GRANITE4 | dict(position_embedding="none", layer_pattern="mmmmmammmm" * 4)
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
    bos_token_id=151643,
    eos_token_id=151645,
)
_QWEN35 = _QWEN3_NEXT | dict(
    family="qwen3_5_text", vocab_size=248320, bos_token_id=None, eos_token_id=248044
)

HYBRIDS: dict[str, dict] = {
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
    "granite-4.0-h-tiny": _GRANITE4_HYBRID
    | size(1536, 512, 40, 12, num_key_value_heads=4, head_dim=128)
    | dict(
        mamba_num_heads=48,
        attention_multiplier=1 / 128,
        logits_scaling=6.0,
        num_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=1024,
    ),
    "granite-4.0-h-small": _GRANITE4_HYBRID
    | size(4096, 768, 40, 32, num_key_value_heads=8, head_dim=128)
    | dict(
        mamba_num_heads=128,
        attention_multiplier=1 / 128,
        logits_scaling=16.0,
        num_experts=72,
        num_experts_per_tok=10,
        moe_intermediate_size=768,
        shared_expert_intermediate_size=1536,
    ),
    "granite-4.0-h-micro": _GRANITE4_HYBRID
    | size(2048, 8192, 40, 32, num_key_value_heads=8, head_dim=64)
    | dict(mamba_num_heads=64, attention_multiplier=1 / 64, logits_scaling=8.0),
    "granite-4.0-micro": _GRANITE4
    | size(2560, 8192, 40, 40, num_key_value_heads=8, head_dim=64)
    | dict(rope_theta=1e7, mamba_num_heads=80, attention_multiplier=1 / 64, logits_scaling=10.0),
    "qwen3-next-80b-a3b": _QWEN3_NEXT
    | size(2048, 5120, 48, 16)
    | dict(
        layer_pattern="ddda" * 12,
        linear_fused_proj=True,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        shared_expert_gate=True,
    ),
    "qwen3.5-9b": _QWEN35
    | size(4096, 12288, 32, 16, num_key_value_heads=4, layer_pattern="ddda" * 8),
    "qwen3.5-27b": _QWEN35
    | size(5120, 17408, 64, 24, num_key_value_heads=4, layer_pattern="ddda" * 16)
    | dict(linear_num_value_heads=48),
    "qwen3.5-35b-a3b": _QWEN35
    | size(2048, 512, 40, 16)
    | dict(
        family="qwen3_5_moe_text",
        layer_pattern="ddda" * 10,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        shared_expert_gate=True,
    ),
}
