"""Hooks of the family DeepSeek-V3 (also Kimi K2), for config.json (see families.py)."""

from minitrain.formats.json_files import read_number
from minitrain.models.decoder_config import DecoderConfig


def read(raw: dict) -> dict:
    """Return the fields of `DecoderConfig` that follow from several keys of config.json."""
    rotated = read_number(raw, "qk_rope_head_dim")
    width = read_number(raw, "moe_intermediate_size")
    return dict(
        head_dim=read_number(raw, "qk_nope_head_dim") + rotated,
        shared_expert_intermediate_size=read_number(raw, "n_shared_experts") * width,
    )


def write(config: DecoderConfig, settings: dict) -> dict:
    """Return config.json with the family's own keys."""
    shared = config.shared_expert_intermediate_size // config.moe_intermediate_size
    # transformers calls the number of rotated channels head_dim
    return settings | dict(head_dim=config.qk_rope_head_dim, n_shared_experts=shared)
