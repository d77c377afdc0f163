"""Describe the config.json and the tensors of each family of language models on the hub."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from minitrain.errors import InputError
from minitrain.formats import deepseek_v3, gemma3, gpt2, granite, nemotron_h
from minitrain.formats.json_files import read_number
from minitrain.models.decoder_config import DecoderConfig

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


CLASSIFIER = "ForSequenceClassification"
# the family of models that transformers does not know
OWN = "minitrain"
# fields and keys that all families have
SIZES = _keys(
    "vocab_size hidden_size intermediate_size num_attention_heads max_position_embeddings",
    num_layers="num_hidden_layers",
)


@dataclass(frozen=True)
class Stacks:
    """How files stack the matrices of all experts."""

    # [experts, in, out], else as ours [experts, out, in]
    transposed: bool = False
    # gate's rows and up's take turns as in ours, else all of gate's come first
    alternating: bool = False


@dataclass(frozen=True)
class Family:
    """The config.json and the stored tensors of an architecture.

    Fields hold tables where possible, and functions otherwise; longer functions are in a file of the
    family's own.
    """

    # --- config.json

    # the name in `architectures`
    architecture: str
    # key -> the only value that `Decoder` supports; the key may be missing
    values: dict = field(default_factory=dict)
    # further fields of `DecoderConfig` -> keys; values are converted to the field's type
    fields: dict = field(default_factory=dict)
    # key of most families -> this family's key
    keys: dict = field(default_factory=dict)
    # alternative key -> the key that is read
    aliases: dict = field(default_factory=dict)
    # fields of `DecoderConfig` that this family fixes to other values than their defaults
    fixed: dict = field(default_factory=dict)
    # the supported quant_method; None: no quantized weights
    quantized: str | None = None
    # the default of rope_theta
    rope_theta: float = 10000.0
    # the default of rope_scaling
    rope: dict = field(default_factory=dict)
    # the default of window_rope_theta, or 0 for rope_theta; None: there is no such setting
    window_rope: float | None = None
    # the default of norm_topk_prob; None: no such key, and it is always true
    norm_topk: bool | None = None
    # False: the head is stored separately, whatever tie_word_embeddings says
    can_tie: bool = True
    # False: transformers has no model with a score as its head
    can_classify: bool = True
    # True: num_attention_heads must divide hidden_size, even where head_dim is given
    heads_divide: bool = False
    # the default of partial_rotary_factor; None: only 1 is supported
    partial_rotary: float | None = None
    # keys that affect only training in transformers
    noise: tuple = ("attention_dropout",)
    # True: transformers' loss can include a load-balancing term (output_router_logits)
    balances: bool = False
    # defaults(raw): return config.json with missing keys added and other spellings replaced
    defaults: Callable[[dict], dict] = lambda raw: raw
    # read(raw): return fields that do not follow from one key each. Raises InputError.
    read: Callable[[dict], dict] = lambda raw: {}
    # write(config, settings): return config.json. settings: its other keys, as most families call them
    write: Callable[[DecoderConfig, dict], dict] = lambda config, settings: settings
    # needed(config): return the fields that must not be 0
    needed: Callable[[DecoderConfig], tuple] = lambda config: (
        "num_experts",
        "sliding_window",
        "kv_lora_rank",
        "no_rope_layer_interval",
    )

    # --- tensors

    # parts of our names -> parts of stored names, all replaced at once; or a function of the name and
    # of the number of layers
    renamed: dict | Callable[[str, int], str] = field(default_factory=dict)
    # full_name(key): return the name that transformers gives a tensor, where other files shorten it
    full_name: Callable[[str], str] = lambda key: key
    # Linears of a module that are stored as one, in the order of their rows
    fused: tuple[str, ...] = ()
    # transposed(name): return whether a parameter is stored as [in, out]
    transposed: Callable[[str], bool] = lambda name: False
    # True: all parameters are stored as they are
    as_ours: bool = False
    # parts of our names that may also appear unchanged in files
    also_ours: tuple = ()
    # names of an expert's matrices: ours -> stored
    expert_matrices: dict = field(default_factory=dict)
    # None: every expert has matrices of its own
    stacks: Stacks | None = None
    # pattern of stored tensors to skip
    ignored: str = ""
    # depth_of(key, layers): return the depth of multi-token prediction, 0, 1, ..., that a stored
    # tensor belongs to; None if to none. Without this function, the family has no such layers
    depth_of: Callable[[str, int], int | None] | None = None
    # names of copies that files have in each layer of multi-token prediction: ours -> stored, with {}
    # for the layer's number
    copied: dict = field(default_factory=dict)

    @property
    def classifier(self) -> str:
        """Return the name in `architectures` of a model with a score as its head.

        If transformers has none, it is the name of the language model.
        """
        if not self.can_classify:
            return self.architecture
        return re.sub("(ForCausalLM|LMHeadModel)$", CLASSIFIER, self.architecture)

    def field(self, name: str) -> Any:
        """Return the value to which the family fixes a field of `DecoderConfig`, or the default."""
        return self.fixed.get(name, getattr(DecoderConfig, name))

    def key(self, name: str) -> str:
        """Return this family's key for the one that most families call `name`."""
        return self.keys.get(name, name)

    def fused_part(self, name: str) -> tuple[int, int]:
        """Return which part of a stored tensor our parameter is, and of how many: (0, 1) of its own."""
        *_, module, _ = ("", "", *name.split("."))
        in_one = module in self.fused
        return (self.fused.index(module), len(self.fused)) if in_one else (0, 1)

    def stored_name(self, name: str, layers: int) -> str:
        """Return the stored name of our parameter. For experts see layouts_hf.py.

        layers: of the model, without those of multi-token prediction.
        """
        if callable(self.renamed):
            return self.renamed(name, layers)
        parts = "|".join(re.escape(part) for part in sorted(self.renamed, key=len, reverse=True))
        return re.sub(parts, lambda found: self.renamed[found[0]], name) if parts else name


def with_smollm3_defaults(raw: dict) -> dict:
    """Return SmolLM3's config.json with what it leaves out.

    Raises InputError where its list of layers that rotate says another thing.
    """
    raw = dict(no_rope_layer_interval=4, tie_word_embeddings=True) | raw
    given = raw.get("no_rope_layers")
    every = read_number(raw, "no_rope_layer_interval")
    if given is None:
        return raw
    listed = given if isinstance(given, list) else []
    regular = all(turns == int(not every or i % every != 0) for i, turns in enumerate(listed, 1))
    if not regular or len(listed) < read_number(raw, "num_hidden_layers"):
        raise InputError(
            f"no_rope_layers={given!r} is not supported (must be 0 for one of "
            f"no_rope_layer_interval={every} layers, the last, and 1 for the others)"
        )
    return raw


def with_rotary_share(raw: dict) -> dict:
    """Return MiniMax-M2's config.json with `partial_rotary_factor`, where it has `rotary_dim`."""
    if raw.get("rotary_dim") is None or raw.get("partial_rotary_factor") is not None:
        return raw
    rotated = read_number(raw, "rotary_dim")
    share = rotated / max(1, read_number(raw, "head_dim", default=128))
    return raw | dict(partial_rotary_factor=share)


# for models without an entry in FAMILIES, such as Wan
PLAIN = Family("")
# names of an expert's matrices, for `expert_matrices`
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
NO_BIAS = dict(attention_bias=False, mlp_bias=False)
QWEN3 = dict(attention_bias=False, use_sliding_window=False)

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
        defaults=with_smollm3_defaults,
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
        depth_of=deepseek_v3.depth_of,
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
        depth_of=deepseek_v3.depth_of,
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
        defaults=with_rotary_share,
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
    OWN: replace(PLAIN, as_ours=True, depth_of=deepseek_v3.depth_of),
}
