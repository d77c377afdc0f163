r"""Compare answers to mathematical questions, for the reward `math` (rewards.py).

Every number is written as its exact value, <3/2> for 1\frac{1}{2} or 1.50; then answers are
equal if their texts are. Its time is bounded: of a long text only the end counts, and a number has
at most 1,000 digits. It does not guess: units that it knows (MEASURE) do not count, any other word
behind a number does, and 5 dozen is not 5. In a text without a mark the last number counts, unless
something beside it makes another of it (CHANGING). Left out: symbolic equality (sqrt(8) is not
2 sqrt(2), 3 * 4 is not yet 12), for which there is `math_verify`, and what units are of.
"""

import re
from fractions import Fraction
from unicodedata import normalize

# characters at a text's end: an answer comes last
TAIL = 20_000

# $3^\circ$ **5** \left( -> 3 5 (
MARKUP = (
    r"\\(?:left|right|displaystyle|bf)(?![a-z])|\\(?:text)?color\{[a-z]+\}|\\[()]"
    r"|\\{0,2}[$%]|[\u20ac\u00a3\u00a5\u20b9`]|\*\*|__"
    # a brace behind \circ that none before it opens belongs to something else: \boxed{45^\circ}
    r"|(?:\u00b0|\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z])))(?:\s*[cf](?![\w(]))?"
)
# \text or \mathrm, before its brace
TEXT = r"\\(?:text|math|mbox|operatorname|bold|rm)[a-z]* ?"
FRACTION = r"\\[a-z]*frac\s*(?:\{\s*(-?)([\d.,]+)\s*\}|(\d))\s*(?:\{\s*(-?[\d.,]+)\s*\}|(\d))"
# words that multiply the number before them, by which power of ten
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
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
    # \frac{1}{2}\frac{3}{4} -> \frac{1}{2}*\frac{3}{4}
    r"(?<=\})\s*(?=\\[a-z]*frac)": "*",
    # \frac{1}{2}345 -> 1/2*345
    rf"{FRACTION}(?=\s*\.?\d)": r"\2\3/\1\4\5*",
    # \frac{1}{2} -> 1/2, \frac12 too
    FRACTION: r"\2\3/\1\4\5 ",
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
    # 3 million -> 3e*6, which multiplies a fraction before it, too
    **{
        rf"(?<=\d) ?(?:({TEXT}\{{) ?)?{word}s?(?![a-z])": rf"e*{exponent}\1"
        for word, exponent in SCALES.items()
    },
    # -(3/4) -> -3/4
    r"(?<=-)\(((?:\d|[./ *^}]|,(?=\d{3})|[e{][-+]?)+?) ?\)(?![\w(^])": r"\1",
}
# 1,234.5 or 1 234 or .5
DIGITS = r"(?:\d{1,3}(?:[, ]\d{3}){1,15}|\d{1,50})(?!\d)(?:\.\d{1,50}(?!\d))?|\.\d{1,50}(?!\d)"
# 1.5e3 or 2^{3}
POWER = rf"(?:{DIGITS})(?:e[+-]?\d{{1,3}}(?!\d))?(?:\^\{{[+-]?\d{{1,3}}\}})?"
# a minus, but not that of 3-4, nor the dash after a word or before an item of a list
SIGN = r"(?<![\w)}\]])-|(?<![\w)}\]\n] )(?<![\w)}\]\n])- |(?<=\bis )- "
# -1 1/2 is (-, 1, 1, 2, ), and 3/4 million is (, , 3, 4, 6): sign, whole, above, below, scale
NUMBER = re.compile(
    rf"(?=[-\d.])({SIGN})?(?<![\d.])(?:(\d+) (?=\d+ ?/))?({POWER})(?: ?/ ?(-?{POWER}))?"
    r"(?:e\*(\d\d?))?"
)
# digits of a number, at most
DIGITS_LIMIT = 1_000
BRACES = r"[^{}]*+"
# inside each other
for _ in range(8):
    BRACES = rf"(?:[^{{}}]++|\{{{BRACES}\}})*+"
# \boxed{\frac{1}{2}} -> \frac{1}{2}
BOXED = re.compile(rf"\\f?box(?:ed)?\s*\{{({BRACES})\}}")
FUNCTION = r"\\?(?:arc)?(?:sin|cos|tan|cot|csc|log|ln|exp|sqrt|gcd|lcm)(?:_\S)?"
# x in 5 + x, but no word
LETTER = r"[b-hj-z](?![a-z])"
# words that make another value of the number before them; others may follow it in a sentence
CHANGING = (
    r"(?:factorial|squared|cubed|dozen|half|halves|thirds|fourths|quarters|(?:ten|hundred)ths"
    rf"|(?:to|raised to) the|or (?:more|less|fewer)|(?:plus|minus|times|over|mod|modulo|choose"
    rf"|divided by|multiplied by) (?:{LETTER}|[\d<]))(?![a-z])|{FUNCTION}(?: ?\(| {LETTER})"
)
# #### answer: 18 dollars -> 18
MARKED = (
    r"^.*####\s*(?:[a-z ]*answer[a-z ]*:? ?)?"
    rf"(.*?)(?:(?<=[\d.}}])[ ,]* (?!{CHANGING})[a-z(].*)?$"
)
# <3/2>, as `with_values` writes it
VALUE = r"<-?\d+(?:/\d+)?>"
# it is <2>\sqrt<3> cm -> <2>\sqrt<3>; with what makes another value of it: 5 + x, sin 30, 12 squared
IN_TEXT = re.compile(
    rf"(?:(?:{FUNCTION}|(?<![a-z]){LETTER} ?[-+*/]|(?<![a-z]){LETTER}\(|\}}\{{) ?\(? ?)?"
    rf"(?:{VALUE}|\\(?:sqrt|pi)|[*/^_])+"
    rf"(?: ?\\(?:sqrt|pi|theta|[a-z]*frac|binom|[pb]?mod)(?![a-z])| ?{FUNCTION} ?[(\\<]"
    rf"| ?{TEXT}\{{[^{{}}]*\}}(?:\^<\d>)?| ?[-+*/] ?{LETTER}|\}}\{{| ?(?:{CHANGING})"
    rf"|(?!(?:st|nd|rd|th)(?![a-z]))[a-z]+(?: ?[-+*/] ?{VALUE})?)?"
)
# \text{even} -> even
LATEX_TEXT = rf"{TEXT}\{{([^{{}}]*)\}}"
# what may be left out behind a number; a word that is not here could be anything: 9 half, 8 choose k
MEASURE = (
    r"(?:(?:square|cubic|sq\.?|cu\.?) )?(?:[cdkmn]m|ft|feet|foot|in|inch(?:es)?|yds?|mi|mph|kmph|kph"
    r"|[km]g|lbs?|oz|tons?|tonnes?|m[ls]|hrs?|mins?|secs?|yrs?|centur(?:y|ies)|deg|rad|rs|usd|eur"
    r"|k?wh?|[km]?hz|percent|celsius|fahrenheit|people|men|women|children|boxes"
    r"|(?:(?:centi|deci|kilo|milli|nano)?(?:meter|metre|gram|liter|litre|watt|joule|second)|yard"
    r"|mile|pound|ounce|gallon|quart|pint|cup|teaspoon|tablespoon|acre|hectare|minute|hour|day"
    r"|week|month|year|decade|degree|radian|dollar|cent|euro|rupee|peso|franc|volt|amp|ohm|newton"
    r"|unit|point|person|student|boy|girl|friend|way|item|piece|apple|orange|egg|book|page|ticket"
    r"|marble|coin|ball|card|car|dog|cat|toy|tree|flower|cookie)s?)(?![a-z])"
)
# m/s, and single letters, which are variables outside of \text
SHORT = rf"(?:{MEASURE}|[acfghjklmnsvw](?![a-z]))"
# <5> cm^<2> -> <5>, <12> apples -> <12>
UNIT = (
    rf"(?:(?<=\S) ?{TEXT}\{{ *(?:{SHORT}(?: per |/| ?)?){{0,6}} *\.?\}}"
    rf"|(?:(?<=>) ?|(?<=\S) )(?:per )?{MEASURE}(?:(?: per | a | ){MEASURE}|/{SHORT}){{0,4}})"
    r"(?:\^<\d>)?$"
)


def same_answer(response: str, answer: str) -> bool:
    """Return whether the response's final answer equals the right one.

    That is the marked answer in `answer`, or all of `answer` if nothing is marked.
    """
    response = spell(response)
    answer = spell(answer)
    marked = marked_answer(response)
    right = marked_answer(answer)
    given = last_number(response) if marked is None else plain(marked)
    return given == plain(answer if right is None else right)


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
        sign, whole, above, below, scale = match.groups()
        try:
            number = int(whole or 0) + power(above) / power(below or "1")
            number *= 10 ** int(scale or 0)
            return f"<{-number if sign else number}>"
        except (ArithmeticError, ValueError):
            # 1/0, or too large to be written
            return match[0]

    # \sqrt{<3>} -> \sqrt<3>
    return re.sub(rf"(\\sqrt|[\^_]) ?\{{ ?(\w|{VALUE}) ?\}}", r"\1\2", NUMBER.sub(value, text))


def power(text: str) -> Fraction:
    """Return the value of a number of NUMBER, such as 1,000^{2}.

    Raises OverflowError if it would have more than DIGITS_LIMIT digits.
    """
    base, _, exponent = re.sub(r"[, {}]", "", text).partition("^")
    value = Fraction(base)
    times = int(exponent or 1)
    # 10 has more than 3 bits
    bits = max(abs(value.numerator), value.denominator).bit_length()
    if (bits - 1) * abs(times) > 3.33 * DIGITS_LIMIT:
        raise OverflowError(f"{text} has more than {DIGITS_LIMIT} digits")
    return value**times


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
