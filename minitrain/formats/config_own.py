"""config.json of models that transformers does not know: our own fields, by their own names.

    {"model_type": "minitrain", "torch_dtype": "float32", "vocab_size": 512, "hidden_size": 64, ...}

Their tensors have our own names and shapes, too: the family `minitrain` changes nothing.
"""

import dataclasses
import typing

import torch

from minitrain.errors import InputError
from minitrain.formats.families import OWN
from minitrain.formats.json_files import read_value
from minitrain.models.decoder_config import DecoderConfig

# what each field holds
KINDS = typing.get_type_hints(DecoderConfig)
# fields that are in no config.json: its model_type says the one, the other has a file of its own
NOT_WRITTEN = ("family", "generation_config")
# keys beside the fields
OTHERS = ("model_type", "torch_dtype", "dtype")


def config_from_own(raw: dict) -> DecoderConfig:
    """Return the config whose fields config.json `raw` holds. Raises InputError for other keys."""
    known = {name for name in KINDS if name not in NOT_WRITTEN}
    if unknown := raw.keys() - known - {*OTHERS}:
        told = f"key {min(unknown)} is no field of a model"
        raise InputError(f"{told} (was it written by a newer minitrain?)")
    found = {name: read_value(raw, name, KINDS[name]) for name in raw if name in known}
    return DecoderConfig(family=OWN, **found)


def config_to_own(config: DecoderConfig, dtype: torch.dtype) -> dict:
    """Return config.json with all fields of a config."""
    names = (field.name for field in dataclasses.fields(config))
    fields = {name: getattr(config, name) for name in names if name not in NOT_WRITTEN}
    return dict(model_type=OWN, torch_dtype=str(dtype).removeprefix("torch.")) | fields
