"""What config.json and tensor names of a Nemotron-H checkpoint mean (Nemotron 3 Nano and Super).

Every layer there has one `norm` and one `mixer`, whatever it does; here it has the names that such
a part has in other families. That rows of Mamba-2 layers are in another order there is told in
mamba.py. Reading and writing the files themselves is in hf.py.
"""

import math
import re
from pathlib import Path

from minitrain.errors import InputError
from minitrain.models.decoder_config import DecoderConfig

KEYS = {  # of config.json: as in Llama's, or a field of ours -> as in Nemotron-H's
    "hidden_act": "mlp_hidden_act",
    "rms_norm_eps": "layer_norm_epsilon",
    "layer_pattern": "hybrid_override_pattern",
}
LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "moe": "E",
    "mlp": "-",
}
NO_EXPERTS = dict(
    n_routed_experts=0,
    num_experts_per_tok=1,
    moe_intermediate_size=0,
    moe_shared_expert_intermediate_size=0,
    n_group=1,
    topk_group=1,
)
HEAD_DIM = 128  # where config.json has none, as Nemotron-H's before Nemotron 3, whatever the other sizes are
LEAST_DT = 1e-30  # a time_step_min that bounds nothing: transformers takes its logarithm


def with_pattern(raw: dict, file: Path) -> dict:
    """config.json with the layer pattern, which has two spellings, in that of letters, and what
    follows from it.
    """
    raw = dict(raw)
    layers = raw.get("layers_block_type")
    if layers is not None:
        layers = layers if isinstance(layers, list) else [layers]
        unknown = [layer for layer in layers if not isinstance(layer, str) or layer not in LETTERS]
        if unknown:
            raise InputError(
                f"{file}: layers_block_type has {unknown[0]!r}, which is none of {', '.join(LETTERS)}"
            )
        raw["hybrid_override_pattern"] = "".join(LETTERS[layer] for layer in layers)
    pattern = raw.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern:
        raise InputError(
            f"{file}: key hybrid_override_pattern or layers_block_type is missing or empty"
        )
    absent = dict(head_dim=HEAD_DIM) | ({} if "E" in pattern else NO_EXPERTS)
    return absent | raw | {"num_hidden_layers": len(pattern)}


def own_settings(config: DecoderConfig) -> dict:
    """What config.json says besides what all families' do. Where dt is bounded, `time_step_limit`
    says so, and `time_step_min` for transformers, see `config_hf.py`."""
    bounded = dict(time_step_limit=[config.time_step_min, math.inf]) if config.time_step_min else {}
    return bounded | dict(
        hybrid_override_pattern=config.layer_pattern,
        moe_latent_size=config.moe_latent_size or None,
        routed_scaling_factor=config.routed_scaling_factor,
        time_step_min=max(config.time_step_min, LEAST_DT),
    )


def stored_name(name: str) -> str:
    """Our name of a parameter -> the stored one."""
    name = re.sub(r"\.(input|post_attention)_layernorm\.", ".norm.", name)
    name = re.sub(r"(\.layers\.\d+)\.(self_attn|mamba|mlp)\.(dynamics\.)?", r"\1.mixer.", name)
    name = name.replace("model.embed_tokens.", "model.embeddings.").replace(
        "model.norm.", "model.norm_f."
    )
    return re.sub(r"^model\.", "backbone.", name)
