"""The published models by name, and a tiny twin of each (NAME-tiny) for tests and laptops."""

import dataclasses
import difflib
from typing import TYPE_CHECKING

from minitrain.errors import InputError, hub_hint
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.shapes.dense import DENSE
from minitrain.models.shapes.experts import EXPERTS
from minitrain.models.shapes.hybrids import HYBRIDS
from minitrain.models.wan_config import WanConfig

if TYPE_CHECKING:
    from minitrain.models.decoder import Decoder
    from minitrain.models.wan import Wan

ZOO: dict[str, dict] = DENSE | EXPERTS | HYBRIDS
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
_TINY_DELTA = dict(
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
)
_TINY_MAMBA = dict(
    mamba_num_heads=8, mamba_head_dim=16, mamba_n_groups=4, ssm_state_size=16, mamba_chunk_size=16
)


def tiny(fields: dict, num_layers: int = 4) -> dict:
    """Return the fields of the tiny twin: the same family and quirks at toy width.

    A scaled context shrinks with it, so that the scaling still acts.
    """
    small = _TINY | dict(num_layers=num_layers, initializer_range=0.02)
    scaling = fields.get("rope_scaling") or {}
    if "original_max_position_embeddings" in scaling:
        small["rope_scaling"] = scaling | dict(original_max_position_embeddings=64)
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
        times = 2 if fields.get("layer_pattern") else 1
        small["shared_expert_intermediate_size"] = times * small["moe_intermediate_size"]
    if fields.get("sliding_window"):
        small["sliding_window"] = 16
        small["sliding_window_pattern"] = min(num_layers, fields.get("sliding_window_pattern", 2))
    heads = DecoderConfig.mamba_num_heads
    if fields.get("mamba_num_heads", heads) != heads:
        small |= _TINY_MAMBA
    if "d" in fields.get("layer_pattern", ""):
        small |= _TINY_DELTA
    if fields.get("layer_pattern"):
        letters = {"M": "ME*E", "m": "mmam", "d": "dada"}[fields["layer_pattern"][0]]
        small["layer_pattern"] = (letters * num_layers)[:num_layers]
    if fields.get("embedding_multiplier") == fields["hidden_size"] ** 0.5:
        small["embedding_multiplier"] = small["hidden_size"] ** 0.5
    if fields.get("attention_multiplier"):
        small["attention_multiplier"] = 1 / small["head_dim"]
    if fields.get("moe_latent_size"):
        small["moe_latent_size"] = 32
    if fields["family"] == "gpt2":
        small["head_dim"] = small["hidden_size"] // small["num_attention_heads"]
    return fields | small


def is_known(name: str) -> bool:
    """Return whether this is the name of a model here, or of its tiny twin."""
    return _published(name) in ZOO | WAN


def _published(name: str) -> str:
    """Return the name without the ending of a tiny twin; Granite 4.0 H Tiny has it itself."""
    return name if name in ZOO else name.removesuffix("-tiny")


def model_config(name: str, **overrides) -> DecoderConfig | WanConfig:
    """Return the config of the model called `name`, with `overrides` of its fields.

    bos and eos become None if a smaller vocabulary does not hold them. Raise InputError for an
    unknown name.
    """
    base = _published(name)
    shrunk = base != name
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
