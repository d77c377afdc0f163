"""Read and write JSON files that hold one object, and check the values in them.

Messages about values name only the key; callers add the file's name with `located`.
"""

import json
import os
from pathlib import Path
from typing import Any

from minitrain.errors import InputError, as_input_error, hub_hint
from minitrain.formats.magic import kind_of_folder, read_head, stand_in_kind


def read_json(file: Path) -> dict:
    """Return the object in a JSON file. Raises InputError, which names the file, if it is none."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        if what := stand_in_kind(file, read_head(file)):
            raise InputError(f"{file} is {what}") from None
        raise InputError(
            f"{file}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}"
        ) from None
    # ValueError: not UTF-8, or a number of 4,300 digits
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{file}: must hold a JSON object, not a {type(raw).__name__}")
    return raw


def read_from_folder(file: Path) -> dict:
    """Return the object in a JSON file of a folder that a user has named.

    Raises InputError, which tells what else that name or folder may be.
    """
    folder = file.parent
    if hint := hub_hint(str(folder), "give "):
        raise InputError(f"{folder} is no folder{hint}")
    with as_input_error(
        f"{file} cannot be read (give a folder that holds it, such as a run's out_dir)"
    ):
        os.stat(folder)
    # unlike Path's, these never raise
    if os.path.isdir(folder) and not os.path.exists(file):
        raise InputError(f"{folder} holds no {file.name}{kind_of_folder(folder)}")
    return read_json(file)


def write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def read_number(raw: dict, key: str, kind: type = int, default: Any = None) -> Any:
    """Return a key's whole number; with kind=float, any number.

    A missing key or null gives the default, if there is one. Raises InputError for other values.
    """
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if key not in raw:
        raise InputError(f"key {key} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise InputError(f"{key}={value!r} must be a {'whole ' if kind is int else ''}number")
    # also refuses nan
    if not abs(value) <= 1 << 63:
        raise InputError(f"{key}={value!r} must be finite, and fit 64 bits")
    return kind(value)


def read_switch(raw: dict, key: str, default: bool = False) -> bool:
    """Return a key's true or false; null is false. Raises InputError for other values."""
    value = raw.get(key, default)
    if not isinstance(value, bool | None):
        raise InputError(f"{key}={value!r} must be true or false")
    return bool(value)


def read_value(raw: dict, key: str, kind: Any) -> Any:
    """Return a key's value. kind: its type, a field's annotation. Raises InputError for others."""
    if kind in (int, float):
        return read_number(raw, key, kind)
    if kind is bool:
        return read_switch(raw, key)
    if key.endswith("_token_id"):
        return read_token_ids(raw, key)
    value = raw.get(key)
    if kind in (dict, dict | None):
        if not isinstance(value, kind):
            raise InputError(f"{key}={value!r} must be an object")
    elif not isinstance(value, str):
        raise InputError(f"{key}={value!r} must be a text")
    return value


def read_token_ids(raw: dict, key: str) -> int | list[int] | None:
    """Return a key's token id, or list of them, or None. Raises InputError for other values."""
    value = raw.get(key)
    for token in value if isinstance(value, list) else [value]:
        if isinstance(token, bool) or not isinstance(token, int | None):
            raise InputError(f"{key}={value!r} must be a token id or a list of them")
    return value


def refuse_other_values(raw: dict, values: dict, architecture: str) -> None:
    """Raise InputError for a key whose value is not the one in `values`.

    A missing key is accepted. Null is accepted in place of false or of an empty value.
    """
    for key, value in values.items():
        given = raw.get(key, value)
        if given != value and (value or given is not None):
            raise InputError(
                f"{key}={given!r} is not supported for {architecture} (must be {value!r})"
            )
