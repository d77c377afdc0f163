"""The architectures of Hugging Face that the decoder computes, and what each name fixes."""

from typing import Any, NamedTuple

from minitrain.formats import gpt2, nemotron_h
from minitrain.models.decoder_config import LATENT, DecoderConfig

EPS_KEYS = {
    "rmsnorm": "rms_norm_eps",
    "layernorm": "layer_norm_epsilon",
    "layernorm1p": "norm_eps",
}
ACTIVATIONS = {"swiglu": "silu", "relu2": "relu2", "clamped_swiglu": "silu", "gelu": "gelu_new"}
# model types that are another family's by a second name
MODEL_TYPES = {"kimi_k2": "deepseek_v3"}


def _keys(same: str, **other: str) -> dict[str, str]:
    """Return fields of `DecoderConfig` -> keys of config.json. same: those with one name, by blanks."""
    return {name: name for name in same.split()} | other


# of every family
SIZES = _keys(
    "vocab_size hidden_size intermediate_size num_attention_heads max_position_embeddings",
    num_layers="num_hidden_layers",
)


class Family(NamedTuple):
    """An architecture, as config.json names it.

    values: the only values of keys that the decoder computes; the keys may be missing.
    sizes: further whole numbers, our field -> key.
    keys: the family's own names of keys that most families share, theirs -> its own.
    fixed: fields of `DecoderConfig` that differ from the defaults.
    quantized: the quant_method that is read.
    rope_theta: where config.json has none. rope: other rotary settings where it has no such object.
    norm_topk: norm_topk_prob where config.json has none. None: the key does not exist, and is true.
    can_tie: if false, the head is stored and separate whatever tie_word_embeddings says.
    heads_divide: num_attention_heads must divide hidden_size, even where head_dim is given.
    partial_rotary: the factor where config.json has none. None: only 1 is possible.
    noise: keys of config.json that transformers heeds in training alone.
    balances: transformers' loss can have a term that balances experts (output_router_logits).
    """

    architecture: str
    values: dict = {}  # noqa: RUF012
    sizes: dict = {}  # noqa: RUF012
    keys: dict = {}  # noqa: RUF012
    fixed: dict = {}  # noqa: RUF012
    quantized: str | None = None
    rope_theta: float = 10000.0
    rope: dict = {}  # noqa: RUF012
    norm_topk: bool | None = None
    can_tie: bool = True
    heads_divide: bool = False
    partial_rotary: float | None = None
    noise: tuple = ("attention_dropout",)
    balances: bool = False

    def field(self, name: str) -> Any:
        """Return a field of `DecoderConfig` as the family fixes it, or the default."""
        return self.fixed.get(name, getattr(DecoderConfig, name))

    def key(self, name: str) -> str:
        """Return the family's own name of a key that most families call `name`."""
        return self.keys.get(name, name)


NO_BIAS = dict(attention_bias=False, mlp_bias=False)
QWEN3 = dict(attention_bias=False, use_sliding_window=False)

FAMILIES = {
    "llama": Family("LlamaForCausalLM", NO_BIAS, heads_divide=True),
    "qwen2": Family(
        "Qwen2ForCausalLM", dict(use_sliding_window=False), fixed=dict(qkv_bias=True)
    ),
    "qwen3": Family("Qwen3ForCausalLM", QWEN3, fixed=dict(qk_norm=True), quantized="fp8"),
    "mixtral": Family(
        "MixtralForCausalLM",
        dict(sliding_window=None),
        rope_theta=1e6,
        noise=("attention_dropout", "router_jitter_noise"),
        balances=True,
        sizes=_keys(
            "num_experts_per_tok",
            num_experts="num_local_experts",
            moe_intermediate_size="intermediate_size",
        ),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        QWEN3 | dict(decoder_sparse_step=1, mlp_only_layers=[]),
        fixed=dict(qk_norm=True),
        quantized="fp8",
        norm_topk=False,
        balances=True,
        sizes=_keys("num_experts num_experts_per_tok moe_intermediate_size"),
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
        sizes=_keys(
            "num_experts_per_tok moe_intermediate_size first_k_dense_replace n_group topk_group",
            num_experts="n_routed_experts",
        )
        | dict(zip(LATENT, LATENT, strict=True)),
        fixed=dict(scoring_func="sigmoid"),
        quantized="fp8",
        norm_topk=True,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        dict(attention_bias=True, swiglu_limit=7.0, swiglu_alpha=1.702),
        sizes=_keys(
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
        sizes=_keys(
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
    ),
}
