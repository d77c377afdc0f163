"""Render a chat by its template, as text that is cut where a reply begins and ends.

Replies are what the template marks by {% generation %}. In a template without marks they are found
by rendering the chat again with another reply: any template will do that writes a reply behind its
generation prompt and ends it with a token of its own. Left out: images, and the date (a row must be
the same tomorrow).
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import accumulate, chain
from os.path import commonprefix
from typing import NamedTuple

from minitrain.data.chat.chat_templates import ChatTemplate
from minitrain.data.chat.jinja import ALL_MARKS, BEGINNING, DONE, EOS, MARKS
from minitrain.data.chat.messages import NO_KEYS, Chat, Message, WrittenArguments
from minitrain.errors import InputError

# key -> pattern that a template must have to support it, if not the key itself; empty: any template
KEY_PATTERNS = {"reasoning_content": "reasoning_content|thinking", "name": "", "tool_call_id": ""}
PLACEHOLDER = "\ue000a reply\ue000"


class Span(NamedTuple):
    """A reply in the text of a chat, with the token that ends it."""

    # the index of its message; None if it is not known
    message: int | None
    start: int
    end: int


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
        written = json.dumps([*messages, dict(shown)], ensure_ascii=False, default=dict)
        if mark := ALL_MARKS.search(written):
            raise InputError(
                f"its text holds U+{ord(mark[0]):04X}, which Unicode keeps for programs (remove it)"
            )

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yield the text in pieces, each with whether the model is to say it."""
        text = self.text
        seen = 0
        for i, start, end in self.spans:
            yield text[seen:start], False
            yield text[start:end], i is None or self.messages[i].learned
            seen = end
        yield text[seen:], False

    @cached_property
    def text(self) -> str:
        """Return the text of the chat, which shows all turns."""
        text = "".join(self.parts)
        self.check_all_shown(text)
        return text

    @cached_property
    def parts(self) -> list[str]:
        """Return the text of the chat, cut at the template's marks: given, a reply, given, ..."""
        return MARKS.split(self.render(self.messages))

    @cached_property
    def spans(self) -> list[Span]:
        """Return where the text has a reply, for each of them."""
        return list(self.marked_replies() or self.probed_replies())

    def marked_replies(self) -> list[Span]:
        """Return each reply that the template marks.

        The messages are None where their number is not that of the replies; then all must be learned.
        """
        borders = list(accumulate(map(len, self.parts)))
        spans = list(zip(borders[::2], borders[1::2], strict=False))
        numbers = self.replies
        if spans and len(spans) != len(numbers):
            if not all(self.messages[i].learned for i in numbers):
                raise self.unclear(numbers[0])
            numbers = [None] * len(spans)
        return [Span(i, *span) for i, span in zip(numbers, spans, strict=False)]

    def probed_replies(self) -> Iterator[Span]:
        """Yield each reply that is found by rendering the chat with another one in its place."""
        seen = 0
        for i in self.replies:
            start, seen = self.find_reply(i, seen)
            yield Span(i, start, seen)

    def find_reply(self, i: int, seen: int) -> tuple[int, int]:
        """Return where in the text message i begins and, with its end token, ends.

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
            if end and self.text.endswith(after[0][end.start() if probe.more else 0 :]):
                break
            problem = self.unclear(i)
        else:
            raise problem
        start = self.start_of_reply(i, seen, before) if i else len(before)
        end = len(self.text) - len(after[0]) + end.end()
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
            return self.template.added_token.search(after)
        # tokens may end parts of calls: the last one before the next message counts
        alone = self.unmarked([*self.messages[:i], probe]).partition(PLACEHOLDER)[2]
        end = max(self.template.added_token.finditer(alone), key=re.Match.end, default=None)
        return end if end and after.startswith(alone[: end.end()]) else None

    def start_of_reply(self, i: int, seen: int, before: str) -> int:
        """Return where message i begins. before: the probe's text up to what the reply says."""
        text = self.text
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
        tokens = (
            m for whole in (turn, prompt) for m in self.template.added_token.finditer(whole)
        )
        return begin + min(size, *(m.start() for m in tokens if m.end() > size))

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

    @property
    def replies(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message.role == "assistant"]

    def render(self, messages: Chat, ask: bool = False) -> str:
        """Return the text of messages, with marks around replies where the template has some."""
        template = self.template.compiled
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

    def check_all_shown(self, text: str) -> None:
        """Raise InputError if the text leaves a turn out. Tools' answers may be written otherwise."""
        written = without_spaces(text)
        for i, (role, content, *_) in enumerate(self.messages):
            if role not in ("assistant", "tool") and without_spaces(content) not in written:
                raise InputError(f"{self.template.name} leaves out message {i + 1}, the {role}'s")

    def unclear(self, i: int) -> InputError:
        return InputError(
            f"{self.template.name} does not show where message {i + 1}, a reply, begins and ends "
            "(use data.template=llama3, chatml or plain)"
        )


def without_spaces(text: str) -> str:
    return "".join(text.split())
