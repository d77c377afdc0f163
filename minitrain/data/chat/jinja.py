"""Compile chat templates as transformers does: in Jinja's sandbox, where they cannot reach Python.

What a template writes inside {% generation %} is a reply. It is marked in the text by characters
that no text may have, and so are the places of the tokenizer's beginning and eos.
"""

import json
import re
from datetime import date
from typing import Any

from minitrain.errors import InputError

# the date that Llama 3.1's and 3.2's templates write if none is given
DATE = date(2024, 7, 26)
# characters that no text may have: a reply's begin and end, the tokenizer's beginning and eos
SAID, DONE, BEGINNING, EOS = map(chr, range(0xFDD0, 0xFDD4))
MARKS = re.compile(f"[{SAID}{DONE}]")
ALL_MARKS = re.compile(f"[{SAID}-{EOS}]")


def asking_with(prompt: str, jinja: str) -> str:
    """Return a template that asks for a reply with `prompt`, and is otherwise `jinja`."""
    return (
        "{%- set asked = add_generation_prompt %}{%- set add_generation_prompt = false %}"
        f"{jinja.removesuffix(chr(10))}{{% if asked %}}{{{{ {prompt!r} }}}}{{% endif %}}"
    )


def compile_template(text: str, name: str) -> Any:
    """Return a Jinja template with the names that Hugging Face's use.

    Text inside {% generation %} comes out between SAID and DONE. Raises InputError, with the line,
    for a text that is no template.
    """
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    # Jinja's own escapes HTML
    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda layout: DATE.strftime(layout),
        "mark_said": lambda caller: f"{SAID}{caller()}{DONE}",
    }
    for tag, block in (("generation", "call mark_said()"), ("endgeneration", "endcall")):
        text = re.sub(rf"(\{{%[-+]?\s*){tag}(\s*[-+]?%\}})", rf"\1{block}\2", text)
    try:
        return environment.from_string(text)
    # Jinja's own, and those of Python's compiler
    except Exception as error:
        message = error
        if isinstance(error, TemplateSyntaxError):
            message = f"line {error.lineno}: {error.message}"
        raise InputError(f"{name} is not valid: {message}") from error
