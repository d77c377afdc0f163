"""Choose a chat template: the tokenizer's own, or one of three that are written out in templates/.

Those are Llama 3, ChatML (Qwen), and a plain one without special tokens. They are for models that
come without a template. rendering.py renders a chat with it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from minitrain.data.chat.jinja import compile_template
from minitrain.data.tokenizer import Tokenizer
from minitrain.errors import InputError


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A template in Jinja."""

    source: str
    # added tokens of the tokenizer, of which one ends a reply; of a template of templates/, those
    # that it writes
    special: tuple[str, ...] = ()
    # for messages
    name: str = "data.template"
    # it came with the tokenizer
    is_own: bool = False
    # bos_token, eos_token, ..., which templates of tokenizers write
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def compiled(self) -> Any:
        return compile_template(self.source, self.name)

    @cached_property
    def added_token(self) -> re.Pattern:
        """Return a pattern that matches any of the special tokens."""
        longest_first = sorted(self.special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def jinja(self, tokenizer: Tokenizer) -> str:
        """Return the template for transformers, to go with the trained model."""
        text = re.sub(r"\{%-? (end)?generation %\}", "", self.source)
        text = text.replace("beginning }}", f"{tokenizer.beginning!r} }}}}")
        return text.replace("eos }}", f"{tokenizer.eos!r} }}}}")


# template in templates/ -> tokens that a tokenizer must have
BUILT_IN = {
    "llama3": ("<|start_header_id|>", "<|eot_id|>"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "plain": (),
}


def built_in(name: str) -> ChatTemplate:
    """Return a template of templates/."""
    file = Path(__file__).parent / "templates" / f"{name}.jinja"
    return ChatTemplate(file.read_text(encoding="utf-8").rstrip(), BUILT_IN[name])


def choose_template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template called `name`.

    `auto` is the tokenizer's own, or if it has none the first whose tokens it has. Raises
    InputError if the tokenizer lacks a token of the template.
    """
    if name == "auto" and tokenizer.chat_template:
        return ChatTemplate(
            tokenizer.chat_template,
            tuple(tokenizer.added_tokens()),
            f"the chat template beside {tokenizer.file}",
            is_own=True,
            special_tokens=tokenizer.special_tokens(),
        )
    # the plain one needs none, so `auto` always finds one
    for known in BUILT_IN if name == "auto" else [name]:
        missing = [token for token in BUILT_IN[known] if tokenizer.token_id(token) is None]
        if not missing:
            break
    if missing:
        raise InputError(
            f"data.template={name} needs the token {missing[0]}, which data.tokenizer lacks"
        )
    if known == "plain" and tokenizer.eos_id is None:
        raise InputError(
            "data.template=plain ends answers with eos, which data.tokenizer lacks (use llama3 or chatml)"
        )
    return built_in(known)
