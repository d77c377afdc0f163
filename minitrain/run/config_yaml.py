"""YAML text and `key=value` words into nested dicts, and those into dataclasses, by the types of
their fields.

A key that no field has is refused with the nearest that one has, a value of another type with what
is asked for. So is text that is too much for a config, as it stands or once its anchors are
expanded.
"""

import dataclasses
import os
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

import yaml

from minitrain.errors import InputError
from minitrain.run.aliases import ALIASES, advice, nearest

MAX_CHARACTERS = 100_000  # of a config's text; the longest here has 2,000
MAX_NODES = 10_000  # values and keys, with anchors expanded
MAX_DEPTH = 50
OTHER_BASE = re.compile(r"[-+]?(0[0-7_]+$|.*:)")  # of YAML 1.1 alone, where 010 is 8 and 1:30 is 90


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-4 as a number, as YAML 1.2 does.

    It refuses keys that are given twice, numbers in bases that 1.2 has no more, deep nesting, and
    anchors that explode.
    """

    depth = 0

    def compose_node(self, parent, index):
        if self.depth == MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(
                problem=f"nested more than {MAX_DEPTH} deep", problem_mark=mark
            )
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def get_single_node(self):
        node = super().get_single_node()
        if node is not None and _expanded_size(node, {}) > MAX_NODES:
            raise _error(f"with its anchors expanded it has more than {MAX_NODES:,} values", node)
        return node

    def compose_mapping_node(
        self, anchor
    ):  # later on, what is merged into a mapping stands beside its own keys
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _error("a key must be a word, not a list or a mapping", key_node)
            if key_node.tag != "tag:yaml.org,2002:merge":
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    raise _error(f"key {key!r} is given twice", key_node)
                seen.add(key)
        return node

    def construct_object(self, node, deep=False):
        try:
            value = super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except (
            Exception
        ) as error:  # constructors trip over what a tag promises: `!!int x`, 2024-99-99
            raise _error(
                f"cannot be read as {node.tag.rpartition(':')[2]}: {error}", node
            ) from error
        if (
            isinstance(value, int) and abs(value) >= 1 << 63
        ):  # printing much longer ones is an error in Python
            raise _error("a whole number must fit 64 bits", node)
        if type(value) in (int, float) and OTHER_BASE.match(node.value):
            raise _error(
                f"YAML reads {node.value} as {value} (write what is meant, or put text into quotes)",
                node,
            )
        if not isinstance(
            value, str | int | float | list | dict | None
        ):  # what JSON has not, nor any setting
            raise _error(
                f"must be text, a number or the like, not {type(value).__name__} (put text into quotes)",
                node,
            )
        return value


def _error(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _expanded_size(node: yaml.Node, sizes: dict[int, float]) -> float:
    """How many nodes there are in `node`, aliases counted as what they stand for; one inside itself
    is endless.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in sizes:
        sizes[id(node)] = float("inf")  # until it is known
        children = (
            node.value
            if isinstance(node, yaml.SequenceNode)
            else [each for pair in node.value for each in pair]
        )
        sizes[id(node)] = 1 + sum(_expanded_size(child, sizes) for child in children)
    return sizes[id(node)]


class _Dumper(yaml.SafeDumper):
    """SafeDumper that puts text into quotes where `_Loader` would read a number."""


for side in _Loader, _Dumper:
    side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )


def to_yaml(tree: dict) -> str:
    """What `read_yaml` reads as the same."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML; a syntax error becomes an InputError with file, line and column."""
    if len(text) > MAX_CHARACTERS:
        raise InputError(
            f"{where}: a config has at most {MAX_CHARACTERS:,} characters, this is longer"
        )
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise InputError(f"{place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from error


def read_tree(path: str | Path) -> dict:
    """What a config file says, as nested dicts. Raises InputError."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except FileNotFoundError:
        raise InputError(f"config file {path} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a zero byte
        raise InputError(f"config file {path} cannot be read: {error}") from error
    tree = read_yaml(text, str(path))
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise InputError(
            f"{path}: a config must be a mapping of keys to values, not {describe(tree)}"
        )
    return tree


SHORT = (
    "dp_replicate",
    "dp_shard",
    "tp",
    "cp",
    "pp",
    "ep",
    "vp",
)  # of `parallel`, which need not be named
ITEM = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^,]*?))\s*(?:,|$)""")  # of a list of text


def apply_override(tree: dict, word: str, kind: type, models: tuple[type, ...] = ()) -> None:
    """Set one `a.b=value` in the nested dict of a `kind`, a dataclass: text as it stands, other
    values as YAML.

    models: the dataclasses whose fields stand beside `model.name`.
    """
    key, equals, value = word.partition("=")
    word = _shortened(word)
    if not equals or not key:
        raise InputError(f"argument {word!r} is not of the form key=value")
    path = ["parallel", key] if key in SHORT else key.split(".")
    *parents, last = path
    for parent in parents:
        if isinstance(tree.get(parent), str):
            tree[parent] = name_or_path(tree[parent])
        elif tree.get(parent) is None:  # `lora: null` too
            tree[parent] = {}
        if not isinstance(tree[parent], dict):
            raise InputError(f"argument {word!r}: {parent!r} is a value, it has no keys under it")
        tree[parent] = tree = dict(tree[parent])  # an alias may be in other places, too
    named = path == ["model"] and not value.startswith("{")
    tree[last] = _read_word(
        value, str if named and value else _kind_of(kind, path, models), f"argument {word!r}"
    )


def _kind_of(kind: Any, path: list[str], models: tuple[type, ...]) -> Any:
    """Return the type of a setting below a dataclass, None where there is none."""
    for key in path:
        hints = {}
        for section in typing.get_args(kind) or (kind,):  # as in `Lora | None`
            hints |= typing.get_type_hints(section) if dataclasses.is_dataclass(section) else {}
        for shape in models if "config" in hints else ():
            hints |= typing.get_type_hints(shape)
        kind = {name.rstrip("_"): hint for name, hint in hints.items()}.get(key)
    return kind


def _read_word(value: str, kind: Any, where: str) -> Any:
    """Return the value of a word: text and lists of text as they stand, which YAML would cut at #
    and read * and ~ in.

    A list may do without its brackets, which some shells take for patterns.
    """
    union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    kinds = typing.get_args(kind) if union else (kind,)
    lists = [each for each in kinds if typing.get_origin(each) in (list, tuple)]
    bracketed = value.startswith("[") and value.endswith("]")
    if lists and typing.get_args(lists[0])[0] is str and (bracketed or str not in kinds):
        items = ITEM.finditer(value[1:-1] if bracketed else value)
        return [text for item in items if (text := next(filter(None, item.groups()), ""))]
    if str in kinds or (
        typing.get_origin(kind) is Literal
        and all(isinstance(x, str) for x in typing.get_args(kind))
    ):
        return value
    is_list = lists and not bracketed and value not in ("", "null", "~")
    return read_yaml(f"[{value}]" if is_list else value, where)


def name_or_path(word: str) -> dict[str, str]:
    """What `model: NAME` or `model: FOLDER` is short for; a folder with a name of the zoo is
    ./NAME.
    """
    from minitrain.models.zoo import is_known  # brings torch, which takes seconds

    is_folder = os.path.isdir(os.path.expanduser(word)) and not is_known(word)
    return {"path" if is_folder else "name": word}


def convert(kind: Any, value: Any, where: str) -> Any:
    """`value` as a `kind`, or an InputError that names the key. Whole floats become ints where an
    int is asked for.
    """
    if dataclasses.is_dataclass(kind):
        return _convert_mapping(kind, value, where)
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            known = list(map(str, arguments))
            told = f"{where}={_shortened(repr(value))} is not one of {', '.join(known)}"
            raise InputError(f"{told} {nearest(str(value), known)}".rstrip())
        return arguments[arguments.index(value)]  # 1 for 1.0
    if origin in (types.UnionType, typing.Union):
        return _convert_union(arguments, value, where)
    if origin is tuple:
        return tuple(
            convert(list[arguments[0]], list(value) if isinstance(value, tuple) else value, where)
        )
    if origin is list:
        if not isinstance(value, list):
            raise InputError(f"{where} must be a list, not {describe(value)}")
        return [convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        return {
            key: convert(arguments[1], v, f"{where}.{key}")
            for key, v in convert(dict, value, where).items()
        }
    return _convert_scalar(kind, value, where)


def _convert_scalar(kind: type, value: Any, where: str) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int and number and value == value // 1:  # 1e3 is a whole number, inf and nan are not
        if abs(value) >= 1 << 63:
            raise InputError(f"{where}={_shortened(repr(value))} must fit 64 bits")
        return int(value)
    if kind is float and number and abs(value) <= sys.float_info.max:  # nan is not
        return float(value)
    if kind is str and isinstance(value, str) and "\0" in value:
        raise InputError(
            f"{where}={_shortened(repr(value))} must not hold a zero byte, which no path has"
        )
    if kind in (str, bool, dict) and isinstance(value, kind):
        return value
    names = {
        int: "a whole number",
        float: "a finite number",
        str: "text",
        bool: "true or false",
        dict: "a mapping",
    }
    raise InputError(f"{where} must be {names[kind]}, not {describe(value)}")


def _convert_mapping(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise InputError(f"{where} must be a mapping, not {describe(value)}")
    hints = typing.get_type_hints(kind)
    known = {name.rstrip("_"): name for name in hints}
    for key in value:
        elsewhere = [] if where or key in known or key in ALIASES else _with_settings_of(hints, key)
        if elsewhere:
            raise InputError(f"unknown key {key} (nearest: {' or '.join(elsewhere)})")
        check_known(key, known, where)
    prefix = where + "." if where else ""
    return kind(
        **{known[key]: convert(hints[known[key]], v, prefix + key) for key, v in value.items()}
    )


def _with_settings_of(sections: dict[str, Any], key: Any) -> list[str]:
    """The sections' settings of that name, as optim.lr for lr."""
    kinds = {name: hint for name, hint in sections.items() if dataclasses.is_dataclass(hint)}
    return [f"{name}.{key}" for name, kind in kinds.items() if key in typing.get_type_hints(kind)]


def _convert_union(kinds: tuple, value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    kinds = [kind for kind in kinds if kind is not type(None)]
    stored_as = {
        kind: {Literal: str, list: list}.get(typing.get_origin(kind), kind) for kind in kinds
    }
    fitting = [kind for kind in kinds if isinstance(value, stored_as[kind])]
    return convert((fitting or kinds)[0], value, where)


def check_known(key: Any, known, where: str) -> None:
    if key not in known:
        word = _shortened(str(key))
        raise InputError(
            f"unknown key {where + '.' if where else ''}{word} {advice(word, known, where)}"
        )


def describe(value: Any) -> str:
    return f"{type(value).__name__} {_shortened(repr(value))}"


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
