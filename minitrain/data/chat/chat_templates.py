"""Chat templates: messages -> text in pieces, in turns given and for the model to say.

A chat model's own template comes with its tokenizer, in Jinja, and is rendered as transformers
renders it: in Jinja's sandbox, where it can take its time but not reach Python. Replies are what
the template marks by {% generation %}. In a template without marks they are found by rendering the
chat again with another reply: any will do that writes a reply behind its generation prompt and
ends it with a token of its own. For models that come without a template, three are written out:
Llama 3, ChatML (Qwen), and a plain one without special tokens. Left out: images, and the date (a
row must be the same tomorrow).
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import date
from functools import cached_property
from itertools import accumulate, chain
from os.path import commonprefix
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from minitrain.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from minitrain.errors import InputError

NO_KEYS = MappingProxyType({})


class Message(NamedTuple):
    """A turn of a chat. more: its other keys that templates read, such as tool_calls."""

    role: str  # system, developer, user, assistant or tool
    content: str | None  # None: nothing but tool calls
    more: Mapping = NO_KEYS
    learned: bool = True  # a reply is to be learned

    def as_dict(self) -> dict:
        """Return the message as templates see it. They know thoughts by one of two names."""
        thought = self.more.get("reasoning_content")
        fields = {"role": self.role, "content": self.content, **self.more, "thinking": thought}
        return {key: value for key, value in fields.items() if value is not None}


class WrittenArguments(dict):
    """Arguments that were given as JSON in a text, which they are where a template takes text.

    Most templates write an object; DeepSeek-V3's adds the arguments to a text.
    """

    def __init__(self, arguments: dict, text: str):
        super().__init__(arguments)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __add__(self, text: str) -> str:
        return self.text + text

    def __radd__(self, text: str) -> str:
        return text + self.text


Chat = list[Message]

# the date that Llama 3.1's and 3.2's templates write if none is given
DATE = date(2024, 7, 26)
# key -> pattern that a template must have to support it, if not the key itself; empty: any template
KEY_PATTERNS = {"reasoning_content": "reasoning_content|thinking", "name": "", "tool_call_id": ""}
# characters that no text may have: a reply's begin and end, the tokenizer's beginning and eos
SAID, DONE, BEGINNING, EOS = map(chr, range(0xFDD0, 0xFDD4))
MARKS = re.compile(f"[{SAID}{DONE}]")
ALL_MARKS = re.compile(f"[{SAID}-{EOS}]")
PLACEHOLDER = "\ue000a reply\ue000"


class ChatTemplate:
    """A template in Jinja.

    special: tokens that a tokenizer must have. tokenizer: the template came with it, `is_own`.
    It counts the replies that `Rendering.pieces` finds, those that lack some of the message, and those that follow
    another prompt than generation has, by both prompts: templates of reasoning models drop
    thoughts, and ask for them. And it counts the chats whose tools or calls have keys that are null.
    """

    def __init__(
        self,
        source: str,
        special: tuple[str, ...] = (),
        tokenizer: HuggingFaceTokenizer | None = None,
    ):
        self.source = source
        self.special = special
        self.name = "data.template"
        self.is_own = tokenizer is not None
        self.special_tokens = {}
        if tokenizer:
            self.name = f"the chat template beside {tokenizer.file}"
            self.special_tokens = tokenizer.special_tokens()
            special = tokenizer.added_tokens()
        longest_first = sorted(special, key=len, reverse=True)
        self.added_token = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.replies = self.shortened = self.with_nulls = 0
        self.prompts: Counter[tuple[str, str]] = Counter()

    @cached_property
    def template(self) -> Any:
        return compile_template(self.source, self.name)

    def jinja(self, tokenizer: Tokenizer) -> str:
        """Return the template for transformers, to go with the trained model."""
        text = re.sub(r"\{%-? (end)?generation %\}", "", self.source)
        text = text.replace("beginning }}", f"{tokenizer.beginning!r} }}}}")
        return text.replace("eos }}", f"{tokenizer.eos!r} }}}}")

    @property
    def notes(self) -> list[str]:
        """Return remarks about the replies."""
        found = []
        if self.shortened:
            found.append(
                f"{self.shortened:,} of {self.replies:,} replies lose text in the chat template "
                "(thoughts, or calls of tools?)"
            )
        if self.with_nulls:
            found.append(
                f"{self.with_nulls:,} chats show null in tools or calls, as to_json of datasets writes keys that a "
                "row lacks (of its parquet or arrow files they are left out)"
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
        asked = (given for (_, given), count in self.prompts.items() if count == self.replies)
        return next(asked, None)


class Rendering:
    """One chat in a template, as text that is cut where a reply begins and ends.

    `question` ends where the next reply begins, `pieces` tells replies from what is given, and
    `after_reply` is what stands between two replies. Where the template does not mark replies, the
    chat is rendered again with a probe, a reply that holds PLACEHOLDER, in one reply's place:
    1. what is behind the placeholder, up to a token of the template's, ends the reply (`end_of_reply`);
    2. what all chats have in common before it, with the generation prompt, ends where the reply
       begins (`start_of_reply`).
    shown: the template's further variables, such as tools.
    """

    def __init__(self, template: ChatTemplate, messages: Chat, shown: Mapping = NO_KEYS):
        self.template = template
        self.shown = shown
        # a key that the template does not read would be lost
        for key in chain(shown, *(message.more for message in messages)):
            if not re.search(rf"\b({KEY_PATTERNS.get(key, key)})\b", template.source):
                raise InputError(
                    f"{key!r} is not supported by {template.name}: it is not in its text "
                    f"(use a tokenizer whose own template has it, or remove it)"
                )
        # a template without a developer role gets such a turn as the system's
        if "developer" not in template.source and "system" in template.source:
            messages = [
                m._replace(role="system") if m.role == "developer" else m for m in messages
            ]
        self.messages = messages
        self.added_token = template.added_token
        written = json.dumps([*messages, dict(shown)], ensure_ascii=False, default=dict)
        if mark := ALL_MARKS.search(written):
            raise InputError(
                f"its text holds U+{ord(mark[0]):04X}, which Unicode keeps for programs (remove it)"
            )
        called = [message.more.get("tool_calls") for message in messages]
        self.has_nulls = holds_null([shown.get("tools"), called])

    def render(self, messages: Chat, ask: bool = False) -> str:
        """Return the text of messages, with marks around replies where the template has some."""
        template = self.template.template
        variables = {"tools": None, "documents": None, "beginning": BEGINNING, "eos": EOS}
        variables |= {**self.template.special_tokens, **self.shown}
        dicts = [message.as_dict() for message in messages]
        try:
            return template.render(variables, messages=dicts, add_generation_prompt=ask)
        # a template can raise whatever Python raises
        except Exception as error:
            raise InputError(f"{self.template.name} refuses it: {error}") from error

    def unmarked(self, messages: Chat, ask: bool = False) -> str:
        return MARKS.sub("", self.render(messages, ask))

    def question(self) -> str:
        """Return the text that a reply follows. An assistant's last one is continued."""
        *before, last = self.messages or [Message("user", "")]
        if last.role != "assistant":
            text = self.unmarked(self.messages, ask=True)
            self.check_all_shown(text)
        else:
            begun = last.content or ""
            marked = last._replace(content=f"{begun}{PLACEHOLDER} ")
            text, mark, rest = self.unmarked([*before, marked]).rpartition(PLACEHOLDER)
            if not mark or begun.strip() not in text:
                raise self.unclear(len(before))
            # the placeholder ends in a space: if the template drops it, it also strips the message
            text = text if rest.startswith(" ") else text.rstrip()
        return text

    def after_reply(self) -> str:
        """Return the text between the last reply, with its end, and the next one that it asks for."""
        i = self.replies[-1]
        problem = self.unclear(i)
        for probe in self.probes(i):
            turns = [*self.messages[:i], probe, *self.messages[i + 1 :]]
            try:
                text = self.render(turns, ask=True)
            except InputError as error:
                problem = error
                continue
            _, *after = text.split(PLACEHOLDER)
            if len(after) != 1:
                continue
            self.check_all_shown(MARKS.sub("", text))
            _, marked, rest = after[0].partition(DONE)
            if marked:
                return MARKS.sub("", rest)
            if end := self.end_of_reply(i, probe, after[0]):
                return after[0][end.end() :]
        raise problem

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yield the text in pieces, each with whether the model is to say it."""
        self.template.with_nulls += self.has_nulls
        # given text, a reply, given text, ...
        parts = MARKS.split(self.render(self.messages))
        text = "".join(parts)
        self.check_all_shown(text)
        seen = 0
        for i, start, end in self.marked_replies(parts) or self.probed_replies(text):
            yield text[seen:start], False
            yield text[start:end], i is None or self.messages[i].learned
            if i is not None:
                self.take_note(text, i, seen, start, end)
            seen = end
        yield text[seen:], False

    def marked_replies(self, parts: list[str]) -> list[tuple[int | None, int, int]]:
        """Return each reply that the template marks: its message, begin and end in the text.

        parts: given text, a reply, given text, ... The messages are None where their number is not
        that of the replies; then all must be learned.
        """
        borders = list(accumulate(map(len, parts)))
        spans = list(zip(borders[::2], borders[1::2], strict=False))
        numbers = self.replies
        if spans and len(spans) != len(numbers):
            if not all(self.messages[i].learned for i in numbers):
                raise self.unclear(numbers[0])
            numbers = [None] * len(spans)
        return [(i, *span) for i, span in zip(numbers, spans, strict=False)]

    def probed_replies(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield each reply that is found by rendering the chat with another one in its place."""
        seen = 0
        for i in self.replies:
            start, seen = self.reply_in(text, i, seen)
            yield i, start, seen

    @property
    def replies(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message.role == "assistant"]

    def check_all_shown(self, text: str) -> None:
        """Raise InputError if the text leaves a turn out. Tools' answers may be written otherwise."""
        written = without_spaces(text)
        for i, (role, content, *_) in enumerate(self.messages):
            if role not in ("assistant", "tool") and without_spaces(content) not in written:
                raise InputError(f"{self.template.name} leaves out message {i + 1}, the {role}'s")

    def reply_in(self, text: str, i: int, seen: int) -> tuple[int, int]:
        """Return where in the text of all messages message i begins and, with its end token, ends.

        seen: the end of the reply before it.
        """
        for probe in self.probes(i):
            try:
                other = self.unmarked([*self.messages[:i], probe, *self.messages[i + 1 :]])
            except InputError as error:
                problem = error
                continue
            before, *after = other.split(PLACEHOLDER)
            end = self.end_of_reply(i, probe, after[0]) if len(after) == 1 else None
            # behind the placeholder an object of arguments is closed
            if end and text.endswith(after[0][end.start() if probe.more else 0 :]):
                break
            problem = self.unclear(i)
        else:
            raise problem
        start = self.start_of_reply(text, i, seen, before) if i else len(before)
        end = len(text) - len(after[0]) + end.end()
        if not seen <= start <= end:
            raise self.unclear(i)
        return start, end

    def probes(self, i: int) -> Iterator[Message]:
        """Yield replies to try in place of message i, each with the placeholder in it.

        A text; and since a template may refuse tools' answers to that, or end it otherwise than
        calls: the calls, of which the last has other arguments.
        """
        yield Message("assistant", PLACEHOLDER)
        message = self.messages[i]
        if calls := message.more.get("tool_calls"):
            arguments = {PLACEHOLDER: ""}
            arguments = WrittenArguments(arguments, json.dumps(arguments, ensure_ascii=False))
            function = calls[-1]["function"] | {"arguments": arguments}
            calls = [*calls[:-1], calls[-1] | {"function": function}]
            yield message._replace(more={**message.more, "tool_calls": calls})

    def end_of_reply(self, i: int, probe: Message, after: str) -> re.Match | None:
        """Return the token in the text after the placeholder that ends the reply, None if unclear."""
        if not probe.more:
            return self.added_token.search(after)
        # tokens may end parts of calls: the last one before the next message counts
        alone = self.unmarked([*self.messages[:i], probe]).partition(PLACEHOLDER)[2]
        end = max(self.added_token.finditer(alone), key=re.Match.end, default=None)
        return end if end and after.startswith(alone[: end.end()]) else None

    def start_of_reply(self, text: str, i: int, seen: int, before: str) -> int:
        """Return where message i begins. before: the text up to what the reply says."""
        asked = self.unmarked(self.messages[:i], ask=True)
        if text.startswith(asked):
            return len(asked)
        given = self.unmarked(self.messages[:i])
        prompt = asked[len(given) :] if asked.startswith(given) else ""
        begin = len(given)
        if not text.startswith(given):
            # a reply that is not the last may be written otherwise, without its thoughts: look for
            # the longest beginning of the prompt that is there
            for size in range(len(prompt), 0, -1):
                begin = text.find(prompt[:size], seen, len(before))
                if begin >= 0:
                    break
            else:
                raise self.unclear(i)
        # some generation prompts open a thought (<think>) that a reply without one does not have
        turn = text[begin:]
        size = len(commonprefix([turn, prompt, before[begin:]]))  # noqa: RUF071
        tokens = (m for whole in (turn, prompt) for m in self.added_token.finditer(whole))
        return begin + min(size, *(m.start() for m in tokens if m.end() > size))

    def take_note(self, text: str, i: int, seen: int, start: int, end: int) -> None:
        """Count a reply that loses text, or follows another prompt than generation has."""
        message = self.messages[i]
        texts = [message.content or "", message.more.get("reasoning_content", "")]
        # a thought may begin in the given text
        written = without_spaces(text[seen:end])
        lost = any(without_spaces(each) not in written for each in texts)
        lost |= any(not is_written(call, written) for call in message.more.get("tool_calls", ()))
        self.template.replies += 1
        self.template.shortened += lost
        if not i:
            return
        asked = self.unmarked(self.messages[:i], ask=True)
        given = self.unmarked(self.messages[:i])
        if asked != text[:start] and asked.startswith(given) and text.startswith(given):
            self.template.prompts[asked[len(given) :], text[len(given) : start]] += 1

    def unclear(self, i: int) -> InputError:
        return InputError(
            f"{self.template.name} does not show where message {i + 1}, a reply, begins and ends "
            "(use data.template=llama3, chatml or plain)"
        )


def without_spaces(text: str) -> str:
    return "".join(text.split())


def is_written(call: dict, written: str) -> bool:
    """Return True if a text without spaces has a call's name, and its arguments' names and texts.

    The texts may be as in JSON; numbers and the like each template writes in its own way.
    """
    function = call["function"]
    arguments = function["arguments"]
    for text in (function["name"], *arguments, *arguments.values()):
        if isinstance(text, str):
            forms = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
            if not any(without_spaces(form) in written for form in forms):
                return False
    return True


def holds_null(value: Any) -> bool:
    """Return True if an object in a value has a key that is null."""
    if isinstance(value, dict):
        return None in value.values() or any(map(holds_null, value.values()))
    return isinstance(value, list) and any(map(holds_null, value))


# --- Jinja


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


# --- choice


# template in templates/ -> tokens that a tokenizer must have
BUILT_IN = {
    "llama3": ("<|start_header_id|>", "<|eot_id|>"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "plain": (),
}


def built_in(name: str) -> ChatTemplate:
    """Return a template of templates/, which has counted no replies yet."""
    file = Path(__file__).parent / "templates" / f"{name}.jinja"
    return ChatTemplate(file.read_text(encoding="utf-8").rstrip(), BUILT_IN[name])


def choose_template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template called `name`, anew.

    `auto` is the tokenizer's own, or if it has none the first whose tokens it has. Raises
    InputError if the tokenizer lacks a token of the template.
    """
    if name == "auto" and tokenizer.chat_template:
        return ChatTemplate(tokenizer.chat_template, tokenizer=tokenizer)
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
