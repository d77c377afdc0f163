"""Every setting as a dataclass; a YAML file and `key=value` words in, one checked `Config` out.

The YAML keys are the field names below, nested as the dataclasses are. What a single field cannot know (does the batch
divide by the ranks, does the kind of data need a path) is checked in `validate` and `check_layout`, before anything is
built or any process group starts. Every mistake is an InputError with one line.
"""

import dataclasses
import difflib
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from minitrain.errors import InputError
from minitrain.models.config_hf import exportable_family, read_config
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


# -------------------------------------------------------------------------------------------------------------- reading


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-4 as a number, as YAML 1.2 does, and refuses a key given twice."""

    def construct_mapping(self, node, deep=False):
        seen = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML; a syntax error becomes an InputError with file, line and column."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise InputError(f"{place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from error


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
        raise InputError(f"{path}: a config must be a mapping of keys to values, not {_describe(tree)}")
    for word in overrides:
        apply_override(tree, word)
    return from_dict(tree)


def apply_override(tree: dict, word: str) -> None:
    """Set one `a.b=value` in a nested dict; the value is read as YAML."""
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise InputError(f"argument {word!r} is not of the form key=value")
    *parents, last = key.split(".")
    for parent in parents:
        if isinstance(tree.get(parent), str):  # `model: NAME` is short for `model: {name: NAME}`
            tree[parent] = {"name": tree[parent]}
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise InputError(f"argument {word!r}: {parent!r} is a value, it has no keys under it")
    tree[last] = read_yaml(value, f"argument {word!r}")


def from_dict(tree: dict) -> Config:
    """A checked Config from nested dicts, as YAML gives them."""
    tree = dict(tree)
    model = _read_model(tree.pop("model", {}))
    config = _convert(Config, tree, "")
    config.model = model
    validate(config)
    return config


def _read_model(value: Any) -> Model:
    if isinstance(value, str):
        value = {"path" if Path(value).is_dir() else "name": value}
    if not isinstance(value, dict):
        raise InputError(f"model must be a name, a folder or a mapping, not {_describe(value)}")
    value = dict(value)
    name, path = (_convert(str, value.pop(key, ""), f"model.{key}") for key in ("name", "path"))
    if name and path:
        raise InputError("model.name and model.path cannot both be given")
    hints = typing.get_type_hints(DecoderConfig)
    for key in value:
        _check_known(key, ["name", "path", *hints], "model")
    overrides = {key: _convert(hints[key], v, f"model.{key}") for key, v in value.items()}
    if path:
        return Model("", path, dataclasses.replace(read_config(path), **overrides))
    return Model(name, "", model_config(name, **overrides) if name else DecoderConfig(**overrides))


def _convert(kind: Any, value: Any, where: str) -> Any:
    """`value` as a `kind`, or an InputError that names the key. Whole floats become ints where an int is asked for."""
    if dataclasses.is_dataclass(kind):
        return _convert_mapping(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            near = _nearest(str(value), map(str, arguments))
            raise InputError(f"{where}={value!r} is not one of {', '.join(arguments)} (nearest: {near})")
        return value
    if origin in (types.UnionType, typing.Union):
        return _convert_union(arguments, value, where)
    if origin is list:
        if not isinstance(value, list):
            raise InputError(f"{where} must be a list, not {_describe(value)}")
        return [_convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if kind is Any or (kind is dict and isinstance(value, dict)):
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int and number and value == value // 1:  # 1e3 is a whole number; nan and inf are not
        return int(value)
    if kind is float and number and abs(value) != float("inf") and value == value:
        return float(value)
    if kind in (str, bool) and isinstance(value, kind):
        return value
    names = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false", dict: "a mapping"}
    raise InputError(f"{where} must be {names[kind]}, not {_describe(value)}")


def _convert_mapping(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise InputError(f"{where} must be a mapping, not {_describe(value)}")
    hints = typing.get_type_hints(kind)
    known = {name.rstrip("_"): name for name in hints}
    for key in value:
        _check_known(key, known, where)
    prefix = where + "." if where else ""
    return kind(**{known[key]: _convert(hints[known[key]], v, prefix + key) for key, v in value.items()})


def _convert_union(kinds: tuple, value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    kinds = [kind for kind in kinds if kind is not type(None)]
    stored_as = {kind: {Literal: str, list: list}.get(typing.get_origin(kind), kind) for kind in kinds}
    fitting = [kind for kind in kinds if isinstance(value, stored_as[kind])]
    return _convert((fitting or kinds)[0], value, where)


def _check_known(key: Any, known, where: str) -> None:
    if key not in known:
        near = _nearest(str(key), known)
        raise InputError(f"unknown key {where + '.' if where else ''}{key} (nearest: {near})")


def _nearest(word: str, known) -> str:
    return difflib.get_close_matches(word, list(known), n=1, cutoff=0)[0]


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


# ------------------------------------------------------------------------------------------------------------- checking


def validate(config: Config) -> None:
    """Refuse settings that contradict each other. What depends on the number of ranks is in `check_layout`."""
    c, b, p, o = config, config.batch, config.parallel, config.optim
    _at_least(1, ("steps", c.steps), ("batch.global", b.global_), ("batch.micro", b.micro),
              ("batch.seq_len", b.seq_len), ("parallel.dp_replicate", p.dp_replicate), ("parallel.tp", p.tp),
              ("parallel.cp", p.cp), ("parallel.pp", p.pp), ("parallel.vp", p.vp),
              ("checkpoint.keep", c.checkpoint.keep), ("validation.batches", c.validation.batches))  # fmt: skip
    exportable_family(c.model.config)
    _at_least(0, ("seed", c.seed), ("parallel.prefetch", p.prefetch), ("optim.lr", o.lr), ("optim.warmup", o.warmup),
              ("optim.eps", o.eps), ("optim.weight_decay", o.weight_decay), ("validation.every", c.validation.every),
              ("checkpoint.every", c.checkpoint.every))  # fmt: skip
    if p.dp_shard < 1 and p.dp_shard != -1:
        raise InputError(f"parallel.dp_shard={p.dp_shard} must be at least 1, or -1 for all remaining ranks")
    if b.global_ % b.micro:
        raise InputError(f"batch.micro={b.micro} does not divide batch.global={b.global_}")
    if b.seq_len > c.model.config.max_position_embeddings:
        limit = c.model.config.max_position_embeddings
        raise InputError(f"batch.seq_len={b.seq_len} exceeds the model's max_position_embeddings={limit}")
    if len(o.betas) != 2 or not all(0 <= beta < 1 for beta in o.betas):
        raise InputError(f"optim.betas={o.betas} must be two numbers, each at least 0 and below 1")
    if o.clip is not None and o.clip <= 0:
        raise InputError(f"optim.clip={o.clip} must be above 0, or null for no clipping")
    for name, share in (("optim.final_lr", o.final_lr), ("data.validation", c.data.validation)):
        if not 0 <= share < 1 and (name, share) != ("optim.final_lr", 1):
            raise InputError(f"{name}={share} must be at least 0 and below 1")
    if o.warmup > c.steps:
        raise InputError(f"optim.warmup={o.warmup} exceeds steps={c.steps}")
    if c.data.kind != "mock" and not c.data.path:
        raise InputError(f"data.kind={c.data.kind} needs data.path")
    if c.validation.every and c.data.kind != "mock" and not c.data.validation:
        raise InputError(f"validation.every={c.validation.every} needs data.validation above 0, the share held out")
    _validate_recompute(c)
    _validate_context(c)
    _validate_tensor(c)
    _validate_experts(c)
    _validate_pipeline(c)


def _validate_context(config: Config) -> None:
    p, heads, length = config.parallel, config.model.config.num_key_value_heads, config.batch.seq_len
    unit = 2 * p.cp if p.context == "allgather" else p.cp
    if p.cp > 1 and "M" in config.model.config.layer_pattern:
        raise InputError(f"parallel.cp={p.cp}: the state of Mamba-2 layers runs through the whole sequence (use cp=1)")
    if p.cp > 1 and length % unit:
        raise InputError(
            f"batch.seq_len={length} is not a multiple of {unit}, which parallel.cp={p.cp} needs with "
            f"context={p.context} (use {length // unit * unit} or {length // unit * unit + unit})"
        )
    if p.cp > 1 and p.context == "ulysses" and heads % (p.cp * p.tp):
        possible = [n for n in range(1, heads + 1) if heads % (n * p.tp) == 0]
        raise InputError(
            f"parallel.cp={p.cp} x tp={p.tp} with context=ulysses does not divide num_key_value_heads={heads} "
            f"(use context=allgather, or cp={_alternatives(possible)})"
        )


def _validate_recompute(config: Config) -> None:
    setting, budget = config.recompute, isinstance(config.recompute, float)
    if (budget and not 0 < setting < 1) or (isinstance(setting, int) and setting < 2):
        raise InputError(
            f"recompute={setting} must be none, full, selective, a whole number of at least 2 (every so many blocks), "
            f"or a memory budget between 0 and 1"
        )
    if budget and not config.compile:
        raise InputError(f"recompute={setting} is a memory budget for the compiler: it needs compile=true")


def _validate_tensor(config: Config) -> None:
    model, batch, p = config.model.config, config.batch, config.parallel
    fields = ("num_key_value_heads", "num_attention_heads", "intermediate_size", "vocab_size")
    sizes = {field: getattr(model, field) for field in fields}
    sizes["batch.seq_len" if p.cp == 1 else f"batch.seq_len / parallel.cp={p.cp}, i.e. seq_len"] = batch.seq_len // p.cp
    for name, size in sizes.items():
        if size % p.tp:
            possible = [n for n in range(1, size + 1) if not any(other % n for other in sizes.values())]
            raise InputError(f"parallel.tp={p.tp} does not divide {name}={size} (use {_alternatives(possible)})")
    for name in ("layer_pattern", "num_experts", "kv_lora_rank", "sinks", "o_bias"):
        if p.tp > 1 and getattr(model, name):
            raise InputError(f"parallel.tp={p.tp} cannot split models with {name}={getattr(model, name)} (use tp=1)")
    if p.async_tp and (p.tp == 1 or not config.compile):
        raise InputError("parallel.async_tp=true needs parallel.tp above 1 and compile=true")


def _validate_experts(config: Config) -> None:
    if config.compile and config.precision == "fp32" and config.model.config.num_experts:
        raise InputError("compile=true with precision=fp32: experts compile in bf16 only (use bf16 or bf16-pure)")


def _validate_pipeline(config: Config) -> None:
    p, slots, stages = config.parallel, config.model.config.num_layers + 2, config.parallel.pp * config.parallel.vp
    if p.pp == 1 and (p.vp > 1 or p.layers_per_stage):
        raise InputError(f"parallel.vp={p.vp} and layers_per_stage={p.layers_per_stage} need parallel.pp above 1")
    if p.pp == 1:
        return
    if p.schedule in ("GPipe", "1F1B") and p.vp > 1:
        raise InputError(
            f"parallel.schedule={p.schedule} has one stage per rank, not vp={p.vp} "
            f"(use vp=1, or Interleaved1F1B, LoopedBFS or InterleavedZeroBubble)"
        )
    if p.schedule in ("ZBVZeroBubble", "DualPipeV") and p.vp != 2:
        raise InputError(f"parallel.schedule={p.schedule} has two stages per rank, not vp={p.vp} (use vp=2)")
    split = p.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    if split and (config.compile or config.recompute != "none"):
        raise InputError(
            f"parallel.schedule={p.schedule} runs each backward pass in two parts: with compile=true all of it would "
            f"run twice, with recompute={config.recompute} a block's forward once per weight (use compile=false and "
            f"recompute=none, or Interleaved1F1B)"
        )
    given = p.layers_per_stage
    if given and (len(given) != stages or sum(given) != slots or min(given) < 1):
        raise InputError(
            f"parallel.layers_per_stage={given} must be {stages} numbers (pp={p.pp} x vp={p.vp} stages) of at least 1 "
            f"with sum {slots} (num_layers={slots - 2}, embedding and head)"
        )
    if stages > slots:
        raise InputError(
            f"parallel.pp={p.pp} x vp={p.vp} stages are more than the {slots} that num_layers={slots - 2}, embedding "
            f"and head can fill (use at most {slots} stages)"
        )


def _check_pipeline(config: Config, micro_batches: int) -> None:
    p = config.parallel
    least = {"1F1B": p.pp, "DualPipeV": 2 * p.pp}.get(p.schedule, 1)
    rounds = max(1, micro_batches // p.pp) if p.schedule.startswith("Interleaved") else 1
    if p.pp > 1 and (micro_batches < least or micro_batches % rounds):
        needed = f"at least {least}" if micro_batches < least else f"a multiple of {p.pp}, or fewer than {2 * p.pp},"
        raise InputError(
            f"parallel.schedule={p.schedule} with pp={p.pp} needs {needed} micro-batches per rank and step, not "
            f"{micro_batches} (batch.global={config.batch.global_} / batch.micro={config.batch.micro} / data ranks)"
        )


def _alternatives(values: list) -> str:
    return " or ".join(filter(None, [", ".join(map(str, values[:-1])), str(values[-1])]))


def _at_least(least: int, *settings: tuple[str, float]) -> None:
    for name, value in settings:
        if value < least:
            raise InputError(f"{name}={value} must be at least {least}")


def check_layout(config: Config, world_size: int) -> None:
    """Can `world_size` ranks run this config? Raises an InputError that says what would be possible."""
    p, b = config.parallel, config.batch
    others = p.dp_replicate * p.tp * p.cp * p.pp
    if p.dp_shard == -1 and world_size % others:
        raise InputError(
            f"parallel.dp_replicate={p.dp_replicate} x tp={p.tp} x cp={p.cp} x pp={p.pp} = {others} "
            f"does not divide the {world_size} ranks"
        )
    if p.dp_shard != -1 and others * p.dp_shard != world_size:
        raise InputError(
            f"parallel.dp_replicate={p.dp_replicate} x dp_shard={p.dp_shard} x tp={p.tp} x cp={p.cp} x pp={p.pp} = "
            f"{others * p.dp_shard} is not the number of ranks, {world_size}"
        )
    data_ranks = world_size // (p.tp * p.cp * p.pp)
    if b.global_ % (b.micro * data_ranks):
        raise InputError(
            f"batch.global={b.global_} is not a multiple of batch.micro={b.micro} x {data_ranks} data-parallel ranks "
            f"(use a multiple of {b.micro * data_ranks})"
        )
    _check_pipeline(config, b.global_ // (b.micro * data_ranks))


def to_dict(config: Config) -> dict:
    """The nested dict that `from_dict` reads back as the same config."""
    tree = dataclasses.asdict(config, dict_factory=lambda items: {key.rstrip("_"): value for key, value in items})
    model = tree["model"]
    fields = model.pop("config")
    tree["model"] = {key: value for key, value in model.items() if value} | fields
    return tree
