"""Read a prompt and its right answer from a line of JSON.

Each has one of its usual names (those of GSM8K, OpenMathInstruct-2, DAPO-Math-17k and their like).
Or the line has a chat whose last message is the assistant's answer.
"""

import json
from collections.abc import Sequence

from minitrain.data.chat.keys import LEARNED_LINE, PROMPTS
from minitrain.data.chat.messages import Chat, Message
from minitrain.data.chat.read_chats import (
    chat_key,
    prompt_of,
    read_turns,
    usual_key,
    with_system,
    words_of,
)
from minitrain.data.faults.other_task import other_task
from minitrain.data.faults.unread_keys import UNREAD_IN_LINE, refuse_unread
from minitrain.data.faults.wording import SETTINGS, Wording
from minitrain.data.records import Number
from minitrain.errors import InputError

# keys of an answer, of which the first that holds something counts
ANSWERS = (
    "expected_answer",
    "answer",
    "ground_truth",
    "solution",
    "response",
    "output",
    "completion",
)


def read_problem(row: dict, prompt_key: str, answer_key: str) -> tuple[Chat, str]:
    """Return the messages and the answer of a line.

    An empty key stands for the first usual name that holds something.
    """
    chat = chat_key(row)
    if 0 in (row.get(key) for key in LEARNED_LINE):
        raise InputError("the line is not to be learned (remove it)")
    turns, last = read_question(row, prompt_key)
    if chat is None or prompt_key:
        return turns, answer_of(row, answer_key)
    if not turns or last is None:
        raise InputError(
            f"{chat!r} must end with the assistant's answer to what comes before (if all of it is the prompt, "
            f"say so: grpo.prompt_key={chat})"
        )
    if not last.learned:
        raise InputError(f"the last message of {chat!r} is masked, but it is the answer")
    answer = words_of(last.as_dict(), "content")
    return turns, answer_of(row, answer_key) if answer_key else answer


def read_question(
    row: dict, key: str = "", words: Wording = SETTINGS
) -> tuple[Chat, Message | None]:
    """Return the messages that a reply is to follow, and the line's own reply if it ends a chat.

    key: of the prompt; without one it is a chat's beginning, or under the first usual name that
    holds something. Raises InputError for what the model should be shown, and would not.
    """
    refuse_unread(row, UNREAD_IN_LINE, "the prompt")
    chat = chat_key(row)
    last = None
    if chat is None or key:
        turns = read_prompt(row, key, words)
    else:
        refuse_unread(row, ["context"], "the messages")
        turns = read_turns(row, chat)
        if turns and turns[-1].role == "assistant":
            *turns, last = turns
    return with_system(turns, row), last


def read_prompt(row: dict, key: str, words: Wording) -> Chat:
    """Return a prompt's messages: text, which is the user's, or a list. key: see `read_problem`."""
    name = key or usual_name(row, PROMPTS, "prompt", words)
    if isinstance(row.get(name), list):
        refuse_unread(row, ["context"], "the messages")
        turns = read_turns(row, name)
        if not turns:
            raise InputError(f"{name!r} is empty")
        return turns
    return [Message("user", words_of(row, key) if key else prompt_of(row, name))]


def answer_of(row: dict, key: str) -> str:
    """Return the answer as text, a number with the digits it has there.

    DAPO-Math-17k has it in `reward_model`.
    """
    row = row | (row["reward_model"] if isinstance(row.get("reward_model"), dict) else {})
    name = key or usual_name(row, ANSWERS, "answer", SETTINGS)
    value = row.get(name)
    if isinstance(value, Number):
        return value.digits()
    return json.dumps(value) if isinstance(value, int) else words_of(row, name)


def usual_name(row: dict, names: Sequence[str], what: str, words: Wording) -> str:
    found = usual_key(row, names)
    if found is None:
        if other := other_task(row, words, "pair", "document"):
            raise InputError(f"{other} (a problem has a prompt and an answer)")
        known = ", ".join(names)
        raise InputError(f"no {what} (one of {known}{words.key.format(what)})")
    return found
