"""A tokenizer that knows its model's chats: what `minitrain.load_tokenizer` returns."""

from functools import cached_property
from pathlib import Path

from minitrain.data import tokenizer
from minitrain.data.byte_tokenizer import ByteTokenizer
from minitrain.data.chat.chat_templates import ChatTemplate, choose_template
from minitrain.data.chat.chats import encode_question, end_of_reply
from minitrain.data.chat.read_chats import read_turns


class WithChats:
    """Adds `encode_chat` to a tokenizer, by its own chat template or the first that fits it."""

    @cached_property
    def template(self) -> ChatTemplate:
        return choose_template("auto", self)

    @cached_property
    def reply_ends(self) -> tuple[int, ...]:
        end = end_of_reply(self.template, self)
        return () if end is None else (end,)

    def encode_chat(self, messages: list[dict]) -> tuple[list[int], tuple[int, ...]]:
        """Return the tokens that a reply to messages follows, and those that end a reply.

        messages: as a line of training data has them, {"role": ..., "content": ...} each. Raises
        InputError for what the model would not be shown.
        """
        turns = read_turns({"messages": messages}, "messages")
        return encode_question(turns, self.template, self), self.reply_ends


class ByteChatTokenizer(WithChats, ByteTokenizer):
    pass


class HuggingFaceChatTokenizer(WithChats, tokenizer.HuggingFaceTokenizer):
    pass


def load_tokenizer(name_or_path: str | Path) -> ByteChatTokenizer | HuggingFaceChatTokenizer:
    """Return "bytes", a tokenizer.json, or the one of a folder, with its chat template."""
    return tokenizer.load_tokenizer(name_or_path, ByteChatTokenizer, HuggingFaceChatTokenizer)
