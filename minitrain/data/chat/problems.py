"""Problems for reinforcement learning: prompts with right answers, from files or made up.

read_problems.py reads one from a line. The chat template turns the prompt into tokens, up to where
the response begins, and says which token ends a response. The tokens at which the model ends any
text end it, too: else the model would go on with another text, and be rewarded for that.

Which problems a step takes is a pure function of the seed and the step.
"""

import json
from collections.abc import Iterator

from minitrain.data.chat.chat_templates import ChatTemplate, choose_template
from minitrain.data.chat.chats import (
    encode_chat,
    encode_question,
    end_of_reply,
    make_sample,
    split_reply,
)
from minitrain.data.chat.messages import Chat, Message
from minitrain.data.chat.read_problems import read_problem
from minitrain.data.chat.read_tools import read_shown
from minitrain.data.faults.skips import Skips
from minitrain.data.faults.wording import counted
from minitrain.data.files import find_files
from minitrain.data.held_out import split_off
from minitrain.data.records import read_records
from minitrain.data.sources import train_and_held_out
from minitrain.data.tokenizer import Tokenizer, encode_after, fitting_tokenizer
from minitrain.data.toys import load_toy
from minitrain.errors import InputError, located
from minitrain.grpo.responses import Problem
from minitrain.hashing import nth
from minitrain.models.decoder_config import DecoderConfig, find_ends
from minitrain.settings import Config


class Problems:
    """A shuffled, endless sequence of problems."""

    def __init__(self, problems: list[Problem], seed: int, note: str = ""):
        self.problems = problems
        self.seed = seed
        self.about = f"{counted(len(problems), 'problem')}{note}"

    def __len__(self) -> int:
        return len(self.problems)

    def take(self, first: int, count: int) -> list[Problem]:
        """Return problems first, first + 1, ...; each epoch has all of them in another order."""
        numbers = [nth(n, len(self), self.seed)[1] for n in range(first, first + count)]
        return [self.problems[number] for number in numbers]


def open_problems(config: Config) -> tuple[Problems, Problems | None, Tokenizer, tuple[int, ...]]:
    """Return the problems to train on, those held out, the tokenizer, and the end tokens.

    Held out: None without data.validation. The tokens end a response, the template's own first.
    Raises InputError for lines that are no problems, and for prompts that leave no room for a
    response.
    """
    data = config.data
    if data.validation_path:
        trained, held = map(open_problems, train_and_held_out(config))
        return trained[0], held[0], *trained[2:]
    tokenizer = fitting_tokenizer(data.tokenizer, config.model.config.vocab_size)
    template = choose_template(data.template, tokenizer)
    skips = Skips(data.on_error == "skip")
    made_up = data.kind == "mock"
    if made_up:
        problems = make_problems(config, template, tokenizer)
    else:
        problems = list(read_problems(config, template, tokenizer, skips))
    if not problems:
        raise InputError(f"data.path={data.path} holds no problem{skips.aside}")
    ends = end_tokens(config, problems[0], template, tokenizer)
    share = data.validation or (0.1 if made_up else 0)
    if not share:
        return Problems(problems, config.seed, skips.aside), None, tokenizer, ends
    sides = split_by_prompt(problems, share, config.seed)
    train, held = (Problems(side, config.seed, skips.aside) for side in sides)
    return train, held, tokenizer, ends


def make_problems(config: Config, template: ChatTemplate, tokenizer: Tokenizer) -> list[Problem]:
    """Return the problems of the toy world: digits to be reversed."""
    digits = config.grpo.mock_digits
    with located(f"grpo.mock_digits={digits}"):
        generated = load_toy("reversal")(digits)
        problems = [encode_problem(*each, template, tokenizer) for each in generated]
        check_length(problems[0], config)
    return problems


def read_problems(
    config: Config, template: ChatTemplate, tokenizer: Tokenizer, skips: Skips
) -> Iterator[Problem]:
    """Yield the problems of all lines of all files, in order."""
    grpo = config.grpo
    # environments make what they need of a line; warming up takes questions with answers
    free = bool(grpo.environment) and not grpo.warmup_steps

    def read(row: dict) -> Problem:
        if free:
            return Problem([], [], "", row)
        messages, answer = read_problem(row, grpo.prompt_key, grpo.answer_key)
        problem = encode_problem(messages, answer, row, template, tokenizer)
        check_length(problem, config)
        return problem

    return read_records(find_files(config.data), read, skips)


def end_tokens(
    config: Config, problem: Problem, template: ChatTemplate, tokenizer: Tokenizer
) -> tuple[int, ...]:
    """Return the tokens that end a response, the one that ends a problem's right reply first."""
    end = problem.reply[-1] if problem.reply else end_of_reply(template, tokenizer)
    if end is None:
        raise InputError(
            f"{template.name} does not show where a reply ends (use data.template=llama3, chatml or plain)"
        )
    # random weights have never seen an end of their own
    shape = config.model.config if config.model.path else DecoderConfig()
    return find_ends(shape, end, tokenizer.eos_id)


def split_by_prompt(
    problems: list[Problem], share: float, seed: int
) -> tuple[list[Problem], list[Problem]]:
    """Return the problems to train on, and those held out: one of each of a share of all prompts.

    Other lines often have the same prompt: DAPO-Math-17k has all of them a hundred times,
    OpenMathInstruct-2 several solutions of many. Without prompts, of which environments make their
    own, lines are told apart.
    """

    def key(problem: Problem) -> tuple:
        return tuple(problem.prompt) or (json.dumps(problem.row, default=str, sort_keys=True),)

    different = {}
    for problem in problems:
        different.setdefault(key(problem), problem)
    _, held = split_off(list(different.values()), share, seed)
    hidden = {key(problem) for problem in held}
    return [problem for problem in problems if key(problem) not in hidden], held


def encode_problem(
    messages: Chat, answer: str, row: dict, template: ChatTemplate, tokenizer: Tokenizer
) -> Problem:
    """Return the problem of a reply to the messages.

    Where they end with the beginning of a reply, it asks for the rest.
    """
    shown = read_shown(row)
    prompt = encode_question(messages, template, tokenizer, shown)
    chat, begun = answered(messages, answer)
    reply = split_reply(make_sample(*encode_chat(chat, template, tokenizer, shown)))[1]
    if begun:
        reply = [*encode_after(begun, answer, tokenizer.encode), reply[-1]]
    return Problem(prompt, reply, answer, row)


def answered(messages: Chat, answer: str) -> tuple[Chat, str]:
    """Return the chat with a reply, and the beginning of it with which the messages may end."""
    begun = ""
    if messages[-1].role == "assistant":
        *messages, last = messages
        begun = last.content or ""
    return [*messages, Message("assistant", begun + answer)], begun


def check_length(problem: Problem, config: Config) -> None:
    room = config.batch.seq_len
    length = len(problem.prompt)
    whole = length + len(problem.reply) - 1
    if length > min(room, config.model.config.max_position_embeddings - 1):
        raise InputError(
            f"batch.seq_len={room} leaves no room for a response to a prompt of {length} tokens"
        )
    if config.grpo.warmup_steps and whole > room:
        raise InputError(
            f"batch.seq_len={room} is too short to warm up on a prompt with its answer, {whole} tokens "
            f"(use grpo.warmup_steps=0, or batch.seq_len={whole})"
        )


# --- JSON lines
