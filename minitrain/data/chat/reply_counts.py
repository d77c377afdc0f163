"""Count what a template makes of the replies of a data set, and tell what the user may not expect."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from minitrain.data.chat.messages import Message
from minitrain.data.chat.rendering import Rendering, without_spaces


@dataclass
class ReplyCounts:
    """Counts over chats, each of which is added by `add`."""

    replies: int = 0
    # replies of which the text lacks something
    shortened: int = 0
    # chats whose tools or calls have keys that are null
    with_nulls: int = 0
    # (prompt with which generation asks, prompt that stands before the reply) -> replies where they
    # differ: templates of reasoning models drop thoughts, and ask for them
    prompts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, chat: Rendering) -> None:
        calls = [message.more.get("tool_calls") for message in chat.messages]
        self.with_nulls += holds_null([chat.shown.get("tools"), calls])
        seen = 0
        for i, start, end in chat.spans:
            if i is not None:
                self.replies += 1
                # a thought may begin in the given text
                self.shortened += loses_text(chat.messages[i], chat.text[seen:end])
                self.prompts.update(other_prompt(chat, i, start))
            seen = end

    @property
    def asks(self) -> str | None:
        """Return the prompt that all replies follow, where generation has another one."""
        asked = (given for (_, given), count in self.prompts.items() if count == self.replies)
        return next(asked, None)

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


def other_prompt(chat: Rendering, i: int, start: int) -> list[tuple[str, str]]:
    """Return generation's prompt for message i and the one it follows, if they differ.

    start: where the message begins in the text. Empty if they are the same.
    """
    if not i:
        return []
    asked = chat.unmarked(chat.messages[:i], ask=True)
    given = chat.unmarked(chat.messages[:i])
    same = asked == chat.text[:start]
    if same or not (asked.startswith(given) and chat.text.startswith(given)):
        return []
    return [(asked[len(given) :], chat.text[len(given) : start])]


def loses_text(message: Message, written: str) -> bool:
    """Return True if the text of a reply lacks its content, its thought or one of its calls."""
    written = without_spaces(written)
    texts = [message.content or "", message.more.get("reasoning_content", "")]
    calls = message.more.get("tool_calls", ())
    return any(without_spaces(text) not in written for text in texts) or any(
        not is_written(call, written) for call in calls
    )


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
