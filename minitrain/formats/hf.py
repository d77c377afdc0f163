"""Hugging Face checkpoints (config.json + safetensors) in and out of a `Decoder`, or of a `Wan`.

Most of our parameter names are theirs; layouts_hf.py knows the others, stacked experts and
quantised weights. First every name and shape is checked against the files' headers, then one tensor
at a time is copied from the mapped file into the model, or only the slices that this process owns.
Writing is the mirror image: tensors come from an iterator and leave memory shard by shard. What is
not here: tokenizers, and how a sharded model is cut (whoever shards it passes `owned`).
"""

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minitrain.errors import InputError, hub_hint, refused
from minitrain.formats import gpt2, wan_names
from minitrain.formats.config_hf import (
    GENERATION,
    config_from_hf,
    config_to_hf,
    read_json,
    write_json,
)
from minitrain.formats.layouts_hf import Piece, is_ignored, pieces, stored_name, to_stored
from minitrain.formats.magic import ADAPTER_CONFIG, kind_of_folder
from minitrain.formats.tensor_files import DTYPES, open_tensors, read_headers, write_tensors
from minitrain.models.decoder import Decoder
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.lora import is_adapter
from minitrain.models.wan import Wan, WanConfig
from minitrain.models.zoo import empty_model
from minitrain.parallel.shards import Slices, all_of

STEMS = ("model", wan_names.STEM)  # of weight files: transformers', diffusers'
OTHER_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pth",
    ".pt",
    ".ckpt",
    ".gguf",
)  # pickled ones could run any code
TIED_HEAD = (
    "lm_head.weight"  # where the output head is stored, which may also be where it is the embedding
)


def load_pretrained(
    path: str | Path, dtype: torch.dtype | None = None, device=None
) -> Decoder | Wan:
    """The model in a folder of Hugging Face layout, on `device` (default: the CPU).

    dtype: of the weights. By default the checkpoint's own, as in transformers: what config.json
    says, or, where it says nothing, what the embedding is stored in. Raises InputError for anything
    that is wrong with the folder.
    """
    config = read_config(path)
    weights = find_weights(config, path)
    dtype = dtype or _stored_dtype(Path(path), weights)
    model = empty_model(config).to(dtype).to_empty(device=device or "cpu")
    _read_into(model, weights, all_of)
    return model


def read_config(path: str | Path) -> DecoderConfig | WanConfig:
    """The shape of the model in folder `path`, of either kind."""
    file = Path(path) / "config.json"
    if os.path.isfile(path):  # unlike Path's, never an error by itself
        raise InputError(
            f"{path} is a file (give a folder with config.json and safetensors, as on the hub)"
        )
    if not os.path.isdir(path) and (hint := hub_hint(str(path), "give ")):
        raise InputError(f"{path} is no folder{hint}")
    inner = [
        Path(path) / name for name in ("transformer", "transformer_2")
    ]  # two experts, in Wan 2.2
    inner = [folder for folder in inner if os.path.exists(folder / file.name)]
    if inner and not os.path.exists(file):
        choice = " or ".join(map(str, inner))
        raise InputError(f"{path} holds a pipeline of diffusers, not a model (use {choice})")
    if os.path.isdir(path) and not os.path.exists(file):
        raise InputError(f"{path} holds no config.json{kind_of_folder(Path(path))}")
    raw = read_json(file)
    if wan_names.is_wan(raw, file):
        return wan_names.config_from_json(raw, file, stored_tensors(weight_files(path)))
    config = config_from_hf(raw, file)
    generation = file.with_name(GENERATION)
    return (
        replace(config, generation_config=read_json(generation)) if generation.exists() else config
    )


def save_pretrained(
    model: Decoder | Wan,
    path: str | Path,
    max_shard_bytes: int = 5 * 10**9,
    original_names: bool = False,
) -> None:
    """Write what `transformers.AutoModelForCausalLM.from_pretrained(path)` loads unchanged, in the
    model's own dtype; for Wan, `diffusers.WanTransformer3DModel`, or, with `original_names`, Wan's
    own code.

    An older checkpoint in the folder is replaced, with its generation_config.json; other files (a
    tokenizer's) stay. Raises InputError for a config that the family's architecture in transformers
    cannot express, for a model that is sharded or has adapters, and for a folder that has some.
    """
    tensors = model.state_dict()
    if any(map(is_adapter, tensors)):
        raise InputError(
            "a model with adapters cannot be saved as one model (use merge_adapters first)"
        )
    if any(hasattr(tensor, "full_tensor") for tensor in tensors.values()):
        raise InputError(
            "a sharded model cannot be saved as it is (use save_tensors of whole_tensors, see train.py)"
        )
    if original_names and not isinstance(model, Wan):
        raise InputError("original_names=True is for Wan models: others have one spelling")
    dtype = next(model.parameters()).dtype
    save_tensors(tensors.items(), model.config, dtype, path, max_shard_bytes, original_names)


# ---------------------------------------------------------------------------------------------------------- weights, in


class StoredTensor(NamedTuple):
    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it


class Weights(NamedTuple):
    """stored: a checkpoint's tensors; sources: of which pieces of them each parameter consists."""

    stored: dict[str, StoredTensor]
    sources: dict[str, list[Piece]]


def find_weights(config: DecoderConfig | WanConfig, path: str | Path) -> Weights:
    """Where a model's weights are in the safetensors of folder `path`, from the files' headers
    alone.

    Raises InputError for a tensor that is missing, unknown, misshapen or of an unknown type, and
    for a damaged file.
    """
    path = Path(path)
    stored = stored_tensors(weight_files(path))
    if len(stored) < config.num_layers:  # before so many are laid out
        raise InputError(
            f"{path}: config.json claims {config.num_layers} layers, the files hold {len(stored)} tensors"
        )
    everything = empty_model(config).state_dict()
    if isinstance(config, WanConfig):
        stored = wan_names.rename_to_ours(stored, everything)
    if config.family == "gpt2":
        stored = {gpt2.full_name(key): tensor for key, tensor in stored.items()}
    dtypes = {key: tensor.dtype for key, tensor in stored.items()}
    sources = {}
    needed = set()
    for name, tensor in everything.items():
        sources[name] = pieces(name, tuple(tensor.shape), config, dtypes)
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
    if isinstance(config, DecoderConfig) and config.tie_word_embeddings and TIED_HEAD in stored:
        _check_tied_head(weights, config.vocab_size)
    return weights


def load_weights(
    model: Decoder | Wan,
    path: str | Path,
    owned: Callable[[Tensor], tuple[Tensor, Slices]] = all_of,
) -> None:
    """Fill `model`, which must be materialised, from the safetensors of folder `path`, converting
    to its dtype.

    owned(tensor) -> (local, slices): of each tensor of the model's state_dict, in turn, this
    process's part, and where in the full tensor that lies: one slice per dimension, with start and
    stop.
    Memory: the owned part of one stored tensor at a time, beside the model. Raises InputError,
    before anything is written, as `find_weights` does.
    """
    # of a pipeline stage too, the whole model's are looked for, so that all ranks agree on what is
    # wrong
    _read_into(model, find_weights(model.config, path), owned)


@torch.no_grad()
def _read_into(model: Decoder | Wan, weights: Weights, owned: Callable) -> None:
    fetch = partial(_fetch, weights.stored)
    sources = weights.sources
    for name, tensor in model.state_dict().items():  # with buffers
        if not is_adapter(name):
            local, slices = owned(tensor)
            for piece in sources[name]:
                _fill(local, slices, piece, fetch)


def _fetch(stored: dict[str, StoredTensor], key: str, slices: Slices) -> Tensor:
    with open_tensors(
        stored[key].file
    ) as file:  # each time: what was read stays resident until its file is closed
        return file.get_slice(stored[key].name)[slices]


def _fill(
    local: Tensor, slices: Slices, piece: Piece, fetch: Callable[[str, Slices], Tensor]
) -> None:
    """Read what a piece holds of `local`, which is the part `slices` of a parameter."""
    common = [
        slice(max(a.start, b.start), min(a.stop, b.stop))
        for a, b in zip(slices, piece.region, strict=True)
    ]

    def within(part: Slices) -> Slices:
        return tuple(
            slice(c.start - p.start, c.stop - p.start) for c, p in zip(common, part, strict=True)
        )

    if all(each.start < each.stop for each in common):
        local[within(slices)].copy_(piece.read(fetch, within(piece.region)))


def stored_tensors(files: list[Path]) -> dict[str, StoredTensor]:
    """Every tensor of the files by name, in their order, from headers alone."""
    stored = {}
    for file in files:
        for name, (shape, dtype) in read_headers(file).items():
            if name in stored:
                raise InputError(f"{file}: tensor {name} is also in {stored[name].file}")
            stored[name] = StoredTensor(name, file, shape, dtype)
    return stored


def _single_and_index(stem: str) -> tuple[str, str]:
    return f"{stem}.safetensors", f"{stem}.safetensors.index.json"


def weight_files(path: str | Path) -> list[Path]:
    """The safetensors files of folder `path` that hold its model."""
    path = Path(path)
    stem = next(
        (stem for stem in STEMS if any((path / file).exists() for file in _single_and_index(stem))),
        STEMS[0],
    )
    single, index = (path / file for file in _single_and_index(stem))
    if single.exists():
        return [single]
    if not index.exists():
        raise _without_weights(path)
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise InputError(f"{index}: weight_map must map tensor names to file names")
    for name in names.values():
        if Path(name).name != name or "\0" in name or not name.endswith(".safetensors"):
            raise InputError(
                f"{index}: weight_map names {name!r}, which must be a safetensors file of the same folder"
            )
    return [path / name for name in sorted(set(names.values()))]


def _without_weights(path: Path) -> InputError:
    known = " or ".join(_single_and_index(stem)[0] for stem in STEMS)
    others = sorted(file.name for file in path.glob("*.*") if file.suffix in OTHER_WEIGHTS)
    hint = (
        f": {others[0]} is not read (save it again with save_pretrained of transformers or diffusers)"
        if others
        else ""
    )
    return InputError(f"{path} holds no {known}, nor an index of shards{hint}")


def check_stored(
    stored: dict[str, StoredTensor],
    key: str,
    shape: tuple[int, ...],
    dtypes: tuple[str, ...],
    path: Path,
) -> None:
    """Raises InputError unless tensor `key` is among those of `path`, of this shape and one of
    these types.
    """
    if key not in stored:
        raise InputError(f"{path}: tensor {key} of shape {list(shape)} is missing")
    tensor = stored[key]
    if tensor.shape != shape:
        raise InputError(
            f"{tensor.file}: tensor {key} has shape {list(tensor.shape)}, expected {list(shape)}"
        )
    if tensor.dtype not in dtypes:
        expected = ", ".join(dtypes)
        raise InputError(
            f"{tensor.file}: tensor {key} is stored as {tensor.dtype}, expected one of {expected}"
        )


def _check_tied_head(weights: Weights, vocab: int) -> None:
    """Raises InputError for a head that is stored beside the embedding and is another matrix: it
    would be lost.
    """
    key = next(iter(weights.sources["model.embed_tokens.weight"][0].needs))
    embedding = weights.stored[key]
    head = weights.stored[TIED_HEAD]

    def same(rows: slice) -> bool:
        return torch.equal(
            *(_fetch(weights.stored, name, (rows,)).float() for name in (key, TIED_HEAD))
        )

    alike = (embedding.shape, embedding.dtype) == (head.shape, head.dtype)
    if not (alike and all(same(slice(first, first + 4096)) for first in range(0, vocab, 4096))):
        raise InputError(
            f"{head.file}: {TIED_HEAD} is not the embedding, to which config.json ties it "
            f"(tie_word_embeddings=false reads both)"
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


# ------------------------------------------------------------------------------------------------------------------ out


def save_tensors(
    tensors: Iterable[tuple[str, Tensor]],
    config: DecoderConfig | WanConfig,
    dtype: torch.dtype,
    path: str | Path,
    max_shard_bytes: int = 5 * 10**9,
    original_names: bool = False,
) -> None:
    """Write full tensors, named as the model's parameters, as a Hugging Face checkpoint in `dtype`,
    but for what the model keeps in fp32. original_names: of Wan's own code, in place of diffusers'.

    `tensors` is consumed lazily, and each shard leaves memory as soon as it is full. The folder
    keeps what it had until everything is on disk; config.json comes last, so a folder that has one
    is complete.
    """
    if isinstance(config, WanConfig):
        spell = wan_names.original_name if original_names else wan_names.diffusers_name
        to_json = wan_names.config_to_original_json if original_names else wan_names.config_to_json
        files = {"config.json": to_json(config)}
        stem = wan_names.STEM
        tensors = ((spell(name), x) for name, x in tensors)
    else:
        check_free_of_adapters(path)
        files = {"config.json": config_to_hf(config, dtype)}
        stem = STEMS[0]
        if config.generation_config:
            files[GENERATION] = config.generation_config
        spell = partial(stored_name, family=config.family)
        if config.family == "gpt2":
            tensors = gpt2.to_stored(tensors)
        else:
            tensors = (pair for name, x in tensors for pair in to_stored(name, x, config))
    wide = torch.promote_types(dtype, torch.float32)
    fp32 = kept_in_fp32(config, spell)
    tensors = (
        (name, x.detach().to("cpu", wide if name in fp32 else dtype).contiguous())
        for name, x in tensors
    )
    _write_checkpoint(tensors, files, stem, Path(path), max_shard_bytes)


def check_free_of_adapters(path: str | Path) -> None:
    """Raises InputError if adapters are in the folder: transformers adds them to any model that it
    finds beside them, also to one that they are merged into already, or that has nothing to do with
    them."""
    if os.path.exists(os.path.join(path, ADAPTER_CONFIG)):
        raise InputError(
            f"{path} holds {ADAPTER_CONFIG}: transformers would add its adapters (use another folder)"
        )


def kept_in_fp32(config: DecoderConfig | WanConfig, spell: Callable[[str], str]) -> set[str]:
    """The stored names of what the config's model has in fp32 whatever the rest is cast to. spell:
    ours -> theirs.
    """
    tensors = empty_model(config).to(torch.bfloat16).state_dict()
    return {spell(name) for name, tensor in tensors.items() if tensor.dtype == torch.float32}


def _write_checkpoint(
    tensors: Iterable[tuple[str, Tensor]],
    files: dict[str, dict],
    stem: str,
    folder: Path,
    limit: int,
) -> None:
    work = folder / ".incomplete"
    shutil.rmtree(work, ignore_errors=True)
    with refused(f"{folder} cannot be written"):
        work.mkdir(parents=True)
    try:
        weight_map, total_size = _write_shards(tensors, work, stem, limit)
        if len(set(weight_map.values())) > 1:
            index = dict(metadata=dict(total_size=total_size), weight_map=weight_map)
            write_json(work / _single_and_index(stem)[1], index)
        for name, contents in files.items():
            write_json(work / name, contents)
        _replace_checkpoint(folder, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_shards(
    tensors: Iterable[tuple[str, Tensor]], work: Path, stem: str, limit: int
) -> tuple[dict[str, str], int]:
    """Files of at most `limit` bytes (a larger tensor stands alone). Returns each tensor's file and
    the total bytes.
    """
    shards = []
    shard = {}
    size = 0
    total_size = 0

    def flush():
        write_tensors(shard, work / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            flush()
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
        total_size += tensor.nbytes
    flush()
    return _name_shards(shards, work, stem), total_size


def _name_shards(shards: list[list[str]], work: Path, stem: str) -> dict[str, str]:
    """Rename the files now that their number is known. Returns the file of each tensor."""
    weight_map = {}
    for i, names in enumerate(shards):
        final = (
            f"{stem}.safetensors"
            if len(shards) == 1
            else f"{stem}-{i + 1:05}-of-{len(shards):05}.safetensors"
        )
        os.replace(work / f"shard-{i}", work / final)
        weight_map |= dict.fromkeys(names, final)
    return weight_map


def _replace_checkpoint(folder: Path, work: Path) -> None:
    """Without config.json neither the old nor the new files are a checkpoint, so no mixture of them
    can be loaded.
    """
    outdated = [folder / "config.json", folder / GENERATION]
    for stem in STEMS:
        outdated += [
            *(folder / file for file in _single_and_index(stem)),
            *folder.glob(f"{stem}-*-of-*.safetensors"),
        ]
    for file in outdated:
        file.unlink(missing_ok=True)
    for file in sorted(work.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, folder / file.name)
