"""Chats as tokens: a line of JSON -> messages -> the text of a chat template -> tokens, and which
of them are trained.

A model should learn to answer, not to ask: only the assistant's turns are predicted, each with the
token that ends it. A turn is tokenised apart from what stands before it, just as it follows the
prompt when the model generates. Text in a message that spells a special token becomes that token,
as it does in transformers.
"""

import json
from typing import Any, NamedTuple

import numpy as np

from minitrain.data.chat_templates import ChatTemplate, Message, Pieces
from minitrain.data.text import text_of
from minitrain.data.tokenizer import Tokenizer
from minitrain.errors import InputError, located
from minitrain.training.loss import IGNORE

LONGEST_TOKEN = 64  # characters of what precedes a text, which its first token can depend on


class Sample(NamedTuple):
    """What a model reads and what it predicts there. tokens: int64 [n]; labels: int64 [n], IGNORE
    or the next token.

    It ends where the last label is predicted: what comes after that token would teach nothing.
    """

    tokens: np.ndarray
    labels: np.ndarray


def encode_chat(
    messages: list[Message], template: ChatTemplate, tokenizer: Tokenizer, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a chat, int64 [n], and which of them the model is to say, bool [n].

    Raises InputError, which begins with `where`, for what the template does not take.
    """
    with located(where):
        return encode_pieces(template.pieces(messages), template, tokenizer)


def encode_question(
    messages: list[Message], template: ChatTemplate, tokenizer: Tokenizer, where: str
) -> list[int]:
    """The tokens that a reply to `messages` follows; raises InputError likewise."""
    with located(where):
        return encode_pieces(template.question(messages), template, tokenizer)[0].tolist()


def end_of_reply(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The token that ends a reply; None of a template that does not show where one ends."""
    try:
        tokens, said = encode_pieces(
            template.pieces([Message("user", "?"), Message("assistant", "!")]), template, tokenizer
        )
    except InputError:
        return None
    return int(tokens[said][-1])


def encode_pieces(
    pieces: Pieces, template: ChatTemplate, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    tokens = []
    said = []
    before = ""
    for text, is_reply in pieces:
        ids = encode_after(before, text, tokenizer)
        if (
            template.begin_with_bos and not tokens
        ):  # but not with what some put behind a whole text, such as eos
            ids = [*tokenizer.beginning_ids, *ids]
        before = (before + text)[-LONGEST_TOKEN:]
        if is_reply and template.reply_ends_with_eos:
            ids = [*ids, tokenizer.eos_id]
            before = "\n"
        tokens += ids
        said += [is_reply] * len(ids)
    return np.array(tokens, np.int64), np.array(said, bool)


def encode_after(before: str, text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of `text`, where `before` precedes it: many vocabularies add a space at the start
    of a whole text.

    Where both share a token, that of `text` alone.
    """
    context = tokenizer.encode(before)
    whole = tokenizer.encode(before + text)
    return whole[len(context) :] if whole[: len(context)] == context else tokenizer.encode(text)


def make_sample(tokens: np.ndarray, said: np.ndarray) -> Sample:
    """The sample of an encoded chat. The very first token cannot be predicted."""
    labels = np.where(said[1:], tokens[1:], IGNORE)
    stop = int(np.flatnonzero(said).max(initial=0))
    return Sample(tokens[:stop], labels[:stop])


def split_reply(sample: Sample) -> tuple[list[int], list[int]]:
    """A sample as what is given before the last reply, and that reply with its end, both as
    tokens.
    """
    predicted = sample.labels != IGNORE
    start = len(predicted) - int(np.argmin(np.append(predicted[::-1], False)))
    return sample.tokens[: start + 1].tolist(), sample.labels[start:].tolist()


# ------------------------------------------------------------------------------------------------------ lines of files

CHATS = ("messages", "conversations")
PROMPTS = ("prompt", "instruction", "question", "problem", "query", "input")
RESPONSES = (
    "response",
    "completion",
    "output",
    "answer",
    "solution",
    "generated_solution",
    "expected_answer",
)
SYSTEMS = ("system", "system_prompt", "system_message", "system_instruction")
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names for them

# Keys of a line, of a prompt and of a message that templates and other trainers show to the model
# or have it say.
SHOWN = (
    "tools",
    "functions",
    "documents",
    "images",
    "image",
    "videos",
    "video",
    "audios",
    "audio",
    "chat_template_kwargs",
)
SHOWN_WITH_PROMPT = ("history", "document", "contexts", "passages", "passage", "choices", "options")
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")
SHOWN_IN_MESSAGE = (
    *SHOWN,
    *THOUGHTS,
    "tool_calls",
    "function_call",
    "tool_call_id",
    "name",
    "channel",
    "recipient",
)
# Keys that say of a line or a reply that it is learned less than others: by another value than 1,
# or by any.
LEARNED = (
    "train",
    "trainable",
    "weight",
    "loss_weight",
    "loss_mask",
    "sample_weight",
    "desirable",
    "kto_tag",
)
LEARNED_IN_MESSAGE = (*LEARNED, "training", "loss", "step_loss_mask")
MASKED = (
    "mask",
    "masked",
    "is_masked",
    "completion_mask",
    "ignore",
    "train_detail",
    "token_weights",
)


def read_messages(record: dict[str, Any], where: str) -> list[Message]:
    """Return the messages of one JSON object.

    `messages` with `role` and `content` each, or `conversations` with `from` and `value`; or
    `context`, `question` and `answers` as in SQuAD, of which the first answer counts; or a prompt
    and a response, under the first of `PROMPTS` and of `RESPONSES` that holds something. What the
    system says may stand beside them, under one of `SYSTEMS`. Keys that say what is shown to the
    model or learned are refused where they would be lost; others are ignored. Raises InputError,
    which begins with `where`, for anything else.
    """
    refuse_masked(record, LEARNED, where)
    if record.get("label") is False:
        raise InputError(
            f"{where}: 'label' is false, as of KTO's bad replies, but all are learned (remove the line)"
        )
    if chat := chat_key(record):
        refuse_shown(record, (*SHOWN, "context"), "the messages", where)
        turns = read_turns(record[chat], f"{where}: {chat!r}")
        if not any(turn.role == "assistant" for turn in turns):
            raise InputError(
                f"{where}: {chat!r} has no message of the assistant, so nothing to learn"
            )
        for number, (turn, given) in enumerate(zip(turns, record[chat], strict=True)):
            if turn.role == "assistant":
                refuse_masked(given, LEARNED_IN_MESSAGE, f"{where}: {chat!r}[{number}]")
        return with_system(turns, record, where)
    if "context" in record and record.get("answers"):
        refuse_shown(record, (*SHOWN, *SHOWN_WITH_PROMPT, *THOUGHTS), "the question", where)
        return with_system(read_squad(record, where), record, where)
    prompt = usual_key(record, PROMPTS)
    response = usual_key(record, RESPONSES)
    if prompt is None or response is None:
        raise InputError(
            f"{where}: neither 'messages', nor 'context', 'question' and 'answers', nor a prompt (one of "
            f"{', '.join(PROMPTS)}) with a response (one of {', '.join(RESPONSES)})"
        )
    refuse_shown(record, THOUGHTS, "the response", where)
    turns = [
        Message("user", prompt_of(record, prompt, where)),
        Message("assistant", words_of(record, response, where)),
    ]
    return with_system(turns, record, where)


def usual_key(record: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """Return the first of `names` that holds something, else one that is empty but there: null is
    not.
    """
    there = [name for name in names if record.get(name) is not None]
    return next((name for name in there if record[name] not in ("", [])), next(iter(there), None))


def chat_key(record: dict[str, Any]) -> str | None:
    """Return the key of the messages, None where the line is of another layout."""
    key = usual_key(record, CHATS)
    return key if key and (record[key] or usual_key(record, PROMPTS) is None) else None


def refuse_shown(record: dict[str, Any], keys: tuple[str, ...], place: str, where: str) -> None:
    """Raise InputError for what the model should see or say, and would not."""
    for key in keys:
        if record.get(key):
            raise InputError(
                f"{where}: {key!r} is not supported (write it into {place}, or remove it)"
            )


def refuse_masked(record: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    """Raise InputError for what is not to be learned, or only in part."""
    for key in (*keys, *MASKED):
        value = record.get(key)
        if value not in (None, "", 1) if key in keys else value:
            raise InputError(
                f"{where}: {key!r} is {json.dumps(value)}, but all replies are learned (remove it)"
            )


def with_system(turns: list[Message], record: dict[str, Any], where: str) -> list[Message]:
    """Return the turns, begun by what the system says beside them (OpenOrca, ShareGPT)."""
    key = usual_key(record, SYSTEMS)
    if key is None or not record[key]:
        return turns
    system = Message("system", text_of(record, key, where))
    if not any(turn.role == "system" for turn in turns):
        return [system, *turns]
    if system not in turns:
        raise InputError(
            f"{where}: {key!r} and a message of the system say different things (keep one)"
        )
    return turns


def prompt_of(record: dict[str, Any], key: str, where: str) -> str:
    """Return the text of a prompt. It may have a `context` (Dolly), an `instruction` also an
    `input` (Alpaca).
    """
    beside = ("input", "context") if key == "instruction" else ("context",)
    refuse_shown(record, (*SHOWN, *SHOWN_WITH_PROMPT), "the prompt", where)
    if key not in ("instruction", "input"):
        refuse_shown(record, ("input",), "the prompt", where)
    texts = [
        words_of(record, key, where),
        *(text_of(record, name, where) for name in beside if record.get(name)),
    ]
    return "\n".join(texts)


def read_turns(turns: Any, where: str) -> list[Message]:
    """The messages of a list of objects; all but the system's must say something."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise InputError(f"{where} must be a list of objects with 'role' and 'content'")
    messages = []
    for number, turn in enumerate(turns):
        names = ("from", "value") if turn.get("from") else ("role", "content")
        given = text_of(turn, names[0], f"{where}[{number}]")
        role = ROLES.get(given, given)
        if role not in ("system", "user", "assistant"):
            raise InputError(
                f"{where}[{number}]: the role {given!r} is not system, user or assistant"
            )
        refuse_shown(turn, SHOWN_IN_MESSAGE, f"{names[1]!r}", f"{where}[{number}]")
        read = text_of if role == "system" else words_of
        messages.append(Message(role, read(turn, names[1], f"{where}[{number}]")))
    return messages


def words_of(record: dict[str, Any], key: str, where: str) -> str:
    """As `text_of`, of text that must not be blank."""
    text = text_of(record, key, where)
    if not text.strip():
        raise InputError(f"{where}: {key!r} is empty")
    return text


def read_squad(record: dict[str, Any], where: str) -> list[Message]:
    """The layout of NeMo's and Megatron's SQuAD tables. Rajpurkar et al. 2016."""
    answers = record["answers"]
    texts = answers.get("text") if isinstance(answers, dict) else answers
    first = texts[0] if isinstance(texts, list) and texts else None
    answer = first.get("text") if isinstance(first, dict) else first
    if not isinstance(answer, str) or not answer.strip():
        raise InputError(
            f"{where}: 'answers' must hold a text, as in SQuAD 1.1: {{'text': ['...']}}"
        )
    context, question = (text_of(record, key, where) for key in ("context", "question"))
    return [
        Message("user", f"Context: {context} Question: {question} Answer:"),
        Message("assistant", answer),
    ]
