"""Hooks of the family GPT-2, for config.json and tensors (see families.py).

GPT-3 has the same architecture; it has no public checkpoint. Three things differ from other families:
keys and tensors have other names, weights of linear layers are stored transposed, [in, out], and
q, k and v are one linear layer.
"""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from minitrain.models.decoder_config import DecoderConfig

# keys of config.json: Llama's -> GPT-2's
KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}
# keys of config.json; their default is 0.1
DROPOUTS = ("embd_pdrop", "resid_pdrop", "attn_pdrop")
# modules that are stored as one
FUSED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# names of modules: ours -> GPT-2's
NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.embed_positions": "transformer.wpe",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
    "input_layernorm": "ln_1",
    **dict.fromkeys(FUSED, "attn.c_attn"),
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}


def with_defaults(raw: dict) -> dict:
    """Return config.json with GPT-2's defaults for missing keys, and Llama's keys renamed.

    transformers accepts Llama's keys too.
    """
    missing = {"tie_word_embeddings": True} | dict.fromkeys(DROPOUTS, 0.1)
    raw = missing | {KEYS.get(key, key): value for key, value in raw.items()}
    if raw.get("n_inner") is None and isinstance(raw.get("n_embd"), int):
        raw["n_inner"] = 4 * raw["n_embd"]
    return raw


def write(config: DecoderConfig, settings: dict) -> dict:
    """Return config.json with GPT-2's own keys (llama.cpp reads n_ctx), without keys it lacks."""
    lacking = ("num_key_value_heads", "head_dim")
    kept = {key: value for key, value in settings.items() if key not in lacking}
    return kept | dict(n_ctx=config.max_position_embeddings) | dict.fromkeys(DROPOUTS, 0.0)


def full_name(key: str) -> str:
    """Return the name that transformers gives a tensor; OpenAI's files omit its first part."""
    return key if key.startswith(("transformer.", "lm_head.", "score.")) else f"transformer.{key}"


def stored_name(name: str) -> str:
    """Return the stored tensor that holds our parameter; q, k and v are in the same one."""
    for ours, theirs in NAMES.items():
        name = re.sub(rf"(^|\.){re.escape(ours)}\.", rf"\1{theirs}.", name)
    return name


def fused_part(name: str) -> int | None:
    """Return 0, 1 or 2 for q, k and v, otherwise None."""
    return next((i for i, module in enumerate(FUSED) if f".{module}." in name), None)


def is_transposed(name: str) -> bool:
    return name.endswith("_proj.weight")


def place(name: str, shape: tuple) -> tuple[str, tuple, tuple, bool]:
    """Return where our parameter is stored, see `Family.place`. The shape is that before transposing."""
    part = fused_part(name)
    rows, *columns = shape
    stored = shape if part is None else (len(FUSED) * rows, *columns)
    return stored_name(name), stored, ((part or 0) * rows,), is_transposed(name)


def to_stored(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of our named parameters; q, k and v once all three have come."""
    waiting = {}
    for name, tensor in tensors:
        stored = stored_name(name)
        part = fused_part(name)
        if part is not None:
            parts = waiting.setdefault(stored, {})
            parts[part] = tensor
            if len(parts) < len(FUSED):
                continue
            tensor = torch.cat([parts[i] for i in range(len(FUSED))])
        yield stored, tensor.T if is_transposed(name) else tensor
