"""A chat as Python objects: what files are read into, and templates are given."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

NO_KEYS = MappingProxyType({})


class Message(NamedTuple):
    """A turn of a chat. more: its other keys that templates read, such as tool_calls."""

    # system, developer, user, assistant or tool
    role: str
    # None: nothing but tool calls
    content: str | None
    more: Mapping = NO_KEYS
    # a reply is to be learned
    learned: bool = True

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
