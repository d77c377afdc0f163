"""Hooks of the families Qwen3-Next and Qwen3.5 (text), for config.json and tensors (see families.py).

Qwen3.5's files on the hub have a vision tower too, `model.visual`, which is not read: the language
model is `model.language_model` in them, as for transformers' AutoModelForCausalLM.
"""

import re

from minitrain.errors import InputError
from minitrain.formats.json_files import read_number
from minitrain.models.decoder_config import DecoderConfig

DEPTHS = "num_nextn_predict_layers"
# Qwen3.5's key of the same number
QWEN3_5_DEPTHS = "mtp_num_hidden_layers"
# defaults of keys
HEAD_DIM = 256
INTERVAL = 4
# our names in the layer of multi-token prediction -> those in files, after `mtp.`
MTP_NAMES = {
    "eh_proj.weight": "fc.weight",
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "shared_head.norm.weight": "norm.weight",
}


def with_defaults(raw: dict) -> dict:
    """Return config.json with what it leaves out, and the interval of attention in `layer_types`.

    Qwen3-Next does not say that its files have a layer of multi-token prediction, so it may have one.
    """
    kinds = raw.get("layer_types")
    every = read_number(raw, "full_attention_interval", default=INTERVAL)
    if isinstance(kinds, list):
        # other lists than one of layers in turn are refused later
        first = [*kinds, "full_attention"].index("full_attention") + 1
        every = first if first <= len(kinds) else max(first, every)
    depths = raw.get(QWEN3_5_DEPTHS, 1)
    return {"head_dim": HEAD_DIM, DEPTHS: depths} | raw | dict(full_attention_interval=every)


def read(raw: dict) -> dict:
    """Raise InputError for several depths of multi-token prediction, for which files have no names."""
    if read_number(raw, DEPTHS) > 1:
        raise InputError(f"{DEPTHS}={raw[DEPTHS]} is not supported (must be 0 or 1)")
    return {}


def write(config: DecoderConfig, settings: dict) -> dict:
    """Return config.json with the number of depths under both keys."""
    return settings | {QWEN3_5_DEPTHS: config.num_nextn_predict_layers}


def depth_of(key: str, layers: int) -> int | None:
    """Return 0 for a stored tensor of multi-token prediction, see `Family.depth_of`."""
    return 0 if key.startswith("mtp.") else None


def full_name(key: str) -> str:
    """Return the name of a stored tensor without the prefix of the language model."""
    return key.replace("model.language_model.", "model.", 1)


def stored_name(name: str, layers: int) -> str:
    """Return the stored name of our parameter. layers: of the model, see `Family.stored_name`."""
    found = re.match(r"model\.layers\.(\d+)\.(.*)", name)
    depth = int(found[1]) - layers if found else -1
    if depth >= 0:
        name = f"mtp.layers.{depth}.{found[2]}"
        if depth == 0 and found[2] in MTP_NAMES:
            name = f"mtp.{MTP_NAMES[found[2]]}"
    return name.replace(".shared_experts.", ".shared_expert.").replace(".dynamics.", ".")
