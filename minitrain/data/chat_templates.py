"""Chat templates: messages -> text in pieces, in turns given and for the model to say.

A chat model's own template comes with its tokenizer, in Jinja, and is rendered as transformers
renders it: in Jinja's sandbox, where it can take its time but not reach Python. Rendering more than
once finds the replies, so any template will do that writes a reply behind its generation prompt and
ends it with a token of its own. For models that come without, three are written out: Llama 3,
ChatML (Qwen), and a plain one without special tokens. Left out: tools, images, options such as
enable_thinking, and the date (a row must be the same tomorrow).
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from os.path import commonprefix
from typing import Any, NamedTuple

from minitrain.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from minitrain.errors import InputError


class Message(NamedTuple):
    role: str  # system, user or assistant
    content: str


# the date that Llama 3.1's and 3.2's templates write where they are not told it
DATE = date(2024, 7, 26)
# text, and whether the model is to say it
Pieces = Iterator[tuple[str, bool]]
Chat = list[Message]

# --------------------------------------------------------------------------------------------------------- written out


@dataclass(frozen=True)
class Template:
    """A format of text: begin, then for each message header, content, end and separator.

    header: with {role}. end: of a turn, the assistant's too. special: tokens in these that a
    tokenizer must have. strip: white space around a message is removed. begin_with_bos: with all
    that the tokenizer puts before a text. reply_ends_with_eos: with that token, in place of `end`.
    """

    header: str
    end: str
    special: tuple[str, ...] = ()
    begin: str = ""
    separator: str = ""
    strip: bool = False
    begin_with_bos: bool = True
    reply_ends_with_eos: bool = False
    # as of a JinjaTemplate
    notes = ()
    asks = None

    def pieces(self, messages: Chat) -> Pieces:
        """Yield the text of a chat, in turns given and for the model to say."""
        given = self.begin
        for role, content in messages:
            given += self.header.format(role=role)
            content = content.strip() if self.strip else content
            if role == "assistant":
                yield given, False
                yield content + ("" if self.reply_ends_with_eos else self.end), True
                given = self.separator
            else:
                given += content + self.end + self.separator
        yield given, False

    def question(self, messages: Chat) -> Pieces:
        """Yield the text that a reply to `messages` follows. An assistant's last one is continued."""
        continued = bool(messages) and messages[-1].role == "assistant"
        if not continued:
            messages = [*messages, Message("assistant", "")]
        *given, (begun, _), _ = self.pieces(messages)
        yield from given
        if continued:
            yield begun if self.reply_ends_with_eos else begun.removesuffix(self.end), False

    def jinja(self, tokenizer: Tokenizer) -> str:
        """Return the same as a template for transformers, to go with the trained model."""
        before, _, after = map(repr, self.header.partition("{role}"))
        header = f"{before} + {{role}} + {after}" if self.header else "''"
        content = "message.content | trim" if self.strip else "message.content"
        end = repr(self.end + self.separator)
        if self.reply_ends_with_eos:
            end = f"({tokenizer.eos!r} if message.role == 'assistant' else {end})"
        begin = repr(self.begin or tokenizer.beginning)
        ask = header.format(role="'assistant'")
        turn = f"{header.format(role='message.role')} + {content} + {end}"
        return (
            f"{{{{ {begin} }}}}{{% for message in messages %}}{{{{ {turn} }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {ask} }}}}{{% endif %}}"
        )


LLAMA3 = Template(
    "<|start_header_id|>{role}<|end_header_id|>\n\n",
    "<|eot_id|>",
    ("<|start_header_id|>", "<|eot_id|>"),
    begin="<|begin_of_text|>",
    strip=True,
    begin_with_bos=False,
)
CHATML = Template(
    "<|im_start|>{role}\n", "<|im_end|>", ("<|im_start|>", "<|im_end|>"), separator="\n"
)
PLAIN = Template("", "\n", reply_ends_with_eos=True)  # a question a line, eos after each answer
TEMPLATES = {"llama3": LLAMA3, "chatml": CHATML, "plain": PLAIN}

# --------------------------------------------------------------------------------------------------- of the tokenizer


class JinjaTemplate:
    """The template that came with a tokenizer.

    It counts the replies of `pieces`, those that lack some of the message, and those that follow
    another prompt than generation has, by both prompts: templates of reasoning models drop
    thoughts, and ask for them.
    """

    # the template writes both
    begin_with_bos = False
    reply_ends_with_eos = False
    PLACEHOLDER = "\ue000a reply\ue000"

    def __init__(self, tokenizer: HuggingFaceTokenizer):
        self.file = tokenizer.file
        self.template = compile_template(tokenizer.chat_template, self.file)
        self.special_tokens = tokenizer.special_tokens()
        longest_first = sorted(tokenizer.added_tokens(), key=len, reverse=True)
        self.added_token = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.replies = self.shortened = 0
        self.prompts: Counter[tuple[str, str]] = Counter()

    def render(self, messages: Chat, add_generation_prompt: bool = False) -> str:
        dicts = [message._asdict() for message in messages]
        try:
            return self.template.render(
                messages=dicts,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        # a template can raise whatever Python raises
        except Exception as error:
            raise InputError(f"the chat template beside {self.file} refuses it: {error}") from error

    def question(self, messages: Chat) -> Pieces:
        """Yield the text that a reply to `messages` follows. An assistant's last one is continued."""
        if not messages or messages[-1].role != "assistant":
            yield self.render(messages, add_generation_prompt=True), False
            return
        *before, (role, begun) = messages
        marked = Message(role, f"{begun}{self.PLACEHOLDER} ")
        text, mark, rest = self.render([*before, marked]).rpartition(self.PLACEHOLDER)
        if not mark or begun.strip() not in text:
            raise self.unclear(len(before))
        # a template that drops the space behind the mark would have dropped one that the message
        # ends in
        yield text if rest.startswith(" ") else text.rstrip(), False

    def pieces(self, messages: Chat) -> Pieces:
        """Yield the text of a chat, in turns given and for the model to say."""
        text = self.render(messages)
        seen = 0
        for i, message in enumerate(messages):
            if message.role == "assistant":
                start, end = self.reply_in(text, messages, i)
                if not seen <= start <= end:
                    raise self.unclear(i)
                yield text[seen:start], False
                yield text[start:end], True
                self.replies += 1
                # a thought may begin in the given text
                shown = without_spaces(text[seen:end])
                self.shortened += without_spaces(message.content) not in shown
                seen = end
        yield text[seen:], False

    @property
    def notes(self) -> list[str]:
        """Return remarks about the replies of `pieces`."""
        found = []
        if self.shortened:
            found.append(
                f"{self.shortened:,} of {self.replies:,} replies lose text in the chat template (thoughts?)"
            )
        for (asked, given), count in self.prompts.items():
            kept = "is saved with" if self.asks else "keeps"
            found.append(
                f"{count:,} of {self.replies:,} replies follow {given!r}, where the chat template asks with {asked!r} "
                f"(that of the trained model {kept} {given if self.asks else asked!r})"
            )
        return found

    @property
    def asks(self) -> str | None:
        """Return the prompt that all replies follow, where generation has another one."""
        for (_, given), count in self.prompts.items():
            if count == self.replies:
                return given
        return None

    def reply_in(self, text: str, messages: Chat, i: int) -> tuple[int, int]:
        """Return where in the text of all messages message i begins and, with its end token, ends."""
        replaced = [*messages[:i], Message("assistant", self.PLACEHOLDER), *messages[i + 1 :]]
        before, *after = self.render(replaced).split(self.PLACEHOLDER)
        end = self.added_token.search(after[0]) if len(after) == 1 else None
        if end is None or not text.endswith(after[0]):
            raise self.unclear(i)
        asked = self.render(messages[:i], add_generation_prompt=True) if i else before
        start = len(asked)
        # some ask for a thought, <think>, where they write a reply without one
        if not text.startswith(asked):
            given = self.render(messages[:i])
            if not text.startswith(given):
                raise self.unclear(i)
            # of characters
            start = len(commonprefix([text, asked, before]))  # noqa: RUF071
            tokens = (m for whole in (text, asked) for m in self.added_token.finditer(whole))
            start = min(start, *(m.start() for m in tokens if m.end() > start))
            if asked.startswith(given):
                self.prompts[asked[len(given) :], text[len(given) : start]] += 1
        return start, len(text) - len(after[0]) + end.end()

    def unclear(self, i: int) -> InputError:
        return InputError(
            f"the chat template beside {self.file} does not show where message {i + 1}, a reply, begins and ends "
            "(use data.template=llama3, chatml or plain)"
        )


def without_spaces(text: str) -> str:
    return "".join(text.split())


def asking_with(prompt: str, jinja: str) -> str:
    """Return a template that asks for a reply with `prompt`, and is otherwise `jinja`."""
    return (
        "{%- set asked = add_generation_prompt %}{%- set add_generation_prompt = false %}"
        f"{jinja.removesuffix(chr(10))}{{% if asked %}}{{{{ {prompt!r} }}}}{{% endif %}}"
    )


def compile_template(text: str, file: Any) -> Any:
    """Return a Jinja template with the names that Hugging Face's use.

    The tags around a text to train on, {% generation %}, are ignored. Raises InputError, with the
    line, for a text that is no template.
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
    }
    for tag, condition in (("generation", "if true"), ("endgeneration", "endif")):
        text = re.sub(rf"(\{{%[-+]?\s*){tag}(\s*[-+]?%\}})", rf"\1{condition}\2", text)
    try:
        return environment.from_string(text)
    # Jinja's own, and those of Python's compiler
    except Exception as error:
        told = error
        if isinstance(error, TemplateSyntaxError):
            told = f"line {error.lineno}: {error.message}"
        raise InputError(f"the chat template beside {file} is not valid: {told}") from error


# -------------------------------------------------------------------------------------------------------------- choice

ChatTemplate = Template | JinjaTemplate


def choose_template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template called `name`.

    `auto` is the tokenizer's own, or if it has none the first whose tokens it has. Raises
    InputError if the tokenizer lacks a token of the template.
    """
    if name == "auto" and tokenizer.chat_template:
        return JinjaTemplate(tokenizer)
    # the plain one needs none, so `auto` always finds one
    for template in TEMPLATES.values() if name == "auto" else [TEMPLATES[name]]:
        missing = [token for token in template.special if tokenizer.token_id(token) is None]
        if not missing:
            break
    if missing:
        raise InputError(
            f"data.template={name} needs the token {missing[0]}, which data.tokenizer lacks"
        )
    if template.reply_ends_with_eos and tokenizer.eos_id is None:
        raise InputError(
            "data.template=plain ends answers with eos, which data.tokenizer lacks (use llama3 or chatml)"
        )
    return template
