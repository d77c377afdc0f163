"""Hooks of the family DeepSeek-V3 (also Kimi K2), for config.json and tensors (see families.py)."""

from minitrain.formats.json_files import read_number
from minitrain.models.decoder_config import DecoderConfig

# our names -> names of the copies that each layer of multi-token prediction has, which vLLM reads
COPIED = {
    "model.embed_tokens.weight": "model.layers.{}.embed_tokens.weight",
    "lm_head.weight": "model.layers.{}.shared_head.head.weight",
}


def read(raw: dict) -> dict:
    """Return the fields of `DecoderConfig` that follow from several keys of config.json."""
    rotated = read_number(raw, "qk_rope_head_dim")
    return dict(head_dim=read_number(raw, "qk_nope_head_dim") + rotated) | read_shared(raw)


def read_shared(raw: dict) -> dict:
    """Return the width of the shared expert, which config.json has as a number of experts."""
    width = read_number(raw, "moe_intermediate_size")
    return dict(shared_expert_intermediate_size=read_number(raw, "n_shared_experts") * width)


def write(config: DecoderConfig, settings: dict) -> dict:
    """Return config.json with the family's own keys."""
    # transformers calls the number of rotated channels head_dim
    return write_shared(config, settings) | dict(head_dim=config.qk_rope_head_dim)


def write_shared(config: DecoderConfig, settings: dict) -> dict:
    """Return config.json with the number of experts that are as wide as the shared one."""
    shared = config.shared_expert_intermediate_size // config.moe_intermediate_size
    return settings | dict(n_shared_experts=shared)
