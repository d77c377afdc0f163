"""What to learn from: prompts with right answers, read from JSONL or made up.

A line has a prompt under one of the usual names and an answer under one of the usual names (GSM8K, OpenMathInstruct-2,
DAPO-Math-17k and their like), or `messages` whose last is the assistant's answer. The chat template (training/chat.py)
turns the prompt into tokens, up to where the response begins, and says which token ends a response.

Which problems a step takes is a pure function of the seed and the step.
"""

from typing import NamedTuple

import numpy as np

from minitrain.config import Config
from minitrain.errors import InputError
from minitrain.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from minitrain.training.chat import (
    PROMPTS,
    Message,
    Template,
    choose_template,
    encode_chat,
    make_sample,
    read_turns,
    split_reply,
)
from minitrain.training.data import find_files, fitting_tokenizer, hold_out, read_objects, shuffled, text_of

ANSWERS = ("expected_answer", "answer", "ground_truth", "solution", "response", "output", "completion")


class Problem(NamedTuple):
    """prompt: its tokens, all that stands before the response; reply: a right response's tokens, with their end.

    answer: what the response is compared with; row: the line that it was read from.
    """

    prompt: list[int]
    reply: list[int]
    answer: str
    row: dict


class Problems:
    """A shuffled, endless sequence of problems."""

    def __init__(self, problems: list[Problem], seed: int):
        self.problems, self.seed = problems, seed

    def __len__(self) -> int:
        return len(self.problems)

    def take(self, first: int, count: int) -> list[Problem]:
        """Problems number first, first + 1, ...; each epoch has all of them in another order."""
        numbers = (divmod(n, len(self)) for n in range(first, first + count))
        return [self.problems[shuffled(index, len(self), self.seed, epoch)] for epoch, index in numbers]


def open_problems(config: Config) -> tuple[Problems, Problems | None, ByteTokenizer | HuggingFaceTokenizer, int]:
    """The problems to train on, those held out (None without data.validation), the tokenizer, and the token that ends
    a response.

    Raises InputError for lines that are no problems, and for prompts that leave no room for a response.
    """
    tokenizer = fitting_tokenizer(config.data.tokenizer, config.model.config.vocab_size)
    template = choose_template(config.data.template, tokenizer)
    made_up = config.data.kind == "mock"
    rows = reversals(config.grpo.mock_digits) if made_up else read_rows(config)
    problems = [encode(messages, answer, row, template, tokenizer) for messages, answer, row in rows]
    check_lengths(problems, config)
    end = problems[0].reply[-1]
    share = config.data.validation or (0.1 if made_up else 0)
    if not share:
        return Problems(problems, config.seed), None, tokenizer, end
    held = hold_out(len(problems), share, config.seed)
    sides = ([p for p, out in zip(problems, held, strict=True) if out == side] for side in (False, True))
    return *(Problems(side, config.seed) for side in sides), tokenizer, end


def encode(
    messages: list[Message], answer: str, row: dict, template: Template, tokenizer: ByteTokenizer | HuggingFaceTokenizer
) -> Problem:
    sample = make_sample(*encode_chat([*messages, Message("assistant", answer)], template, tokenizer))
    return Problem(*split_reply(sample), answer, row)


def check_lengths(problems: list[Problem], config: Config) -> None:
    if not problems:
        raise InputError(f"data.path={config.data.path} holds no problem")
    longest, room = max(len(problem.prompt) for problem in problems), config.batch.seq_len
    if longest > room:
        raise InputError(f"batch.seq_len={room} leaves no room for a response to the longest prompt, {longest} tokens")


# ----------------------------------------------------------------------------------------------------------- JSON lines


def read_rows(config: Config) -> list[tuple[list[Message], str, dict]]:
    """The messages before the response, the answer and the JSON object of every line of data.path."""
    grpo = config.grpo
    return [
        (*read_problem(row, where, grpo.prompt_key, grpo.answer_key), row)
        for file in find_files(config.data)
        for where, row in read_objects(file)
    ]


def read_problem(row: dict, where: str, prompt_key: str = "", answer_key: str = "") -> tuple[list[Message], str]:
    """The messages and the answer of a line; without keys, what the first usual names have.

    Raises InputError, which begins with `where`.
    """
    if "messages" in row and not prompt_key:
        *messages, last = read_turns(row["messages"], f"{where}: 'messages'")
        if last.role != "assistant" or not messages:
            raise InputError(f"{where}: 'messages' must end with the assistant's answer to what comes before")
        return messages, answer_of(row, where, answer_key) if answer_key else last.content
    prompt_key = prompt_key or next((key for key in PROMPTS if key in row), PROMPTS[0])
    if isinstance(row.get(prompt_key), list):
        answer = Message("assistant", "")  # what read_turns asks for, though here it is elsewhere
        turns = [*row[prompt_key], answer._asdict()]
        return read_turns(turns, f"{where}: {prompt_key!r}")[:-1], answer_of(row, where, answer_key)
    return [Message("user", text_of(row, prompt_key, where))], answer_of(row, where, answer_key)


def answer_of(row: dict, where: str, key: str) -> str:
    """The answer as text; numbers are written out. DAPO-Math-17k has it in `reward_model`."""
    row = row | (row["reward_model"] if isinstance(row.get("reward_model"), dict) else {})
    key = key or next((name for name in ANSWERS if name in row), ANSWERS[0])
    value = row.get(key)
    return str(value) if isinstance(value, int | float) else text_of(row, key, where)


# -------------------------------------------------------------------------------------------------------------- made up


def reversals(digits: int, count: int = 4000) -> list[tuple[list[Message], str, dict]]:
    """Strings of digits that are to be reversed: always the same ones, all different if there are enough."""
    count = min(count, 10**digits)
    draws = np.random.default_rng(digits).integers(10, size=(4 * count, digits))
    texts = dict.fromkeys("".join(map(str, draw)) for draw in draws.tolist())
    return [([Message("user", text)], text[::-1], {"prompt": text}) for text in list(texts)[:count]]
