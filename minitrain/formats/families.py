"""The architectures of Hugging Face that the decoder computes, and what each name fixes."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from minitrain.formats import deepseek_v3, gpt2, nemotron_h
from minitrain.models.decoder_config import DecoderConfig

EPS_KEYS = {
    "rmsnorm": "rms_norm_eps",
    "layernorm": "layer_norm_epsilon",
    "layernorm1p": "norm_eps",
}
ACTIVATIONS = {"swiglu": "silu", "relu2": "relu2", "clamped_swiglu": "silu", "gelu": "gelu_new"}
# second names of model types -> the family's name
MODEL_TYPES = {"kimi_k2": "deepseek_v3"}


def _keys(same: str, **other: str) -> dict[str, str]:
    """Return fields of `DecoderConfig` -> keys of config.json. same: those with one name, by blanks."""
    return {name: name for name in same.split()} | other


# the family of models that transformers does not know
OWN = "minitrain"
# The fields and keys of every family.
SIZES = _keys(
    "vocab_size hidden_size intermediate_size num_attention_heads max_position_embeddings",
    num_layers="num_hidden_layers",
)


class Family(NamedTuple):
    """An architecture, as config.json and the tensors' names have it.

    What no table can say is in functions, mostly of a file of the family's own.
    """

    # --- config.json

    architecture: str
    # the only values of keys that the decoder computes; the keys may be missing
    values: dict = {}  # noqa: RUF012
    # further fields of `DecoderConfig` -> keys. The field's annotation says what is read: int, float,
    # bool or str.
    fields: dict = {}  # noqa: RUF012
    # names of keys that most families share -> the family's own names
    keys: dict = {}  # noqa: RUF012
    # other names of keys -> those that are read
    aliases: dict = {}  # noqa: RUF012
    # fields of `DecoderConfig` that differ from the defaults
    fixed: dict = {}  # noqa: RUF012
    # the quant_method that is read
    quantized: str | None = None
    # the value where config.json has none
    rope_theta: float = 10000.0
    # other rotary settings where config.json has no such object
    rope: dict = {}  # noqa: RUF012
    # norm_topk_prob where config.json has none. None: the key does not exist, and is true.
    norm_topk: bool | None = None
    # False: the head is stored and separate whatever tie_word_embeddings says
    can_tie: bool = True
    # True: num_attention_heads must divide hidden_size, even where head_dim is given
    heads_divide: bool = False
    # the factor where config.json has none. None: only 1 is possible.
    partial_rotary: float | None = None
    # keys of config.json that transformers heeds in training alone
    noise: tuple = ("attention_dropout",)
    # True: transformers' loss can have a term that balances experts (output_router_logits)
    balances: bool = False
    # defaults(raw): return config.json in the one spelling that is read, with missing keys filled in
    defaults: Callable[[dict], dict] = lambda raw: raw
    # read(raw): return fields that are not the value of one key. Raises InputError.
    read: Callable[[dict], dict] = lambda raw: {}
    # write(config, settings): return config.json for a config. settings: all the others, by most
    # families' names of keys.
    write: Callable[[DecoderConfig, dict], dict] = lambda config, settings: settings
    # needed(config): return the fields that must not be 0
    needed: Callable[[DecoderConfig], tuple] = lambda config: (
        "num_experts",
        "sliding_window",
        "kv_lora_rank",
    )

    # --- tensors

    # parts of our names -> theirs, all replaced at once; or a function of the whole name and the
    # number of layers
    renamed: dict | Callable[[str, int], str] = {}  # noqa: RUF012
    # full_name(key): return a stored tensor's name as transformers writes it
    full_name: Callable[[str], str] = lambda key: key
    # place(name, shape): return the stored tensor that holds a parameter, its shape, where the
    # parameter begins in it, and whether it is transposed. None: layouts_hf.py knows.
    place: Callable[[str, tuple], tuple] | None = None
    # to_stored(tensors): yield the stored tensors of all parameters. None: layouts_hf.py does.
    to_stored: Callable[[Iterable], Iterator] | None = None
    # parts of our names that a file may hold as they are, too
    also_ours: tuple = ()
    # our names of an expert's matrices -> theirs, where each has a tensor
    expert_matrices: dict = {}  # noqa: RUF012
    # True: experts are stored as stacks, transposed, the rows of gate and up in turn as here
    stacked: bool = False
    # pattern of stored tensors without a place here
    ignored: str = ""
    # depth_of(key, layers): return the depth of multi-token prediction, 0, 1, ..., that a stored
    # tensor is of; None: of none. Absent: the family has no such layers.
    depth_of: Callable[[str, int], int | None] | None = None
    # our names -> those of copies that each of these layers has beside it, by its number
    copied: dict = {}  # noqa: RUF012

    def field(self, name: str) -> Any:
        """Return a field of `DecoderConfig` as the family fixes it, or the default."""
        return self.fixed.get(name, getattr(DecoderConfig, name))

    def key(self, name: str) -> str:
        """Return the family's own name of a key that most families call `name`."""
        return self.keys.get(name, name)

    def stored_name(self, name: str, layers: int) -> str:
        """Return the hub's name of our parameter. For stacked experts see layouts_hf.py.

        layers: of the model, without those of multi-token prediction.
        """
        if callable(self.renamed):
            return self.renamed(name, layers)
        parts = "|".join(re.escape(part) for part in sorted(self.renamed, key=len, reverse=True))
        return re.sub(parts, lambda found: self.renamed[found[0]], name) if parts else name


# A family whose config.json and tensors are as here.
PLAIN = Family("")
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
        fields=_keys(
            "num_experts_per_tok",
            num_experts="num_local_experts",
            moe_intermediate_size="intermediate_size",
        ),
        renamed={".mlp.": ".block_sparse_moe."},
        # transformers 5 writes the router so, in files with stacks of experts
        also_ours=(".mlp.gate.",),
        expert_matrices={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        QWEN3 | dict(decoder_sparse_step=1, mlp_only_layers=[]),
        fixed=dict(qk_norm=True),
        quantized="fp8",
        norm_topk=False,
        balances=True,
        fields=_keys("num_experts num_experts_per_tok moe_intermediate_size"),
        # transformers 5 writes this name.
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
        stacked=True,
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
        defaults=nemotron_h.with_pattern,
        read=nemotron_h.read,
        write=nemotron_h.write,
        needed=nemotron_h.needed,
        renamed=nemotron_h.stored_name,
        depth_of=nemotron_h.depth_of,
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
        place=gpt2.place,
        to_stored=gpt2.to_stored,
        # The ignored tensors are masks.
        ignored=r".*\.attn\.(masked_)?bias",
    ),
    # No architecture of transformers describes such a model: config_own.py does.
    OWN: PLAIN._replace(depth_of=deepseek_v3.depth_of),
}
