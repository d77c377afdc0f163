"""Load and save a `Decoder` or a `Wan` as a Hugging Face checkpoint: config.json and safetensors.

Most parameters have the same names as in the files; layouts_hf.py maps the others, stacked experts
and quantized weights. Loading first checks every name and shape against the files' headers. Then it
copies one tensor at a time from the mapped file into the model; for a sharded model only the slices
that this process holds. Saving consumes tensors from an iterator, and frees each shard of the
checkpoint when it is written. Tokenizers are not handled here.
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

from minitrain.errors import InputError, as_input_error
from minitrain.formats import wan_names
from minitrain.formats.config_hf import (
    GENERATION,
    check_exportable,
    config_from_hf,
    config_to_json,
    exportable,
)
from minitrain.formats.families import FAMILIES, OWN
from minitrain.formats.family import PLAIN
from minitrain.formats.json_files import read_from_folder, read_json, write_json
from minitrain.formats.layouts_hf import (
    EMBEDDING,
    FP8_SETTINGS,
    IN_FP8,
    SCORE,
    TIED_HEAD,
    Config,
    Piece,
    all_to_stored,
    copies,
    fill,
    fill_frozen,
    held_depths,
    is_ignored,
    pieces,
    write_fp8,
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
from minitrain.models.frozen import frozen_weights, further_parts
from minitrain.models.lora import is_adapter
from minitrain.models.wan import Wan, WanConfig
from minitrain.models.zoo import empty_model
from minitrain.parallel.shards import Slices, local_shard

# dtypes by torch's names, which config.json has too, and by the names of settings
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
SHORT_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Model = Decoder | Wan
Named = Iterable[tuple[str, Tensor]]


def load_pretrained(
    path: str | Path, dtype: torch.dtype | str | None = None, device=None
) -> Model:
    """Return the model in a folder of Hugging Face layout, on `device` (default: the CPU).

    dtype: of the weights, torch's or a name such as bf16. The default is the checkpoint's own, as in
    transformers: that in config.json, otherwise that of the first tensor. Raises InputError for
    anything that is wrong with the folder.
    """
    dtype = SHORT_NAMES.get(dtype, NAMES.get(dtype, dtype))
    if dtype not in (None, *NAMES.values()):
        raise InputError(f"dtype={dtype!r} is not one of {', '.join([*SHORT_NAMES, *NAMES])}")
    config = read_config(path)
    weights = find_weights(config, path)
    dtype = dtype or _stored_dtype(Path(path), weights)
    model = empty_model(config).to(dtype).to_empty(device=device or "cpu")
    _read_into(model, weights)
    return model


def read_config(path: str | Path) -> Config:
    """Return the config of the model in folder `path`, of either kind.

    Its depths of multi-token prediction are those in the files: transformers drops their weights, but
    keeps their number in config.json.
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
        # missing files are reported when the weights are read
        with suppress(InputError):
            held = held_depths(config, stored_tensors(weight_files(path)))
        config = replace(config, num_nextn_predict_layers=held)
    return config


def save_pretrained(
    model: Model,
    path: str | Path,
    tokenizer=None,
    max_shard_bytes: int = 5 * 10**9,
    original_names: bool = False,
    fp8: bool = False,
) -> None:
    """Write a checkpoint that `transformers.AutoModelForCausalLM.from_pretrained(path)` loads.

    It has the model's own dtype. A Wan is saved for `diffusers.WanTransformer3DModel` or, with
    `original_names`, for Wan's own code. With `fp8` the blocks' matrices are e4m3 with a scale for
    each 128 x 128, in the layout of DeepSeek-V3's files, for families that have such. A model of
    family `minitrain` is saved for `load_pretrained` only. An older checkpoint in the folder is
    replaced, including generation_config.json, and, if `tokenizer` is given (see
    minitrain.load_tokenizer), its tokenizer; other files stay.

    Raises InputError for a config that its family in transformers cannot express, for a model that is
    sharded or has adapters, and for a folder that holds adapters.
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
    if tokenizer is not None and not hasattr(tokenizer, "encode_prompt"):
        raise InputError(
            f"tokenizer={tokenizer!r:.60} is none of ours (give minitrain.load_tokenizer(FOLDER))"
        )
    dtype = next(model.parameters()).dtype
    save_tensors(tensors.items(), model.config, dtype, path, max_shard_bytes, original_names, fp8)
    if tokenizer is not None:
        tokenizer.save(path)


# --- load weights


class Weights(NamedTuple):
    """A checkpoint's tensors, and the pieces of them that make up each parameter."""

    stored: dict[str, StoredTensor]
    sources: dict[str, list[Piece]]


def find_weights(config: Config, path: str | Path) -> Weights:
    """Return where a model's weights are in the safetensors of folder `path`; read only headers.

    Raises InputError for a tensor that is missing, unknown, or of another shape or type, and for a
    damaged file.
    """
    path = Path(path)
    stored = stored_tensors(weight_files(path))
    # refuse a config.json that claims billions of layers before they are built
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
    # a reward model may begin as a language model
    if SCORE in everything and not read_config(path).num_labels:
        del everything[SCORE]
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
    """Fill a materialized model from the safetensors of folder `path`, converting dtypes.

    Besides the model, memory holds this process's part of one stored tensor at a time. Raises
    InputError as `find_weights` does, before the model is changed.
    """
    # every pipeline stage checks the tensors of all stages, so that all ranks fail or none does
    _read_into(model, find_weights(model.config, path))


@torch.no_grad()
def _read_into(model: Model, weights: Weights) -> None:
    fetch = partial(_fetch, weights.stored)
    # state_dict has buffers too
    tensors = model.state_dict()
    frozen = frozen_weights(model)
    further = further_parts(frozen)
    for name, tensor in tensors.items():
        if name in frozen:
            shards = [local_shard(tensors[part]) for part in frozen[name].names]
            fill_frozen(frozen[name], shards, weights.sources[name], fetch)
        elif not is_adapter(name) and name not in further:
            local, slices = local_shard(tensor)
            # what is new, such as a classifier's head, has none
            for piece in weights.sources.get(name, ()):
                fill(local, slices, piece, fetch)


def _fetch(stored: dict[str, StoredTensor], key: str, slices: Slices) -> Tensor:
    # pages of a mapped file stay in memory while it is open, so it is closed after each tensor
    with open_tensors(stored[key].file) as file:
        return file.get_slice(stored[key].name)[slices]


def _check_copy(weights: Weights, key: str, name: str) -> None:
    """Raise InputError if stored tensor `key` is not a copy of our parameter `name`, from which it is read."""
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
    if not isinstance(name, str) or name not in NAMES:
        raise InputError(
            f"{path / 'config.json'}: dtype {name!r} is not supported (known: {', '.join(NAMES)})"
        )
    return NAMES[name]


# --- save


class Form(NamedTuple):
    """The form in which a checkpoint stores a model."""

    # JSON files: name -> contents
    files: dict[str, dict]
    # the weight files' names before the number and the ending
    stem: str
    # to_stored(tensors): yield the stored tensors of the model's named parameters
    to_stored: Callable[[Named], Named]


def save_tensors(
    tensors: Named,
    config: Config,
    dtype: torch.dtype,
    path: str | Path,
    max_shard_bytes: int = 5 * 10**9,
    original_names: bool = False,
    fp8: bool = False,
) -> None:
    """Write full tensors, named as the model's parameters, as a Hugging Face checkpoint in `dtype`.

    Tensors that the model keeps in fp32 stay so. original_names: use the names of Wan's own code
    instead of diffusers'. fp8: see `save_pretrained`; it rounds matrices from the type that they
    have. `tensors` is consumed lazily, and a shard is freed when it is written.
    The folder's old checkpoint stays until all new files are on disk. A folder that has a config.json
    holds a complete checkpoint.
    """
    path = Path(path)
    if fp8:
        _check_fp8(config)
    if isinstance(config, WanConfig):
        form = _form_of_wan(config, original_names)
    else:
        check_free_of_adapters(path)
        form = _form_of_decoder(config, dtype)
    # the model keeps these tensors in fp32 whatever its dtype
    model = empty_model(config).to(torch.bfloat16)
    stored = dict(form.to_stored(model.state_dict().items()))
    fp32 = {key for key, x in stored.items() if x.dtype == torch.float32}
    if fp8:
        form.files["config.json"]["quantization_config"] = _fp8_settings(stored)
    tensors = (
        pair
        for key, x in form.to_stored(tensors)
        for pair in _as_stored(key, x, dtype, key in fp32, fp8)
    )
    work = path / ".incomplete"
    shutil.rmtree(work, ignore_errors=True)
    with as_input_error(f"{path} cannot be written"):
        work.mkdir(parents=True)
    try:
        _write_shards(tensors, work, form.stem, max_shard_bytes)
        for name, contents in form.files.items():
            write_json(work / name, contents)
        _replace_checkpoint(path, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_fp8(config: Config) -> None:
    """Raise InputError for a family whose files are not known in FP8 with blocks."""
    family = getattr(config, "family", "wan")
    if FAMILIES.get(family, PLAIN).quantized != "fp8":
        raise InputError(f"fp8: files of family {family} have no FP8 blocks (use fp8=False)")


def _fp8_settings(stored: dict[str, Tensor]) -> dict:
    """Return the quantization_config of a model in FP8, with the matrices that are not."""
    others = (key for key, x in stored.items() if x.ndim == 2 and not IN_FP8.fullmatch(key))
    kept = [key.removesuffix(".weight") for key in others]
    return FP8_SETTINGS | {"modules_to_not_convert": kept}


def _as_stored(
    key: str, x: Tensor, dtype: torch.dtype, in_fp32: bool, fp8: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor [...] in its type, or in FP8 with scales, on the CPU."""
    x = x.detach().cpu()
    if fp8 and IN_FP8.fullmatch(key):
        yield from ((name, part.contiguous()) for name, part in write_fp8(key, x))
    else:
        wide = torch.promote_types(dtype, torch.float32)
        yield key, x.to(wide if in_fp32 else dtype).contiguous()


def _form_of_wan(config: WanConfig, original_names: bool) -> Form:
    """Return the form of a Wan for diffusers or, with original names, for Wan's own code."""
    if original_names:
        stored_name = wan_names.original_name
        contents = wan_names.config_to_original_json(config)
    else:
        stored_name = wan_names.diffusers_name
        contents = wan_names.config_to_json(config)

    def rename(tensors: Named) -> Named:
        return ((stored_name(name), tensor) for name, tensor in tensors)

    return Form({"config.json": contents}, wan_names.STEM, rename)


def _form_of_decoder(config: DecoderConfig, dtype: torch.dtype) -> Form:
    """Return the form of a decoder: its family's or, if that has none for it, our own."""
    config = exportable(config)
    files = {"config.json": config_to_json(config, dtype)}
    if config.generation_config:
        files[GENERATION] = config.generation_config

    return Form(files, STEMS[0], partial(all_to_stored, config=config))


def check_free_of_adapters(path: str | Path) -> None:
    """Raise InputError if the folder holds adapters.

    transformers would add them to any model in the same folder, even if they are already merged into
    it, or belong to another model.
    """
    if os.path.exists(os.path.join(path, ADAPTER_CONFIG)):
        raise InputError(
            f"{path} holds {ADAPTER_CONFIG}: transformers would add its adapters (use another folder)"
        )


def _write_shards(tensors: Named, work: Path, stem: str, limit: int) -> None:
    """Write files of at most `limit` bytes (or of one larger tensor), and their index."""
    names = []
    total_size = 0
    for shard in _shards(tensors, limit):
        write_tensors(shard, work / f"shard-{len(names)}", metadata={"format": "pt"})
        names.append(list(shard))
        total_size += sum(tensor.nbytes for tensor in shard.values())
    # the files' final names contain their number, which is known only now
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
    """Yield dicts of tensors of at most `limit` bytes; each is emptied before the next is filled."""
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
    """Replace the old files by the new ones.

    The old config.json is removed first and the new one comes last. A folder without it cannot be
    loaded, so a mixture of old and new files never is.
    """
    outdated = ["config.json", GENERATION, "hf_quant_config.json", "quantize_config.json"]
    for stem in STEMS:
        outdated += single_and_index(stem)
        outdated += [file.name for file in folder.glob(f"{stem}-*-of-*.safetensors")]
    for name in outdated:
        (folder / name).unlink(missing_ok=True)
    for file in sorted(work.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, folder / file.name)
