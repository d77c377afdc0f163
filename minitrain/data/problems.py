"""What to learn from: prompts with right answers, read from JSONL or made up.

A line has a prompt under one of the usual names and an answer under one of the usual names (GSM8K,
OpenMathInstruct-2, DAPO-Math-17k and their like), or a chat whose last message is the assistant's
answer. The chat template (see data/chat_templates.py) turns the prompt into tokens, up to where the
response begins, and says which token ends a response. So do those at which the model ends any text:
it would go on with another one, and be rewarded for that.

Which problems a step takes is a pure function of the seed and the step.
"""

import numpy as np

from minitrain.data.chat import (
    LEARNED_IN_MESSAGE,
    PROMPTS,
    SHOWN,
    chat_key,
    encode_after,
    encode_chat,
    encode_question,
    make_sample,
    prompt_of,
    read_turns,
    refuse_masked,
    refuse_shown,
    split_reply,
    usual_key,
    with_system,
    words_of,
)
from minitrain.data.chat_templates import ChatTemplate, Message, choose_template
from minitrain.data.files import find_files
from minitrain.data.text import Skips, Written, fitting_tokenizer, read_jsonl, split_off
from minitrain.data.tokenizer import Tokenizer
from minitrain.errors import InputError
from minitrain.grpo.batches import Problem
from minitrain.hashing import nth
from minitrain.models.decoder_config import DecoderConfig, find_ends
from minitrain.settings import Config

ANSWERS = (
    "expected_answer",
    "answer",
    "ground_truth",
    "solution",
    "response",
    "output",
    "completion",
)


class Problems:
    """A shuffled, endless sequence of problems."""

    def __init__(self, problems: list[Problem], seed: int, note: str = ""):
        self.problems = problems
        self.seed = seed
        self.about = f"{len(problems):,} problems{note}"

    def __len__(self) -> int:
        return len(self.problems)

    def take(self, first: int, count: int) -> list[Problem]:
        """Problems number first, first + 1, ...; each epoch has all of them in another order."""
        return [self.problems[nth(n, len(self), self.seed)[1]] for n in range(first, first + count)]


def open_problems(config: Config) -> tuple[Problems, Problems | None, Tokenizer, tuple[int, ...]]:
    """The problems to train on, those held out (None without data.validation), the tokenizer, and
    the tokens that end a response, the template's own first.

    Raises InputError for lines that are no problems, and for prompts that leave no room for a
    response.
    """
    tokenizer = fitting_tokenizer(config.data.tokenizer, config.model.config.vocab_size)
    template = choose_template(config.data.template, tokenizer)
    made_up = config.data.kind == "mock"
    skips = Skips(config.data.on_error == "skip")

    def read(row: dict, where: str) -> Problem:
        messages, answer = read_problem(row, where, config.grpo.prompt_key, config.grpo.answer_key)
        problem = encode(messages, answer, row, template, tokenizer, where)
        check_length(problem, config, where)
        return problem

    if made_up:
        where = f"grpo.mock_digits={config.grpo.mock_digits}"
        problems = [
            encode(*made, template, tokenizer, where) for made in reversals(config.grpo.mock_digits)
        ]
        check_length(problems[0], config, where)
    else:
        problems = list(read_jsonl(find_files(config.data), read, skips))
    if not problems:
        raise InputError(f"data.path={config.data.path} holds no problem{skips.aside}")
    # random weights have never seen an end of their own
    shape = config.model.config if config.model.path else DecoderConfig()
    ends = find_ends(shape, problems[0].reply[-1], tokenizer.eos_id)
    share = config.data.validation or (0.1 if made_up else 0)
    if not share:
        return Problems(problems, config.seed, skips.aside), None, tokenizer, ends
    sides = split_by_prompt(problems, share, config.seed)
    train, held = (Problems(side, config.seed, skips.aside) for side in sides)
    return train, held, tokenizer, ends


def split_by_prompt(
    problems: list[Problem], share: float, seed: int
) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on, and those held out, which are of a share of all different prompts,
    one of each.

    Other lines often have the same prompt: DAPO-Math-17k has all of them a hundred times,
    OpenMathInstruct-2 several solutions of many.
    """
    different: dict[tuple[int, ...], Problem] = {}
    for problem in problems:
        different.setdefault(tuple(problem.prompt), problem)
    _, held = split_off(list(different.values()), share, seed)
    hidden = {tuple(problem.prompt) for problem in held}
    return [problem for problem in problems if tuple(problem.prompt) not in hidden], held


def encode(
    messages: list[Message],
    answer: str,
    row: dict,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    where: str,
) -> Problem:
    """The problem that asks for a reply to the messages, or, where they end with the beginning of
    one, for the rest.
    """
    prompt = encode_question(messages, template, tokenizer, where)
    if messages[-1].role != "assistant":
        sample = make_sample(
            *encode_chat([*messages, Message("assistant", answer)], template, tokenizer, where)
        )
        return Problem(prompt, split_reply(sample)[1], answer, row)
    *before, (role, begun) = messages
    sample = make_sample(
        *encode_chat([*before, Message(role, begun + answer)], template, tokenizer, where)
    )
    end = split_reply(sample)[1][-1]
    return Problem(prompt, [*encode_after(begun, answer, tokenizer), end], answer, row)


def check_length(problem: Problem, config: Config, where: str) -> None:
    room = config.batch.seq_len
    length = len(problem.prompt)
    whole = length + len(problem.reply) - 1
    if length > min(room, config.model.config.max_position_embeddings - 1):
        raise InputError(
            f"{where}: batch.seq_len={room} leaves no room for a response to a prompt of {length} tokens"
        )
    if config.grpo.warmup_steps and whole > room:
        raise InputError(
            f"{where}: batch.seq_len={room} is too short to warm up on a prompt with its answer, {whole} tokens "
            f"(use grpo.warmup_steps=0, or batch.seq_len={whole})"
        )


# ----------------------------------------------------------------------------------------------------------- JSON lines


def read_problem(
    row: dict, where: str, prompt_key: str, answer_key: str
) -> tuple[list[Message], str]:
    """The messages and the answer of a line; where a key is empty, what the first usual name has.

    Raises InputError, which begins with `where`.
    """
    chat = chat_key(row)
    refuse_shown(row, SHOWN, "the prompt", where)
    if chat is None or prompt_key:
        return with_system(read_prompt(row, where, prompt_key), row, where), answer_of(
            row, where, answer_key
        )
    refuse_shown(row, ("context",), "the messages", where)
    turns = read_turns(row[chat], f"{where}: {chat!r}")
    if len(turns) < 2 or turns[-1].role != "assistant":
        raise InputError(
            f"{where}: {chat!r} must end with the assistant's answer to what comes before (if all of it is the prompt, "
            f"say so: grpo.prompt_key={chat})"
        )
    refuse_masked(row[chat][-1], LEARNED_IN_MESSAGE, f"{where}: {chat!r}")
    answer = answer_of(row, where, answer_key) if answer_key else turns[-1].content
    return with_system(turns[:-1], row, where), answer


def read_prompt(row: dict, where: str, key: str) -> list[Message]:
    """Text, which is the user's, or a list of messages. key: as `read_problem` has it."""
    name = key or usual_name(row, PROMPTS, where, "prompt")
    if isinstance(row.get(name), list):
        refuse_shown(row, ("context",), "the messages", where)
        turns = read_turns(row[name], f"{where}: {name!r}")
        if not turns:
            raise InputError(f"{where}: {name!r} is empty")
        return turns
    if key:
        return [Message("user", words_of(row, key, where))]
    return [Message("user", prompt_of(row, name, where))]


def answer_of(row: dict, where: str, key: str) -> str:
    """Return the answer as text, a number with the digits it has there. DAPO-Math-17k has it in
    `reward_model`.
    """
    row = row | (row["reward_model"] if isinstance(row.get("reward_model"), dict) else {})
    name = key or usual_name(row, ANSWERS, where, "answer")
    value = row.get(name)
    if isinstance(value, Written):
        return value.digits()
    return str(value) if isinstance(value, int | float) else words_of(row, name, where)


def usual_name(row: dict, names: tuple[str, ...], where: str, what: str) -> str:
    found = usual_key(row, names)
    if found is None:
        raise InputError(
            f"{where}: no {what} (one of {', '.join(names)}; or name its key by grpo.{what}_key)"
        )
    return found


# -------------------------------------------------------------------------------------------------------------- made up


def reversals(digits: int) -> list[tuple[list[Message], str, dict]]:
    """Up to 4,000 different strings of digits that are to be reversed, always the same ones."""
    count = min(4000, 10**digits)
    draws = np.random.default_rng(digits).integers(10, size=(4 * count, digits))
    texts = dict.fromkeys("".join(map(str, draw)) for draw in draws.tolist())
    return [([Message("user", text)], text[::-1], {"prompt": text}) for text in list(texts)[:count]]
