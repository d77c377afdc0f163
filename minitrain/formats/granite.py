"""Hooks of the families Granite 3 and 4.1 (dense) and Granite 4 (dense, experts, hybrids), see families.py.

In Granite 4 every layer has attention or Mamba-2, and an MLP, which is called shared_mlp and, in
layers with experts, is their shared one.
"""

import math

from minitrain.errors import InputError
from minitrain.formats.hybrid_keys import bounded_dt, letters_of
from minitrain.formats.json_files import read_number
from minitrain.models.decoder_config import LIMITS, DecoderConfig

# the multipliers' keys are those of our fields
MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
# kind of layer in `layer_types` -> its letter in `layer_pattern`
LETTERS = dict(linear_attention="m", mamba="m", full_attention="a", attention="a")
# fields of Mamba-2 -> their keys
MAMBA = dict(
    mamba_num_heads="mamba_n_heads",
    mamba_head_dim="mamba_d_head",
    mamba_n_groups="mamba_n_groups",
    ssm_state_size="mamba_d_state",
    conv_kernel="mamba_d_conv",
    mamba_chunk_size="mamba_chunk_size",
)
# transformers' values of keys that files may leave out
DEFAULTS = dict(
    num_local_experts=8,
    num_experts_per_tok=2,
    mamba_n_heads=128,
    mamba_d_head="auto",
    mamba_n_groups=1,
    mamba_d_state=256,
    mamba_d_conv=4,
    mamba_chunk_size=256,
    mamba_expand=2,
)
# our names of parts of a layer with experts, or of one without -> stored names
MOE = ".block_sparse_moe"
RENAMED = {
    ".mlp.gate.weight": f"{MOE}.router.layer.weight",
    ".mlp.experts.gate_up_proj": f"{MOE}.input_linear.weight",
    ".mlp.experts.down_proj": f"{MOE}.output_linear.weight",
    ".mamba.dynamics.": ".mamba.",
}
for part in (".mlp", ".mlp.shared_experts"):
    RENAMED |= {
        f"{part}.gate_proj.": ".shared_mlp.input_linear.",
        f"{part}.up_proj.": ".shared_mlp.input_linear.",
        f"{part}.down_proj.": ".shared_mlp.output_linear.",
    }


def with_multipliers(raw: dict) -> dict:
    """Return config.json with the multipliers that it leaves out."""
    return dict.fromkeys(MULTIPLIERS, 1.0) | raw


def with_pattern(raw: dict) -> dict:
    """Return Granite 4's config.json with its layers as letters, and with what it leaves out."""
    raw = DEFAULTS | with_multipliers(raw)
    key = "layers_block_type" if raw.get("layers_block_type") else "layer_types"
    count = min(read_number(raw, "num_hidden_layers"), LIMITS["num_layers"])
    layers = raw.pop(key, None) or ["mamba"] * count
    pattern = letters_of(key, layers, LETTERS)
    heads = max(1, read_number(raw, "mamba_n_heads"))
    width = read_number(raw, "mamba_expand") * read_number(raw, "hidden_size")
    if raw["mamba_d_head"] == "auto":
        raw["mamba_d_head"] = width // heads
    each = read_number(raw, "mamba_d_head")
    if each * heads != width:
        raise InputError(
            f"mamba_n_heads={heads} x mamba_d_head={each} must be mamba_expand x hidden_size={width}"
        )
    # files without experts have 0
    raw["num_experts_per_tok"] = raw["num_experts_per_tok"] or 1
    return raw | dict(layer_pattern=pattern if "m" in pattern else "")


def read(raw: dict) -> dict:
    """Return fields of `DecoderConfig` that have another form in Granite 4's config.json."""
    rotates = raw.get("position_embedding_type") == "rope"
    shared = read_number(raw, "shared_intermediate_size")
    if shared < 1:
        raise InputError(f"shared_intermediate_size={shared} must be at least 1")
    found = dict(
        position_embedding="rotary" if rotates else "none",
        time_step_min=bounded_dt(raw, "time_step_limit"),
    )
    if raw["num_local_experts"]:
        return found
    unused = raw["intermediate_size"]
    return found | dict(
        intermediate_size=shared,
        shared_expert_intermediate_size=0,
        moe_intermediate_size=0 if unused == shared else unused,
    )


def write(config: DecoderConfig, settings: dict) -> dict:
    """Return Granite 4's config.json with its own keys."""
    names = {"m": "mamba", "a": "attention"}
    pattern = config.layer_pattern or "a" * config.num_layers
    own = dict(
        layer_types=[names.get(letter, letter) for letter in pattern],
        position_embedding_type="rope" if config.position_embedding == "rotary" else "nope",
        mamba_expand=config.mamba.width // config.hidden_size,
    )
    if config.time_step_min:
        own["time_step_limit"] = [config.time_step_min, math.inf]
    if not config.num_experts:
        own["shared_intermediate_size"] = config.intermediate_size
        own["intermediate_size"] = config.moe_intermediate_size or config.intermediate_size
    return {key: settings[key] for key in settings if key != "layer_pattern"} | own
