"""Read and write config.json and tensor names of Nemotron-H (Nemotron 3 Nano and Super).

Every layer there has one `norm` and one `mixer`, whatever it does; here it has the names that such
a part has in other families. That rows of Mamba-2 layers are in another order there is told in
mamba.py. Reading and writing the files themselves is in hf.py.
"""

import math
import re

from minitrain.errors import InputError
from minitrain.models.decoder_config import DecoderConfig

# of config.json: the key of Llama's, or our field -> Nemotron-H's key
KEYS = {
    "hidden_act": "mlp_hidden_act",
    "rms_norm_eps": "layer_norm_epsilon",
    "layer_pattern": "hybrid_override_pattern",
}
LETTERS = dict(
    linear_attention="M", mamba="M", full_attention="*", attention="*", moe="E", mlp="-"
)
NO_EXPERTS = dict(
    n_routed_experts=0,
    num_experts_per_tok=1,
    moe_intermediate_size=0,
    moe_shared_expert_intermediate_size=0,
    n_group=1,
    topk_group=1,
)
# where config.json has none, as Nemotron-H's before Nemotron 3, whatever the other sizes are
HEAD_DIM = 128
# a time_step_min that bounds nothing: transformers takes its logarithm
LEAST_DT = 1e-30


def with_pattern(raw: dict) -> dict:
    """Return config.json with the layer pattern in letters, and the keys that follow from it.

    The other spelling is a list, `layers_block_type`.
    """
    pattern = raw.get("hybrid_override_pattern")
    layers = raw.get("layers_block_type")
    if layers is not None:
        pattern = ""
        for layer in layers if isinstance(layers, list) else [layers]:
            if not isinstance(layer, str) or layer not in LETTERS:
                known = ", ".join(LETTERS)
                raise InputError(f"layers_block_type has {layer!r}, which is none of {known}")
            pattern += LETTERS[layer]
    if not isinstance(pattern, str) or not pattern:
        raise InputError("key hybrid_override_pattern or layers_block_type is missing or empty")
    absent = dict(head_dim=HEAD_DIM) | ({} if "E" in pattern else NO_EXPERTS)
    known = dict(hybrid_override_pattern=pattern, num_hidden_layers=len(pattern))
    return absent | raw | known


def own_settings(config: DecoderConfig) -> dict:
    """Return the keys of config.json that other families do not have.

    A bound of dt is in `time_step_limit`, and for transformers in `time_step_min`, see config_hf.py.
    """
    bounded = (
        dict(time_step_limit=[config.time_step_min, math.inf]) if config.time_step_min else {}
    )
    return bounded | dict(
        hybrid_override_pattern=config.layer_pattern,
        moe_latent_size=config.moe_latent_size or None,
        routed_scaling_factor=config.routed_scaling_factor,
        time_step_min=max(config.time_step_min, LEAST_DT),
    )


def stored_name(name: str) -> str:
    """Return the stored name of our parameter."""
    name = re.sub(r"\.(input|post_attention)_layernorm\.", ".norm.", name)
    name = re.sub(r"(\.layers\.\d+)\.(self_attn|mamba|mlp)\.(dynamics\.)?", r"\1.mixer.", name)
    name = name.replace("model.embed_tokens.", "model.embeddings.")
    name = name.replace("model.norm.", "model.norm_f.")
    return re.sub(r"^model\.", "backbone.", name)
