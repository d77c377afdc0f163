"""Read the messages of a line of JSON, in the layouts that data sets of the hub have.

`read_messages` is for fine-tuning; read_pairs.py and read_problems.py read what the other tasks
need with the same parts. What a line has beside its messages is read by read_tools.py.
"""

import json
from collections.abc import Sequence

from minitrain.data.chat.keys import (
    CHATS,
    LEARNED_LINE,
    LEARNED_MESSAGE,
    PROMPTS,
    RESPONSES,
    SHAREGPT_ROLES,
    SYSTEMS,
    THOUGHTS,
)
from minitrain.data.chat.messages import Chat, Message
from minitrain.data.chat.read_tools import read_calls
from minitrain.data.faults.other_task import other_task
from minitrain.data.faults.unread_keys import (
    UNREAD_BESIDE_MESSAGES,
    UNREAD_BESIDE_PROMPT,
    UNREAD_IN_MESSAGE,
    masks,
    refuse_unread,
)
from minitrain.data.faults.wording import SETTINGS, Wording
from minitrain.data.records import text_of
from minitrain.errors import InputError, located


def read_messages(record: dict, words: Wording = SETTINGS) -> Chat:
    """Return the messages of one JSON object.

    `messages` with `role` and `content` each, or `conversations` with `from` and `value`; or
    `context`, `question` and `answers` as in SQuAD, of which the first answer counts; or a prompt
    and a response, under one of the usual keys. The system's text may stand beside them. Keys about
    what is shown to the model or learned are refused where they would be lost; others are ignored.
    Raises InputError for anything else.
    """
    learned = is_learned(record, LEARNED_LINE)
    for key in ("label", "kto_tag", "desirable"):
        if record.get(key) is False:
            raise InputError(f"{key!r} is false, as of KTO's bad replies (remove the line)")
    turns = with_system(read_layout(record, words), record)
    return turns if learned else [turn._replace(learned=False) for turn in turns]


def read_layout(record: dict, words: Wording) -> Chat:
    """Return a line's messages, or those of its prompt and response; without a system's text beside."""
    if chat := chat_key(record):
        refuse_unread(record, UNREAD_BESIDE_MESSAGES, "the messages")
        turns = read_turns(record, chat)
        if not any(turn.role == "assistant" for turn in turns):
            raise InputError(f"{chat!r} has no message of the assistant, so nothing to learn")
        return turns
    if "context" in record and record.get("answers"):
        refuse_unread(record, UNREAD_BESIDE_PROMPT, "the question")
        asked, answer = read_squad(record)
    else:
        prompt = usual_key(record, PROMPTS)
        response = usual_key(record, RESPONSES)
        if prompt is None or response is None:
            raise InputError(
                other_task(record, words, "document")
                or "neither 'messages', nor 'context', 'question' and 'answers', nor a prompt (one of "
                f"{', '.join(PROMPTS)}) with a response (one of {', '.join(RESPONSES)})"
            )
        asked = prompt_of(record, prompt)
        answer = words_of(record, response)
    return [Message("user", asked), Message("assistant", answer, thought_of(record))]


def usual_key(record: dict, names: Sequence[str]) -> str | None:
    """Return the first of `names` that holds something, else one that is empty but not null."""
    there = [name for name in names if record.get(name) is not None]
    filled = [name for name in there if record[name] not in ("", [])]
    return next(iter(filled + there), None)


def chat_key(record: dict) -> str | None:
    """Return the key of the messages, None where the line is of another layout."""
    key = usual_key(record, CHATS)
    return key if key and (record[key] or usual_key(record, PROMPTS) is None) else None


def is_learned(record: dict, keys: Sequence[str]) -> bool:
    """Return false if one of `keys` is 0 or false. Raises InputError for other ways to mask."""
    for key, value in record.items():
        if key not in keys and masks(key, value):
            shown = json.dumps(value)
            raise InputError(f"{key!r} is {shown} (mask a whole reply by 'train': false)")
    given = {key: record[key] for key in keys if record.get(key) not in (None, "")}
    for key, value in given.items():
        if value not in (0, 1):
            message = f"{key!r} is {json.dumps(value)}, but a reply is learned or not"
            raise InputError(f"{message} (1 and true, or 0 and false)")
    return all(given.values())


def with_system(turns: Chat, record: dict) -> Chat:
    """Return the turns, begun by the system's text beside them (OpenOrca, ShareGPT)."""
    key = usual_key(record, SYSTEMS)
    if key is None or not record[key]:
        return turns
    system = Message("system", text_of(record, key))
    if not any(turn.role == "system" for turn in turns):
        return [system, *turns]
    if system not in turns:
        raise InputError(f"{key!r} and a message of the system say different things (keep one)")
    return turns


def prompt_of(record: dict, key: str) -> str:
    """Return the text of a prompt.

    It may have a `context` (Dolly), an `instruction` also an `input` (Alpaca).
    """
    beside = ("input", "context") if key == "instruction" else ("context",)
    unread = UNREAD_BESIDE_PROMPT
    if key not in ("instruction", "input"):
        unread = (*unread, "input")
    refuse_unread(record, unread, "the prompt")
    texts = [text_of(record, name) for name in beside if record.get(name)]
    return "\n".join([words_of(record, key), *texts])


def read_turns(record: dict, key: str) -> Chat:
    """Return the messages of a list of objects; users and replies must say something."""
    turns = record[key]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise InputError(f"{key!r} must be a list of objects with 'role' and 'content'")
    messages = []
    for number, turn in enumerate(turns):
        with located(f"{key!r}[{number}]"):
            messages.append(read_turn(turn))
    return messages


def read_turn(turn: dict) -> Message:
    sender, content = ("from", "value") if turn.get("from") else ("role", "content")
    given = text_of(turn, sender)
    role = SHAREGPT_ROLES.get(given, given)
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise InputError(f"the role {given!r} is not system, developer, user, assistant or tool")
    refuse_unread(turn, UNREAD_IN_MESSAGE, repr(content))
    if isinstance(turn.get(content), list):
        turn = turn | {content: text_of_parts(turn[content])}
    more = thought_of(turn)
    if calls := read_calls(turn):
        if role != "assistant":
            raise InputError(f"the role {given!r} calls tools, as only the assistant does")
        more["tool_calls"] = calls
    if role == "tool":
        more |= {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key)}
    else:
        refuse_unread(turn, ["name"], repr(content))
    text = None
    if turn.get(content) is not None or not calls:
        read = text_of if calls or role in ("system", "tool") else words_of
        text = read(turn, content)
    return Message(role, text, more, role != "assistant" or is_learned(turn, LEARNED_MESSAGE))


def thought_of(record: dict) -> dict:
    """Return the text of a thought by the name that most templates know."""
    key = usual_key(record, THOUGHTS)
    return {"reasoning_content": text_of(record, key)} if key and record[key] else {}


def text_of_parts(content: list) -> str:
    """Return the text of content in parts."""
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type", "text") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InputError(f"part {number} of its content is {kind!r}, not text")
    return "".join(text_of(part, "text") for part in content)


def words_of(record: dict, key: str) -> str:
    """Return text that is not blank. Raises InputError for all else."""
    text = text_of(record, key)
    if not text.strip():
        raise InputError(f"{key!r} is empty")
    return text


def read_squad(record: dict) -> tuple[str, str]:
    """Return question and answer of NeMo's and Megatron's SQuAD tables. Rajpurkar et al. 2016."""
    answer = record["answers"]
    answer = answer.get("text") if isinstance(answer, dict) else answer
    answer = answer[0] if isinstance(answer, list) and answer else None
    answer = answer.get("text") if isinstance(answer, dict) else answer
    if not isinstance(answer, str) or not answer.strip():
        raise InputError("'answers' must hold a text, as in SQuAD 1.1: {'text': ['...']}")
    context = text_of(record, "context")
    question = text_of(record, "question")
    return f"Context: {context} Question: {question} Answer:", answer
