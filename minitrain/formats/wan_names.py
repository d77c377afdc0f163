"""Convert config.json and tensor names of Wan, in diffusers' form and that of Wan's own code.

Our parameter names are diffusers', except that scale_shift_table is in a module `adaln`. The original
code has other names, but the same tensors: none is transposed, split or reordered. hf.py reads and
writes the files.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from minitrain.errors import InputError, located
from minitrain.formats.json_files import read_number, refuse_other_values
from minitrain.models.wan_config import WanConfig

# beginning of the names of weight files, in both forms
STEM = "diffusion_pytorch_model"
# values of _class_name in config.json
DIFFUSERS = "WanTransformer3DModel"
ORIGINAL = "WanModel"
# the only values of keys of diffusers that are supported
FIXED = dict(cross_attn_norm=True, qk_norm="rms_norm_across_heads", pos_embed_seq_len=None)
# the only values of fields that Wan's own code supports
ORIGINAL_VALUES = dict(image_dim=(None, 1280), patch_size=((1, 2, 2),))
# field -> key of Wan's own code, where a head's width is always dim / num_heads
ORIGINAL_FIELDS = {
    "num_attention_heads": "num_heads",
    "ffn_dim": "ffn_dim",
    "num_layers": "num_layers",
    "in_channels": "in_dim",
    "out_channels": "out_dim",
    "freq_dim": "freq_dim",
}
# beginnings of names: ours -> original
ORIGINAL_PREFIXES = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "scale_shift_table": "head.modulation",
    "proj_out": "head.head",
}
# parts of all other names, between dots: ours -> original
ORIGINAL_PARTS = {
    "attn1": "self_attn",
    "attn2": "cross_attn",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "o",
    "add_k_proj": "k_img",
    "add_v_proj": "v_img",
    "norm_added_k": "norm_k_img",
    # the only norm with weights; in the original code it is the third one
    "norm2": "norm3",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "scale_shift_table": "modulation",
}
# Linears of a block that can have adapters
ADAPTED = (
    "attn1.to_q",
    "attn1.to_k",
    "attn1.to_v",
    "attn1.to_out.0",
    "attn2.to_q",
    "attn2.to_k",
    "attn2.to_v",
    "attn2.to_out.0",
    "attn2.add_k_proj",
    "attn2.add_v_proj",
    "ffn.net.0.proj",
    "ffn.net.2",
)
# end of an adapter tensor's name -> which part of the adapter it is
ROLES = {
    "lora_A.weight": "A",
    "lora_down.weight": "A",
    "lora_B.weight": "B",
    "lora_up.weight": "B",
    "alpha": "alpha",
}


def is_wan(raw: dict, file: Path) -> bool:
    """Return True if config.json `raw` is Wan's, in either form.

    Raises InputError for other models of diffusers.
    """
    kind = raw.get("_class_name")
    known = (DIFFUSERS, ORIGINAL)
    if kind not in (None, *known):
        raise InputError(
            f"{file}: _class_name={kind!r} is not supported (known: {', '.join(known)})"
        )
    return kind is not None


def diffusers_name(name: str) -> str:
    """Return diffusers' name of our parameter."""
    return name.replace("adaln.scale_shift_table", "scale_shift_table")


def original_name(name: str) -> str:
    """Return the original name of our parameter."""
    name = diffusers_name(name)
    for ours, theirs in ORIGINAL_PREFIXES.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    for ours, theirs in ORIGINAL_PARTS.items():
        name = re.sub(rf"\.{re.escape(ours)}(?=\.|$)", f".{theirs}", name)
    return name


def rename_to_ours(stored: dict, parameters: Iterable[str]) -> dict:
    """Return the dict with stored names of either form replaced by ours; unknown names stay."""
    spell = original_name if "head.modulation" in stored else diffusers_name
    ours = {spell(name): name for name in parameters}
    return {ours.get(name, name): value for name, value in stored.items()}


@cache
def linears_by_spelling() -> dict[str, str]:
    """Return our names of ADAPTED by their names in both forms, with `_` for dots as in kohya's."""
    return {
        spell(f".{linear}")[1:].replace(".", "_"): linear
        for linear in ADAPTED
        for spell in (str, original_name)
    }


def adapter_place(key: str) -> tuple[str, str] | None:
    """Return our name of the Linear that an adapter file's tensor belongs to, and A, B or alpha.

    transformer.blocks.0.attn1.to_q.lora_A.weight           diffusers
    diffusion_model.blocks.0.self_attn.q.lora_A.weight      ComfyUI, diffusion-pipe; also lora_down, and alpha beside it
    lora_unet_blocks_0_self_attn_q.lora_down.weight         musubi-tuner, as kohya's other programs; VideoX-Fun (`__`)
    blocks.0.self_attn.q.lora_A.default.weight              DiffSynth-Studio, also behind `pipe.dit.`
    """
    block = r"(?:transformer\.|diffusion_model\.|pipe\.dit\.|lora_unet__?)?blocks[._](\d{1,9})[._](.+?)"
    match = re.fullmatch(
        rf"{block}\.({'|'.join(map(re.escape, ROLES))})", key.replace(".default.", ".")
    )
    linear = linears_by_spelling().get(match[2].replace(".", "_")) if match else None
    return (f"blocks.{match[1]}.{linear}", ROLES[match[3]]) if linear else None


def config_from_json(raw: dict, file: Path, stored: dict) -> WanConfig:
    """Return the config that config.json `raw` describes.

    stored: the checkpoint's tensors by name, each with a `.shape`, because the original config.json
    lacks some sizes. Raises InputError, naming `file`, for settings that `Wan` does not compute.
    """
    with located(file):
        diffusers = raw["_class_name"] == DIFFUSERS
        fields = _from_diffusers(raw) if diffusers else _from_original(raw, stored)
        # both forms may omit these
        eps = read_number(raw, "eps", float, 1e-6)
        patch = raw.get("patch_size", [1, 2, 2])
        if not 0 < eps <= 1:
            raise InputError(f"eps={raw['eps']!r} must be a number above 0, and at most 1")
        if not isinstance(patch, list) or not all(type(p) is int for p in patch):
            raise InputError(f"patch_size={patch!r} must be a list of three whole numbers")
        return WanConfig(**fields, eps=eps, patch_size=tuple(patch))


def _from_diffusers(raw: dict) -> dict:
    sizes = ("attention_head_dim", "text_dim", *ORIGINAL_FIELDS)
    fields = {key: read_number(raw, key) for key in sizes}
    values = FIXED | dict(added_kv_proj_dim=None)
    if raw.get("image_dim") is not None:
        fields["image_dim"] = read_number(raw, "image_dim")
        dim = fields["num_attention_heads"] * fields["attention_head_dim"]
        values["added_kv_proj_dim"] = dim
    refuse_other_values(raw, values, DIFFUSERS)
    return fields


def _from_original(raw: dict, stored: dict) -> dict:
    """Return the fields of `WanConfig` from a config.json of Wan's own code.

    The image-to-video models of Wan 2.1 and 2.2 have the same config.json, but only 2.1's use CLIP
    features. The network of Wan 2.2's 5B model, ti2v, is a text-to-video one: an image is given to it
    as the latents of the first frame.
    """
    kind = raw.get("model_type")
    if kind not in ("t2v", "i2v", "ti2v"):
        raise InputError(f"model_type={kind!r} is not supported (known: 't2v', 'i2v', 'ti2v')")
    refuse_other_values(raw, dict(cross_attn_norm=True, qk_norm=True), ORIGINAL)
    fields = {ours: read_number(raw, theirs) for ours, theirs in ORIGINAL_FIELDS.items()}
    dim = read_number(raw, "dim")
    heads = fields["num_attention_heads"]
    if heads < 1 or dim % heads:
        raise InputError(f"num_heads={heads} does not divide dim={dim}")
    return fields | dict(
        attention_head_dim=dim // heads,
        text_dim=_inputs(stored, "text_embedding.0.weight") or 4096,
        image_dim=_inputs(stored, "img_emb.proj.1.weight"),
    )


def _inputs(stored: dict, name: str) -> int | None:
    """Return the number of columns of a stored matrix; None if there is none."""
    return stored[name].shape[1] if name in stored and len(stored[name].shape) == 2 else None


def config_to_json(config: WanConfig) -> dict:
    """Return config.json for diffusers."""
    keys = ("attention_head_dim", "eps", "image_dim", "text_dim", *ORIGINAL_FIELDS)
    fields = FIXED | {key: getattr(config, key) for key in keys}
    return fields | dict(
        _class_name=DIFFUSERS,
        added_kv_proj_dim=None if config.image_dim is None else config.dim,
        patch_size=list(config.patch_size),
        rope_max_seq_len=1024,
    )


def config_to_original_json(config: WanConfig) -> dict:
    """Return config.json for Wan's own code. Raises InputError for sizes that it does not support."""
    for field, known in ORIGINAL_VALUES.items():
        given = getattr(config, field)
        if given not in known:
            values = " or ".join(map(str, known))
            raise InputError(
                f"model.{field}={given} cannot be saved as {ORIGINAL} (must be {values})"
            )
    fields = {theirs: getattr(config, ours) for ours, theirs in ORIGINAL_FIELDS.items()}
    return fields | dict(
        _class_name=ORIGINAL,
        dim=config.dim,
        eps=config.eps,
        model_type="t2v" if config.in_channels == config.out_channels else "i2v",
        text_dim=config.text_dim,
        text_len=512,
    )
