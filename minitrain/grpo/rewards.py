"""What a response is worth: the reward functions, and how to compare answers to mathematical questions.

A reward function takes the response's text, the right answer and the problem's whole line of data:

    def reward(response: str, answer: str, row: dict) -> float

`exact` and `math` are built in; a config may name any other as `package.module:name`. Answers are compared as text and
as fractions, in bounded time whatever the model writes: nothing is evaluated, and of a long text only the end counts.
Left out: symbolic equality (sqrt(8) is not 2 sqrt(2) here) and units.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from minitrain.errors import InputError

Reward = Callable[[str, str, dict], float]
LOOKED_AT = 20_000  # characters at a text's end: an answer comes last
DIGITS = 100  # longer numbers are compared as text
NUMBER = r"-?(?:\d+(?:\.\d+)?|\.\d+)"
# 3-4 has no minus; 1+1/2 is 1 1/2, see `plain_fractions`
IN_TEXT = r"(?:(?<![\w)])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:(?:\+\d+)? ?/ ?\d+)?"


def exact(response: str, answer: str, row: dict) -> float:
    """1 if the response is the answer, but for white space around it."""
    return float(response.strip() == answer.strip())


def math(response: str, answer: str, row: dict) -> float:
    """1 if the response's final answer is the marked answer in `answer`, or else all of it, as text or as a number."""
    response, answer = (text[-LOOKED_AT:].replace("\u2212", "-") for text in (response, answer))
    given, right = final_answer(response), marked_answer(answer)
    if given is None:
        return 0.0
    given, right = normalize(given), normalize(answer if right is None else right)
    number = to_number(given)
    return float(given == right or (number is not None and number == to_number(right)))


def final_answer(text: str) -> str | None:
    """The marked answer; else the last number or fraction; else None."""
    marked = marked_answer(text)
    numbers = re.findall(IN_TEXT, plain_fractions(text)) if marked is None else [marked]
    return numbers[-1] if numbers else None


def marked_answer(text: str) -> str | None:
    r"""The content of the last \boxed{...}; else the rest of the line after the last ####; else None."""
    boxed = last_boxed(text)
    if boxed is None and "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    return boxed


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} whose braces close."""
    for start in [match.end() for match in re.finditer(r"\\boxed\s*\{", text)][:-9:-1]:  # the last few: linear time
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
    return None


def normalize(answer: str) -> str:
    r"""One spelling of each: no white space, $, %, \text, \left, degrees, thousands separators, final full stop, or
    braces around one character, as in x^{2}.

    Of an equation with a name on its left, such as x = 5, the right side (Hendrycks et al. 2021).
    """
    answer = re.sub(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}", r"\1", answer)
    answer = re.sub(r"\\(?:left|right|!|%|\$)|\^\s*\{?\\circ\}?|[$%\u00b0]", "", answer)
    answer = re.sub(r"(\\sqrt|[\^_])\s*\{\s*(\w)\s*\}", r"\1\2", answer)  # also lets a fraction have them inside
    answer = re.sub(r"\s", "", plain_fractions(re.sub(r"\\[,;: ]", " ", answer)))
    answer = re.sub(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?:\D|$))", "", answer)
    answer = re.sub(r"^[a-zA-Z]{1,2}=", "", answer)
    return answer.rstrip(".").removeprefix("+").lower()


def plain_fractions(text: str) -> str:
    r"""\frac{a}{b} as a/b, with (a) if it is a sum, (b) if it is more than a number or a letter: \frac{x+1}{2} is not
    x+\frac12; and behind a whole number, which it is added to, as +a/b: neither 1\frac12 nor 1 1/2 is 11/2 or 1/2."""

    def plain(match: re.Match) -> str:
        above, below = (re.sub(r"\s", "", part) for part in match.groups() if part is not None)
        is_sum = re.search(r".[+-]", re.sub(r"\([^()]*\)", "", above))
        is_one = re.fullmatch(r"-?(?:[\d.,]*|[a-zA-Z]|\\[a-zA-Z]+|\([^()]*\))", below)
        return (f"({above})" if is_sum else above) + "/" + (below if is_one else f"({below})")

    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"(?<=\d)(?=\\frac)", " ", text)
    text = re.sub(r"\\frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))", plain, text)
    return re.sub(r"(?<=\d) +(?=\d+ */ *\d)", "+", text)


def to_number(answer: str) -> Fraction | None:
    """A normalised answer as an exact number, if it is an integer, a decimal, a fraction of those or a mixed number."""
    mixed = rf"(?:(\d+)\+(?=\d+/))?({NUMBER})(?:/({NUMBER}))?"
    match = re.fullmatch(mixed, answer) if len(answer) <= DIGITS else None
    if match is None:
        return None
    whole, numerator, denominator = Fraction(match[1] or 0), Fraction(match[2]), Fraction(match[3] or 1)
    return whole + numerator / denominator if denominator else None


def overlong(tokens: int, longest: int, buffer: int, penalty: float) -> float:
    """What to add to the reward for length: 0 up to longest - buffer tokens, then linearly down to -penalty (DAPO)."""
    return -penalty * min(max(tokens - (longest - buffer), 0) / buffer, 1) if buffer else 0.0


BUILT_IN: dict[str, Reward] = {"exact": exact, "math": math}


def load_reward(name: str) -> Reward:
    """`exact`, `math`, or the function at `package.module:name`, looked for in the current folder too."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, function = name.partition(":")
    if not colon or not module or not function or module.startswith("."):
        raise InputError(f"grpo.reward={name!r} is not exact, math or package.module:function")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InputError(f"grpo.reward={name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise InputError(f"grpo.reward={name!r} is a {type(found).__name__}, not a function")
    try:
        inspect.signature(found).bind("response", "answer", {})
    except (TypeError, ValueError) as error:  # ValueError: some of Python's own functions do not tell what they take
        raise InputError(f"grpo.reward={name!r} must take (response, answer, row): {error}") from error
    return found
