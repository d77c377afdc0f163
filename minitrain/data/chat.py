"""Chats as tokens: a line of JSON -> messages -> the text of a chat template -> tokens and labels.

A model should learn to answer, not to ask: only the assistant's turns are predicted, each with the
token that ends it. A turn is tokenized apart from what stands before it, just as it follows the
prompt when the model generates. Text in a message that spells a special token becomes that token,
as it does in transformers.
"""

import json
from typing import NamedTuple

import numpy as np

from minitrain.data.chat_templates import Chat, ChatTemplate, Message, Pieces
from minitrain.data.records import text_of
from minitrain.data.tokenizer import Tokenizer
from minitrain.errors import InputError, located
from minitrain.training.loss import IGNORE

# characters before a text that its first token can depend on
LONGEST_TOKEN = 64


class Sample(NamedTuple):
    """A model's input and its targets. tokens: int64 [n]; labels: int64 [n], IGNORE or next token.

    It ends where the last label is predicted: what comes after that token would teach nothing.
    """

    tokens: np.ndarray
    labels: np.ndarray


def encode_chat(
    messages: Chat, template: ChatTemplate, tokenizer: Tokenizer, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a chat, int64 [n], and which of them the model is to say, bool [n].

    Raises InputError, which begins with `where`, for what the template does not take.
    """
    with located(where):
        return encode_pieces(template.pieces(messages), template, tokenizer)


def encode_question(
    messages: Chat, template: ChatTemplate, tokenizer: Tokenizer, where: str
) -> list[int]:
    """Return the tokens that a reply to `messages` follows. Raises InputError likewise."""
    with located(where):
        return encode_pieces(template.question(messages), template, tokenizer)[0].tolist()


def end_of_reply(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the token that ends a reply; None if the template does not show where one ends."""
    try:
        pieces = template.pieces([Message("user", "?"), Message("assistant", "!")])
        tokens, said = encode_pieces(pieces, template, tokenizer)
    except InputError:
        return None
    return int(tokens[said][-1])


def encode_pieces(
    pieces: Pieces, template: ChatTemplate, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of pieces of text, int64 [n], and which the model is to say, bool [n]."""
    tokens = []
    said = []
    before = ""
    for text, is_reply in pieces:
        ids = encode_after(before, text, tokenizer)
        # but not with what some put behind a whole text, such as eos
        if template.begin_with_bos and not tokens:
            ids = [*tokenizer.beginning_ids, *ids]
        before = (before + text)[-LONGEST_TOKEN:]
        if is_reply and template.reply_ends_with_eos:
            ids = [*ids, tokenizer.eos_id]
            before = "\n"
        tokens += ids
        said += [is_reply] * len(ids)
    return np.array(tokens, np.int64), np.array(said, bool)


def encode_after(before: str, text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of `text`, where `before` precedes it.

    Many vocabularies add a space at the start of a whole text. Where both share a token, the tokens
    of `text` alone.
    """
    context = tokenizer.encode(before)
    whole = tokenizer.encode(before + text)
    return whole[len(context) :] if whole[: len(context)] == context else tokenizer.encode(text)


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


# ------------------------------------------------------------------------------------------------------ lines of files

CHATS = ("messages", "conversations")
PROMPTS = (
    "prompt",
    "instruction",
    "question",
    "problem",
    "query",
    "input",
)
RESPONSES = (
    "response",
    "completion",
    "output",
    "answer",
    "solution",
    "generated_solution",
    "expected_answer",
)
SYSTEMS = (
    "system",
    "system_prompt",
    "system_message",
    "system_instruction",
)
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
SHOWN_WITH_PROMPT = (
    "history",
    "document",
    "contexts",
    "passages",
    "passage",
    "choices",
    "options",
)
THOUGHTS = (
    "reasoning_content",
    "reasoning",
    "thinking",
    "thought",
)
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
# Keys that say of a line or a reply that it is learned less than others: LEARNED by another value
# than 1, MASKED by any.
LEARNED = (
    "train",
    "trainable",
    "learn",
    "learnable",
    "weight",
    "loss_weight",
    "loss_mask",
    "loss_scale",
    "compute_loss",
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
    "assistant_masks",
    "ignore",
    "skip",
    "rejected",
    "rejected_response",
    "train_detail",
    "token_weights",
)


def read_messages(record: dict, where: str) -> Chat:
    """Return the messages of one JSON object.

    `messages` with `role` and `content` each, or `conversations` with `from` and `value`; or
    `context`, `question` and `answers` as in SQuAD, of which the first answer counts; or a prompt
    and a response, under the first of `PROMPTS` and of `RESPONSES` that holds something. The
    system's text may stand beside them, under one of `SYSTEMS`. Keys about what is shown to the
    model or learned are refused where they would be lost; others are ignored. Raises InputError,
    which begins with `where`, for anything else.
    """
    with located(where):
        refuse_masked(record, LEARNED)
        if record.get("label") is False:
            raise InputError(
                "'label' is false, as of KTO's bad replies, but all are learned (remove the line)"
            )
        return with_system(_read_layout(record), record)


def _read_layout(record: dict) -> Chat:
    if chat := chat_key(record):
        refuse_shown(record, (*SHOWN, "context"), "the messages")
        turns = read_turns(record, chat)
        if not any(turn.role == "assistant" for turn in turns):
            raise InputError(f"{chat!r} has no message of the assistant, so nothing to learn")
        for number, turn in enumerate(turns):
            if turn.role == "assistant":
                with located(f"{chat!r}[{number}]"):
                    refuse_masked(record[chat][number], LEARNED_IN_MESSAGE)
        return turns
    if "context" in record and record.get("answers"):
        refuse_shown(record, (*SHOWN, *SHOWN_WITH_PROMPT, *THOUGHTS), "the question")
        return read_squad(record)
    prompt = usual_key(record, PROMPTS)
    response = usual_key(record, RESPONSES)
    if prompt is None or response is None:
        raise InputError(
            "neither 'messages', nor 'context', 'question' and 'answers', nor a prompt (one of "
            f"{', '.join(PROMPTS)}) with a response (one of {', '.join(RESPONSES)})"
        )
    refuse_shown(record, THOUGHTS, "the response")
    asked = Message("user", prompt_of(record, prompt))
    return [asked, Message("assistant", words_of(record, response))]


def usual_key(record: dict, names: tuple[str, ...]) -> str | None:
    """Return the first of `names` that holds something, else one that is empty but not null."""
    there = [name for name in names if record.get(name) is not None]
    return next((name for name in there if record[name] not in ("", [])), next(iter(there), None))


def chat_key(record: dict) -> str | None:
    """Return the key of the messages, None where the line is of another layout."""
    key = usual_key(record, CHATS)
    return key if key and (record[key] or usual_key(record, PROMPTS) is None) else None


def refuse_shown(record: dict, keys: tuple[str, ...], place: str) -> None:
    """Raise InputError for what the model should see or say, and would not."""
    for key in keys:
        if record.get(key):
            raise InputError(f"{key!r} is not supported (write it into {place}, or remove it)")


def refuse_masked(record: dict, keys: tuple[str, ...]) -> None:
    """Raise InputError for what is not to be learned, or only in part."""
    for key in (*keys, *MASKED):
        value = record.get(key)
        if value not in (None, "", 1) if key in keys else value:
            told = f"{key!r} is {json.dumps(value)}, but all replies are learned (remove it)"
            raise InputError(told)


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
    shown = (*SHOWN, *SHOWN_WITH_PROMPT)
    if key not in ("instruction", "input"):
        shown += ("input",)
    refuse_shown(record, shown, "the prompt")
    texts = [text_of(record, name) for name in beside if record.get(name)]
    return "\n".join([words_of(record, key), *texts])


def read_turns(record: dict, key: str) -> Chat:
    """Return the messages of a list of objects; all but the system's must say something."""
    turns = record[key]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise InputError(f"{key!r} must be a list of objects with 'role' and 'content'")
    messages = []
    for number, turn in enumerate(turns):
        with located(f"{key!r}[{number}]"):
            sender, content = ("from", "value") if turn.get("from") else ("role", "content")
            given = text_of(turn, sender)
            role = ROLES.get(given, given)
            if role not in ("system", "user", "assistant"):
                raise InputError(f"the role {given!r} is not system, user or assistant")
            refuse_shown(turn, SHOWN_IN_MESSAGE, repr(content))
            read = text_of if role == "system" else words_of
            messages.append(Message(role, read(turn, content)))
    return messages


def words_of(record: dict, key: str) -> str:
    """Return text that is not blank. Raises InputError for all else."""
    text = text_of(record, key)
    if not text.strip():
        raise InputError(f"{key!r} is empty")
    return text


def read_squad(record: dict) -> Chat:
    """Return the messages of NeMo's and Megatron's SQuAD tables. Rajpurkar et al. 2016."""
    answer = record["answers"]
    answer = answer.get("text") if isinstance(answer, dict) else answer
    answer = answer[0] if isinstance(answer, list) and answer else None
    answer = answer.get("text") if isinstance(answer, dict) else answer
    if not isinstance(answer, str) or not answer.strip():
        raise InputError("'answers' must hold a text, as in SQuAD 1.1: {'text': ['...']}")
    context, question = (text_of(record, key) for key in ("context", "question"))
    asked = f"Context: {context} Question: {question} Answer:"
    return [Message("user", asked), Message("assistant", answer)]
