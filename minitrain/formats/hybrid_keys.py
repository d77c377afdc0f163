"""Read keys of config.json that families of several kinds of layers share."""

import math
from typing import Any

from minitrain.errors import InputError
from minitrain.formats.json_files import read_number

# infinity as Python's JSON reads it, and as transformers 5 writes it
ENDLESS = (math.inf, {"__float__": "Infinity"})


def letters_of(key: str, layers: Any, known: dict[str, str]) -> str:
    """Return the letters of a list of names of layers, as `layer_pattern` has them.

    key: of the list, for messages. known: name -> letter. Raises InputError.
    """
    letters = ""
    for layer in layers if isinstance(layers, list) else [layers]:
        if not isinstance(layer, str) or layer not in known:
            raise InputError(f"{key} has {layer!r}, which is none of {', '.join(known)}")
        letters += known[layer]
    return letters


def bounded_dt(raw: dict, key: str) -> float:
    """Return the lower bound of Mamba-2's dt under a key. Raises InputError for an upper bound."""
    limit = raw.get(key, [0.0, math.inf])
    if not isinstance(limit, list) or len(limit) != 2 or limit[1] not in ENDLESS:
        raise InputError(f"{key}={limit!r} is not supported (must be [a number, Infinity])")
    return read_number({key: limit[0]}, key, float)
