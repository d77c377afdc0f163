"""config.json of Hugging Face in and out of a `DecoderConfig`: what each architecture's name and
keys mean.

Both spellings of rotary settings are read, that of transformers 4 is written, which 5 reads too.
What the decoder would not compute exactly is refused by name.
"""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minitrain.errors import InputError, located
from minitrain.formats import gpt2, nemotron_h
from minitrain.formats.magic import placeholder, read_head
from minitrain.models.decoder_config import LATENT, ROPE_SCALINGS, YARN, DecoderConfig

GENERATION = "generation_config.json"
EPS_KEYS = {"rmsnorm": "rms_norm_eps", "layernorm": "layer_norm_epsilon", "layernorm1p": "norm_eps"}
ACTIVATIONS = {"swiglu": "silu", "relu2": "relu2", "clamped_swiglu": "silu", "gelu": "gelu_new"}


def _keys(*same: str, **other: str) -> dict[str, str]:
    """Keys of config.json by our names for them, most of which are the `same`."""
    return dict(zip(same, same, strict=True)) | other


SIZES = _keys(
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "max_position_embeddings",
    num_layers="num_hidden_layers",
)
ALSO_CALLED = {"num_experts": "num_local_experts"}  # by transformers 5
MODEL_TYPES = {"kimi_k2": "deepseek_v3"}  # other names of families
ENDLESS = (
    math.inf,
    {"__float__": "Infinity"},
)  # as Python's JSON writes infinity, and as transformers 5 does
UNSAVED = {
    "bias_update_speed",
    "router_aux_loss_coef",
    "seq_aux",
    "fake_balanced_gate",
}  # settings of training alone
# keys that are read in more than one spelling, and those that speak of how, or with which more
# tensors, it was stored
NOT_KEPT = {
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "num_experts",
    "num_local_experts",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "layers_block_type",
    "hybrid_override_pattern",
    "num_hidden_layers",
    "mamba_dt_min",
    "mamba_dt_limit",
    "time_step_min",
    "time_step_limit",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "auto_map",
    "transformers_version",
    "num_nextn_predict_layers",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
}


class Family(NamedTuple):
    """What an architecture's name says.

    values: settings of config.json of which the decoder knows one value only; they may be absent.
    sizes: further whole numbers, ours -> theirs. keys: other names of keys that most families
    share, those -> its own. fixed: fields of `DecoderConfig`, where they are not its defaults.
    quantised: the quant_method that is read.
    """

    architecture: str
    values: dict[str, Any] = {}  # noqa: RUF012
    sizes: dict[str, str] = {}  # noqa: RUF012
    keys: dict[str, str] = {}  # noqa: RUF012
    fixed: dict[str, Any] = {}  # noqa: RUF012
    quantised: str | None = None
    rope_theta: float = 10000.0  # where config.json gives none
    rope: dict[str, Any] = {}  # noqa: RUF012  # other rotary settings, where it has no object of them
    norm_topk: bool | None = (
        None  # norm_topk_prob where config.json has none; None: it always has none, for true
    )
    can_tie: bool = (
        True  # if not, the head is stored and separate whatever tie_word_embeddings says
    )
    heads_divide: bool = (
        False  # must num_attention_heads divide hidden_size, even where head_dim is given?
    )
    partial_rotary: float | None = (
        None  # the factor where config.json gives none; None: heads are always rotated whole
    )

    def field(self, name: str) -> Any:
        """Of `DecoderConfig`: as the family fixes it, or the default."""
        return self.fixed.get(name, getattr(DecoderConfig, name))

    def key(self, name: str) -> str:
        """What most families call `name`, as this one does."""
        return self.keys.get(name, name)


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", dict(attention_bias=False, mlp_bias=False), heads_divide=True
    ),
    "qwen2": Family("Qwen2ForCausalLM", dict(use_sliding_window=False), fixed=dict(qkv_bias=True)),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        dict(attention_bias=False, use_sliding_window=False),
        fixed=dict(qk_norm=True),
        quantised="fp8",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        dict(sliding_window=None),
        rope_theta=1e6,
        sizes=_keys(
            "num_experts_per_tok",
            num_experts="num_local_experts",
            moe_intermediate_size="intermediate_size",
        ),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        dict(
            attention_bias=False,
            use_sliding_window=False,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        fixed=dict(qk_norm=True),
        quantised="fp8",
        norm_topk=False,
        sizes=_keys("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
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
            "num_experts_per_tok",
            "moe_intermediate_size",
            "first_k_dense_replace",
            "n_group",
            "topk_group",
            *LATENT,
            num_experts="n_routed_experts",
        ),
        fixed=dict(scoring_func="sigmoid"),
        quantised="fp8",
        norm_topk=True,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        dict(attention_bias=True, swiglu_limit=7.0, swiglu_alpha=1.702),
        sizes=_keys(
            "num_experts_per_tok",
            "sliding_window",
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
        fixed=dict(mlp="clamped_swiglu", qkv_bias=True, o_bias=True, sinks=True, expert_bias=True),
        quantised="mxfp4",
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        dict(attention_bias=False, mlp_bias=False),
        fixed=dict(norm="layernorm1p", mlp="relu2"),
        partial_rotary=0.5,
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        dict(
            attention_bias=False,
            mlp_bias=False,
            use_bias=False,
            use_conv_bias=True,
            mamba_hidden_act="silu",
            n_shared_experts=1,
            sliding_window=None,
        ),
        sizes=_keys(
            "num_experts_per_tok",
            "moe_intermediate_size",
            "n_group",
            "topk_group",
            "mamba_num_heads",
            "mamba_head_dim",
            "ssm_state_size",
            "conv_kernel",
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
    ),
}


# ------------------------------------------------------------------------------------------------------------------ in


def config_from_hf(raw: dict, file: Path) -> DecoderConfig:
    """What config.json `raw` says. Raises InputError, naming `file`, for what the decoder would not
    compute exactly.
    """
    name = _find_family(raw, file)
    family = FAMILIES[name]
    if name == "gpt2":
        raw = gpt2.with_defaults(raw)
    if name == "nemotron_h":
        raw = nemotron_h.with_pattern(raw, file)
    _refuse_unsupported(raw, family, file)
    rope = _read_rope(raw, family, file)
    keys = {ours: family.key(theirs) for ours, theirs in (SIZES | family.sizes).items()}
    sizes = {ours: read_number(raw, key, file) for ours, key in keys.items()}
    keys |= family.keys | {"norm_eps": family.key(EPS_KEYS[family.field("norm")])}
    hidden = sizes["hidden_size"]
    heads = sizes["num_attention_heads"]
    fields = dict(
        num_key_value_heads=read_number(raw, "num_key_value_heads", file, default=heads),
        head_dim=read_number(raw, "head_dim", file, default=hidden // max(heads, 1)),
        norm_eps=read_number(raw, keys["norm_eps"], file, float),
        rope_theta=read_number(rope, "rope_theta", file, float, default=family.rope_theta),
        rope_scaling=_rope_scaling(rope, file),
        partial_rotary_factor=_partial_rotary(rope, family, file),
        tie_word_embeddings=family.can_tie and _switch(raw, "tie_word_embeddings", file),
        norm_topk_prob=family.norm_topk is None
        or _switch(raw, "norm_topk_prob", file, default=family.norm_topk),
        initializer_range=read_number(raw, "initializer_range", file, float, default=0.02),
        bos_token_id=_token_ids(raw, "bos_token_id", file),
        eos_token_id=_token_ids(raw, "eos_token_id", file),
    )
    if name == "deepseek_v3":
        fields |= _deepseek_fields(raw, sizes, file)
    if name == "nemotron_h":
        fields |= _nemotron_h_fields(raw, file)
    try:
        config = DecoderConfig(family=name, **sizes, **fields, **family.fixed)
    except InputError as error:  # with our names
        told = re.sub(
            r"(?:model\.)?([\w.]+)(?==)", lambda name: keys.get(name[1], name[1]), str(error)
        )
        raise InputError(f"{file}: {told}") from None
    written = _settings(config, torch.float32).keys() | NOT_KEPT
    extra = {
        key: value for key, value in raw.items() if key not in written and not key.startswith("_")
    }
    return dataclasses.replace(config, extra_config=extra)


def _nemotron_h_fields(raw: dict, file: Path) -> dict:
    return dict(
        layer_pattern=raw["hybrid_override_pattern"],
        moe_latent_size=read_number(raw, "moe_latent_size", file, default=0),
        routed_scaling_factor=read_number(raw, "routed_scaling_factor", file, float, default=1.0),
        time_step_min=_least_dt(raw, file),
    )


def _least_dt(raw: dict, file: Path) -> float:
    """The lower bound of dt; an upper one is refused.

    In NVIDIA's code, by which the published models were trained, it is that of `time_step_limit`;
    `time_step_min` is a setting of the initialisation alone. transformers 5.24 bounds dt by the
    latter all the same (its pull request 48989; for Nemotron 3 Nano and Super 1 to 6 % of
    perplexity, says mlx-lm's 1026). What it has written itself, with its own names of layers,
    computes as it does there.
    """
    if "linear_attention" in (raw.get("layers_block_type") or []):
        key = (
            "mamba_dt_min" if "mamba_dt_min" in raw else "time_step_min"
        )  # an older name, which outranks the newer
        least = read_number(raw, key, file, float, default=0.001)
        return 0.0 if least == nemotron_h.LEAST_DT else least
    key = "mamba_dt_limit" if "mamba_dt_limit" in raw else "time_step_limit"
    limit = raw.get(key, [0.0, math.inf])
    if not isinstance(limit, list) or len(limit) != 2 or limit[1] not in ENDLESS:
        raise InputError(f"{file}: {key}={limit!r} is not supported (must be [a number, Infinity])")
    return read_number({key: limit[0]}, key, file, float)


def _deepseek_fields(raw: dict, sizes: dict, file: Path) -> dict:
    return dict(
        head_dim=sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"],
        shared_expert_intermediate_size=read_number(raw, "n_shared_experts", file)
        * sizes["moe_intermediate_size"],
        routed_scaling_factor=read_number(raw, "routed_scaling_factor", file, float),
    )


def read_json(file: Path) -> dict:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        if what := placeholder(file, read_head(file)):
            raise InputError(f"{file} is {what}") from None
        raise InputError(
            f"{file}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}"
        ) from None
    except (
        OSError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: not UTF-8, or a number of 4,300 digits
        raise InputError(f"{file} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{file}: must hold a JSON object, not a {type(raw).__name__}")
    return raw


def write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def end_also_at(config: DecoderConfig, end: int | None) -> DecoderConfig:
    """Return the config of a model that ends a text at token `end`, too, if that is not None.

    generation_config.json, where there is one, counts before config.json.
    """
    generation = config.generation_config
    if generation and end is not None:
        own = generation.get("eos_token_id")
        generation = generation | {
            "eos_token_id": with_end(config.eos_token_id if own is None else own, end)
        }
    return dataclasses.replace(
        config, eos_token_id=with_end(config.eos_token_id, end), generation_config=generation
    )


def with_end(ends: int | list[int] | None, end: int | None) -> int | list[int] | None:
    """The tokens at which to end a text, as `eos_token_id` has them, and one more, if that is not
    among them.
    """
    known = ends if isinstance(ends, list) else [ends] * (ends is not None)
    return ends if end is None or end in known else [*known, end] if known else end


def _find_family(raw: dict, file: Path) -> str:
    """The family that `architectures` names, or `model_type` where there is no such key: both must
    mean the same.
    """
    if raw.get("architectures"):
        key = "architectures"
        known = {family.architecture: name for name, family in FAMILIES.items()}
        values = raw[key] if isinstance(raw[key], list) else [raw[key]]
    else:
        key = "model_type"
        known = {name: name for name in FAMILIES}
        values = [raw.get(key)]
    name = next(
        (known[value] for value in values if isinstance(value, str) and value in known), None
    )
    if name is None:
        raise InputError(
            f"{file}: {key}={raw.get(key)!r} is not supported (known: {', '.join(known)})"
        )
    kind = raw.get("model_type") or name
    if MODEL_TYPES.get(str(kind), kind) != name:
        raise InputError(
            f"{file}: model_type={kind!r} contradicts {key}={raw.get(key)!r} (must be {name!r})"
        )
    return name


def _refuse_unsupported(raw: dict, family: Family, file: Path) -> None:
    # since 5.2 transformers lets every decoder see later tokens too, if `is_causal` says so, as
    # embedding models' does
    refuse_other_values(raw, dict(is_causal=True) | family.values, family.architecture, file)
    _refuse_other_layers(raw, family, file)
    key = family.key("hidden_act")
    expected = ACTIVATIONS[family.field("mlp")]
    if raw.get(key) not in (None, expected):
        raise InputError(f"{file}: {key}={raw[key]!r} is not supported (must be {expected!r})")
    _refuse_other_quantisation(raw.get("quantization_config") or {}, family, file)


def refuse_other_values(raw: dict, values: dict[str, Any], architecture: str, file: Path) -> None:
    """Raises InputError for a key of `raw` that says anything but `values` does; a null says the
    same as false or empty."""
    for key, value in values.items():
        given = raw.get(key, value)
        if given != value and not (given is None and not value):
            raise InputError(
                f"{file}: {key}={given!r} is not supported for {architecture} (must be {value!r})"
            )


def _refuse_other_quantisation(settings: Any, family: Family, file: Path) -> None:
    settings = settings if isinstance(settings, dict) else dict(quant_method=settings)
    method = settings.get("quant_method")
    blocks = settings.get("weight_block_size")
    if settings and (method is None or method != family.quantised):
        wanted = (
            f"must be {family.quantised!r}"
            if family.quantised
            else f"{family.architecture} must have none"
        )
        raise InputError(
            f"{file}: quant_method={method!r} of quantization_config is not supported ({wanted})"
        )
    if method == "fp8" and blocks != [128, 128]:
        raise InputError(
            f"{file}: weight_block_size={blocks} of quantization_config must be [128, 128]"
        )


def _refuse_other_layers(raw: dict, family: Family, file: Path) -> None:
    given = raw.get("layer_types") or []
    given = given if isinstance(given, list) else [given]
    kinds = (
        ["sliding_attention", "full_attention"]
        if "sliding_window" in family.sizes
        else ["full_attention"]
    )
    expected = [kinds[i % len(kinds)] for i in range(len(given))]
    if given != expected:
        raise InputError(
            f"{file}: layer_types other than {', '.join(kinds)} in turn are not supported"
        )


def _read_rope(raw: dict, family: Family, file: Path) -> dict:
    """Everything about rotary embeddings in one dict, from the old keys (transformers 4) and the
    new one (5).
    """
    rope = {
        key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if raw.get(key) is not None
    }
    for key in ("rope_scaling", "rope_parameters"):
        value = raw.get(key)
        if not isinstance(value, dict | None):
            raise InputError(f"{file}: {key} must be an object, not a {type(value).__name__}")
        if any(isinstance(setting, dict) for setting in (value or {}).values()):
            raise InputError(
                f"{file}: {key} of each kind of layer is not supported (must be the same for all)"
            )
    given = raw.get("rope_scaling") or raw.get(
        "rope_parameters"
    )  # of both, transformers takes the first
    rope |= family.rope if given is None else given
    key = "original_max_position_embeddings"
    if raw.get(key) not in (
        None,
        rope.get(key, raw.get(key)),
    ):  # outside it is the one for transformers 5, not for 4
        raise InputError(
            f"{file}: {key}={raw[key]!r} contradicts {rope[key]!r} of its rotary settings"
        )
    return {key: raw.get(key) or raw.get("max_position_embeddings")} | rope


def _rope_scaling(rope: dict, file: Path) -> dict | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in list(ROPE_SCALINGS):
        raise InputError(
            f"{file}: rope_type {kind!r} is not supported (known: default, {', '.join(ROPE_SCALINGS)})"
        )
    kinds = {"original_max_position_embeddings": int}
    scaling = dict(rope_type=kind) | {
        x: read_number(rope, x, file, kinds.get(x, float)) for x in ROPE_SCALINGS[kind]
    }
    if kind == "yarn":
        scaling |= {
            key: read_number(rope, key, file, float) for key in YARN if rope.get(key) is not None
        }
        scaling |= {} if _switch(rope, "truncate", file, default=True) else dict(truncate=False)
        if rope.get("attention_factor") is not None:
            raise InputError(
                f"{file}: attention_factor={rope['attention_factor']} is not supported (must be absent)"
            )
    return scaling


def _partial_rotary(rope: dict, family: Family, file: Path) -> float:
    factor = read_number(
        rope, "partial_rotary_factor", file, float, default=family.partial_rotary or 1.0
    )
    if family.partial_rotary is None and factor != 1:
        raise InputError(
            f"{file}: partial_rotary_factor={factor} is not supported for {family.architecture} (use 1)"
        )
    return factor


def read_number(raw: dict, key: str, file: Path, kind: type = int, default: Any = None) -> Any:
    """A key's whole number, or with kind=float any number. Raises InputError for all else; a
    default may stand in.
    """
    value = raw.get(key, raw.get(ALSO_CALLED.get(key)))
    if value is None and default is not None:
        return default
    if value is None and key not in raw:
        raise InputError(f"{file}: key {key} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise InputError(
            f"{file}: {key}={value!r} must be a {'whole ' if kind is int else ''}number"
        )
    if not abs(value) <= 1 << 63:  # nan is not
        raise InputError(f"{file}: {key}={value!r} must be finite, and fit 64 bits")
    return kind(value)


def _switch(raw: dict, key: str, file: Path, default: bool = False) -> bool:
    value = raw.get(key, default)
    if not isinstance(value, bool | None):
        raise InputError(f"{file}: {key}={value!r} must be true or false")
    return bool(value)


def _token_ids(raw: dict, key: str, file: Path) -> int | list[int] | None:
    value = raw.get(key)
    for token in value if isinstance(value, list) else [value]:
        if isinstance(token, bool) or not isinstance(token, int | None):
            raise InputError(f"{file}: {key}={value!r} must be a token id or a list of them")
    return value


# ----------------------------------------------------------------------------------------------------------------- out


def check_exportable(config: DecoderConfig) -> None:
    """Raises InputError for a model that its family's config.json cannot describe: read again, that
    says another.
    """
    family = FAMILIES.get(config.family)
    if family is None:
        raise InputError(
            f"model.family={config.family!r} cannot be saved (known: {', '.join(FAMILIES)})"
        )
    needed = [
        key for key in ("num_experts", "sliding_window", "kv_lora_rank") if key in family.sizes
    ]
    if config.family == "nemotron_h":
        needed = ["shared_expert_intermediate_size"] if "E" in config.layer_pattern else []
    for key in needed:
        if not getattr(config, key):
            raise InputError(
                f"model.{key}=0 cannot be saved as {family.architecture} (must be at least 1)"
            )
    if family.heads_divide and config.hidden_size % config.num_attention_heads:
        raise InputError(
            f"model.num_attention_heads={config.num_attention_heads} cannot be saved as {family.architecture}: "
            f"it must divide hidden_size={config.hidden_size}"
        )
    with located(f"model cannot be saved as {family.architecture}"):
        again = config_from_hf(_settings(config, torch.float32), Path("config.json"))
    free = UNSAVED | {
        "rope_theta",
        "rope_scaling",
    }  # of these two, reading refuses what it does not know
    free |= {"generation_config"}  # a file of its own
    free |= {"head_dim"} if config.kv_lora_rank else set()
    for key in (field.name for field in dataclasses.fields(config) if field.name not in free):
        given = getattr(config, key)
        value = getattr(again, key)
        if given != value:
            raise InputError(
                f"model.{key}={given!r} cannot be saved as {family.architecture} (must be {value!r})"
            )


def config_to_hf(config: DecoderConfig, dtype: torch.dtype) -> dict:
    """config.json in the spelling of transformers 4, which 5 reads too. Raises InputError: see
    `check_exportable`.
    """
    check_exportable(config)
    return _settings(config, dtype)


def _settings(config: DecoderConfig, dtype: torch.dtype) -> dict:
    family = FAMILIES[config.family]
    optional = (
        {}
        if family.partial_rotary is None
        else dict(partial_rotary_factor=config.partial_rotary_factor)
    )
    optional |= {} if family.norm_topk is None else dict(norm_topk_prob=config.norm_topk_prob)
    if "sliding_window" in family.sizes:
        kinds = ("full_attention", "sliding_attention")
        optional["layer_types"] = [
            kinds[config.windowed(layer)] for layer in range(config.num_layers)
        ]
    settings = dict(
        architectures=[family.architecture],
        model_type=config.family,
        **{theirs: getattr(config, ours) for ours, theirs in (family.sizes | SIZES).items()},
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        hidden_act=ACTIVATIONS[family.field("mlp")],
        **{EPS_KEYS[family.field("norm")]: config.norm_eps},
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling
        or (dict(rope_type="default") if family.rope else None),  # null: family.rope
        **optional,
        **family.values,
        tie_word_embeddings=config.tie_word_embeddings,
        initializer_range=config.initializer_range,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        torch_dtype=str(dtype).removeprefix("torch."),
    )
    if config.family == "deepseek_v3":
        settings |= dict(
            head_dim=config.qk_rope_head_dim,  # what transformers rotates
            n_shared_experts=config.shared_expert_intermediate_size // config.moe_intermediate_size,
            routed_scaling_factor=config.routed_scaling_factor,
        )
    if config.position_embedding != "rotary":
        del settings["rope_theta"], settings["rope_scaling"]
    if config.family == "nemotron_h":
        settings |= nemotron_h.own_settings(config)
    if config.family == "gpt2":
        del settings["num_key_value_heads"], settings["head_dim"]  # keys that GPT-2 does not have
        settings["n_ctx"] = (
            config.max_position_embeddings
        )  # GPT-2's own files have it too; llama.cpp reads it alone
    return {family.key(key): value for key, value in settings.items()} | config.extra_config
