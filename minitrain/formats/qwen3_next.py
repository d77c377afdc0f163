"""Hooks of the families Qwen3-Next and Qwen3.5 (text), for config.json and tensors (see families.py).

Qwen3.5's files on the hub have a vision tower too, `model.visual`, which is not read: the language
model is `model.language_model` in them, as for transformers' AutoModelForCausalLM.
"""

import re

from minitrain.errors import InputError
from minitrain.formats.family import DEPTHS
from minitrain.formats.hybrid_keys import letters_of
from minitrain.formats.json_files import read_number
from minitrain.models.decoder_config import LIMITS, DecoderConfig

# Qwen3.5's key of the number of depths
QWEN3_5_DEPTHS = "mtp_num_hidden_layers"
# kind of layer in `layer_types` -> its letter in `layer_pattern`
LETTERS = dict(linear_attention="d", full_attention="a")
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
    """Return config.json with its layers as letters, and with what it leaves out.

    Qwen3-Next does not say that its files have a layer of multi-token prediction, so it may have one.
    """
    depths = raw.get(QWEN3_5_DEPTHS, 1)
    raw = {"head_dim": HEAD_DIM, DEPTHS: depths} | raw
    most = LIMITS["num_layers"]
    every = min(read_number(raw, "full_attention_interval", default=INTERVAL), most + 1)
    raw.pop("full_attention_interval", None)
    layers = raw.pop("layer_types", None)
    if layers is None:
        # the last of so many has attention
        count = min(read_number(raw, "num_hidden_layers"), most)
        kinds = ["linear_attention"] * (every - 1) + ["full_attention"]
        layers = (kinds * count)[:count]
    pattern = letters_of("layer_types", layers, LETTERS)
    return raw | dict(layer_pattern=pattern if "d" in pattern else "")


def read(raw: dict) -> dict:
    """Raise InputError for several depths of multi-token prediction, for which files have no names."""
    if read_number(raw, DEPTHS) > 1:
        raise InputError(f"{DEPTHS}={raw[DEPTHS]} is not supported (must be 0 or 1)")
    return {}


def write(config: DecoderConfig, settings: dict) -> dict:
    """Return config.json with names of layers, and with the number of depths under both keys."""
    names = {letter: name for name, letter in LETTERS.items()}
    pattern = config.layer_pattern or "a" * config.num_layers
    own = {
        "layer_types": [names.get(letter, letter) for letter in pattern],
        QWEN3_5_DEPTHS: config.num_nextn_predict_layers,
    }
    return {key: settings[key] for key in settings if key != "layer_pattern"} | own


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
