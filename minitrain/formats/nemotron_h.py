"""Hooks of the family Nemotron-H (Nemotron 3 Nano and Super), for config.json and tensors.

In files every layer has one `norm` and one `mixer`, whatever it does; our names are those that such
layers have in other families. models/mamba.py explains why the rows of Mamba-2's weights are in
another order in files.
"""

import math
import re

from minitrain.errors import InputError
from minitrain.formats.family import DEPTHS
from minitrain.formats.hybrid_keys import bounded_dt, letters_of
from minitrain.formats.json_files import read_number
from minitrain.models.decoder_config import DecoderConfig

# key of most families, or field of `DecoderConfig` -> Nemotron-H's key
KEYS = {
    "hidden_act": "mlp_hidden_act",
    "rms_norm_eps": "layer_norm_epsilon",
    "layer_pattern": "hybrid_override_pattern",
}
MTP_PATTERN = "mtp_hybrid_override_pattern"
# kind of layer in `layers_block_type` -> its letter in `hybrid_override_pattern`
LETTERS = dict(
    linear_attention="M", mamba="M", full_attention="*", attention="*", moe="E", mlp="-"
)
# defaults of a model without experts
NO_EXPERTS = dict(
    n_routed_experts=0,
    num_experts_per_tok=1,
    moe_intermediate_size=0,
    moe_shared_expert_intermediate_size=0,
    n_group=1,
    topk_group=1,
)
# the default of head_dim, which models before Nemotron 3 omit; it does not depend on other sizes
HEAD_DIM = 128
# a time_step_min without effect; not 0, because transformers takes its logarithm
LEAST_DT = 1e-30


def with_pattern(raw: dict) -> dict:
    """Return config.json with the layer pattern in letters, and with keys that depend on it.

    The pattern may also be given as a list of names, `layers_block_type`.
    """
    pattern = raw.get("hybrid_override_pattern")
    layers = raw.get("layers_block_type")
    if layers is not None:
        pattern = letters_of("layers_block_type", layers, LETTERS)
    if not isinstance(pattern, str) or not pattern:
        raise InputError("key hybrid_override_pattern or layers_block_type is missing or empty")
    absent = dict(head_dim=HEAD_DIM) | ({} if "E" in pattern else NO_EXPERTS)
    known = dict(hybrid_override_pattern=pattern, num_hidden_layers=len(pattern))
    return absent | raw | known


def _mtp_pattern(pattern: str) -> str:
    """Return the letters of a depth of multi-token prediction, for a model with this pattern."""
    return "*E" if "E" in pattern else "*-"


def read(raw: dict) -> dict:
    """Return fields of `DecoderConfig` that have defaults, or another form in config.json.

    Raises InputError for multi-token prediction with layers other than attention and MLP.
    """
    if raw.get(DEPTHS):
        names = raw.get("mtp_layers_block_type")
        pattern = (
            raw.get(MTP_PATTERN)
            if names is None
            else letters_of("mtp_layers_block_type", names, LETTERS)
        )
        known = _mtp_pattern(raw["hybrid_override_pattern"])
        if pattern != known:
            raise InputError(f"{MTP_PATTERN}={pattern!r} is not supported (must be {known!r})")
    return dict(
        layer_pattern=raw["hybrid_override_pattern"],
        moe_latent_size=read_number(raw, "moe_latent_size", default=0),
        routed_scaling_factor=read_number(raw, "routed_scaling_factor", float, 1.0),
        time_step_min=_least_dt(raw),
    )


def _least_dt(raw: dict) -> float:
    """Return the lower bound of dt. Raises InputError for an upper bound.

    NVIDIA's code, which trained the published models, bounds dt by `time_step_limit` and uses
    `time_step_min` only for initialization. transformers 5.24 bounds dt by `time_step_min`
    nevertheless (its pull request 48989), which raises the perplexity of Nemotron 3 Nano and Super by
    1 to 6 % (mlx-lm #1026). Here NVIDIA's code is followed, except for files that transformers wrote,
    recognized by its names of layers: these models compute the same as in transformers.
    """
    if "linear_attention" in (raw.get("layers_block_type") or []):
        # the older key takes precedence, as in transformers
        key = "mamba_dt_min" if "mamba_dt_min" in raw else "time_step_min"
        least = read_number(raw, key, float, 0.001)
        return 0.0 if least == LEAST_DT else least
    return bounded_dt(raw, "mamba_dt_limit" if "mamba_dt_limit" in raw else "time_step_limit")


def write(config: DecoderConfig, settings: dict) -> dict:
    """Return config.json with the family's own keys.

    dt's lower bound is written as `time_step_limit`, and for transformers as `time_step_min`.
    """
    least = config.time_step_min
    bounded = dict(time_step_limit=[least, math.inf]) if least else {}
    own = dict(
        hybrid_override_pattern=config.layer_pattern,
        moe_latent_size=config.moe_latent_size or None,
        routed_scaling_factor=config.routed_scaling_factor,
        time_step_min=max(least, LEAST_DT),
    )
    if config.num_nextn_predict_layers:
        own[MTP_PATTERN] = _mtp_pattern(config.layer_pattern)
    return settings | bounded | own


def needed(config: DecoderConfig) -> tuple[str, ...]:
    """Return the fields that must not be 0."""
    return ("shared_expert_intermediate_size",) if "E" in config.layer_pattern else ()


def depth_of(key: str, layers: int) -> int | None:
    """Return the depth of multi-token prediction that a stored tensor is of, see `stored_name`."""
    found = re.match(r"mtp\.(?:layers\.(\d{1,9})\.)?", key)
    return int(found[1] or 0) // 2 if found else None


def stored_name(name: str, layers: int) -> str:
    """Return the stored name of our parameter. layers: of the model, see `Family.stored_name`.

    A layer of multi-token prediction is stored as two: mtp.layers.0 has the attention, the projection
    and the norms before it; mtp.layers.1 has the MLP and the last norm.
    """
    found = re.match(r"model\.layers\.(\d+)\.(post_attention_layernorm|mlp|shared_head)?", name)
    if found and int(found[1]) >= layers:
        number = 2 * (int(found[1]) - layers) + (found[2] is not None)
        name = f"mtp.layers.{number}.{name[found.end(1) + 1 :]}"
        name = name.replace(".shared_head.norm.", ".final_layernorm.")
    name = re.sub(r"\.(input|post_attention)_layernorm\.", ".norm.", name)
    name = re.sub(r"(\.layers\.\d+)\.(self_attn|mamba|mlp)\.(dynamics\.)?", r"\1.mixer.", name)
    name = name.replace("model.embed_tokens.", "model.embeddings.")
    name = name.replace("model.norm.", "model.norm_f.")
    return re.sub(r"^model\.", "backbone.", name)
