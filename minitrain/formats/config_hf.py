"""Convert between Hugging Face's config.json and `DecoderConfig`.

Rotary settings are read as transformers 4 or 5 writes them, and written as 4 does, which both can
read. Settings that the decoder would not compute exactly are refused by name.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import torch

from minitrain.errors import InputError, located
from minitrain.formats.config_own import KINDS, config_from_own, config_to_own
from minitrain.formats.families import ACTIVATIONS, EPS_KEYS, FAMILIES, MODEL_TYPES, OWN, SIZES
from minitrain.formats.family import CLASSIFIER, DEPTHS, Family
from minitrain.formats.json_files import (
    read_number,
    read_switch,
    read_token_ids,
    read_value,
    refuse_other_values,
)
from minitrain.models.decoder_config import ROPE_SCALINGS, YARN, DecoderConfig, as_classifier
from minitrain.models.layers import attention_factor

GENERATION = "generation_config.json"
ORIGINAL_LENGTH = "original_max_position_embeddings"
# fields of `DecoderConfig` that no config.json has
TRAINING_ONLY = {"bias_update_speed", "router_aux_loss_coef", "seq_aux", "fake_balanced_gate"}
LABELS = "num_labels"
_NO_SCALING = dict(rope_type="default")
# keys that an export does not copy from the config.json that was read: it writes these settings in
# another form, and has weights in another format
NOT_KEPT = {
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    ORIGINAL_LENGTH,
    "num_experts",
    "num_local_experts",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "no_rope_layers",
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
    "layer_pattern",
    DEPTHS,
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
}


def config_from_hf(raw: dict, file: str | Path) -> DecoderConfig:
    """Return the config that config.json `raw` describes.

    Raises InputError, which names `file`, for what the decoder would not compute exactly.
    """
    with located(file):
        raw = _language_model(raw)
        name = _find_family(raw)
        if name == OWN:
            return config_from_own(raw)
        family = FAMILIES[name]
        raw = family.defaults(raw)
        raw = {ours: raw[key] for key, ours in family.aliases.items() if key in raw} | raw
        _refuse_unsupported(raw, family)
        return _read_fields(raw, name, family)


def _language_model(raw: dict) -> dict:
    """Return config.json of the language model, where it stands in that of one that sees too."""
    inner = raw.get("text_config")
    kind = inner.get("model_type") if isinstance(inner, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        return raw
    of_both = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
    return {key: raw[key] for key in of_both if key in raw} | inner


def _read_fields(raw: dict, name: str, family: Family) -> DecoderConfig:
    """Return the config of a config.json in the form that the family's `defaults` returns."""
    window_rope = None
    if family.window_rope is not None:
        raw, window_rope = _split_rope(raw, family)
    rope = _read_rope(raw, family)
    keys = {ours: family.key(theirs) for ours, theirs in (SIZES | family.fields).items()}
    fields = {ours: read_value(raw, key, KINDS[ours]) for ours, key in keys.items()}
    keys |= family.keys | {"norm_eps": family.key(EPS_KEYS[family.field("norm")])}
    heads = fields["num_attention_heads"]
    norm_topk = family.norm_topk is None or read_switch(raw, "norm_topk_prob", family.norm_topk)
    fields |= dict(
        num_key_value_heads=read_number(raw, "num_key_value_heads", default=heads),
        head_dim=read_number(raw, "head_dim", default=fields["hidden_size"] // max(heads, 1)),
        norm_eps=read_number(raw, keys["norm_eps"], float),
        rope_theta=read_number(rope, "rope_theta", float, family.rope_theta),
        rope_scaling=_rope_scaling(rope),
        partial_rotary_factor=_partial_rotary(rope, family),
        tie_word_embeddings=family.can_tie and read_switch(raw, "tie_word_embeddings"),
        norm_topk_prob=norm_topk,
        initializer_range=read_number(raw, "initializer_range", float, 0.02),
        bos_token_id=read_token_ids(raw, "bos_token_id"),
        eos_token_id=read_token_ids(raw, "eos_token_id"),
    )
    if window_rope is not None:
        fields["window_rope_theta"] = window_rope or fields["rope_theta"]
    if family.depth_of:
        fields[DEPTHS] = read_number(raw, DEPTHS, default=0)
    fields |= family.read(raw)
    try:
        config = DecoderConfig(family=name, **fields, **family.fixed)
        if CLASSIFIER in str(raw.get("architectures")):
            names = raw.get("id2label")
            labels = (
                len(names) if isinstance(names, dict) else read_number(raw, LABELS, default=2)
            )
            config = as_classifier(config, labels)
    except InputError as error:
        # name the keys of config.json where the message names our fields
        line = re.sub(r"(?:model\.)?([\w.]+)(?==)", lambda m: keys.get(m[1], m[1]), str(error))
        raise InputError(line) from None
    written = (_settings(config, torch.float32).keys() | NOT_KEPT) - {*family.noise}
    extra = {key: raw[key] for key in raw if key not in written and not key.startswith("_")}
    return dataclasses.replace(config, extra_config=extra)


def not_trained_with(config: DecoderConfig) -> list[str]:
    """Return the settings of config.json that affect training in transformers, but not here."""
    extra = config.extra_config
    family = FAMILIES[config.family]
    found = {key: extra[key] for key in family.noise if extra.get(key)}
    balanced = family.balances and config.num_experts and extra.get("output_router_logits")
    if balanced and not config.router_aux_loss_coef:
        found["router_aux_loss_coef"] = extra.get("router_aux_loss_coef", 0.001)
    return [f"{key}={value}" for key, value in found.items()]


def end_also_at(config: DecoderConfig, end: int | None) -> DecoderConfig:
    """Add `end` to the end-of-text tokens; None: change nothing.

    Both config.json and generation_config.json get it; libraries prefer the latter's.
    """
    generation = config.generation_config
    if generation:
        own = generation.get("eos_token_id")
        ends = _with_end(config.eos_token_id if own is None else own, end)
        generation = generation | {"eos_token_id": ends}
    ends = _with_end(config.eos_token_id, end)
    return dataclasses.replace(config, eos_token_id=ends, generation_config=generation)


def _with_end(ends: Any, end: int) -> Any:
    """Return `eos_token_id` (a token, a list or None) with one more token."""
    if ends in (None, []):
        return end
    known = ends if isinstance(ends, list) else [ends]
    return ends if end in known else [*known, end]


def _find_family(raw: dict) -> str:
    """Return the family that `architectures` names or, if there is no such key, `model_type`.

    Raises InputError if the two contradict each other.
    """
    key = "architectures"
    known = {each.architecture: name for name, each in FAMILIES.items() if name != OWN}
    known |= {FAMILIES[name].classifier: name for name in known.values()}
    if not raw.get(key):
        key = "model_type"
        known = {name: name for name in FAMILIES}
    values = raw.get(key)
    values = values if isinstance(values, list) and key == "architectures" else [values]
    names = [known[value] for value in values if isinstance(value, str) and value in known]
    if not names:
        raise InputError(f"{key}={raw.get(key)!r} is not supported (known: {', '.join(known)})")
    kind = raw.get("model_type") or names[0]
    if MODEL_TYPES.get(str(kind), kind) != names[0]:
        raise InputError(
            f"model_type={kind!r} contradicts {key}={raw.get(key)!r} (must be {names[0]!r})"
        )
    return names[0]


def _refuse_unsupported(raw: dict, family: Family) -> None:
    """Raise InputError for values that the decoder does not compute."""
    # from transformers 5.2 on, is_causal=false makes any decoder attend to later tokens
    refuse_other_values(raw, dict(is_causal=True) | family.values, family.architecture)
    given = raw.get("layer_types") or []
    given = given if isinstance(given, list) else [given]
    kinds = ["full_attention"]
    if "sliding_window" in family.fields:
        key = "sliding_window_pattern"
        every = read_number(raw, key) if key in family.fields else family.field(key)
        # a list need not be longer than the one that is given
        kinds = ["sliding_attention"] * (min(every, len(given) + 1) - 1) + kinds
    if any(kind != kinds[i % len(kinds)] for i, kind in enumerate(given)):
        raise InputError(f"layer_types other than {', '.join(kinds)} in turn are not supported")
    key = family.key("hidden_act")
    expected = ACTIVATIONS[family.field("mlp")]
    if raw.get(key) not in (None, expected):
        raise InputError(f"{key}={raw[key]!r} is not supported (must be {expected!r})")
    if settings := raw.get("quantization_config"):
        _refuse_other_quantization(settings, family)


def _refuse_other_quantization(settings: Any, family: Family) -> None:
    """Raise InputError for quantized weights that layouts_hf.py does not read."""
    if not isinstance(settings, dict):
        settings = dict(quant_method=settings)
    method = settings.get("quant_method")
    blocks = settings.get("weight_block_size")
    if method is None or method != family.quantized:
        wanted = f"{family.architecture} must have none"
        if family.quantized:
            wanted = f"must be {family.quantized!r}"
        raise InputError(
            f"quant_method={method!r} of quantization_config is not supported ({wanted})"
        )
    if method == "fp8" and blocks != [128, 128]:
        raise InputError(f"weight_block_size={blocks} of quantization_config must be [128, 128]")


def _split_rope(raw: dict, family: Family) -> tuple[dict, float]:
    """Return config.json with the rotary settings of layers without a window, and rope_theta of others.

    transformers 5 has both in `rope_parameters`, 4 one at the top; 0: the second is not given.
    Raises InputError for a scaling of layers with a window.
    """
    both = raw.get("rope_parameters")
    if not isinstance(both, dict) or not any(isinstance(each, dict) for each in both.values()):
        return raw, read_number(raw, "rope_local_base_freq", float, family.window_rope)
    full, window = (both.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    if not isinstance(full, dict) or not isinstance(window, dict):
        raise InputError(f"rope_parameters={both!r} must be an object for each kind of layer")
    if window.get("rope_type", "default") != "default":
        raise InputError(
            f"rope_type {window['rope_type']!r} of layers with a window is not supported "
            "(must be 'default')"
        )
    scaling = raw.get("rope_scaling") or {}
    if isinstance(scaling, dict):
        raw = raw | dict(rope_scaling=None, rope_parameters=full | scaling)
    default = family.window_rope or family.rope_theta
    return raw, read_number(window, "rope_theta", float, default)


def _read_rope(raw: dict, family: Family) -> dict:
    """Return all rotary settings, whether transformers 4 or 5 wrote them."""
    for key in ("rope_scaling", "rope_parameters"):
        value = raw.get(key)
        if not isinstance(value, dict | None):
            raise InputError(f"{key} must be an object, not a {type(value).__name__}")
        if any(isinstance(setting, dict) for setting in (value or {}).values()):
            raise InputError(
                f"{key} of each kind of layer is not supported (must be the same for all)"
            )
    # transformers ignores rope_parameters beside rope_scaling
    given = raw.get("rope_scaling") or raw.get("rope_parameters")
    outside = {key: raw.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    rope = {key: value for key, value in outside.items() if value is not None}
    rope |= family.rope if given is None else given
    length = raw.get(ORIGINAL_LENGTH)
    # transformers 5 has this key at the top, 4 among the rotary settings
    if length not in (None, rope.get(ORIGINAL_LENGTH, length)):
        other = rope[ORIGINAL_LENGTH]
        raise InputError(
            f"{ORIGINAL_LENGTH}={length!r} contradicts {other!r} of its rotary settings"
        )
    return {ORIGINAL_LENGTH: length or raw.get("max_position_embeddings")} | rope


def _rope_scaling(rope: dict) -> dict | None:
    """Return `DecoderConfig.rope_scaling` from the rotary settings of config.json."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in list(ROPE_SCALINGS):
        known = ", ".join(ROPE_SCALINGS)
        raise InputError(f"rope_type {kind!r} is not supported (known: default, {known})")
    scaling = dict(rope_type=kind)
    for key in ROPE_SCALINGS[kind]:
        scaling[key] = read_number(rope, key, int if key == ORIGINAL_LENGTH else float)
    if kind == "yarn":
        for key in YARN:
            if rope.get(key) is not None:
                scaling[key] = read_number(rope, key, float)
        if not read_switch(rope, "truncate", True):
            scaling["truncate"] = False
        factor = read_number(rope, "attention_factor", float, attention_factor(scaling))
        if not math.isclose(factor, attention_factor(scaling), rel_tol=1e-6):
            raise InputError(
                f"attention_factor={factor} is not supported (must be absent, or "
                f"{attention_factor(scaling)}, which follows from the other settings)"
            )
    return scaling


def _partial_rotary(rope: dict, family: Family) -> float:
    factor = read_number(rope, "partial_rotary_factor", float, family.partial_rotary or 1.0)
    if family.partial_rotary is None and factor != 1:
        raise InputError(
            f"partial_rotary_factor={factor} is not supported for {family.architecture} (use 1)"
        )
    return factor


# --- write


def check_family(config: DecoderConfig) -> None:
    """Raise InputError for an unknown family."""
    if config.family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InputError(f"model.family={config.family!r} cannot be saved (known: {known})")


def exportable(config: DecoderConfig) -> DecoderConfig:
    """Return the config; with family OWN if its family's config.json cannot describe the model."""
    return dataclasses.replace(config, family=OWN) if export_fault(config) else config


def export_fault(config: DecoderConfig) -> str:
    """Return why transformers cannot load the model; "" if it can, or if the family is OWN."""
    if config.family != OWN:
        try:
            check_exportable(config)
        except InputError as error:
            return str(error)
    return ""


def check_exportable(config: DecoderConfig) -> None:
    """Raise InputError for a model that its family's config.json cannot describe.

    The config is written and read again, and must be the same then.
    """
    check_family(config)
    family = FAMILIES[config.family]
    target = f"cannot be saved as {family.architecture}"
    for key in family.needed(config):
        if key in family.fields and not getattr(config, key):
            raise InputError(f"model.{key}=0 {target} (must be at least 1)")
    if family.heads_divide and config.hidden_size % config.num_attention_heads:
        raise InputError(
            f"model.num_attention_heads={config.num_attention_heads} {target}: "
            f"it must divide hidden_size={config.hidden_size}"
        )
    with located(f"model {target}"):
        again = config_from_hf(_settings(config, torch.float32), "config.json")
    # rotary settings may be read in another form, and reading checks them; extra_config and
    # generation_config do not describe the model
    free = TRAINING_ONLY | {"rope_theta", "rope_scaling", "generation_config", "extra_config"}
    if config.kv_lora_rank:
        free.add("head_dim")
    for field in dataclasses.fields(config):
        given = getattr(config, field.name)
        value = getattr(again, field.name)
        if given != value and field.name not in free:
            raise InputError(f"model.{field.name}={given!r} {target} (must be {value!r})")


def config_to_json(config: DecoderConfig, dtype: torch.dtype) -> dict:
    """Return config.json of an `exportable` config; of our own fields if its family is OWN."""
    return config_to_own(config, dtype) if config.family == OWN else _settings(config, dtype)


def config_to_hf(config: DecoderConfig, dtype: torch.dtype) -> dict:
    """Return config.json as transformers 4 writes it, which 5 reads too.

    Raises InputError as `check_exportable` does.
    """
    check_exportable(config)
    return _settings(config, dtype)


def _settings(config: DecoderConfig, dtype: torch.dtype) -> dict:
    family = FAMILIES[config.family]
    optional = {}
    if family.partial_rotary is not None:
        optional["partial_rotary_factor"] = config.partial_rotary_factor
    if family.norm_topk is not None:
        optional["norm_topk_prob"] = config.norm_topk_prob
    if "sliding_window" in family.fields:
        kinds = ("full_attention", "sliding_attention")
        layers = range(config.num_layers)
        optional["layer_types"] = [kinds[config.windowed(layer)] for layer in layers]
    if family.depth_of:
        optional[DEPTHS] = config.num_nextn_predict_layers
    # null would be read as the family's default
    no_scaling = _NO_SCALING if family.rope else None
    settings = dict(
        architectures=[family.architecture],
        model_type=config.family,
        **{theirs: getattr(config, ours) for ours, theirs in (family.fields | SIZES).items()},
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        hidden_act=ACTIVATIONS[family.field("mlp")],
        **{EPS_KEYS[family.field("norm")]: config.norm_eps},
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling or no_scaling,
        **optional,
        **family.values,
        tie_word_embeddings=config.tie_word_embeddings,
        initializer_range=config.initializer_range,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        torch_dtype=str(dtype).removeprefix("torch."),
    )
    if config.position_embedding != "rotary":
        del settings["rope_theta"], settings["rope_scaling"]
    if family.window_rope is not None:
        full = dict(rope_theta=config.rope_theta) | (config.rope_scaling or _NO_SCALING)
        window = dict(rope_theta=config.window_rope_theta) | _NO_SCALING
        settings["rope_parameters"] = dict(full_attention=full, sliding_attention=window)
    if config.num_labels:
        settings |= {"architectures": [family.classifier], LABELS: config.num_labels}
    settings = family.write(config, settings)
    return {family.key(key): value for key, value in settings.items()} | config.extra_config
