"""Hugging Face checkpoints (config.json + safetensors) in and out of a `Decoder`.

Our parameter names are theirs, so loading means looking each parameter up: first every name and shape is checked
against the files' headers, then one tensor at a time is copied from the mapped file into the model, or only the slices
that this process owns. Writing is the mirror image: tensors come from an iterator and leave memory shard by shard.
What is not here: tokenizers, quantised weights, and how a sharded model is cut (whoever shards it passes `owned`).
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minitrain.errors import InputError
from minitrain.models.decoder import Decoder, DecoderConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EPS_KEYS = {"rmsnorm": "rms_norm_eps", "layernorm1p": "norm_eps"}
ACTIVATIONS = {"swiglu": "silu", "relu2": "relu2"}
SIZES = {name: name for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
                                 "max_position_embeddings")} | {"num_layers": "num_hidden_layers"}  # fmt: skip


class Family(NamedTuple):
    """What an architecture's name fixes, and the switches of its config.json that the decoder does not have."""

    architecture: str
    switches: tuple[str, ...]
    norm: str = "rmsnorm"
    mlp: str = "swiglu"
    qkv_bias: bool = False
    qk_norm: bool = False
    partial_rotary: float | None = None  # the factor where config.json gives none; None: heads are always rotated whole


FAMILIES = {
    "llama": Family("LlamaForCausalLM", ("attention_bias", "mlp_bias")),
    "qwen2": Family("Qwen2ForCausalLM", ("use_sliding_window",), qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", ("attention_bias", "use_sliding_window"), qk_norm=True),
    "nemotron": Family(
        "NemotronForCausalLM", ("attention_bias", "mlp_bias"), norm="layernorm1p", mlp="relu2", partial_rotary=0.5
    ),
}


def load_pretrained(path: str | Path, dtype: torch.dtype | None = None, device=None) -> Decoder:
    """The model in a folder of Hugging Face layout, on `device` (default: the CPU).

    dtype: of the weights. By default the checkpoint's own, as in transformers: what config.json says, or, where it says
    nothing, what the embedding is stored in. Raises InputError for anything that is wrong with the folder.
    """
    config = read_config(path)
    dtype = dtype or _stored_dtype(Path(path))
    with torch.device("meta"):
        model = Decoder(config).to(dtype)
    model.to_empty(device=device or "cpu")
    load_weights(model, path)
    return model


def save_pretrained(model: Decoder, path: str | Path, max_shard_bytes: int = 5 * 10**9) -> None:
    """Write what `transformers.AutoModelForCausalLM.from_pretrained(path)` loads unchanged, in the model's own dtype.

    An older checkpoint in the folder is replaced; other files (a tokenizer's) stay. Raises InputError for a config that
    the family's architecture in transformers cannot express.
    """
    save_tensors(model.named_parameters(), model.config, model.head_weight.dtype, path, max_shard_bytes)


# ------------------------------------------------------------------------------------------------------ config.json, in


def read_config(path: str | Path) -> DecoderConfig:
    """The shape of the model in folder `path`. Raises InputError for what the decoder would not compute exactly."""
    file = Path(path) / "config.json"
    raw = _read_json(file)
    name = _find_family(raw, file)
    family = FAMILIES[name]
    _refuse_unsupported(raw, family, file)
    rope = _read_rope(raw, file)
    sizes = {ours: _number(raw, theirs, file) for ours, theirs in SIZES.items()}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    fields = dict(
        num_key_value_heads=_number(raw, "num_key_value_heads", file, default=heads),
        head_dim=_number(raw, "head_dim", file, default=hidden // max(heads, 1)),
        norm_eps=_number(raw, EPS_KEYS[family.norm], file, float),
        rope_theta=_number(rope, "rope_theta", file, float, default=10000.0),
        rope_scaling=_rope_scaling(rope, file),
        partial_rotary_factor=_partial_rotary(rope, family, file),
        tie_word_embeddings=_switch(raw, "tie_word_embeddings", file),
        initializer_range=_number(raw, "initializer_range", file, float, default=0.02),
        bos_token_id=_token_ids(raw, "bos_token_id", file),
        eos_token_id=_token_ids(raw, "eos_token_id", file),
    )
    try:
        return DecoderConfig(family=name, **sizes, **fields, **_fixed(family))
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def _fixed(family: Family) -> dict:
    return {key: getattr(family, key) for key in ("norm", "mlp", "qkv_bias", "qk_norm")}


def _read_json(file: Path) -> dict:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(f"{file}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{file}: must hold a JSON object, not a {type(raw).__name__}")
    return raw


def _find_family(raw: dict, file: Path) -> str:
    """The family that `architectures` names, or `model_type` where there is no such key."""
    if raw.get("architectures"):
        key, known = "architectures", {family.architecture: name for name, family in FAMILIES.items()}
        values = raw[key] if isinstance(raw[key], list) else [raw[key]]
    else:
        key, known = "model_type", {name: name for name in FAMILIES}
        values = [raw.get(key)]
    for value in values:
        if isinstance(value, str) and value in known:
            return known[value]
    raise InputError(f"{file}: {key}={raw.get(key)!r} is not supported (known: {', '.join(known)})")


def _refuse_unsupported(raw: dict, family: Family, file: Path) -> None:
    for key in family.switches:
        if _switch(raw, key, file):
            raise InputError(f"{file}: {key}=true is not supported for {family.architecture}")
    if set(map(str, raw.get("layer_types") or [])) - {"full_attention"}:
        raise InputError(f"{file}: layer_types other than full_attention are not supported")
    activation, expected = raw.get("hidden_act"), ACTIVATIONS[family.mlp]
    if activation not in (None, expected):
        raise InputError(f"{file}: hidden_act={activation!r} is not supported (must be {expected!r})")
    if raw.get("quantization_config"):
        raise InputError(f"{file}: quantization_config is not supported (weights must be stored in floating point)")


def _read_rope(raw: dict, file: Path) -> dict:
    """Everything about rotary embeddings in one dict, from the old keys (transformers 4) and the new one (5)."""
    rope = {key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if raw.get(key) is not None}
    for key in ("rope_scaling", "rope_parameters"):
        value = raw.get(key)
        if not isinstance(value, dict | None):
            raise InputError(f"{file}: {key} must be an object, not a {type(value).__name__}")
        rope |= value or {}
    return rope


def _rope_scaling(rope: dict, file: Path) -> dict | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise InputError(f"{file}: rope_type {kind!r} is not supported (known: 'default', 'llama3')")
    factors = {key: _number(rope, key, file, float) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    original = _number(rope, "original_max_position_embeddings", file)
    return dict(rope_type="llama3", **factors, original_max_position_embeddings=original)


def _partial_rotary(rope: dict, family: Family, file: Path) -> float:
    factor = _number(rope, "partial_rotary_factor", file, float, default=family.partial_rotary or 1.0)
    if family.partial_rotary is None and factor != 1:
        raise InputError(f"{file}: partial_rotary_factor={factor} is not supported for {family.architecture} (use 1)")
    return factor


def _number(raw: dict, key: str, file: Path, kind: type = int, default: Any = None) -> Any:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if key not in raw:
        raise InputError(f"{file}: key {key} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise InputError(f"{file}: {key}={value!r} must be a {'whole ' if kind is int else ''}number")
    return kind(value)


def _switch(raw: dict, key: str, file: Path) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool | None):
        raise InputError(f"{file}: {key}={value!r} must be true or false")
    return bool(value)


def _token_ids(raw: dict, key: str, file: Path) -> int | list[int] | None:
    value = raw.get(key)
    for token in value if isinstance(value, list) else [value]:
        if isinstance(token, bool) or not isinstance(token, int | None):
            raise InputError(f"{file}: {key}={value!r} must be a token id or a list of them")
    return value


# ---------------------------------------------------------------------------------------------------------- weights, in


class StoredTensor(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it


def whole(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This process holds all of every parameter."""
    return parameter, ()


@torch.no_grad()
def load_weights(
    model: Decoder,
    path: str | Path,
    owned: Callable[[Tensor], tuple[Tensor, tuple[slice, ...]]] = whole,
) -> None:
    """Fill `model`, which must be materialised, from the safetensors of folder `path`, converting to its dtype.

    owned(parameter) -> (local, slices): where this process's part of it lies, and which part of the full tensor that
    is, one slice per dimension. A sharded parameter's `.shape` must be the full one, as a DTensor's is.
    Memory: the owned part of one stored tensor at a time, beside the model. Raises InputError, before anything is
    written, for a tensor that is missing, unknown, misshapen or not in floating point, and for a damaged file.
    """
    stored = _stored_tensors(Path(path))
    parameters = dict(model.named_parameters())
    _check_tensors(stored, parameters, model.config.tie_word_embeddings, Path(path))
    for name, tensor in stored.items():
        if name in parameters:
            local, slices = owned(parameters[name])
            with _open(tensor.file) as file:  # once per tensor: what was read stays resident until its file is closed
                local.copy_(file.get_slice(name)[slices])


def _stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name, in file order, from the files' headers alone."""
    stored = {}
    for file in _weight_files(path):
        with _open(file) as contents:
            for name in contents.keys():  # noqa: SIM118
                if name in stored:
                    raise InputError(f"{file}: tensor {name} is also in {stored[name].file}")
                tensor = contents.get_slice(name)
                stored[name] = StoredTensor(file, tuple(tensor.get_shape()), tensor.get_dtype())
    return stored


def _weight_files(path: Path) -> list[Path]:
    index = path / INDEX
    if (path / SINGLE).exists() or not index.exists():
        return [path / SINGLE]
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise InputError(f"{index}: weight_map must map tensor names to file names")
    for name in names.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{index}: weight_map names {name!r}, which must be a safetensors file of the same folder")
    return [path / name for name in sorted(set(names.values()))]


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file} cannot be read as safetensors: {error}") from None


def _check_tensors(stored: dict[str, StoredTensor], parameters: dict[str, Tensor], tied: bool, path: Path) -> None:
    for name, parameter in parameters.items():
        if name not in stored:
            raise InputError(f"{path}: tensor {name} of shape {list(parameter.shape)} is missing")
        file, shape, dtype = stored[name]
        if shape != tuple(parameter.shape):
            raise InputError(f"{file}: tensor {name} has shape {list(shape)}, expected {list(parameter.shape)}")
        if dtype not in DTYPES:
            raise InputError(f"{file}: tensor {name} is stored as {dtype}, expected one of {', '.join(DTYPES)}")
    for name, tensor in stored.items():
        redundant = name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
        if name not in parameters and not redundant:
            raise InputError(f"{tensor.file}: tensor {name} has no place in the model that config.json describes")


def _stored_dtype(path: Path) -> torch.dtype:
    raw = _read_json(path / "config.json")
    name = raw.get("dtype") or raw.get("torch_dtype")
    if name is None:
        embedding = _stored_tensors(path).get("model.embed_tokens.weight")
        return DTYPES.get(embedding.dtype if embedding else "", torch.float32)
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    if not isinstance(name, str) or name not in known:
        raise InputError(f"{path / 'config.json'}: dtype {name!r} is not supported (known: {', '.join(known)})")
    return known[name]


# ------------------------------------------------------------------------------------------------------------------ out


def save_tensors(
    tensors: Iterable[tuple[str, Tensor]],
    config: DecoderConfig,
    dtype: torch.dtype,
    path: str | Path,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write full tensors, named as the model's parameters, as a Hugging Face checkpoint in `dtype`.

    `tensors` is consumed lazily, and each shard leaves memory as soon as it is full. The folder keeps what it had until
    everything is on disk; config.json comes last, so a folder that has one is complete.
    """
    settings = config_to_hf(config, dtype)
    folder = Path(path)
    work = folder / ".incomplete"
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}") from None
    try:
        weight_map, total_size = _write_shards(tensors, dtype, work, max_shard_bytes)
        if len(set(weight_map.values())) > 1:
            _write_json(work / INDEX, dict(metadata=dict(total_size=total_size), weight_map=weight_map))
        _write_json(work / "config.json", settings)
        _replace_checkpoint(folder, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_shards(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, work: Path, limit: int
) -> tuple[dict[str, str], int]:
    """Files of at most `limit` bytes (a larger tensor stands alone). Returns each tensor's file and the total bytes."""
    shards, shard, size, total_size = [], {}, 0, 0

    def flush():
        save_file(shard, work / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        tensor = tensor.detach().to("cpu", dtype).contiguous()
        if shard and size + tensor.nbytes > limit:
            flush()
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
        total_size += tensor.nbytes
    flush()
    return _name_shards(shards, work), total_size


def _name_shards(shards: list[list[str]], work: Path) -> dict[str, str]:
    """Rename the files now that their number is known. Returns the file of each tensor."""
    weight_map = {}
    for i, names in enumerate(shards):
        final = SINGLE if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        os.replace(work / f"shard-{i}", work / final)
        weight_map |= dict.fromkeys(names, final)
    return weight_map


def _replace_checkpoint(folder: Path, work: Path) -> None:
    """Without config.json neither the old nor the new files are a checkpoint, so no mixture of them can be loaded."""
    outdated = [folder / "config.json", folder / SINGLE, folder / INDEX, *folder.glob("model-*-of-*.safetensors")]
    for file in outdated:
        file.unlink(missing_ok=True)
    for file in sorted(work.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, folder / file.name)


def _write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def config_to_hf(config: DecoderConfig, dtype: torch.dtype) -> dict:
    """config.json in the spelling of transformers 4, which 5 reads too."""
    family = exportable_family(config)
    partial = {} if family.partial_rotary is None else dict(partial_rotary_factor=config.partial_rotary_factor)
    return dict(
        architectures=[family.architecture],
        model_type=config.family,
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        hidden_act=ACTIVATIONS[family.mlp],
        **{EPS_KEYS[family.norm]: config.norm_eps},
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        **partial,
        **dict.fromkeys(family.switches, False),
        tie_word_embeddings=config.tie_word_embeddings,
        initializer_range=config.initializer_range,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        torch_dtype=str(dtype).removeprefix("torch."),
    )


def exportable_family(config: DecoderConfig) -> Family:
    family = FAMILIES.get(config.family)
    if family is None:
        raise InputError(f"model.family={config.family!r} cannot be saved (known: {', '.join(FAMILIES)})")
    fixed = _fixed(family) | ({} if family.partial_rotary else dict(partial_rotary_factor=1.0))
    for key, value in fixed.items():
        given = getattr(config, key)
        if given != value:
            raise InputError(f"model.{key}={given!r} cannot be saved as {family.architecture} (must be {value!r})")
    return family
