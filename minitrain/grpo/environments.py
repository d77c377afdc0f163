"""Environments: what a sample talks to before it ends, such as a tool, a game or a user.

    environment = Class()                                    one for each sample
    messages = environment.reset(row)                        what the first reply follows
    messages, reward, done = environment.step(response)      after each reply

Messages are a list of {"role": ..., "content": ...}. Those of `step` are from the user, the system
or a tool, and do not matter if it is done. The sample's score is the sum of its rewards. Both
methods may be coroutines, and may take their time: other samples go on meanwhile. An environment
may have `tools`, a list of their schemas, which the chat template shows; `response.tool_calls` are
the calls that a reply makes.

What an environment says is appended to the sample as the chat template would write it, up to where
the next reply begins. The sample's caches stay, so no token is computed twice. Only tokens that the
policy has drawn are learned, each with its log-probability when it was drawn.

A sample ends when its environment is done, after grpo.turns replies, or at rollout.max_tokens, all
that follows the prompt included; a reply that is cut off there is still sent. Environments run in
threads beside the sampler. A run gives the same bits again as long as all answers come within
grpo.environment_wait, for which decoding waits: else when they come decides which samples are in a
batch, and the products of batches of other sizes are rounded otherwise.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from minitrain.errors import InputError
from minitrain.user_code import load_function


class ToolCall(NamedTuple):
    """A call that a reply makes. arguments: None if `text`, what was written, has none to be read."""

    name: str
    arguments: dict | None
    text: str


class Reply(str):
    """A reply's text, without special tokens."""

    tool_calls: list[ToolCall]


class Environment(Protocol):
    """One sample's environment, see above."""

    def reset(self, row: dict) -> list[dict]: ...
    def step(self, response: Reply) -> tuple[list[dict], float, bool]: ...


class Dialog(Protocol):
    """The chat of one sample as tokens (data/chat/dialogs.py). Raises InputError for what is none."""

    def ask(self, messages: list[dict], row: dict, tools: list | None) -> list[int]:
        """Return the tokens that the first reply follows."""

    def hear(self, tokens: list[int], ended: bool) -> Reply:
        """Return a reply. ended: its last token is one that ends it."""

    def tell(self, messages: list[dict]) -> list[int]:
        """Return the tokens between the last reply, with its end, and the next one."""


class EnvironmentFactory(NamedTuple):
    """Makes what one sample needs: its environment, and its chat with it in tokens."""

    environment: Callable[[], Environment]
    dialog: Callable[[], Dialog]


def load_environment(name: str) -> Callable[[], Environment]:
    """Return what makes an environment, `package.module:Class`, else raise InputError."""
    setting = f"grpo.environment={name!r}"
    found = load_function(setting, name, {}, "empty or ")
    missing = [key for key in ("reset", "step") if not callable(getattr(found, key, None))]
    if isinstance(found, type) and missing:
        raise InputError(f"{setting} has no {missing[0]}()")
    return found
