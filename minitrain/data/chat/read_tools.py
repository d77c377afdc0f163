"""Read the tools of a line and the calls of tools in its messages, as OpenAI's interface has them."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from minitrain.data.chat.keys import ARGUMENTS, SHOWN
from minitrain.data.chat.messages import WrittenArguments
from minitrain.errors import InputError


def read_shown(record: dict) -> dict:
    """Return what a template is shown beside the messages of a line: tools and other variables.

    tools, documents: lists of objects. enable_thinking: a variable that verl reads there.
    chat_template_kwargs: variables by name. Raises InputError for anything else.
    """
    shown = {key: record.get(key) for key in SHOWN[:3]}
    more = read_value(record, "chat_template_kwargs", dict) or {}
    shown = {key: value for key, value in (shown | more).items() if value is not None}
    for key in shown.keys() & {"tools", "documents"}:
        shown[key] = read_objects(shown, key) or None
    if shown.get("tools"):
        shown["tools"] = [read_tool(tool) for tool in shown["tools"]]
    return {key: value for key, value in shown.items() if value is not None}


def read_objects(record: dict, key: str) -> list[dict]:
    """Return a list of objects. It, and each of them, may be written as JSON in a text.

    So data sets hold objects of different keys in one table. An empty list is one of nothing.
    """
    items = []
    for item in read_value(record, key, list) or []:
        with suppress(ValueError):
            item = json.loads(item) if isinstance(item, str) else item
        if not isinstance(item, dict):
            written = json.dumps(item, ensure_ascii=False)
            raise InputError(f"{key!r} is not supported with {written} in it (a list of objects)")
        items.append(item)
    return items


def read_tool(tool: dict) -> dict:
    """Return a tool whose function, and whose parameters, may be written as JSON in texts."""
    for key in ("function", "parameters", "input_schema"):
        if tool.get(key) and isinstance(tool[key], str):
            tool = tool | {key: read_value(tool, key, dict)}
    if isinstance(tool.get("function"), dict):
        tool = tool | {"function": read_tool(tool["function"])}
    return tool


def read_value(record: dict, key: str, kind: type) -> Any:
    """Return a list or an object, which may be written as JSON in a text; None if it is empty."""
    value = record.get(key)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InputError(f"{key!r} is a text that is not valid JSON: {error}") from None
    if value and not isinstance(value, kind):
        raise InputError(f"{key!r} must be a {kind.__name__}, not {type(value).__name__}")
    return value or None


def read_calls(turn: dict) -> list[dict]:
    """Return a turn's tool calls as OpenAI's interface has them.

    The arguments may have another name, or stand beside the function. Raises InputError for a call
    without any: one that needs none says {}.
    """
    found = []
    for call in read_objects(turn, "tool_calls"):
        function = read_value(call, "function", dict) or call
        if not function.get("name"):
            raise InputError(
                "'tool_calls' must be a list of objects with 'function': {'name': ...}"
            )
        arguments = arguments_of(call, function)
        around = {} if function is call else without(call, ARGUMENTS)
        function = without(function, ("function", *ARGUMENTS)) | {"arguments": arguments}
        found.append({"type": "function"} | around | {"function": function})
    return found


def arguments_of(call: dict, function: dict) -> dict:
    """Return the arguments of a call. Raises InputError where two places have different ones."""
    where = f"the call of {function['name']!r}"
    places = [(part, key) for part in (function, call) for key in ARGUMENTS]
    given = [read_arguments(part, key) for part, key in places if part.get(key) is not None]
    if not given:
        raise InputError(
            f"{where} has no key 'arguments' (a call without arguments says 'arguments': {{}})"
        )
    filled = [arguments for arguments in given if arguments]
    if any(arguments != filled[0] for arguments in filled):
        raise InputError(f"{where} has two different sets of arguments (keep 'arguments')")
    return (filled or given)[0]


def read_arguments(part: dict, key: str) -> dict:
    arguments = read_value(part, key, dict) or {}
    return WrittenArguments(arguments, part[key]) if isinstance(part[key], str) else arguments


def without(record: dict, keys: Sequence[str]) -> dict:
    return {key: value for key, value in record.items() if key not in keys}
