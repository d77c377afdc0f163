"""The chat of a sample with its environment, turn by turn, in tokens.

Only the first turns are rendered as a whole. What an environment says later is what the template
writes between two replies: the chat is rendered with a stand-in for the last one, and all up to its
end is cut off. So what a model has said stays as it has said it, whatever the template would make
of it in a chat of the past.
"""

from typing import Any

from minitrain.data.chat.chat_templates import ChatTemplate
from minitrain.data.chat.chats import encode_pieces, encode_question
from minitrain.data.chat.messages import Message
from minitrain.data.chat.read_chats import read_turns
from minitrain.data.chat.read_tools import read_shown
from minitrain.data.chat.rendering import Rendering
from minitrain.data.chat.tool_calls import find_calls
from minitrain.data.tokenizer import Tokenizer
from minitrain.errors import InputError
from minitrain.grpo.environments import Reply

# a reply of the past, whose words no template needs to write what comes after it
SAID = "..."


class ChatDialog:
    """A Dialog (grpo/environments.py) in a chat template."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer):
        self.template = template
        self.tokenizer = tokenizer
        self.chat: list[Message] = []
        self.shown: dict = {}
        # the last reply's end, and its calls as templates know them
        self.end = ""
        self.calls: list[dict] = []

    def ask(self, messages: Any, row: dict, tools: list | None) -> list[int]:
        """Return the tokens that the first reply follows. tools: in place of the row's."""
        self.shown = read_shown(row if tools is None else row | {"tools": tools})
        self.chat = read_said(messages, "reset()")
        return encode_question(self.chat, self.template, self.tokenizer, self.shown)

    def hear(self, tokens: list[int], ended: bool) -> Reply:
        """Return a reply of these tokens. ended: the last one ends it."""
        said = tokens[:-1] if ended else tokens
        reply = Reply(self.tokenizer.decode(said))
        reply.tool_calls = find_calls(
            self.tokenizer.decode(said, special=True), self.shown.get("tools")
        )
        self.end = self.tokenizer.decode(tokens[len(said) :], special=True)
        number = len(self.chat)
        # of nine letters, as Mistral's template wants them
        self.calls = [
            {
                "id": f"call{number % 1000:03}{i % 100:02}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(reply.tool_calls)
            if call.name and call.arguments is not None
        ]
        return reply

    def tell(self, messages: Any) -> list[int]:
        """Return the tokens between the last reply, with its end, and the next one."""
        turns = read_said(messages, "step()")
        if "assistant" in {turn.role for turn in turns}:
            raise InputError("step() returned a message of the assistant, which is the policy")
        more = {"tool_calls": self.calls} if self.calls else {}
        self.chat.append(Message("assistant", "" if self.calls else SAID, more))
        self.chat += self.answering(turns)
        text = Rendering(self.template, self.chat, self.shown).after_reply()
        # GLM's replies end with the mark of the next turn
        text = text.removeprefix(self.end) if self.end else text
        # only what stands behind the end, in its context
        tokens, behind = encode_pieces([(self.end, False), (text, True)], self.tokenizer)
        return tokens[behind].tolist()

    def answering(self, turns: list[Message]) -> list[Message]:
        """Return turns of which those of tools name the calls that they answer, one after the other."""
        calls = iter(self.calls)
        named = []
        for turn in turns:
            if turn.role == "tool" and (call := next(calls, None)):
                about = {"name": call["function"]["name"], "tool_call_id": call["id"]}
                turn = turn._replace(more=about | dict(turn.more))
            named.append(turn)
        return named


def read_said(messages: Any, where: str) -> list[Message]:
    """Return the messages that an environment returned. Raises InputError for what are none."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InputError(
            f"{where} returned {messages!r:.80}, and not a list of messages with 'role' and 'content'"
        )
    return read_turns({where: list(messages)}, where)
