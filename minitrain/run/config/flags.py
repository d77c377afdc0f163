"""Accept --key=value for key=value, and explain flags of other trainers: --learning_rate 1e-4."""

import dataclasses
import typing
from collections.abc import Iterable
from contextlib import suppress
from itertools import zip_longest
from typing import Any

from minitrain.errors import InputError
from minitrain.run.config.aliases import ALIASES, advice, nearest
from minitrain.run.config.config_yaml import SHORT, Word, convert
from minitrain.settings import Config


def take_flags(words: list[str], options: Iterable[str]) -> list[str]:
    """Return the words of a command line with --key=value rewritten as key=value.

    options: the command's own flags, which are left alone. Raises InputError for `--key value`, since
    nothing says whether the next word is a value. The message lists the setting for each such flag.
    """
    taken = []
    problems = []
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        key = flag.lstrip("-").replace("-", "_")
        own = any(option.startswith(flag) for option in options)
        if own or not key or not flag.startswith("-"):
            taken.append(word)
        elif equals and not nearest(flag, options, 0.8):
            taken.append(f"{key}={value}")
        else:
            given = "" if equals or following.startswith("-") or "=" in following else following
            problems.append(
                f"{flag} {given}".rstrip() + f" is {meaning(flag, key, given, options)}"
            )
    if problems:
        raise InputError(f"settings are key=value: {', '.join(problems)}")
    return taken


def meaning(flag: str, key: str, value: str, options: Iterable[str]) -> str:
    """Return the setting that a flag stands for, with `=value` if the value has the right type."""
    kinds = setting_kinds()
    # the types of the model's settings depend on its config
    kinds |= {key: str} if key.startswith("model.") else {}
    if near := nearest(flag, options, 0.8):
        raise InputError(f"unknown option {flag} {near}")
    ours = key if key in kinds else ALIASES.get(key.lower())
    homes = [ours] if ours else [name for name in kinds if name.endswith(f".{key}")]
    if not homes:
        raise InputError(f"unknown option {flag} {advice(key, kinds, '')}")
    with suppress(InputError):
        if value and homes[0] in kinds:
            convert(kinds[homes[0]], Word(value), homes[0])
            return f"{homes[0]}={value}"
    return " or ".join(homes)


def setting_kinds() -> dict[str, Any]:
    """Return the type of each setting by name. Names in sections are section.key."""
    found = {}
    for name, kind in typing.get_type_hints(Config).items():
        # `Lora | None`
        section = next(filter(dataclasses.is_dataclass, (kind, *typing.get_args(kind))), None)
        if section is None or name == "model":
            found[name] = str if name == "model" else kind
            continue
        for key, inner in typing.get_type_hints(section).items():
            found[f"{name}.{key.rstrip('_')}"] = inner
    return found | {name: found[f"parallel.{name}"] for name in SHORT}
