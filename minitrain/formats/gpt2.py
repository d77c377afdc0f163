"""Hooks of the family GPT-2, for config.json and tensors (see families.py).

GPT-3 has the same architecture; it has no public checkpoint. Three things differ from other families:
keys and tensors have other names, weights of linear layers are stored transposed, [in, out], and
q, k and v are one linear layer.
"""

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
# names of modules: ours -> GPT-2's; q, k and v are stored as one
RENAMED = {
    "model.embed_tokens.": "transformer.wte.",
    "model.embed_positions.": "transformer.wpe.",
    "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.h.",
    ".input_layernorm.": ".ln_1.",
    ".self_attn.q_proj.": ".attn.c_attn.",
    ".self_attn.k_proj.": ".attn.c_attn.",
    ".self_attn.v_proj.": ".attn.c_attn.",
    ".self_attn.o_proj.": ".attn.c_proj.",
    ".post_attention_layernorm.": ".ln_2.",
    ".mlp.up_proj.": ".mlp.c_fc.",
    ".mlp.down_proj.": ".mlp.c_proj.",
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


def is_transposed(name: str) -> bool:
    return name.endswith("_proj.weight")
