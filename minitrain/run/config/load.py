"""Read a YAML file and `key=value` words into one checked `Config`.

A mistake raises an InputError with a message of one line.
"""

import dataclasses
import os
import typing
from pathlib import Path
from typing import Any

from minitrain.errors import InputError
from minitrain.models.decoder_config import DecoderConfig, as_classifier
from minitrain.models.wan_config import WanConfig
from minitrain.models.zoo import model_config
from minitrain.run.config.config_yaml import (
    apply_override,
    as_mapping,
    check_known,
    convert,
    read_tree,
    type_and_value,
)
from minitrain.settings import Config, Data, Lora, Model


def load(path: str | Path, overrides: list[str] = ()) -> Config:
    """Read a YAML file, override it with `key=value` words (dotted keys), and check the result.

    Checks that need the world size are made later, by `check_layout`.
    """
    tree = read_tree(path)
    for word in overrides:
        apply_override(tree, word)
    return from_dict(tree)


def from_dict(tree: dict) -> Config:
    """Return a checked Config from nested dicts, such as a YAML file holds."""
    tree = dict(tree)
    # whose given keys are asked for below
    for key in ("data", "lora"):
        if isinstance(word := tree.get(key), str) and word.startswith("{"):
            tree[key] = as_mapping(word, key)
    model = tree.pop("model", {})
    config = convert(Config, tree, "")
    config.model = _read_model(model, WanConfig if config.task == "diffusion" else DecoderConfig)
    if config.task == "reward":
        config.model.config = as_classifier(config.model.config)
    if config.lora is None and config.task == "lora":
        config.lora = Lora()
    elif config.lora and config.lora.path:
        config.lora = _read_lora(config, tree["lora"])
    given = tree.get("data") or {}
    if config.data.path and "kind" not in given:
        raise InputError(
            "data.path needs data.kind (text, jsonl, tokens or latents): by default it is mock"
        )
    _take_from_sources(config.data, given)
    if "tokenizer" not in given:
        config.data.tokenizer = _own_tokenizer(config)
    # imported late, because it imports torch, which takes seconds: unknown keys and wrong types are
    # reported before
    from minitrain.run.config.checks import validate

    validate(config)
    return config


def _take_from_sources(data: Data, given: dict) -> None:
    """Set data.kind and data.field to the value that all sources share, unless they are given.

    They apply to the files of data.validation_path.
    """
    for key in ("kind", "field"):
        own = {getattr(source, key) for source in data.sources} - {None}
        named = all(getattr(source, key) is not None for source in data.sources)
        if key not in given and named and len(own) == 1:
            setattr(data, key, own.pop())


def _own_tokenizer(config: Config) -> str:
    """Return the folder of the adapters or the model to start from, whichever has a tokenizer first.

    If neither does, returns data.tokenizer.
    """
    for folder in (config.lora and config.lora.path, config.model.path):
        if folder and os.path.isfile(f"{folder}/tokenizer.json"):
            return folder
    return config.data.tokenizer


def _read_lora(config: Config, given: dict) -> Lora:
    """Return the settings of the adapters in lora.path. given: the keys of `lora` that the user set."""
    lora = config.lora
    from minitrain.formats.peft import read_adapter_config

    stored = read_adapter_config(lora.path)
    own = ("dropout", "dropout_position", "dtype", "base", "path")
    found = dataclasses.replace(stored, **{key: getattr(lora, key) for key in own})
    for key in given:
        ours = getattr(lora, key)
        theirs = getattr(found, key)
        same = key == "targets" and _adapt_the_same(config, lora, stored)
        if ours != theirs and not same:
            raise InputError(
                f"lora.{key}={ours} cannot be changed: lora.path={lora.path} has {theirs}"
            )
    return found


def _adapt_the_same(config: Config, *loras: Lora) -> bool:
    """Return whether the targets of these settings name the same weights of the model."""
    from minitrain.formats.peft import adapter_shapes

    ours, theirs = (adapter_shapes(config.model.config, lora).keys() for lora in loras)
    return ours == theirs


def _read_model(value: Any, kind: type) -> Model:
    if isinstance(value, str):
        value = as_mapping(value, "model")
    if not isinstance(value, dict):
        raise InputError(
            f"model must be a name, a folder or a mapping, not {type_and_value(value)}"
        )
    value = dict(value)
    name, path = (convert(str, value.pop(key, ""), f"model.{key}") for key in ("name", "path"))
    if name and path:
        raise InputError(
            "model.name and model.path cannot both be given (model=FOLDER stands for the path alone)"
        )
    hints = typing.get_type_hints(kind)
    for key in value:
        check_known(key, ["name", "path", *hints], "model")
    overrides = {key: convert(hints[key], v, f"model.{key}") for key, v in value.items()}
    shape = model_config(name) if name else kind()
    if path:
        from minitrain.formats.hf import read_config

        shape = read_config(path)
    if not isinstance(shape, kind):
        wanted = (
            "not a diffusion model, as task=diffusion needs"
            if kind is WanConfig
            else "for task=diffusion alone"
        )
        raise InputError(f"model={name or path!r} is {wanted}")
    shape = model_config(name, **overrides) if name else dataclasses.replace(shape, **overrides)
    return Model(name, path, shape)


def to_dict(config: Config) -> dict:
    """Return nested dicts from which `from_dict` makes the same config."""
    tree = dataclasses.asdict(
        config, dict_factory=lambda items: {key.rstrip("_"): value for key, value in items}
    )
    model = tree["model"]
    fields = model.pop("config")
    tree["model"] = {key: value for key, value in model.items() if value} | fields
    return tree
