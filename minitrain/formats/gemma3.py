"""Hooks of the family Gemma 3, the language model alone, for config.json (see families.py)."""

from minitrain.errors import InputError
from minitrain.formats.json_files import read_number
from minitrain.models.decoder_config import DecoderConfig

# transformers' values of keys that files may leave out
DEFAULTS = dict(
    num_key_value_heads=4,
    head_dim=256,
    sliding_window=4096,
    sliding_window_pattern=6,
    query_pre_attn_scalar=256,
    tie_word_embeddings=True,
)


def with_defaults(raw: dict) -> dict:
    """Return config.json with what it leaves out; a list of layers tells the pattern of windows."""
    raw = DEFAULTS | raw
    layers = raw.get("layer_types")
    if isinstance(layers, list) and "full_attention" in layers:
        raw["sliding_window_pattern"] = layers.index("full_attention") + 1
    return raw


def read(raw: dict) -> dict:
    """Return the multipliers of embeddings and scores, which follow from sizes in config.json."""
    scalar = read_number(raw, "query_pre_attn_scalar")
    if scalar < 1:
        raise InputError(f"query_pre_attn_scalar={scalar} must be at least 1")
    return dict(
        embedding_multiplier=max(1, read_number(raw, "hidden_size")) ** 0.5,
        attention_multiplier=scalar**-0.5,
    )


def write(config: DecoderConfig, settings: dict) -> dict:
    """Return config.json with the family's own keys; transformers 4 reads the window's base from one."""
    multiplier = config.attention_multiplier
    return settings | dict(
        query_pre_attn_scalar=round(multiplier**-2) if multiplier else config.head_dim,
        rope_local_base_freq=config.window_rope_theta,
    )
