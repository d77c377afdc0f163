r"""Reward functions, and how they compare answers to mathematical questions.

`exact` and `math` are built in; a config may name any other `Reward` as `package.module:name`. What
it remembers is its process's own, and in no checkpoint: every rank that rewards has one, and sees
its own share of the responses.

`math` writes every number as its exact value, <3/2> for 1\frac{1}{2} or 1.50; then answers are
equal if their texts are. Its time is bounded: of a long text only the end counts. Left out:
symbolic equality (sqrt(8) is not 2 sqrt(2), 3 * 4 is not yet 12) and units.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Protocol
from unicodedata import normalize

from minitrain.errors import InputError


class Reward(Protocol):
    """A function of a response's text, the right answer, and the problem's whole line of data."""

    def __call__(self, response: str, answer: str, row: dict) -> float: ...


# characters at a text's end: an answer comes last
TAIL = 20_000

# $3^\circ$ **5** \left( -> 3 5 (
MARKUP = (
    r"\\(?:left|right|displaystyle|bf)(?![a-z])|\\(?:text)?color\{[a-z]+\}|\\[()]"
    r"|\\{0,2}[$%]|[\u00b0\u20ac\u00a3\u00a5\u20b9`]|\*\*|__|\^\s*\{?\s*\\circ\s*\}?"
)
# Ways to write the same thing, and the one that is read. An example stands above each.
SPELLINGS = {
    # \u22123 -> -3
    r"[\u2212\u2013]": "-",
    # \approx 3 -> = 3
    r"\u2248|\\approx(?![a-z])": "=",
    # 2**3 -> 2^3
    r"(?<=\d)\*\*(?=\d)": "^",
    # 2 \times 3 -> 2 * 3
    r"\\(?:times|cdot|ast)(?![a-z])|[\u00d7\u00b7]": "*",
    # 6 \div 3 -> 6 / 3
    r"\\div(?![a-z])|[\u00f7\u2044]": "/",
    # 1{,}000 -> 1000
    r" ?\\!|\{,\}(?=\d{3})": "",
    # $ - 5 -> -5
    r"\\?\$\s*-\s*(?=[$\\\d.])": "-",
    # 3$$4 -> 3;4, two numbers
    rf"(\d)(?:{MARKUP})+(?=\d)": r"\1;",
    # $3$ -> 3
    MARKUP: "",
    # 1\frac{1}{2} -> 1 \frac{1}{2}
    r"(?<=\d)(?=\\[a-z]*frac)": " ",
    # \frac{1}{2} -> 1/2, \frac12 too
    r"\\[a-z]*frac\s*(?:\{\s*(-?)([\d.,]+)\s*\}|(\d))\s*(?:\{\s*(-?[\d.,]+)\s*\}|(\d))": r"\2\3/\1\4\5 ",
    # 3\,000 -> 3 000
    r"(?:(?<!\\)\\[,;: ]|~|[^\S\n])+": " ",
    # x^2 -> x^{2}
    r" ?([\^_]) ?(?:\{ ?([+-]?\d+) ?\}|([+-]?\d+))": r"\1{\2\3}",
    # 3 * 10^{4} -> 3e4
    r"(?<=\d) ?[*x] ?10\^\{([+-]?\d+)\}": r"e\1",
    # 5 cm^{2} -> 5 cm
    r"(?<=[ \d][ckm]m| ft)\^\{[23]\}": "",
    # x={5} -> x=5
    r"(?<=[-+=({])\{((?:[^{}]|\{[^{}]*\})*)\}": r"\1",
    # (1)/(2) -> 1/2
    r"(?<![\w)}\]])\((\d+)\)/\((\d+)\)": r"\1/\2",
    # -(3/4) -> -3/4
    r"(?<=-)\(((?:\d|[./ *^}]|,(?=\d{3})|[e{][-+]?)+?) ?\)(?![\w(^])": r"\1",
}
# 1,234.5 or 1 234 or .5
DIGITS = r"(?:\d{1,3}(?:[, ]\d{3}){1,15}|\d{1,50})(?!\d)(?:\.\d{1,50}(?!\d))?|\.\d{1,50}(?!\d)"
# 1.5e3 or 2^{3}
POWER = rf"(?:{DIGITS})(?:e[+-]?\d{{1,3}}(?!\d))?(?:\^\{{[+-]?\d{{1,3}}\}})?"
# a minus, but not that of 3-4, nor the dash after a word or before an item of a list
SIGN = r"(?<![\w)}\]])-|(?<![\w)}\]\n] )(?<![\w)}\]\n])- |(?<=\bis )- "
# -1 1/2 is (-, 1, 1, 2), and 3/4 is (, , 3, 4): sign, whole, above, below
NUMBER = re.compile(
    rf"(?=[-\d.])({SIGN})?(?<![\d.])(?:(\d+) (?=\d+ ?/))?({POWER})(?: ?/ ?(-?{POWER}))?"
)
BRACES = r"[^{}]*+"
# inside each other
for _ in range(8):
    BRACES = rf"(?:[^{{}}]++|\{{{BRACES}\}})*+"
# \boxed{\frac{1}{2}} -> \frac{1}{2}
BOXED = re.compile(rf"\\f?box(?:ed)?\s*\{{({BRACES})\}}")
# #### answer: 18 dollars -> 18
MARKED = r"^.*####\s*(?:[a-z ]*answer[a-z ]*:? ?)?(.*?)(?:(?<=[\d.}])[ ,]* [a-z(].*)?$"
# <3/2>, as `with_values` writes it
VALUE = r"<-?\d+(?:/\d+)?>"
# it is <2>\sqrt<3> cm -> <2>\sqrt<3>
IN_TEXT = re.compile(rf"(?:{VALUE}|\\(?:sqrt|pi)|[*/^_])+")
# \text{even} -> even
LATEX_TEXT = r"\\(?:text|math|mbox|operatorname|bold|rm)[a-z]* ?\{([^{}]*)\}"
# <5> cm^<2> -> <5>, <12> apples -> <12>
UNIT = rf"(?:(?<=\S) ?{LATEX_TEXT}|(?<=>) ?(?:[a-z]{{3,}}|[ckm]m|kg|ft)[^<=]*)(?:\^<\d>)?$"


def exact(response: str, answer: str, row: dict) -> float:
    """Return 1 if the response is the answer, but for white space around it."""
    return float(response.strip() == answer.strip())


def math(response: str, answer: str, row: dict) -> float:
    """Return 1 if the response's final answer equals the right one.

    That is the marked answer in `answer`, or all of `answer` if nothing is marked.
    """
    response = spell(response)
    answer = spell(answer)
    marked = marked_answer(response)
    right = marked_answer(answer)
    given = last_number(response) if marked is None else plain(marked)
    return float(given == plain(answer if right is None else right))


def spell(text: str) -> str:
    """Write a text's end in lower case, and what has several spellings in one of them."""
    # 2\u00bd -> 2 \u00bd, else the next line but one would make it 21/2
    text = re.sub("[\u00bc-\u00be\u2150-\u215e]", r" \g<0>", text)
    # x\u00b2 -> x^{\u00b2}
    text = re.sub("[\u00b2\u00b3\u00b9\u2070-\u207b]+", r"^{\g<0>}", text)
    text = normalize("NFKC", text)[-TAIL:].lower()
    for spelling, plainest in SPELLINGS.items():
        text = re.sub(spelling, plainest, text)
    return text


def marked_answer(text: str) -> str | None:
    r"""Find the last \boxed{...}, else the rest of the line after the last ####, else None.

    Behind #### a number ends where words or a bracket begin, as GSM8K's own grader has it (Cobbe et
    al. 2021).
    """
    found = BOXED.findall(text) or re.findall(MARKED, text, re.M)
    # as MATH's grader looks for it: the inner one of two
    while found and (inner := BOXED.findall(found[-1])):
        found = inner
    return found[-1] if found else None


def last_number(text: str) -> str | None:
    r"""Find the last number with what multiplies it, such as 2\sqrt{3}; else None."""
    for line in reversed(re.split(r"(?=\n)", text)):
        if numbers := [found for found in IN_TEXT.findall(with_values(line)) if "<" in found]:
            return tidy(numbers[-1].strip("*"))
    return None


def plain(answer: str) -> str:
    """Write equal answers as the same text.

    Of an equation with a name, such as x = 5, the right side counts.
    """
    # x = 5 -> 5, f(x)=5 -> 5
    name = r"^(?:(?:[a-z]{1,2}|\\[a-z]+)(?:_\{\w+\}|_\w|\(\w\))?)? ?=(?=[^=]*$)"
    answer = re.sub(name, "", answer.strip(" *").rstrip(".,;"))
    # (1,200) -> (1, 200): not thousands
    answer = re.sub(
        r"(?:[(\[]|\\\{)[^()\[\]{}]*", lambda inside: inside[0].replace(",", ", "), answer
    )
    return tidy(with_values(answer))


def with_values(text: str) -> str:
    """Write every number in a text as its exact value, without braces around one."""

    def value(match: re.Match) -> str:
        sign, whole, above, below = match.groups()
        try:
            number = int(whole or 0) + power(above) / power(below or "1")
            return f"<{-number if sign else number}>"
        except (ArithmeticError, ValueError):
            # 1/0, or too large to be written
            return match[0]

    # \sqrt{<3>} -> \sqrt<3>
    return re.sub(rf"(\\sqrt|[\^_]) ?\{{ ?(\w|{VALUE}) ?\}}", r"\1\2", NUMBER.sub(value, text))


def power(text: str) -> Fraction:
    """Return the value of a number of NUMBER, such as 1,000^{2}."""
    base, _, exponent = re.sub(r"[, {}]", "", text).partition("^")
    return Fraction(base) ** int(exponent or 1)


def tidy(text: str) -> str:
    r"""Drop units, blanks and a plus in front; write \frac{a}{b} as a/b.

    A sum, or a product below, is put in brackets.
    """
    text = re.sub(r"\s", "", re.sub(UNIT, "", text))
    # \frac{x+<1>}<2> -> (x+<1>)/(<2>)
    part = rf"(?:\{{([^{{}}]*)\}}|({VALUE}))"
    text = re.sub(rf"\\[dtc]?frac{part}{part}", r"(\1\2)/(\3\4)", text)
    # (<3>) -> <3>
    text = re.sub(rf"(?<![a-z])\(({VALUE}|[a-z]|\\[a-z]+)\)", r"\1", text)
    # (<2>x)/<3> -> <2>x/<3>
    text = re.sub(rf"(?<![a-z])\((-?(?:[^()<+,-]|{VALUE}|\([^()]*\))*)\)/", r"\1/", text)
    # (\text{even}) -> even
    text = re.sub(r"^\(([^(),]*)\)$", r"\1", re.sub(LATEX_TEXT, r"\1", text))
    # <-3> -> -<3>, but x<-3> stays
    return re.sub(r"(?<![\w)}\]>])<-", "-<", text).removeprefix("+")


def overlong(tokens: int, longest: int, buffer: int, penalty: float) -> float:
    """Return DAPO's penalty: 0 up to longest - buffer tokens, then linear to -penalty."""
    return -penalty * min(max(tokens - longest + buffer, 0) / buffer, 1) if buffer else 0.0


BUILT_IN = {"exact": exact, "math": math}


def load_reward(name: str) -> Reward:
    """Return `exact`, `math`, or the function at `package.module:name`, else raise InputError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    example = {"response": "response", "answer": "answer", "row": {}}
    return load_function(f"grpo.reward={name!r}", name, example, "exact, math or ")


def load_function(setting: str, name: str, example: dict, others: str = "") -> Callable:
    """Return the function at `package.module:name`; modules in the current folder are found, too.

    setting: tells where the name stands. example: arguments that it must take, by order. others:
    what else the setting may be. Raises InputError if there is no such function.
    """
    module, _, function = name.partition(":")
    if not module or not function or module.startswith("."):
        raise InputError(f"{setting} is not {others}package.module:function")
    sys.path.append("")
    try:
        found = getattr(importlib.import_module(module), function)
    # a module can raise whatever Python raises, as a reward can (rollouts.py)
    except (Exception, SystemExit) as error:
        raise InputError(f"{setting} cannot be imported: {error!r}") from error
    if not callable(found):
        raise InputError(f"{setting} is a {type(found).__name__}, not a function")
    try:
        inspect.signature(found).bind(*example.values())
    except (TypeError, ValueError) as error:
        # ValueError: some of Python's own functions do not tell what they take
        raise InputError(f"{setting} must take ({', '.join(example)}): {error}") from error
    return found
