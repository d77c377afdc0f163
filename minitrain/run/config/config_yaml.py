"""Read YAML and `key=value` words into nested dicts, and those into dataclasses by their types.

The error for an unknown key names the nearest known one. The error for a value of the wrong type
names the type that is expected.
"""

import dataclasses
import json
import os
import re
import sys
import types
import typing
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import yaml

from minitrain.data.faults.wrong_text import encoding_of, in_utf8, look_alike
from minitrain.errors import InputError, as_input_error
from minitrain.models.zoo import is_known
from minitrain.run.config.aliases import ALIASES, advice, nearest
from minitrain.run.config.recipes import own_configs

TAG = "tag:yaml.org,2002:"
# numbers of YAML 1.2: 1e-4 is a number, 1:30 and 2024-12-24 are text, 010 is 10
NUMBERS = {f"{TAG}int": r"[-+]?\d+$", f"{TAG}float": r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"}
# the types whose YAML 1.1 patterns, PyYAML's default, are removed
REPLACED = (*NUMBERS, f"{TAG}timestamp")


class _Loader(yaml.SafeLoader):
    """SafeLoader with the numbers of YAML 1.2. It refuses a key that is given twice."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        # checked here, because later `<<` has merged other mappings' keys into this one
        node = super().compose_mapping_node(anchor)
        words = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in words[:number] and key.value != "<<":
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark
                )
        return node


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which `_Loader` would read as a number."""


_Loader.add_constructor(f"{TAG}int", lambda loader, node: int(node.value))
for side in _Loader, _Dumper:
    side.yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] not in REPLACED]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern in NUMBERS.items():
        side.add_implicit_resolver(tag, re.compile(pattern), list("-+.0123456789"))


def to_yaml(tree: dict) -> str:
    """Return the text that `read_yaml` reads as this tree."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML. Raises InputError with file, line and column for a syntax error."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        if found := look_alike(text):
            raise InputError(f"{where}:{found}") from error
        mark = error.problem_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}"
        raise InputError(f"{place}: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from error


def read_tree(path: str | Path) -> dict:
    """Return a config file as nested dicts. Raises InputError if it cannot be read."""
    if os.path.isdir(path):
        raise InputError(
            f"config file {path} is a folder (a run's out_dir has {path}/config.yaml)"
        )
    if not os.path.exists(path):
        near = nearest(str(path).removesuffix(".yaml"), own_configs(), 0.7)
        raise InputError(f"config file {path} does not exist {near}".rstrip())
    with as_input_error(f"config file {path} cannot be read"):
        raw = Path(path).read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"config file {path} is not UTF-8 at byte {error.start}{in_utf8(raw)}"
        ) from error
    if b"\0" in raw and encoding_of(raw):
        raise InputError(f"config file {path} is not UTF-8{in_utf8(raw)}")
    tree = read_yaml(text, str(path)) or {}
    if not isinstance(tree, dict):
        raise InputError(
            f"{path}: a config must be a mapping of keys to values, not {type_and_value(tree)}"
        )
    return tree


# keys of `parallel` that a word may give without the prefix `parallel.`
SHORT = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "vp")
UNIONS = (types.UnionType, typing.Union)
# an item of a list of text: quoted or plain, up to the next comma
ITEM = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^,]*?))\s*(?:,|$)""")


class Word(str):
    """The value of a `key=value` word, to be read as plain text or as YAML, by its setting's type."""


def as_words(tree: dict, before: str = "") -> list[str]:
    """Return the `a.b=value` words that set the values of a nested dict."""
    words = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            words += as_words(value, f"{before}{key}.")
        else:
            text = (
                value
                if isinstance(value, str | os.PathLike)
                else json.dumps(value, default=str, ensure_ascii=False)
            )
            words.append(f"{before}{key}={text}")
    return words


def apply_override(tree: dict, word: str) -> None:
    """Set one `a.b=value` in the nested dict of a config."""
    key, equals, value = word.partition("=")
    word = _shortened(word)
    if not equals or not key:
        raise InputError(f"argument {word!r} is not of the form key=value")
    path = ["parallel", key] if key in SHORT else key.split(".")
    *parents, last = path
    for parent in parents:
        text = tree.get(parent)
        if isinstance(text, str) and (parent == "model" or text.startswith("{")):
            tree[parent] = as_mapping(tree[parent], parent)
        # missing or null
        elif tree.get(parent) is None:
            tree[parent] = {}
        if not isinstance(tree[parent], dict):
            raise InputError(f"argument {word!r}: {parent!r} is a value, it has no keys under it")
        # copied, because a YAML alias can put the same dict in several places
        tree[parent] = tree = dict(tree[parent])
    # the values inside a section's dicts and in `reference` have no declared types
    typed = len(path) < 3 and parents != ["reference"]
    tree[last] = Word(value) if typed else read_yaml(value, f"argument {word!r}")


def _read_word(value: str, kind: Any, where: str) -> Any:
    """Return the value of a word.

    Text and lists of text are taken literally, because # and * have a meaning in YAML. A list may be
    written without brackets, which some shells take for patterns.
    """
    kinds = typing.get_args(kind) if typing.get_origin(kind) in UNIONS else (kind,)
    lists = [each for each in kinds if typing.get_origin(each) in (list, tuple)]
    bracketed = value.startswith("[") and value.endswith("]")
    if lists and typing.get_args(lists[0])[0] is str and (bracketed or str not in kinds):
        # JSON, which escapes quotes, or plain items
        with suppress(ValueError):
            texts = json.loads(value) if bracketed else None
            if texts and all(isinstance(text, str) for text in texts):
                return texts
        items = ITEM.finditer(value[1:-1] if bracketed else value)
        return [text for item in items if (text := next(filter(None, item.groups()), ""))]
    if str in kinds:
        return str(value)
    is_list = lists and not bracketed and value not in ("", "null", "~")
    return read_yaml(f"[{value}]" if is_list else value, where)


def as_mapping(word: str, key: str) -> dict:
    """Return the mapping that text stands for: YAML's if it begins with {, else a model's name or folder.

    A name of the zoo wins over a folder of the same name, which is written ./NAME.
    """
    if word.startswith("{"):
        return read_yaml(word, f"argument '{key}={word}'")
    word = os.path.expanduser(word)
    is_folder = os.path.isdir(word) and not is_known(word)
    return {"path" if is_folder else "name": word}


def convert(kind: Any, value: Any, where: str) -> Any:
    """Return `value` converted to the type `kind`. Raises InputError if that is not possible.

    where: the key, for the message.
    """
    if isinstance(value, Word):
        value = _read_word(value, kind, f"argument {_shortened(f'{where}={value}')!r}")
    if dataclasses.is_dataclass(kind):
        return _convert_mapping(kind, value, where)
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            known = list(map(str, arguments))
            problem = f"{where}={_shortened(repr(value))} is not one of {', '.join(known)}"
            raise InputError(f"{problem} {nearest(str(value), known)}".rstrip())
        # returns 1 for 1.0
        return arguments[arguments.index(value)]
    if origin in UNIONS:
        return _convert_union(arguments, value, where)
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise InputError(f"{where} must be a list, not {type_and_value(value)}")
        return origin(
            convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)
        )
    if origin is dict:
        tree = _convert_scalar(dict, value, where)
        return {key: convert(arguments[1], item, f"{where}.{key}") for key, item in tree.items()}
    return _convert_scalar(kind, value, where)


def _convert_union(kinds: tuple, value: Any, where: str) -> Any:
    """Return the value converted to the first of `kinds` that accepts it.

    If none does, raises the error of the first.
    """
    if value is None and types.NoneType in kinds:
        return None
    for kind in kinds:
        with suppress(InputError):
            return convert(kind, value, where)
    return convert(kinds[0], value, where)


def _convert_scalar(kind: type, value: Any, where: str) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # 1e3 is accepted; inf and nan fail the comparison
    if kind is int and number and value == value // 1:
        return int(value)
    # nan fails the comparison
    if kind is float and number and abs(value) <= sys.float_info.max:
        return float(value)
    if kind is str and isinstance(value, str):
        if "\0" in value:
            raise InputError(f"{where} must not hold a zero byte")
        # done here, because a shell does not expand the ~ in key=~/a
        return os.path.expanduser(value)
    if kind in (bool, dict) and isinstance(value, kind):
        return value
    names = {
        types.NoneType: "null",
        int: "a whole number",
        float: "a finite number",
        str: "text",
        bool: "true or false",
        dict: "a mapping",
    }
    raise InputError(f"{where} must be {names[kind]}, not {type_and_value(value)}")


def _convert_mapping(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise InputError(f"{where} must be a mapping, not {type_and_value(value)}")
    hints = typing.get_type_hints(kind)
    known = {name.rstrip("_"): name for name in hints}
    prefix = where + "." if where else ""
    for key in value:
        if key not in known and not where:
            _check_section(key, hints)
        check_known(key, known, where)
    return kind(
        **{known[key]: convert(hints[known[key]], v, prefix + key) for key, v in value.items()}
    )


def _check_section(key: Any, hints: dict[str, Any]) -> None:
    """Raise InputError for a key that belongs into a section, such as lr for optim.lr.

    Aliases of other trainers get a better message later.
    """
    homes = [
        name for name, section in hints.items() if key in getattr(section, "__annotations__", ())
    ]
    if homes and key not in ALIASES:
        raise InputError(
            f"unknown key {key} (nearest: {' or '.join(f'{home}.{key}' for home in homes)})"
        )


def check_known(key: Any, known: Iterable[str], where: str) -> None:
    """Raise InputError, which names the nearest of `known`, if `key` below `where` is not one of them."""
    if key not in known:
        word = _shortened(str(key))
        raise InputError(
            f"unknown key {where + '.' if where else ''}{word} {advice(word, known, where)}"
        )


def type_and_value(value: Any) -> str:
    """Return the type and the value as text for a message."""
    return f"{type(value).__name__} {_shortened(repr(value))}"


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
