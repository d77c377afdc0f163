"""Read and write config.json of models that transformers does not know: the family `minitrain`.

    {"model_type": "minitrain", "torch_dtype": "float32", "vocab_size": 512, "hidden_size": 64, ...}

Its keys are the fields of `DecoderConfig`. Tensors are stored under our own names and shapes.
"""

import dataclasses
import typing

import torch

from minitrain.errors import InputError
from minitrain.formats.families import OWN
from minitrain.formats.json_files import read_value
from minitrain.models.decoder_config import DecoderConfig

# field -> type
KINDS = typing.get_type_hints(DecoderConfig)
# fields that are not in config.json: model_type is the family, and generation_config has its own file
NOT_WRITTEN = ("family", "generation_config")
# keys besides the fields
OTHERS = ("model_type", "torch_dtype", "dtype")


def config_from_own(raw: dict) -> DecoderConfig:
    """Return the config of config.json `raw`. Raises InputError for unknown keys."""
    known = {name for name in KINDS if name not in NOT_WRITTEN}
    if unknown := raw.keys() - known - {*OTHERS}:
        raise InputError(
            f"key {min(unknown)} is no field of a model (was it written by a newer minitrain?)"
        )
    found = {name: read_value(raw, name, KINDS[name]) for name in raw if name in known}
    return DecoderConfig(family=OWN, **found)


def config_to_own(config: DecoderConfig, dtype: torch.dtype) -> dict:
    """Return config.json with all fields of a config."""
    names = (field.name for field in dataclasses.fields(config))
    fields = {name: getattr(config, name) for name in names if name not in NOT_WRITTEN}
    return dict(model_type=OWN, torch_dtype=str(dtype).removeprefix("torch.")) | fields
