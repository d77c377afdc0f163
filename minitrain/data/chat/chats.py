"""Chats as tokens: a line of JSON -> messages -> the text of a chat template -> tokens and labels.

A model should learn to answer, not to ask: only the assistant's turns are predicted, each with the
token that ends it. A turn is tokenized apart from what stands before it, just as it follows the
prompt when the model generates. Text in a message that spells a special token becomes that token,
as it does in transformers.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from minitrain.data.chat.chat_templates import (
    BEGINNING,
    EOS,
    NO_KEYS,
    Chat,
    ChatTemplate,
    Message,
    Rendering,
    WrittenArguments,
)
from minitrain.data.chat.keys import (
    ARGUMENTS,
    CHATS,
    LEARNED_LINE,
    LEARNED_MESSAGE,
    MASKS,
    MASKS_WHERE_0,
    PROMPTS,
    RESPONSES,
    SHAREGPT_ROLES,
    SHOWN,
    SYSTEMS,
    THOUGHTS,
    UNREAD_BESIDE_MESSAGES,
    UNREAD_BESIDE_PROMPT,
    UNREAD_IN_MESSAGE,
)
from minitrain.data.faults.wording import SETTINGS, Wording
from minitrain.data.records import other_task, text_of
from minitrain.data.sample import Sample
from minitrain.data.tokenizer import LONGEST_TOKEN, Tokenizer, encode_after
from minitrain.errors import InputError, located
from minitrain.training.loss import IGNORE


def encode_chat(
    messages: Chat, template: ChatTemplate, tokenizer: Tokenizer, shown: Mapping = NO_KEYS
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a chat, int64 [n], and which of them the model is to say, bool [n].

    shown: what the template sees beside the messages, as from `read_shown`. Raises InputError for
    what the template does not take.
    """
    return encode_pieces(Rendering(template, messages, shown).pieces(), tokenizer)


def encode_question(
    messages: Chat, template: ChatTemplate, tokenizer: Tokenizer, shown: Mapping = NO_KEYS
) -> list[int]:
    """Return the tokens that a reply to `messages` follows. Raises InputError likewise."""
    text = Rendering(template, messages, shown).question()
    return encode_pieces([(text, False)], tokenizer)[0].tolist()


def end_of_reply(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the token that ends a reply; None if the template does not show where one ends."""
    try:
        chat = [Message("user", "?"), Message("assistant", "!")]
        tokens, said = encode_chat(chat, template, tokenizer)
    except InputError:
        return None
    return int(tokens[said][-1])


def encode_pieces(pieces: Iterable, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of pieces of text, int64 [n], and which the model is to say, bool [n]."""
    tokens = []
    said = []
    before = ""
    for text, is_reply in pieces:
        ids = []
        for part in re.split(f"([{BEGINNING}{EOS}])", text):
            if part == BEGINNING:
                # without eos, which some tokenizers put behind a whole text
                ids += tokenizer.beginning_ids
            elif part == EOS:
                ids.append(tokenizer.eos_id)
                before = "\n"
            else:
                ids += encode_after(before, part, tokenizer.encode)
                before = (before + part)[-LONGEST_TOKEN:]
        tokens += ids
        said += [is_reply] * len(ids)
    return np.array(tokens, np.int64), np.array(said, bool)


def make_sample(tokens: np.ndarray, said: np.ndarray) -> Sample:
    """Return the sample of an encoded chat. The very first token cannot be predicted."""
    labels = np.where(said[1:], tokens[1:], IGNORE)
    stop = int(np.flatnonzero(said).max(initial=0))
    return Sample(tokens[:stop], labels[:stop])


def split_reply(sample: Sample) -> tuple[list[int], list[int]]:
    """Split a sample before its last reply. Returns the tokens of both sides."""
    predicted = sample.labels != IGNORE
    start = len(predicted) - int(np.argmin(np.append(predicted[::-1], False)))
    return sample.tokens[: start + 1].tolist(), sample.labels[start:].tolist()


# --- lines of files


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
    turns = with_system(_read_layout(record, words), record)
    return turns if learned else [turn._replace(learned=False) for turn in turns]


def read_shown(record: dict) -> dict:
    """Return what a template is shown beside the messages of a line: tools and other variables.

    tools, documents: lists of objects. enable_thinking: a variable that verl reads there.
    chat_template_kwargs: variables by name. Raises InputError for anything else.
    """
    shown = {key: record.get(key) for key in SHOWN[:3]}
    more = read_value(record, "chat_template_kwargs", dict) or {}
    shown = {key: value for key, value in (shown | more).items() if value is not None}
    for key in shown.keys() & {"tools", "documents"}:
        shown[key] = read_objects(shown, key) or None
    if shown.get("tools"):
        shown["tools"] = [read_tool(tool) for tool in shown["tools"]]
    return {key: value for key, value in shown.items() if value is not None}


def read_objects(record: dict, key: str) -> list[dict]:
    """Return a list of objects. It, and each of them, may be written as JSON in a text.

    So data sets hold objects of different keys in one table. An empty list is one of nothing.
    """
    items = []
    for item in read_value(record, key, list) or []:
        with suppress(ValueError):
            item = json.loads(item) if isinstance(item, str) else item
        if not isinstance(item, dict):
            written = json.dumps(item, ensure_ascii=False)
            raise InputError(f"{key!r} is not supported with {written} in it (a list of objects)")
        items.append(item)
    return items


def read_tool(tool: dict) -> dict:
    """Return a tool whose function, and whose parameters, may be written as JSON in texts."""
    for key in ("function", "parameters", "input_schema"):
        if tool.get(key) and isinstance(tool[key], str):
            tool = tool | {key: read_value(tool, key, dict)}
    if isinstance(tool.get("function"), dict):
        tool = tool | {"function": read_tool(tool["function"])}
    return tool


def read_value(record: dict, key: str, kind: type) -> Any:
    """Return a list or an object, which may be written as JSON in a text; None if it is empty."""
    value = record.get(key)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InputError(f"{key!r} is a text that is not valid JSON: {error}") from None
    if value and not isinstance(value, kind):
        raise InputError(f"{key!r} must be a {kind.__name__}, not {type(value).__name__}")
    return value or None


def _read_layout(record: dict, words: Wording) -> Chat:
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


def refuse_unread(record: dict, keys: Sequence[str], place: str) -> None:
    """Raise InputError for what the model should see or say, and would not."""
    for key in keys:
        if record.get(key):
            raise InputError(f"{key!r} is not supported (write it into {place}, or remove it)")


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


def masks(key: str, value: Any) -> bool:
    """Return True if a key says that something is not learned, in another way than `is_learned` reads."""
    if key in MASKS:
        return bool(value)
    values = value if isinstance(value, list) else [value]
    # a loss of 0.0 is a score
    is_score = key == "loss" and isinstance(value, float)
    return key in MASKS_WHERE_0 and 0 in values and not is_score


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


def read_calls(turn: dict) -> list[dict]:
    """Return a turn's tool calls as OpenAI's interface has them.

    The arguments may have another name, or stand beside the function. Raises InputError for a call
    without any: one that needs none says {}.
    """
    found = []
    for call in read_objects(turn, "tool_calls"):
        function = read_value(call, "function", dict) or call
        if not function.get("name"):
            raise InputError(
                "'tool_calls' must be a list of objects with 'function': {'name': ...}"
            )
        arguments = arguments_of(call, function)
        around = {} if function is call else without(call, ARGUMENTS)
        function = without(function, ("function", *ARGUMENTS)) | {"arguments": arguments}
        found.append({"type": "function"} | around | {"function": function})
    return found


def arguments_of(call: dict, function: dict) -> dict:
    """Return the arguments of a call. Raises InputError where two places have different ones."""
    where = f"the call of {function['name']!r}"
    places = [(part, key) for part in (function, call) for key in ARGUMENTS]
    given = [read_arguments(part, key) for part, key in places if part.get(key) is not None]
    if not given:
        raise InputError(
            f"{where} has no key 'arguments' (a call without arguments says 'arguments': {{}})"
        )
    filled = [arguments for arguments in given if arguments]
    if any(arguments != filled[0] for arguments in filled):
        raise InputError(f"{where} has two different sets of arguments (keep 'arguments')")
    return (filled or given)[0]


def read_arguments(part: dict, key: str) -> dict:
    arguments = read_value(part, key, dict) or {}
    return WrittenArguments(arguments, part[key]) if isinstance(part[key], str) else arguments


def without(record: dict, keys: Sequence[str]) -> dict:
    return {key: value for key, value in record.items() if key not in keys}


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
