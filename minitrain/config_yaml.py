"""YAML text and `key=value` words into nested dicts, and those into dataclasses, by the types of their fields.

A key that no field has is refused with the nearest that one has, a value of another type with what is asked for.
"""

import dataclasses
import difflib
import re
import types
import typing
from typing import Any, Literal

import yaml

from minitrain.errors import InputError


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-4 as a number, as YAML 1.2 does, and refuses a key given twice."""

    def construct_mapping(self, node, deep=False):
        seen = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML; a syntax error becomes an InputError with file, line and column."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise InputError(f"{place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from error


def apply_override(tree: dict, word: str) -> None:
    """Set one `a.b=value` in a nested dict; the value is read as YAML."""
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise InputError(f"argument {word!r} is not of the form key=value")
    *parents, last = key.split(".")
    for parent in parents:
        if isinstance(tree.get(parent), str):  # `model: NAME` is short for `model: {name: NAME}`
            tree[parent] = {"name": tree[parent]}
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise InputError(f"argument {word!r}: {parent!r} is a value, it has no keys under it")
    tree[last] = read_yaml(value, f"argument {word!r}")


def convert(kind: Any, value: Any, where: str) -> Any:
    """`value` as a `kind`, or an InputError that names the key. Whole floats become ints where an int is asked for."""
    if dataclasses.is_dataclass(kind):
        return _convert_mapping(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            near = _nearest(str(value), map(str, arguments))
            raise InputError(f"{where}={value!r} is not one of {', '.join(arguments)} (nearest: {near})")
        return value
    if origin in (types.UnionType, typing.Union):
        return _convert_union(arguments, value, where)
    if origin is tuple:
        return tuple(convert(list[arguments[0]], list(value) if isinstance(value, tuple) else value, where))
    if origin is list:
        if not isinstance(value, list):
            raise InputError(f"{where} must be a list, not {describe(value)}")
        return [convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if kind is Any or (kind is dict and isinstance(value, dict)):
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int and number and value == value // 1:  # 1e3 is a whole number; nan and inf are not
        return int(value)
    if kind is float and number and abs(value) != float("inf") and value == value:
        return float(value)
    if kind in (str, bool) and isinstance(value, kind):
        return value
    names = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false", dict: "a mapping"}
    raise InputError(f"{where} must be {names[kind]}, not {describe(value)}")


def _convert_mapping(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise InputError(f"{where} must be a mapping, not {describe(value)}")
    hints = typing.get_type_hints(kind)
    known = {name.rstrip("_"): name for name in hints}
    for key in value:
        check_known(key, known, where)
    prefix = where + "." if where else ""
    return kind(**{known[key]: convert(hints[known[key]], v, prefix + key) for key, v in value.items()})


def _convert_union(kinds: tuple, value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    kinds = [kind for kind in kinds if kind is not type(None)]
    stored_as = {kind: {Literal: str, list: list}.get(typing.get_origin(kind), kind) for kind in kinds}
    fitting = [kind for kind in kinds if isinstance(value, stored_as[kind])]
    return convert((fitting or kinds)[0], value, where)


def check_known(key: Any, known, where: str) -> None:
    if key not in known:
        near = _nearest(str(key), known)
        raise InputError(f"unknown key {where + '.' if where else ''}{key} (nearest: {near})")


def _nearest(word: str, known) -> str:
    return difflib.get_close_matches(word, list(known), n=1, cutoff=0)[0]


def describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
