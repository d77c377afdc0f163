"""Refuse absurd sizes in a model's config, before a model is built from it.

The limits are above the sizes of any model, and below those that overflow or take minutes to
allocate. A config.json may be wrong or hostile, and the model is built before weights are read.
"""

import dataclasses
from typing import Literal, get_args, get_origin

from minitrain.errors import InputError

LIMITS = {
    "num_layers": 1_000,
    "num_nextn_predict_layers": 64,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 30,
    "sliding_window": 1 << 30,
    **dict.fromkeys(
        (
            "hidden_size",
            "intermediate_size",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_latent_size",
            "ffn_dim",
            "dim",
        ),
        1 << 20,
    ),
}
# numbers of heads and experts, widths of heads, ranks of projections
DEFAULT_LIMIT = 1 << 16


def check_fields(config) -> None:
    """Raise InputError for a config's unknown words, negative floats, and sizes out of bounds.

    A size may be 0 if that is its default: the model then has no such part.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is int:
            check_size(field.name, value, min(field.default, 1))
        elif field.type is float and value < 0:
            raise InputError(f"model.{field.name}={value!r} must be at least 0")
        elif get_origin(field.type) is Literal and value not in get_args(field.type):
            known = ", ".join(get_args(field.type))
            raise InputError(f"model.{field.name}={value!r} is not one of {known}")


def check_size(name: str, value: int, least: int = 1) -> None:
    """Raise InputError for a size `name` of a model that is below `least` or absurdly large."""
    if value < least:
        raise InputError(f"model.{name}={value} must be at least {least}")
    if value > LIMITS.get(name, DEFAULT_LIMIT):
        raise InputError(
            f"model.{name}={value} must be at most {LIMITS.get(name, DEFAULT_LIMIT):,}"
        )
