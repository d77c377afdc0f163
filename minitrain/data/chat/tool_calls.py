r"""Calls of tools in the text of a reply, as the models of these families write them.

    Qwen 2.5, Qwen 3, Hermes   <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>
    Qwen 3.5, Nemotron 3       <tool_call><function=add><parameter=a>2</parameter></function></tool_call>
    GLM 4.5                    <tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>
    Llama 3                    {"name": "add", "parameters": {"a": 2}}, and nothing else
    Mistral                    [TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}], or
                               [TOOL_CALLS]add[ARGS]{"a": 2}
    DeepSeek-V3                begin, function, sep, add, the arguments as a block of code, end
    DeepSeek-V3.1              begin, add, sep, {"a": 2}, end
    gpt-oss                    ... to=functions.add ... <|message|>{"a": 2}<|call|>

Which of these a model writes is seen from its text alone. In the two forms that have no types an
argument is what JSON says it is, unless the tool's schema says that it is a text.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress

from minitrain.data.chat.read_tools import read_calls
from minitrain.errors import InputError
from minitrain.grpo.environments import ToolCall

BAR, BLOCK = "\uff5c", "\u2581"


def deepseek(*words: str) -> str:
    """Return a token of DeepSeek's, whose bars and blocks are no ASCII."""
    return f"<{BAR}{BLOCK.join(words)}{BAR}>"


SEPARATOR = deepseek("tool", "sep")
# what is between these is a call, or a list of calls; a reply may be cut off before the second
MARKS = [
    (r"<tool_call>", r"</tool_call>"),
    (r"\[TOOL_CALLS\]", r"(?=\[TOOL_CALLS\])"),
    (re.escape(deepseek("tool", "call", "begin")), re.escape(deepseek("tool", "call", "end"))),
    (r"(?=to=functions\.)", r"<\|(?:call|end|return)\|>"),
]
MARKED = [re.compile(rf"{begin}(.*?)(?:{end}|\Z)", re.DOTALL) for begin, end in MARKS]
# Llama's, with the token that may stand before it
BARE = re.compile(r"(?:<\|python_tag\|>\s*)?(\{.*\})", re.DOTALL)
TAGGED = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
KEYED = re.compile(r"([\w.-]+)\s*((?:<arg_key>.*)?)", re.DOTALL)
KEY = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
# name, what stands between, and an object
NAMED = [
    re.compile(rf"function{SEPARATOR}([\w.-]+)\s*```(?:json)?(.*)```", re.DOTALL),
    re.compile(rf"([\w.-]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\]|{SEPARATOR})(.*)", re.DOTALL),
    re.compile(r"to=functions\.([\w.-]+).*?<\|message\|>(.*)", re.DOTALL),
]


# as templates write what is neither a text nor a list
PYTHON = {"True": "true", "False": "false", "None": "null"}


def find_calls(text: str, tools: list[dict] | None = None) -> list[ToolCall]:
    """Return the calls in a reply's text, which shows special tokens, in order.

    tools: schemas of the tools. Calls in thoughts do not count. What is marked as a call and cannot
    be read is one without arguments.
    """
    said = text.rpartition("</think>")[2]
    for marked in MARKED:
        if bodies := [match[1].strip() for match in marked.finditer(said)]:
            return [call for body in bodies for call in read_body(body, tools or [])]
    bare = BARE.fullmatch(said.strip())
    calls = list(read_json(bare[1])) if bare else []
    # an answer may be JSON, too
    return [call for call in calls if call.name and call.arguments is not None]


def read_body(body: str, tools: list[dict]) -> Iterator[ToolCall]:
    """Yield the calls that stand between marks: one, or a list of several."""
    for named in NAMED:
        if match := named.fullmatch(body):
            name, written = match.groups()
            yield ToolCall(name, read_object(written), body)
            return
    if match := TAGGED.fullmatch(body):
        name, written = match.groups()
        yield ToolCall(name, typed(PARAMETER.findall(written), name, tools), body)
    elif match := KEYED.fullmatch(body):
        name, written = match.groups()
        yield ToolCall(name, typed(KEY.findall(written), name, tools), body)
    else:
        yield from read_json(body)


def read_object(written: str) -> dict | None:
    try:
        found = json.loads(written)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_json(body: str) -> Iterator[ToolCall]:
    """Yield the calls of an object, or of a list of objects."""
    try:
        found = json.loads(body)
        found = found if isinstance(found, list) else [found]
    except (ValueError, RecursionError):
        found = [None]
    for item in found:
        try:
            function = read_calls({"tool_calls": [item]})[0]["function"]
            yield ToolCall(str(function["name"]), dict(function["arguments"]), body)
        except (InputError, TypeError, RecursionError):
            name = item.get("name") if isinstance(item, dict) else None
            yield ToolCall(name if isinstance(name, str) else "", None, body)


def typed(found: list[tuple[str, str]], name: str, tools: list[dict]) -> dict:
    """Return arguments that are written without types, as the schema of the tool `name` has them."""
    functions = [tool.get("function", tool) for tool in tools]
    schemas = [each.get("parameters") or {} for each in functions if each.get("name") == name]
    properties = (schemas[0].get("properties") or {}) if schemas else {}
    arguments = {}
    for key, written in found:
        arguments[key.strip()] = written
        if (properties.get(key.strip()) or {}).get("type") != "string":
            with suppress(ValueError, RecursionError):
                arguments[key.strip()] = json.loads(PYTHON.get(written, written))
    return arguments
