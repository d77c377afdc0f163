"""Describe the settings for `--help`, `--help SECTION` and `--print-config`.

Each key is printed below its comment in settings.py or the model's config, with choices and default.
"""

import dataclasses
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from minitrain.errors import InputError
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.wan_config import WanConfig
from minitrain.run.config.aliases import ALIASES, nearest
from minitrain.run.config.config_yaml import UNIONS
from minitrain.run.config.flags import setting_kinds
from minitrain.settings import Config, Lora, Model

DEFAULTS = Config(model=Model(config=DecoderConfig()), lora=Lora())
SECTIONS = [name for name, value in vars(DEFAULTS).items() if dataclasses.is_dataclass(value)]


def list_settings() -> str:
    """Return the settings outside of sections, with their defaults, and the names of the sections."""
    return "\n".join(
        ["settings, and sections (--help SECTION):", *annotate(DEFAULTS, "  ", deep=False)]
    )


def describe_section(name: str) -> str:
    """Return a section's keys with their defaults. Raises InputError for an unknown section."""
    if name not in SECTIONS:
        known = ", ".join(SECTIONS)
        ours = ALIASES.get(name.lower(), name)
        homes = [key for key in setting_kinds() if key == ours or key.endswith(f".{ours}")]
        places = [f"--help {home.rpartition('.')[0]}".rstrip() + f" has {home}" for home in homes]
        hint = f"({', '.join(places)})" if homes else nearest(name, SECTIONS)
        raise InputError(f"there is no section {name} {hint or f'(but {known})'}")
    section = getattr(DEFAULTS, name)
    lines = [inspect.getdoc(type(section)), "", f"{name}:", *annotate(section, "  ")]
    if name == "model":
        lines += ["", "or for task=diffusion:", *annotate(WanConfig(), "  ")]
    return "\n".join(lines)


def annotate(section: Any, indent: str = "", deep: bool = True) -> Iterator[str]:
    """Yield the lines of a section as YAML with comments. deep: include the sections in it.

    Raises ValueError for a field without a comment.
    """
    notes = comments(type(section))
    defaults = type(section)()
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        # the model's shape: its fields are written beside the model's name
        if field.type is Any:
            yield from annotate(value, indent)
            continue
        key = field.name.rstrip("_")
        is_section = dataclasses.is_dataclass(value)
        if is_section:
            about = inspect.getdoc(value)
            line = f"{indent}{key}:"
        else:
            default = json.dumps(getattr(defaults, field.name))
            note = notes.get(field.name)
            # a setting that nobody can look up is a fault of the code
            if not note:
                raise ValueError(f"{type(section).__name__}.{field.name} has no comment")
            about = f"{note} ({in_words(field.type)}; default: {default})"
            line = f"{indent}{key}: {json.dumps(value)}"
        if not deep:
            about = about.partition("\n")[0]
        start = f"{indent}# "
        yield from textwrap.wrap(about.strip(), 96, initial_indent=start, subsequent_indent=start)
        yield line
        if is_section and deep:
            yield from annotate(value, indent + "  ")


def in_words(kind: Any) -> str:
    """Return in words which values a type allows."""
    names = {
        int: "whole number",
        float: "number",
        str: "text",
        bool: "true or false",
        types.NoneType: "null",
    }
    origin = typing.get_origin(kind)
    inner = typing.get_args(kind)
    if origin is Literal:
        return ", ".join(map(str, inner))
    if origin in UNIONS:
        return " or ".join(map(in_words, inner))
    return (
        f"list of {in_words(inner[0])}" if origin in (list, tuple) else names.get(kind, "mapping")
    )


def comments(kind: type) -> dict[str, str]:
    """Return the comment of each field of a dataclass: the lines above it and the end of its line.

    A comment followed by an empty line is the heading of a group and belongs to no field.
    """
    found = {}
    notes = []
    for line in inspect.getsource(kind).splitlines():
        code, _, text = line.partition("# ")
        notes.append(text)
        if field := re.match(r"    (\w+): ", code):
            found[field[1]] = " ".join(filter(None, notes))
        if code.strip() or not line.strip():
            notes = []
    return found
