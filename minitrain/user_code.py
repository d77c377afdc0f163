"""Load and call what a setting names: a function or class of the user, or of this package."""

import inspect
import os
import sys
import traceback
import zlib
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from math import isfinite
from types import ModuleType
from typing import Any

from minitrain.errors import InputError


def load_from(place: str) -> Any:
    """Return what `package.module:name` or `path/to/file.py:name` refers to.

    Modules in the current folder are found, too. Raises whatever the module raises.
    """
    module, _, name = place.partition(":")
    if "" not in sys.path:
        sys.path.append("")
    found = load_file(module) if module.endswith(".py") else import_module(module)
    return getattr(found, name)


def load_file(file: str) -> ModuleType:
    """Return a file as a module, run once; it finds the modules beside it, after all others."""
    path = os.path.abspath(os.path.expanduser(file))
    # its own name may be that of another module, such as json
    name = f"user_code_{zlib.crc32(path.encode())}"
    if name in sys.modules:
        return sys.modules[name]
    if os.path.dirname(path) not in sys.path:
        sys.path.append(os.path.dirname(path))
    spec = spec_from_file_location(name, path)
    # dataclasses and pickle look there
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_function(setting: str, name: str, example: dict, others: str = "") -> Callable:
    """Return the function at a place, see `load_from`.

    setting: tells where the name stands. example: arguments that it must take, by order. others:
    what else the setting may be. Raises InputError if there is no such function.
    """
    module, _, function = name.partition(":")
    if not module or not function or (module.startswith(".") and not module.endswith(".py")):
        raise InputError(f"{setting} is not {others}package.module:function")
    try:
        found = load_from(name)
    # a module can raise whatever Python raises
    except (Exception, SystemExit) as error:
        # of a missing file, repr leaves out the name
        reason = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else repr(error)
        raise InputError(f"{setting} cannot be imported: {reason}") from error
    if not callable(found):
        raise InputError(f"{setting} is a {type(found).__name__}, not a function")
    try:
        inspect.signature(found).bind(*example.values())
    except (TypeError, ValueError) as error:
        # ValueError: some of Python's own functions do not tell what they take
        raise InputError(f"{setting} must take ({', '.join(example)}): {error}") from error
    return found


def call(setting: str, about: str, function: Callable, *arguments: Any) -> Any:
    """Call what a setting names; whatever it raises becomes one line, an InputError."""
    try:
        return function(*arguments)
    # it is the user's code, which can raise anything
    except (Exception, SystemExit) as error:
        # where in that code, and what
        last = traceback.extract_tb(error.__traceback__)[-1]
        what = traceback.format_exception_only(error)[-1].partition("\n")[0]
        raise InputError(
            f"{setting} raised {what} {about}, at {last.filename}:{last.lineno}"
        ) from error


def finite_number(value: Any) -> float | None:
    """Return what a user's code calls a number as a float; None if it is none, or not finite."""
    try:
        number = float(value)
    # RuntimeError: a tensor with several elements
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if isfinite(number) else None
