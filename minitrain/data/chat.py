"""Chats as tokens: a line of JSON -> messages -> the text of a chat template -> tokens, and which of them are trained.

A model should learn to answer, not to ask: only the assistant's turns are predicted, each with the token that ends it.
A turn is tokenised apart from what stands before it, just as it follows the prompt when the model generates.
Text in a message that spells a special token becomes that token, as it does in transformers.
"""

from typing import Any, NamedTuple

import numpy as np

from minitrain.data.chat_templates import ChatTemplate, Message, Pieces
from minitrain.data.text import text_of
from minitrain.data.tokenizer import Tokenizer
from minitrain.errors import InputError, located
from minitrain.training.loss import IGNORE

LONGEST_TOKEN = 64  # characters of what precedes a text, which its first token can depend on


class Sample(NamedTuple):
    """What a model reads and what it predicts there. tokens: int64 [n]; labels: int64 [n], IGNORE or the next token.

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


def encode_question(messages: list[Message], template: ChatTemplate, tokenizer: Tokenizer, where: str) -> list[int]:
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


def encode_pieces(pieces: Pieces, template: ChatTemplate, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    tokens, said, before = [], [], ""
    for text, is_reply in pieces:
        ids = encode_after(before, text, tokenizer)
        if template.begin_with_bos and not tokens:  # but not with what some put behind a whole text, such as eos
            ids = [*tokenizer.beginning_ids, *ids]
        before = (before + text)[-LONGEST_TOKEN:]
        if is_reply and template.reply_ends_with_eos:
            ids, before = [*ids, tokenizer.eos_id], "\n"
        tokens += ids
        said += [is_reply] * len(ids)
    return np.array(tokens, np.int64), np.array(said, bool)


def encode_after(before: str, text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of `text`, where `before` precedes it: many vocabularies add a space at the start of a whole text.

    Where both share a token, that of `text` alone.
    """
    context, whole = tokenizer.encode(before), tokenizer.encode(before + text)
    return whole[len(context) :] if whole[: len(context)] == context else tokenizer.encode(text)


def make_sample(tokens: np.ndarray, said: np.ndarray) -> Sample:
    """The sample of an encoded chat. The very first token cannot be predicted."""
    labels = np.where(said[1:], tokens[1:], IGNORE)
    stop = int(np.flatnonzero(said).max(initial=0))
    return Sample(tokens[:stop], labels[:stop])


def split_reply(sample: Sample) -> tuple[list[int], list[int]]:
    """A sample as what is given before the last reply, and that reply with its end, both as tokens."""
    predicted = sample.labels != IGNORE
    start = len(predicted) - int(np.argmin(np.append(predicted[::-1], False)))
    return sample.tokens[: start + 1].tolist(), sample.labels[start:].tolist()


# ------------------------------------------------------------------------------------------------------ lines of files

CHATS = ("messages", "conversations")
PROMPTS = ("prompt", "instruction", "question", "problem", "query", "input")
RESPONSES = ("response", "completion", "output", "answer", "solution", "generated_solution", "expected_answer")
SYSTEMS = ("system", "system_prompt")
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names for them
TOOLS = ("tools", "functions")  # of a chat: what the model may call
UNSPOKEN = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")  # of a message


def read_messages(record: dict[str, Any], where: str) -> list[Message]:
    """The messages of one JSON object; other keys than these are ignored, but for those that templates would write.

    `messages` with `role` and `content` each, or `conversations` with `from` and `value`; or `context`, `question` and
    `answers` as in SQuAD, of which the first answer counts; or a prompt and a response, under the first of `PROMPTS`
    and of `RESPONSES` that is there. What the system says may stand beside them, under one of `SYSTEMS`.
    Raises InputError, which begins with `where`, for anything else.
    """
    for key in CHATS:
        if key in record:
            refuse_unread(record, TOOLS, "the system's message", where)
            turns = read_turns(record[key], f"{where}: {key!r}")
            if not any(turn.role == "assistant" for turn in turns):
                raise InputError(f"{where}: {key!r} has no message of the assistant, so nothing to learn")
            for number, (turn, given) in enumerate(zip(turns, record[key], strict=True)):
                if turn.role == "assistant" and given.get("weight") == 0:  # OpenAI's way to say: not to be learned
                    raise InputError(f"{where}: {key!r}[{number}]: 'weight' is 0, but all replies are learned")
            return with_system(turns, record, where)
    if "context" in record and "answers" in record:
        return with_system(read_squad(record, where), record, where)
    keys = [next((key for key in names if key in record), None) for names in (PROMPTS, RESPONSES)]
    if None in keys:
        raise InputError(
            f"{where}: neither 'messages', nor 'context', 'question' and 'answers', nor a prompt (one of "
            f"{', '.join(PROMPTS)}) with a response (one of {', '.join(RESPONSES)})"
        )
    refuse_unread(record, ("history",), "'messages'", where)
    prompt, response = prompt_of(record, keys[0], where), words_of(record, keys[1], where)
    return with_system([Message("user", prompt), Message("assistant", response)], record, where)


def with_system(turns: list[Message], record: dict[str, Any], where: str) -> list[Message]:
    """The turns, begun by what the system says beside them (OpenOrca, ShareGPT), unless it speaks among them."""
    key = next((key for key in SYSTEMS if record.get(key)), None)
    if key is None or any(turn.role == "system" for turn in turns):
        return turns
    return [Message("system", text_of(record, key, where)), *turns]


def prompt_of(record: dict[str, Any], key: str, where: str) -> str:
    """The text of a prompt. It may have a `context` (Dolly), an `instruction` also an `input` (Alpaca)."""
    beside = ("input", "context") if key == "instruction" else ("context",)
    texts = [words_of(record, key, where), *(text_of(record, name, where) for name in beside if record.get(name))]
    return "\n".join(texts)


def read_turns(turns: Any, where: str) -> list[Message]:
    """The messages of a list of objects; all but the system's must say something."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise InputError(f"{where} must be a list of objects with 'role' and 'content'")
    messages = []
    for number, turn in enumerate(turns):
        names = ("from", "value") if "from" in turn else ("role", "content")
        given = text_of(turn, names[0], f"{where}[{number}]")
        role = ROLES.get(given, given)
        if role not in ("system", "user", "assistant"):
            raise InputError(f"{where}[{number}]: the role {given!r} is not system, user or assistant")
        refuse_unread(turn, UNSPOKEN, f"{names[1]!r}", f"{where}[{number}]")
        read = text_of if role == "system" else words_of
        messages.append(Message(role, read(turn, names[1], f"{where}[{number}]")))
    return messages


def refuse_unread(record: dict[str, Any], keys: tuple[str, ...], place: str, where: str) -> None:
    """Raises InputError for what a template would write and is left out here: quietly, other text would be learned."""
    for key in keys:
        if record.get(key):
            raise InputError(f"{where}: {key!r} is not supported (write it into {place}, or remove it)")


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
        raise InputError(f"{where}: 'answers' must hold a text, as in SQuAD 1.1: {{'text': ['...']}}")
    context, question = (text_of(record, key, where) for key in ("context", "question"))
    return [Message("user", f"Context: {context} Question: {question} Answer:"), Message("assistant", answer)]
