"""The shapes of published hybrids: attention, and layers that carry a state."""

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
}
