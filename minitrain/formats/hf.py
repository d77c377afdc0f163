"""Hugging Face checkpoints (config.json + safetensors) in and out of a `Decoder`, or of a `Wan`.

Most of our parameter names are theirs; layouts_hf.py knows the others, stacked experts and
quantized weights. First every name and shape is checked against the files' headers. Then one tensor
at a time is copied from the mapped file into the model: of a sharded one only the slices that this
process has. Writing is the mirror image: tensors come from an iterator and leave memory shard by
shard. Left out: tokenizers.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minitrain.errors import InputError, refused
from minitrain.formats import wan_names
from minitrain.formats.config_hf import (
    GENERATION,
    check_exportable,
    config_from_hf,
    config_to_json,
    exportable,
)
from minitrain.formats.families import FAMILIES, OWN, PLAIN
from minitrain.formats.json_files import read_from_folder, read_json, write_json
from minitrain.formats.layouts_hf import (
    EMBEDDING,
    TIED_HEAD,
    Config,
    Piece,
    copies,
    held_depths,
    is_ignored,
    pieces,
    to_stored,
)
from minitrain.formats.magic import ADAPTER_CONFIG
from minitrain.formats.tensor_files import (
    DTYPES,
    STEMS,
    StoredTensor,
    check_stored,
    open_tensors,
    single_and_index,
    stored_tensors,
    weight_files,
    write_tensors,
)
from minitrain.models.decoder import Decoder
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.lora import is_adapter
from minitrain.models.wan import Wan, WanConfig
from minitrain.models.zoo import empty_model
from minitrain.parallel.shards import Slices, local_shard

Model = Decoder | Wan
Named = Iterable[tuple[str, Tensor]]


def load_pretrained(path: str | Path, dtype: torch.dtype | None = None, device=None) -> Model:
    """Return the model in a folder of Hugging Face layout, on `device` (default: the CPU).

    dtype: of the weights. By default the checkpoint's own, as in transformers: that of config.json,
    or, if it has none, that of the first tensor. Raises InputError for anything that is wrong with
    the folder.
    """
    config = read_config(path)
    weights = find_weights(config, path)
    dtype = dtype or _stored_dtype(Path(path), weights)
    model = empty_model(config).to(dtype).to_empty(device=device or "cpu")
    _read_into(model, weights)
    return model


def read_config(path: str | Path) -> Config:
    """Return the config of the model in folder `path`, of either kind.

    It has as many depths of multi-token prediction as the files hold: transformers drops their
    weights, and keeps the number in config.json.
    """
    file = Path(path) / "config.json"
    if os.path.isfile(path):
        raise InputError(
            f"{path} is a file (give a folder with config.json and safetensors, as on the hub)"
        )
    # Wan 2.2 has two networks
    inner = [file.parent / name for name in ("transformer", "transformer_2")]
    inner = [str(folder) for folder in inner if os.path.exists(folder / file.name)]
    if inner and not os.path.exists(file):
        choice = " or ".join(inner)
        raise InputError(f"{path} holds a pipeline of diffusers, not a model (use {choice})")
    raw = read_from_folder(file)
    if wan_names.is_wan(raw, file):
        return wan_names.config_from_json(raw, file, stored_tensors(weight_files(path)))
    config = config_from_hf(raw, file)
    generation = file.with_name(GENERATION)
    if generation.exists():
        config = replace(config, generation_config=read_json(generation))
    if config.num_nextn_predict_layers:
        held = 0
        # files that are missing are told when they are read
        with suppress(InputError):
            held = held_depths(config, stored_tensors(weight_files(path)))
        config = replace(config, num_nextn_predict_layers=held)
    return config


def save_pretrained(
    model: Model, path: str | Path, max_shard_bytes: int = 5 * 10**9, original_names: bool = False
) -> None:
    """Write a checkpoint that `transformers.AutoModelForCausalLM.from_pretrained(path)` loads.

    It has the model's own dtype. A Wan is for `diffusers.WanTransformer3DModel`, or, with
    `original_names`, for Wan's own code. An older checkpoint in the folder is replaced, with its
    generation_config.json; other files (a tokenizer's) stay. A model of family `minitrain` is for
    `load_pretrained` alone. Raises InputError for a config that another family's architecture in
    transformers cannot express, for a model that is sharded or has adapters, and for a folder that
    has some.
    """
    tensors = model.state_dict()
    if any(map(is_adapter, tensors)):
        raise InputError(
            "a model with adapters cannot be saved as one model (use merge_adapters first)"
        )
    if any(hasattr(tensor, "full_tensor") for tensor in tensors.values()):
        raise InputError(
            "a sharded model cannot be saved as it is (use save_tensors of full_tensors, see run/tasks/exports.py)"
        )
    if original_names and not isinstance(model, Wan):
        raise InputError("original_names=True is for Wan models: others have one spelling")
    if isinstance(model, Decoder) and model.config.family != OWN:
        check_exportable(model.config)
    dtype = next(model.parameters()).dtype
    save_tensors(tensors.items(), model.config, dtype, path, max_shard_bytes, original_names)


# --- weights, in


class Weights(NamedTuple):
    """A checkpoint's tensors, and the pieces of them that each parameter consists of."""

    stored: dict[str, StoredTensor]
    sources: dict[str, list[Piece]]


def find_weights(config: Config, path: str | Path) -> Weights:
    """Return where a model's weights are in the safetensors of folder `path`, from headers alone.

    Raises InputError for a tensor that is missing, unknown, misshapen or of an unknown type, and
    for a damaged file.
    """
    path = Path(path)
    stored = stored_tensors(weight_files(path))
    # a config.json may claim billions of layers: refuse it before they are built
    if len(stored) < config.num_layers:
        raise InputError(
            f"{path}: config.json claims {config.num_layers} layers, the files hold {len(stored)} tensors"
        )
    depths = getattr(config, "num_nextn_predict_layers", 0)
    if depths and (held := held_depths(config, stored)) < depths:
        raise InputError(
            f"model.num_nextn_predict_layers={depths}: {path} holds {held} layers of multi-token prediction"
        )
    everything = empty_model(config).state_dict()
    if isinstance(config, WanConfig):
        stored = wan_names.rename_to_ours(stored, everything)
    full_name = FAMILIES.get(config.family, PLAIN).full_name
    stored = {full_name(key): tensor for key, tensor in stored.items()}
    sources = {}
    needed = set()
    for name, tensor in everything.items():
        sources[name] = pieces(name, tuple(tensor.shape), config, stored)
        for piece in sources[name]:
            for key, (shape, allowed) in piece.needs.items():
                check_stored(stored, key, shape, allowed, path)
                needed.add(key)
    for key, tensor in stored.items():
        if key not in needed and not is_ignored(key, config):
            raise InputError(
                f"{tensor.file}: tensor {key} has no place in the model that config.json describes"
            )
    weights = Weights(stored, sources)
    if isinstance(config, DecoderConfig):
        tied = {TIED_HEAD: EMBEDDING} if config.tie_word_embeddings else {}
        for key, name in (tied | copies(config)).items():
            if key in stored:
                _check_copy(weights, key, name)
    return weights


def load_weights(model: Model, path: str | Path) -> None:
    """Fill `model`, which must be materialized, from the safetensors of folder `path`.

    Values are converted to its dtype. Memory: this process's part of one stored tensor at a time,
    beside the model. Raises InputError, before anything is written, as `find_weights` does.
    """
    # a pipeline stage also checks the other stages' tensors: all ranks fail together or none does
    _read_into(model, find_weights(model.config, path))


@torch.no_grad()
def _read_into(model: Model, weights: Weights) -> None:
    fetch = partial(_fetch, weights.stored)
    # parameters and buffers
    for name, tensor in model.state_dict().items():
        if not is_adapter(name):
            local, slices = local_shard(tensor)
            for piece in weights.sources[name]:
                _fill(local, slices, piece, fetch)


def _fetch(stored: dict[str, StoredTensor], key: str, slices: Slices) -> Tensor:
    # The file is closed after each tensor: its pages stay in memory as long as it is open.
    with open_tensors(stored[key].file) as file:
        return file.get_slice(stored[key].name)[slices]


def _fill(local: Tensor, slices: Slices, piece: Piece, fetch: Callable) -> None:
    """Copy the part of `local` that a piece holds. slices: `local`'s place in the parameter."""
    inside = []
    wanted = []
    for own, held in zip(slices, piece.region, strict=True):
        step = held.step or 1
        stop = min(own.stop, held.stop)
        # counted in the piece's own rows: the first that `local` has, and the end
        first = max(0, -((held.start - own.start) // step))
        end = -((held.start - stop) // step)
        if first >= end:
            return
        wanted.append(slice(first, end))
        inside.append(slice(held.start + first * step - own.start, stop - own.start, step))
    local[tuple(inside)].copy_(piece.read(fetch, tuple(wanted)))


def _check_copy(weights: Weights, key: str, name: str) -> None:
    """Raise InputError if stored tensor `key`, which nothing reads, differs from our parameter `name`."""
    keys = (next(iter(weights.sources[name][0].needs)), key)
    original, copy = (weights.stored[each] for each in keys)
    blocks = [(slice(first, first + 4096),) for first in range(0, original.shape[0], 4096)]
    alike = (original.shape, original.dtype) == (copy.shape, copy.dtype) and all(
        torch.equal(*(_fetch(weights.stored, each, rows).float() for each in keys))
        for rows in blocks
    )
    if not alike:
        setting = "num_nextn_predict_layers=0 reads neither"
        if key == TIED_HEAD:
            setting = "tie_word_embeddings=false reads both"
        what = "the embedding" if name == EMBEDDING else "the head"
        raise InputError(
            f"{copy.file}: {key} is not {what}, to which config.json ties it ({setting})"
        )


def _stored_dtype(path: Path, weights: Weights) -> torch.dtype:
    raw = read_json(path / "config.json")
    name = raw.get("dtype") or raw.get("torch_dtype")
    if name is None:
        embedding = next(iter(weights.sources.values()))[0]
        return DTYPES.get(weights.stored[next(iter(embedding.needs))].dtype, torch.float32)
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    if not isinstance(name, str) or name not in known:
        raise InputError(
            f"{path / 'config.json'}: dtype {name!r} is not supported (known: {', '.join(known)})"
        )
    return known[name]


# --- out


def save_tensors(
    tensors: Named,
    config: Config,
    dtype: torch.dtype,
    path: str | Path,
    max_shard_bytes: int = 5 * 10**9,
    original_names: bool = False,
) -> None:
    """Write full tensors, named as the model's parameters, as a Hugging Face checkpoint in `dtype`.

    Tensors that the model keeps in fp32 stay so. original_names: use the names of Wan's own code,
    not diffusers'. `tensors` is consumed lazily, and each shard leaves memory as soon as it is full.
    The folder keeps what it had until everything is on disk. A folder with config.json is complete.
    """
    path = Path(path)
    files = {}
    if isinstance(config, WanConfig):
        spell = wan_names.original_name if original_names else wan_names.diffusers_name
        to_json = (
            wan_names.config_to_original_json if original_names else wan_names.config_to_json
        )
        files["config.json"] = to_json(config)
        stem = wan_names.STEM
        tensors = ((spell(name), x) for name, x in tensors)
    else:
        check_free_of_adapters(path)
        config = exportable(config)
        files["config.json"] = config_to_json(config, dtype)
        stem = STEMS[0]
        if config.generation_config:
            files[GENERATION] = config.generation_config
        family = FAMILIES[config.family]
        spell = partial(family.stored_name, layers=config.num_layers)
        if family.to_stored:
            tensors = family.to_stored(tensors)
        else:
            tensors = (pair for name, x in tensors for pair in to_stored(name, x, config))
    wide = torch.promote_types(dtype, torch.float32)
    # The model keeps these tensors in fp32 whatever the dtype.
    model = empty_model(config).to(torch.bfloat16)
    fp32 = {spell(name) for name, x in model.state_dict().items() if x.dtype == torch.float32}
    tensors = (
        (name, x.detach().to("cpu", wide if name in fp32 else dtype).contiguous())
        for name, x in tensors
    )
    work = path / ".incomplete"
    shutil.rmtree(work, ignore_errors=True)
    with refused(f"{path} cannot be written"):
        work.mkdir(parents=True)
    try:
        _write_shards(tensors, work, stem, max_shard_bytes)
        for name, contents in files.items():
            write_json(work / name, contents)
        _replace_checkpoint(path, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_free_of_adapters(path: str | Path) -> None:
    """Raise InputError if adapters are in the folder.

    transformers adds them to any model beside them, even if they are merged into it already, or
    belong to another model.
    """
    if os.path.exists(os.path.join(path, ADAPTER_CONFIG)):
        raise InputError(
            f"{path} holds {ADAPTER_CONFIG}: transformers would add its adapters (use another folder)"
        )


def _write_shards(tensors: Named, work: Path, stem: str, limit: int) -> None:
    """Write files of at most `limit` bytes (a larger tensor stands alone), and their index."""
    names = []
    total_size = 0
    for shard in _shards(tensors, limit):
        write_tensors(shard, work / f"shard-{len(names)}", metadata={"format": "pt"})
        names.append(list(shard))
        total_size += sum(tensor.nbytes for tensor in shard.values())
    # their number is known only now
    single, index = single_and_index(stem)
    weight_map = {}
    for i, inside in enumerate(names):
        final = single
        if len(names) > 1:
            final = f"{stem}-{i + 1:05}-of-{len(names):05}.safetensors"
        os.replace(work / f"shard-{i}", work / final)
        weight_map |= dict.fromkeys(inside, final)
    if len(names) > 1:
        contents = dict(metadata=dict(total_size=total_size), weight_map=weight_map)
        write_json(work / index, contents)


def _shards(tensors: Named, limit: int) -> Iterator[dict[str, Tensor]]:
    """Yield tensors by name, as many as `limit` bytes hold; each dict is emptied for the next."""
    shard = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard.clear()
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _replace_checkpoint(folder: Path, work: Path) -> None:
    """Move the new files in place of the old.

    The old config.json goes first and the new one comes last: without it a folder cannot be loaded,
    so no mixture of old and new files ever is.
    """
    outdated = ["config.json", GENERATION, "hf_quant_config.json", "quantize_config.json"]
    for stem in STEMS:
        outdated += single_and_index(stem)
        outdated += [file.name for file in folder.glob(f"{stem}-*-of-*.safetensors")]
    for name in outdated:
        (folder / name).unlink(missing_ok=True)
    for file in sorted(work.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, folder / file.name)
