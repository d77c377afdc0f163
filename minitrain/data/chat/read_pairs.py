"""Read a pair of chats that differ in their last replies from a line of JSON.

A line is {"prompt": ..., "chosen": ..., "rejected": ...}, as TRL has it: texts or lists of messages;
a reply may also be one message, and the prompt `messages` or `conversations`, as LLaMA-Factory and
axolotl have them, or what both lists begin with. Only what follows is learned. Tools, a system text
and masks stand beside them as in read_chats.py.
"""

from itertools import takewhile

from minitrain.data.chat.keys import CHATS, LEARNED_LINE, PROMPTS
from minitrain.data.chat.messages import Chat, Message
from minitrain.data.chat.read_chats import (
    is_learned,
    prompt_of,
    read_turns,
    usual_key,
    with_system,
    words_of,
)
from minitrain.data.faults.other_task import other_task
from minitrain.data.faults.unread_keys import UNREAD_IN_LINE, refuse_unread
from minitrain.data.faults.wording import SETTINGS
from minitrain.errors import InputError

SIDES = ("chosen", "rejected")


def read_pair(record: dict) -> list[Chat]:
    """Return the chats with the chosen and the rejected reply; the turns they share are not learned.

    Raises InputError for a line that is no such pair.
    """
    if any(record.get(key) is None for key in SIDES) and (
        other := other_task(record, SETTINGS, "chat", "document")
    ):
        raise InputError(f"{other} (a pair has 'chosen' and 'rejected')")
    beside = {key: value for key, value in record.items() if key not in SIDES}
    refuse_unread(beside, UNREAD_IN_LINE, "the messages")
    asked = read_prompt(beside)
    pair = []
    for key in SIDES:
        turns = read_reply(record, key, asked)
        # some data sets repeat the prompt here
        if turns[: len(asked)] != asked:
            turns = asked + turns
        pair.append(with_system(turns, record))
    alike = takewhile(lambda turns: turns[0] == turns[1], zip(*pair, strict=False))
    shared = len(list(alike))
    if pair[0] == pair[1]:
        raise InputError("'chosen' and 'rejected' are the same, so nothing is to be learned")
    for key, turns in zip(SIDES, pair, strict=True):
        if not any(turn.role == "assistant" for turn in turns[shared:]):
            raise InputError(f"{key!r} has no reply of its own beside the other's")
    if not is_learned(beside, LEARNED_LINE):
        shared = max(map(len, pair))
    marked = []
    for chat in pair:
        before = [turn._replace(learned=False) for turn in chat[:shared]]
        marked.append(before + chat[shared:])
    return marked


def read_prompt(record: dict) -> Chat:
    """Return the messages before both replies; none where the replies' lists hold them."""
    key = usual_key(record, PROMPTS + CHATS)
    if key is None or not record[key]:
        return []
    if isinstance(record[key], list):
        refuse_unread(record, ["context"], "the messages")
        return read_turns(record, key)
    return [Message("user", prompt_of(record, key))]


def read_reply(record: dict, key: str, asked: Chat) -> Chat:
    """Return the messages of a list, or one of a text that answers what is `asked`."""
    if isinstance(record.get(key), dict):
        record = {key: [record[key]]}
    if isinstance(record.get(key), list):
        return read_turns(record, key)
    reply = Message("assistant", words_of(record, key))
    if not asked:
        raise InputError(f"{key!r} is a text, and there is no 'prompt' that it answers")
    return [reply]
