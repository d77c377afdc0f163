"""Chats as tokens: a line of JSON -> messages -> the text of a chat template -> tokens, and which of them are trained.

A model should learn to answer, not to ask: only the assistant's turns are predicted, each with the token that ends it.
A turn is tokenised apart from the header before it, just as it follows the prompt when the model generates.

The templates are those of Llama 3 and of Qwen (ChatML), written out here, so that no template language is needed, and a
plain one for models without special tokens. Left out: tools, images, reasoning that is cut from earlier turns (Qwen 3).
Text in a message that spells a special token becomes that token, as it does in transformers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from minitrain.errors import InputError
from minitrain.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from minitrain.training.data import text_of
from minitrain.training.loss import IGNORE


class Message(NamedTuple):
    role: str  # system, user or assistant
    content: str


class Sample(NamedTuple):
    """What a model reads and what it predicts there. tokens: int64 [n]; labels: int64 [n], IGNORE or the next token.

    It ends where the last label is predicted: what comes after that token would teach nothing.
    """

    tokens: np.ndarray
    labels: np.ndarray


# ----------------------------------------------------------------------------------------------------------- templates


@dataclass(frozen=True)
class Template:
    """How messages become text: begin, then for each message header, content, end and separator."""

    header: str  # with {role}
    end: str  # of a turn, trained as part of the assistant's
    special: tuple[str, ...] = ()  # tokens in these that a tokenizer must have
    begin: str = ""
    separator: str = ""
    reply_ends_with_eos: bool = False  # the assistant's turns end with the tokenizer's eos, not with `end`
    strip: bool = False  # white space around a message is removed
    preface: str = ""  # stands before the system message's content, and alone if there is none
    default_system: str = ""  # the content of a system message that is not there


LLAMA3 = Template(
    "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", ("<|start_header_id|>", "<|eot_id|>"),
    begin="<|begin_of_text|>", strip=True,
)  # fmt: skip
CHATML = Template("<|im_start|>{role}\n", "<|im_end|>", ("<|im_start|>", "<|im_end|>"), separator="\n")
PLAIN = Template("", "\n", reply_ends_with_eos=True)  # a line for each question, eos after each answer
TEMPLATES = {"llama3": LLAMA3, "chatml": CHATML, "plain": PLAIN}

LLAMA31_PREFACE = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
QWEN25_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


def choose_template(name: str, tokenizer: ByteTokenizer | HuggingFaceTokenizer) -> Template:
    """The template called `name`, or for `auto` the tokenizer's; InputError if the tokenizer lacks a token of it."""
    template = template_of(tokenizer) if name == "auto" else TEMPLATES[name]
    for token in template.special:
        if tokenizer.token_id(token) is None:
            raise InputError(f"data.template={name} needs the token {token}, which data.tokenizer lacks")
    if template.reply_ends_with_eos and tokenizer.eos_id is None:
        raise InputError("data.template=plain ends answers with eos, which data.tokenizer lacks (use llama3 or chatml)")
    return template


def template_of(tokenizer: ByteTokenizer | HuggingFaceTokenizer) -> Template:
    """The first template whose special tokens the tokenizer has; the plain one has none.

    What a family adds to the system message (Llama 3.1 a date, Qwen 2.5 a default) is added if the template that came
    with the tokenizer does so.
    """
    template = next(t for t in TEMPLATES.values() if None not in map(tokenizer.token_id, t.special))
    if "Cutting Knowledge Date" in tokenizer.chat_template:
        template = replace(template, preface=LLAMA31_PREFACE)
    if QWEN25_SYSTEM in tokenizer.chat_template:
        template = replace(template, default_system=QWEN25_SYSTEM)
    return template


def render(messages: list[Message], template: Template) -> Iterator[tuple[str, bool]]:
    """The text of a chat in pieces, alternating between what is given (False) and what the model is to say (True)."""
    given = template.begin
    for role, content in prepare(messages, template):
        given += template.header.format(role=role)
        if role == "assistant":
            yield given, False
            yield content + ("" if template.reply_ends_with_eos else template.end), True
            given = template.separator
        else:
            given += content + template.end + template.separator
    yield given, False


def prepare(messages: list[Message], template: Template) -> list[Message]:
    """The messages as the template wants them, with what it adds to the first, or puts before it."""
    if template.strip:
        messages = [Message(role, content.strip()) for role, content in messages]
    stated = messages[0].role == "system"
    content = template.preface + (messages[0].content if stated else template.default_system)
    return [Message("system", content), *messages[stated:]] if stated or content else messages


def encode_chat(
    messages: list[Message], template: Template, tokenizer: ByteTokenizer | HuggingFaceTokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a chat, int64 [n], and which of them the model is to say, bool [n]."""
    tokens, said = [], []
    for text, is_reply in render(messages, template):
        ids = tokenizer.encode(text)
        if is_reply and template.reply_ends_with_eos:
            ids = [*ids, tokenizer.eos_id]
        tokens += ids
        said += [is_reply] * len(ids)
    return np.array(tokens, np.int64), np.array(said, bool)


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

PROMPTS = ("prompt", "instruction", "question", "problem", "query", "input")
RESPONSES = ("response", "completion", "output", "answer", "solution", "generated_solution", "expected_answer")
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names for them


def read_messages(record: dict[str, Any], where: str) -> list[Message]:
    """The messages of one JSON object; other keys than these are ignored.

    `messages` with `role` and `content` each, or `conversations` with `from` and `value`; or `context`, `question` and
    `answers` as in SQuAD, of which the first answer counts; or a prompt and a response, under the first of `PROMPTS`
    and of `RESPONSES` that is there, where `instruction` may have an `input` (Alpaca).
    Raises InputError, which begins with `where`, for anything else.
    """
    for key in ("messages", "conversations"):
        if key in record:
            turns = read_turns(record[key], f"{where}: {key!r}")
            if not any(turn.role == "assistant" for turn in turns):
                raise InputError(f"{where}: {key!r} has no message of the assistant, so nothing to learn")
            return turns
    if "context" in record and "answers" in record:
        return read_squad(record, where)
    keys = [next((key for key in names if key in record), None) for names in (PROMPTS, RESPONSES)]
    if None in keys:
        raise InputError(
            f"{where}: neither 'messages', nor 'context', 'question' and 'answers', nor a prompt (one of "
            f"{', '.join(PROMPTS)}) with a response (one of {', '.join(RESPONSES)})"
        )
    prompt, response = (words_of(record, key, where) for key in keys)
    if keys[0] == "instruction" and record.get("input"):
        prompt += "\n" + text_of(record, "input", where)
    return [Message("user", prompt), Message("assistant", response)]


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
        raise InputError(f"{where}: 'answers' must hold a text, as in SQuAD 1.1: {{'text': ['...']}}")
    context, question = (text_of(record, key, where) for key in ("context", "question"))
    return [Message("user", f"Context: {context} Question: {question} Answer:"), Message("assistant", answer)]
