"""Every setting as a dataclass; a YAML file and `key=value` words in, one checked `Config` out.

The YAML keys are the field names below, nested as the dataclasses are. What a single field cannot know (does the batch
divide by the ranks, does the kind of data need a path) is checked in config_checks.py. Every mistake is an InputError
with one line.
"""

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from minitrain.config_checks import validate
from minitrain.config_yaml import apply_override, check_known, convert, describe, read_yaml
from minitrain.errors import InputError
from minitrain.models.config_hf import read_config
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.zoo import model_config


@dataclass
class Model:
    """`model: llama3-8b`, or `model: {name | path: ..., any field of DecoderConfig: ...}`, or those fields alone.

    path: a folder in Hugging Face layout; training starts from its weights.
    """

    name: str = ""
    path: str = ""
    config: DecoderConfig = field(default_factory=DecoderConfig)


@dataclass
class Data:
    """Where tokens come from: see training/data.py."""

    kind: Literal["mock", "text", "jsonl", "tokens"] = "mock"
    path: str | list[str] = ""  # files, folders or globs; {stdlib} stands for Python's own library
    exclude: list[str] = field(default_factory=list)  # glob patterns of files to leave out
    field: str = "text"  # jsonl: the key that holds the text
    tokenizer: str = "bytes"  # or a tokenizer.json, or a folder that holds one
    token_dtype: Literal["uint16", "uint32"] = "uint16"  # tokens: of raw .bin files (.npy files know theirs)
    document_end: int | None = None  # tokens: the id that ends a document; None: one document per file
    validation: float = 0.0  # the share of documents held out


@dataclass
class Batch:
    """global_ (`global` in YAML): sequences per optimizer step over all ranks; micro: per rank and forward pass."""

    global_: int = 8
    micro: int = 8
    seq_len: int = 1024


@dataclass
class Parallel:
    """How the ranks are used: their number is dp_replicate x dp_shard x cp x tp x pp.

    dp_shard=-1 takes all ranks that the others leave.
    """

    dp_replicate: int = 1  # copies of the parameters, each trained on other rows
    dp_shard: int = -1  # shards of the parameters, each rank trained on other rows
    tp: int = 1  # tensor and sequence parallel: heads, MLP channels, vocabulary
    cp: int = 1  # context parallel: each row's sequence
    pp: int = 1  # pipeline parallel: layers
    reshard_after_forward: bool = True  # free a block's gathered weights until its backward needs them again
    prefetch: int = 1  # how many blocks ahead to gather
    context: Literal["allgather", "ulysses"] = "allgather"  # how context-parallel ranks exchange keys and values
    async_tp: bool = False  # CUDA and compile only: overlap tensor parallel's collectives with its matrix products
    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    vp: int = 1  # pipeline stages per rank
    layers_per_stage: list[int] | None = None  # embedding and head count as a layer each; default: as even as possible


@dataclass
class Optim:
    """The optimizer and its learning-rate schedule: see training/optim.py."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    final_lr: float = 0.0  # as a share of lr, reached at the last step


@dataclass
class Validation:
    """Every `every` steps (0: never) and after the last, on `batches` global batches of held-out data."""

    every: int = 0
    batches: int = 8


@dataclass
class Checkpoint:
    """Every `every` steps (0: only after the last); the newest `keep` stay on disk."""

    every: int = 0
    keep: int = 2
    asynchronous: bool = False
    resume: bool = True  # from the newest complete checkpoint under out_dir, if there is one


@dataclass
class Config:
    model: Model = field(default_factory=Model)
    task: Literal["pretrain"] = "pretrain"
    steps: int = 100
    seed: int = 0
    out_dir: str = "out/run"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    parallel: Parallel = field(default_factory=Parallel)
    precision: Literal["fp32", "bf16", "bf16-pure"] = "fp32"  # bf16: fp32 weights, computed with in bf16
    optim: Optim = field(default_factory=Optim)
    compile: bool = False
    recompute: Literal["none", "full", "selective"] | int | float = "none"  # see parallel/recompute.py
    validation: Validation = field(default_factory=Validation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    reference: dict = field(default_factory=dict)  # published figures of the same row


def load(path: str | Path, overrides: list[str] = ()) -> Config:
    """Read a YAML file, apply `key=value` words (dotted keys) over it, check all that needs no world size."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"config file {path} cannot be read: {error}") from error
    tree = read_yaml(text, str(path))
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise InputError(f"{path}: a config must be a mapping of keys to values, not {describe(tree)}")
    for word in overrides:
        apply_override(tree, word)
    return from_dict(tree)


def from_dict(tree: dict) -> Config:
    """A checked Config from nested dicts, as YAML gives them."""
    tree = dict(tree)
    model = _read_model(tree.pop("model", {}))
    config = convert(Config, tree, "")
    config.model = model
    validate(config)
    return config


def _read_model(value: Any) -> Model:
    if isinstance(value, str):
        value = {"path" if Path(value).is_dir() else "name": value}
    if not isinstance(value, dict):
        raise InputError(f"model must be a name, a folder or a mapping, not {describe(value)}")
    value = dict(value)
    name, path = (convert(str, value.pop(key, ""), f"model.{key}") for key in ("name", "path"))
    if name and path:
        raise InputError("model.name and model.path cannot both be given")
    hints = typing.get_type_hints(DecoderConfig)
    for key in value:
        check_known(key, ["name", "path", *hints], "model")
    overrides = {key: convert(hints[key], v, f"model.{key}") for key, v in value.items()}
    if path:
        return Model("", path, dataclasses.replace(read_config(path), **overrides))
    return Model(name, "", model_config(name, **overrides) if name else DecoderConfig(**overrides))


def to_dict(config: Config) -> dict:
    """The nested dict that `from_dict` reads back as the same config."""
    tree = dataclasses.asdict(config, dict_factory=lambda items: {key.rstrip("_"): value for key, value in items})
    model = tree["model"]
    fields = model.pop("config")
    tree["model"] = {key: value for key, value in model.items() if value} | fields
    return tree
