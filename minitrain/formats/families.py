"""Describe the config.json and the tensors of each family of language models on the hub."""

from dataclasses import replace

from minitrain.formats import (
    deepseek_v3,
    gemma3,
    gpt2,
    granite,
    minimax_m2,
    nemotron_h,
    qwen3_next,
    smollm3,
)
from minitrain.formats.family import PLAIN, Family, Stacks, depth_by_number

# norm of `DecoderConfig` -> key of its epsilon
EPS_KEYS = {
    "rmsnorm": "rms_norm_eps",
    "rmsnorm1p": "rms_norm_eps",
    "layernorm": "layer_norm_epsilon",
    "layernorm1p": "norm_eps",
}
# mlp of `DecoderConfig` -> value of hidden_act
ACTIVATIONS = {
    "swiglu": "silu",
    "geglu": "gelu_pytorch_tanh",
    "relu2": "relu2",
    "clamped_swiglu": "silu",
    "gelu": "gelu_new",
}
# further values of model_type -> the family's name
MODEL_TYPES = {"kimi_k2": "deepseek_v3"}


def _keys(same: str, **other: str) -> dict[str, str]:
    """Return fields of `DecoderConfig` -> keys of config.json.

    same: fields whose key has the same name, separated by blanks. other: field=key.
    """
    return {name: name for name in same.split()} | other


# the family of models that transformers does not know
OWN = "minitrain"
# fields and keys that all families have
SIZES = _keys(
    "vocab_size hidden_size intermediate_size num_attention_heads max_position_embeddings",
    num_layers="num_hidden_layers",
)


# names of an expert's matrices, for `expert_matrices`
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
NO_BIAS = dict(attention_bias=False, mlp_bias=False)
QWEN3 = dict(attention_bias=False, use_sliding_window=False)
# Qwen3-Next, Qwen3.5, and those of them with experts
DELTA = dict(
    fields=_keys(
        "layer_pattern linear_num_key_heads linear_num_value_heads"
        " linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim"
    ),
    fixed=dict(norm="rmsnorm1p", qk_norm=True, attn_output_gate=True),
    partial_rotary=0.25,
    defaults=qwen3_next.with_defaults,
    read=qwen3_next.read,
    write=qwen3_next.write,
    renamed=qwen3_next.stored_name,
    depth_of=qwen3_next.depth_of,
    needed=lambda config: ("num_experts", "shared_expert_intermediate_size"),
)
DELTA_EXPERTS = DELTA | dict(
    fields=DELTA["fields"]
    | _keys(
        "num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size"
    ),
    fixed=DELTA["fixed"] | dict(shared_expert_gate=True),
    balances=True,
)
# in files that have a vision tower too
WITH_VISION = dict(
    full_name=qwen3_next.full_name, ignored=r"model\.visual\..*", can_classify=False
)

FAMILIES = {
    "llama": Family("LlamaForCausalLM", NO_BIAS, heads_divide=True),
    "qwen2": Family(
        "Qwen2ForCausalLM", dict(use_sliding_window=False), fixed=dict(qkv_bias=True)
    ),
    "qwen3": Family("Qwen3ForCausalLM", QWEN3, fixed=dict(qk_norm=True), quantized="fp8"),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        NO_BIAS | dict(use_sliding_window=False),
        fields=_keys("no_rope_layer_interval"),
        rope_theta=2e6,
        defaults=smollm3.with_defaults,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        dict(attention_bias=False),
        fields=_keys("sliding_window"),
        rope_theta=500000.0,
        window_rope=0.0,
        fixed=dict(
            norm_position="after", qk_norm=True, qk_norm_over_heads=True, sliding_window_pattern=4
        ),
        renamed={
            ".mixer_output_norm.": ".post_attention_layernorm.",
            ".mlp_output_norm.": ".post_feedforward_layernorm.",
        },
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        dict(
            attention_bias=False,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            use_bidirectional_attention=False,
        ),
        fields=_keys("sliding_window sliding_window_pattern"),
        keys={"hidden_act": "hidden_activation"},
        rope_theta=1e6,
        window_rope=10000.0,
        fixed=dict(norm="rmsnorm1p", norm_position="both", mlp="geglu", qk_norm=True),
        can_classify=False,
        heads_divide=True,
        defaults=gemma3.with_defaults,
        read=gemma3.read,
        write=gemma3.write,
        renamed={
            ".mixer_output_norm.": ".post_attention_layernorm.",
            ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
            ".mlp_output_norm.": ".post_feedforward_layernorm.",
        },
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        dict(sliding_window=None),
        rope_theta=1e6,
        noise=("attention_dropout", "router_jitter_noise"),
        balances=True,
        fields=_keys(
            "num_experts_per_tok",
            num_experts="num_local_experts",
            moe_intermediate_size="intermediate_size",
        ),
        renamed={".mlp.": ".block_sparse_moe."},
        # transformers 5 calls the router so in files with stacked experts
        also_ours=(".mlp.gate.",),
        expert_matrices=MIXTRAL,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        QWEN3 | dict(decoder_sparse_step=1, mlp_only_layers=[]),
        fixed=dict(qk_norm=True),
        quantized="fp8",
        norm_topk=False,
        balances=True,
        fields=_keys("num_experts num_experts_per_tok moe_intermediate_size"),
        # transformers 5 writes this name
        aliases={"num_local_experts": "num_experts"},
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        dict(
            attention_bias=False,
            rope_interleave=True,
            moe_layer_freq=1,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
        ),
        fields=_keys(
            "num_experts_per_tok moe_intermediate_size first_k_dense_replace n_group topk_group"
            " kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
            " routed_scaling_factor",
            num_experts="n_routed_experts",
        ),
        fixed=dict(scoring_func="sigmoid"),
        quantized="fp8",
        norm_topk=True,
        read=deepseek_v3.read,
        write=deepseek_v3.write,
        depth_of=depth_by_number,
        copied=deepseek_v3.COPIED,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        fields=_keys(
            "num_experts_per_tok moe_intermediate_size first_k_dense_replace n_group topk_group"
            " routed_scaling_factor",
            num_experts="n_routed_experts",
            qkv_bias="attention_bias",
            qk_norm="use_qk_norm",
        ),
        fixed=dict(scoring_func="sigmoid"),
        quantized="fp8",
        partial_rotary=0.5,
        norm_topk=True,
        can_classify=False,
        read=deepseek_v3.read_shared,
        write=deepseek_v3.write_shared,
        depth_of=depth_by_number,
        copied=deepseek_v3.COPIED,
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        dict(
            scoring_func="sigmoid",
            use_routing_bias=True,
            use_qk_norm=True,
            qk_norm_type="per_layer",
            shared_intermediate_size=0,
        ),
        fields=_keys(
            "num_experts_per_tok",
            num_experts="num_local_experts",
            moe_intermediate_size="intermediate_size",
        ),
        fixed=dict(scoring_func="sigmoid", qk_norm=True, qk_norm_over_heads=True),
        quantized="fp8",
        rope_theta=5e6,
        partial_rotary=1.0,
        noise=("attention_dropout", "router_jitter_noise"),
        balances=True,
        can_classify=False,
        defaults=minimax_m2.with_rotary_share,
        write=lambda config, settings: settings | dict(rotary_dim=config.rotary_dim),
        renamed={".mlp.": ".block_sparse_moe.", ".mlp.gate.e_score": ".block_sparse_moe.e_score"},
        expert_matrices=MIXTRAL,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        dict(attention_bias=True, swiglu_limit=7.0, swiglu_alpha=1.702),
        fields=_keys(
            "num_experts_per_tok sliding_window",
            num_experts="num_local_experts",
            moe_intermediate_size="intermediate_size",
        ),
        rope_theta=150000.0,
        rope=dict(
            rope_type="yarn",
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=4096,
        ),
        fixed=dict(
            mlp="clamped_swiglu", qkv_bias=True, o_bias=True, sinks=True, expert_bias=True
        ),
        quantized="mxfp4",
        balances=True,
        renamed={".mlp.gate.": ".mlp.router."},
        stacks=Stacks(transposed=True, alternating=True),
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        NO_BIAS,
        fixed=dict(norm="layernorm1p", mlp="relu2"),
        partial_rotary=0.5,
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        NO_BIAS
        | dict(
            use_bias=False,
            use_conv_bias=True,
            mamba_hidden_act="silu",
            n_shared_experts=1,
            sliding_window=None,
        ),
        fields=_keys(
            "num_experts_per_tok moe_intermediate_size n_group topk_group"
            " mamba_num_heads mamba_head_dim ssm_state_size conv_kernel",
            num_experts="n_routed_experts",
            shared_expert_intermediate_size="moe_shared_expert_intermediate_size",
            mamba_n_groups="n_groups",
            mamba_chunk_size="chunk_size",
        ),
        keys=nemotron_h.KEYS,
        fixed=dict(
            mlp="relu2",
            scoring_func="sigmoid",
            position_embedding="none",
            scaled_residual_init=True,
        ),
        norm_topk=True,
        can_tie=False,
        can_classify=False,
        defaults=nemotron_h.with_pattern,
        read=nemotron_h.read,
        write=nemotron_h.write,
        needed=nemotron_h.needed,
        renamed=nemotron_h.stored_name,
        depth_of=nemotron_h.depth_of,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        NO_BIAS,
        fields=_keys(" ".join(granite.MULTIPLIERS)),
        can_classify=False,
        defaults=granite.with_multipliers,
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        dict(attention_bias=False, mamba_conv_bias=True, mamba_proj_bias=False),
        fields=_keys(
            " ".join((*granite.MULTIPLIERS, "num_experts_per_tok layer_pattern")),
            num_experts="num_local_experts",
            moe_intermediate_size="intermediate_size",
            shared_expert_intermediate_size="shared_intermediate_size",
            **granite.MAMBA,
        ),
        balances=True,
        can_classify=False,
        defaults=granite.with_pattern,
        read=granite.read,
        write=granite.write,
        needed=lambda config: (),
        renamed=granite.RENAMED,
        fused=("gate_proj", "up_proj"),
        stacks=Stacks(),
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        dict(attention_bias=False, decoder_sparse_step=1, mlp_only_layers=[]),
        quantized="fp8",
        norm_topk=True,
        **DELTA_EXPERTS | dict(fixed=DELTA_EXPERTS["fixed"] | dict(linear_fused_proj=True)),
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        dict(attention_bias=False, attn_output_gate=True),
        **DELTA | WITH_VISION,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        dict(attention_bias=False, attn_output_gate=True),
        # it has no dense MLPs
        keys={"intermediate_size": "moe_intermediate_size"},
        **DELTA_EXPERTS | WITH_VISION,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        dict(
            scale_attn_by_inverse_layer_idx=False,
            add_cross_attention=False,
            scale_attn_weights=True,
        ),
        keys=gpt2.KEYS,
        fixed=dict(
            norm="layernorm",
            mlp="gelu",
            qkv_bias=True,
            o_bias=True,
            position_embedding="learned",
            scaled_residual_init=True,
        ),
        heads_divide=True,
        noise=gpt2.DROPOUTS,
        defaults=gpt2.with_defaults,
        write=gpt2.write,
        full_name=gpt2.full_name,
        renamed=gpt2.RENAMED,
        fused=("q_proj", "k_proj", "v_proj"),
        transposed=gpt2.is_transposed,
        # these tensors are masks
        ignored=r".*\.attn\.(masked_)?bias",
    ),
    # config_own.py reads and writes its config.json; all parameters are stored as they are
    OWN: replace(PLAIN, as_ours=True, depth_of=depth_by_number),
}
