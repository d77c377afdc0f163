"""The math reward against four oracles: exact fractions over generated pairs of values and forms, sympy, and the
graders of GSM8K (Cobbe et al. 2021) and MATH (Hendrycks et al. 2021), written here as their papers' code has them."""

import random
import re
from fractions import Fraction

import pytest
import sympy
from sympy.core.function import AppliedUndef

from minitrain.grpo.rewards import load_reward

math = load_reward("math")


# ------------------------------------------------------------------------------------------------------ exact fractions


SUPERSCRIPTS = str.maketrans(
    "0123456789", "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
)
VULGAR = {
    "1/2": "\u00bd",
    "1/4": "\u00bc",
    "3/4": "\u00be",
    "1/3": "\u2153",
    "2/3": "\u2154",
    "5/8": "\u215d",
}


def whole_forms(n: int) -> list[str]:
    forms = [
        str(n),
        f"{n}.0",
        f"{n}.00",
        f"{n}/1",
        rf"\frac{{{2 * n}}}{{2}}",
        rf"\cfrac{{{3 * n}}}{{3}}",
    ]
    for base in (2, 3, 7, 10):
        for power in range(2, 8):
            if base**power == n:
                forms += [
                    f"{base}{str(power).translate(SUPERSCRIPTS)}",
                    f"{base}**{power}",
                    f"{base}^{power}",
                ]
    if n >= 1000:
        grouped = f"{n:,}"
        forms += [
            grouped,
            *(grouped.replace(",", mark) for mark in ("{,}", r",\!", r"\,", " ", "\u202f")),
        ]
    if n and n % 1000 == 0:
        mantissa, power = n, 0
        while mantissa % 10 == 0:
            mantissa, power = mantissa // 10, power + 1
        forms += [
            rf"{mantissa}\times 10^{{{power}}}",
            rf"{mantissa} \cdot 10^{power}",
            f"{mantissa}e{power}",
            f"{mantissa} * 10^{power}",
            f"{mantissa} \u00d7 10^{{{power}}}",
            f"{mantissa} x 10^{power}",
        ]
        if mantissa == 1:
            forms += [f"10^{{{power}}}", f"10^{power}"]
    return forms


def decimal_forms(value: Fraction) -> list[str]:
    places = next((k for k in range(7) if (value * 10**k).denominator == 1), None)
    if not places:
        return []
    digits = f"{int(value * 10**places):0{places + 1}d}"
    text = f"{digits[:-places]}.{digits[-places:]}"
    forms = [
        text,
        text + "0",
        rf"{int(value * 10**places)} \times 10^{{-{places}}}",
        f"{int(value * 10**places)}e-{places}",
    ]
    return (
        forms
        + ([text[1:]] if value < 1 else [])
        + ([f"{int(value):,}{text[text.index('.') :]}"] if value > 1000 else [])
    )


def fraction_forms(value: Fraction) -> list[str]:
    p, q = value.numerator, value.denominator
    forms = [
        f"{p}/{q}",
        f"{p} / {q}",
        rf"\frac{{{p}}}{{{q}}}",
        rf"\dfrac{{ {p} }}{{ {q} }}",
        rf"\tfrac {{{p}}} {{{q}}}",
        rf"\frac{{{3 * p}}}{{{3 * q}}}",
        rf"{p} \div {q}",
        rf"\cfrac{{{p}}}{{{q}}}",
        rf"\sfrac{{{p}}}{{{q}}}",
        rf"\nicefrac{{{p}}}{{{q}}}",
        f"{p}\u2044{q}",
        f"({p})/({q})",
    ]
    forms += [VULGAR[str(value)]] if str(value) in VULGAR else []
    if p < 10 and q < 10:
        forms += [rf"\frac{p}{q}", rf"\frac {p} {q}", rf"\frac{p}{{{q}}}", rf"\frac{{{p}}}{q}"]
    if value > 1 and q > 1:
        w, rest = divmod(p, q)
        forms += [
            rf"{w}\frac{{{rest}}}{{{q}}}",
            f"{w} {rest}/{q}",
            rf"{w}\,\dfrac{{{rest}}}{{{q}}}",
            f"{w} {rest} / {q}",
            rf"{w} \frac{{{rest}}}{{{q}}}",
            rf"{w}\ \tfrac{{{rest}}}{{{q}}}",
        ]
        forms += [rf"{w}\frac{rest}{q}"] if rest < 10 and q < 10 else []
        if part := VULGAR.get(f"{rest}/{q}"):
            forms += [f"{w}{part}", f"{w} {part}"]
    return forms


def forms_of(value: Fraction) -> list[str]:
    size = abs(value)
    forms = (
        whole_forms(int(size))
        if size.denominator == 1
        else decimal_forms(size) + fraction_forms(size)
    )
    if value >= 0:
        return [
            sign.format(form) for form in forms for sign in ("{}", "+{}", "${}$", r"\${}", "${}")
        ]
    signs = (
        "-{}",
        "- {}",
        "\u2212{}",
        r"-\,{}",
        "$-{}$",
        "-${}$",
        r"-\${}",
        "$- {}$",
        r"- \${}",
        "-({})",
    )
    inside = [
        rf"\frac{{-{size.numerator}}}{{{size.denominator}}}",
        rf"\frac{{{size.numerator}}}{{-{size.denominator}}}",
    ]
    return [sign.format(form) for form in forms for sign in signs] + inside


ANSWERS = ("{}", "{}", "#### {}", r"\boxed{{{}}}", "She sells 16 - 3 = <<16-3=13>>13.\n#### {}")
RESPONSES = r"""
\boxed{{{}}}
so \boxed{{ {} }}.
\boxed{{x = {}}}
7, no: $\boxed{{{}\text{{ cm}}}}$
\boxed{{{}\%}}
\boxed{{{}^\circ}}
\boxed{{{}\ \mathrm{{cm}}^2}}
\boxed{{{} dollars}}
\boxed{{{} km per hour}}
\boxed{{\text{{{}}}}}
\boxed{{{}.}} And 3 more
3 * 4\n#### {}
#### **{}**\n8
#### {} dollars
#### {}.
####{}
#### {} (2 a day)
the answer is {}.
the answer is {}
x = {}
**Answer:** {}
**{}**
5 + 6 = {} dollars
first 7, then it is {}
- 5 apples\n- 7 pears\nThat is {}
\[ {} \]
it is {}, as 3 is prime. Answer: {}!
\boxed{{{{{}}}}}
\boxed{{\bf {}}}
\boxed{{\boldsymbol{{{}}}}}
\boxed{{\color{{blue}}{{{}}}}}
\boxed{{\boxed{{{}}}}}
\boxed{{\approx {}}}
\boxed{{x_1 = {}}}
\boxed{{f(x) = {}}}
\boxed{{{}\\%}}
\boxed{{{}\operatorname{{cm}}}}
\boxed{{{}\,\rm{{cm}}}}
\boxed{{{},}}
#### = {}
#### The answer is {}.
#### Answer: {}
#### *{}*
#### ***{}***
#### {} m
#### {},
#### {}, which is it
*{}*
The area is {} cm^2.
The area is {} cm\u00b2.
"""
RESPONSES = [
    line.replace(r"\n", "\n").replace(r"\u00b2", "\u00b2")
    for line in RESPONSES.split("\n")
    if line
]


def near(value: Fraction, draw: random.Random) -> Fraction:
    """A value that a careless reader takes for this one: another sign, digits run together, a part of it."""
    w, rest = divmod(abs(value), 1)
    p, q = rest.numerator, rest.denominator
    others = [
        -value,
        value + 1,
        10 * value,
        value / 10,
        w - rest,
        rest - w,
        w * rest,
        rest,
        w,
        w + 2 * rest,
        Fraction(q),
        Fraction(int(w) % 1000),
        Fraction(int(f"{int(w)}{p}"), q),
        Fraction(int(f"{p}{q}")),
        value / 100,
    ]
    return draw.choice([other for other in others if other != value])


def values(draw: random.Random) -> Fraction:
    kind = draw.randrange(6)
    if kind == 0:
        return Fraction(draw.randint(-99, 99))
    if kind == 1:
        return Fraction(
            draw.choice((-1, 1))
            * draw.choice((draw.randint(1000, 9_999_999), 10 ** draw.randint(3, 9)))
        )
    if kind == 2:
        return Fraction(draw.randint(-99_999, 99_999), 10 ** draw.randint(1, 4))
    if kind == 3:
        return Fraction(draw.choice((-1, 1)) * draw.choice((2, 3, 7)) ** draw.randint(2, 7))
    return Fraction(draw.randint(-30, 30), draw.randint(2, 12))


@pytest.mark.parametrize("seed", range(4))
def test_equals_exact_fractions(seed):
    draw, wrong = random.Random(seed), []
    for _ in range(5_200):
        right = values(draw)
        given = right if draw.random() < 0.5 else near(right, draw)
        answer = draw.choice(ANSWERS).format(draw.choice(forms_of(right)))
        form, response = draw.choice(forms_of(given)), draw.choice(RESPONSES)
        response = response.format(*[form] * response.count("{}"))
        if math(response, answer, {}) != (given == right):
            wrong.append((response, answer, given, right))
    assert not wrong, f"{len(wrong)}: " + "\n".join(map(str, wrong[:40]))


# --------------------------------------------------------------------------------------------------- published graders


def gsm8k(response: str, answer: str) -> bool:
    """Numbers with digits, full stops and commas directly behind ####, as text without commas (Cobbe et al. 2021)."""
    given, right = (re.search(r"#### (-?[0-9.,]+)", text) for text in (response, answer))
    return given is not None and given[1].replace(",", "") == right[1].replace(",", "")


def hendrycks(answer: str) -> str:
    """What MATH's grader compares (Hendrycks et al. 2021): the text after these repairs, in this order."""
    for old, new in (
        ("\n", ""),
        (r"\!", ""),
        (r"\\", "\\"),
        ("tfrac", "frac"),
        ("dfrac", "frac"),
        (r"\left", ""),
        (r"\right", ""),
        (r"^{\circ}", ""),
        (r"^\circ", ""),
        (r"\$", ""),
    ):
        answer = answer.replace(old, new)
    answer = (
        answer.split(r"\text{ ")[0].replace(r"\%", "").replace(" .", " 0.").replace("{.", "{0.")
    )
    answer = "0" + answer if answer.startswith(".") else answer
    name, equals, value = answer.partition("=")
    answer = value if equals and len(name) <= 2 and "=" not in value else answer
    answer = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", answer).replace(" ", "")
    answer = re.sub(
        r"\\frac([^{])\{",
        r"\\frac{\1}{",
        re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", answer),
    )
    answer = r"\frac{1}{2}" if answer == "0.5" else answer
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", answer)


HENDRYCKS = r"""
\frac{1}{2} ; 2\sqrt{3} ; \left( 3, \frac{\pi}{2} \right) ; p - q ; \frac{14}{3} ; 9 ; \text{Evelyn} ; 42 ; 90^\circ
; 3\sqrt{13} ; 2220 ; \frac{3}{56} ; \sqrt{51} ; 6 - 5i ; -50 ; \pi ; 6+9i ; x=5 ; 1,-2 ; -2,1 ; 52_8 ;
\frac{243}{625} ; 3, 5, 7 ; \left( \frac{3}{2}, -13 \right) ; \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ;
\begin{pmatrix} 12 & 3 \\ 4 & 5 \end{pmatrix} ; (-\infty, 2) \cup (3, \infty) ; (-\infty, 2] \cup (3, \infty) ; x^3
+ 3x - 6 ; x^3 + 3x + 6 ; \$36 ; 15\% ; 10,\!080 ; 18\text{ inches} ; \frac{3\sqrt{3}}{4} ; 2k+2 ; 2k+22 ;
\dfrac{9}{7} ; 0.5 ; (6,31,-1) ; [0,3) ; (0,3) ; \frac{9}{4} \pi ; \frac{9}{4\pi} ; \frac{1}{\sqrt{2}} ; E ;
-\frac{1}{3} ; 1.45 ; 145 ; 1736 ; 17,36 ; \frac{3 \pm \sqrt{5}}{2} ; \frac32 \pm \sqrt{5} ; 3 \pm \sqrt{5} ; y = 2x
+ 1 ; \frac{x+2}{7} ; x + \frac27 ; 2^8 ; 28 ; 3/4 ; \frac34 ; (1, 234) ; 1234 ; 12/34 ; \text{June 20} ; \sin
\frac{x}{2} ; \frac{\sin x}{2} ; x^{2/3} ; \frac{x^2}{3} ; 7:30 ; 730 ; -1, \frac12 ; -1\frac12 ; 3! ; 3
"""
HENDRYCKS = [answer.strip() for answer in HENDRYCKS.split(";")]


def respellings(text: str) -> list[str]:
    replaced = [
        (r"frac", "dfrac"),
        (r"d?frac", "tfrac"),
        (" ", ""),
        (",", ", "),
        (r"\(", r"\\left("),
        (r"\)", r"\\right)"),
        (r"\\sqrt\{(\d)\}", r"\\sqrt\1"),
        (r"frac\{(\d)\}\{(\d)\}", r"frac\1\2"),
        (r"frac\{(\d)\}", r"frac\1"),
        (r"^\\d?frac\{(\d+)\}\{(\d+)\}$", r"\1/\2"),
        ("([-+])", r" \1 "),
        (r"(\d)(\d{3})$", r"\1\\!\2"),
        ("^0", ""),
    ]
    around = [r" {} ", r"{}\%", r"{}^{{\circ}}", r"\${}", "x = {}"] + (
        [] if "text" in text else [r"{}\text{{ units}}"]
    )
    return [re.sub(*pair, text) for pair in replaced] + [form.format(text) for form in around]


def test_agrees_with_the_grader_of_math():
    for right in HENDRYCKS:
        for other in HENDRYCKS:
            alike = hendrycks(right) == hendrycks(other)
            assert math(rf"\boxed{{{other}}}", right, {}) == alike, (other, right)
        for given in respellings(right):
            if hendrycks(given) == hendrycks(right):
                assert math(rf"\boxed{{{given}}}", right, {}) == 1, (given, right)


def test_agrees_with_the_grader_of_gsm8k():
    draw = random.Random(0)
    for _ in range(2_000):
        right = draw.choice((draw.randint(-99, 99), draw.randint(1000, 99_999_999)))
        given = draw.choice((right, right, -right, right % 1000, right * 10, int(f"{right}7")))
        response = draw.choice(
            ("{}", "{:,}", "{} dollars", "{:,} (of 7)", "{} for 3 and 4", "{}\n7")
        ).format(given)
        answer = "She has 3 * 4 = <<3*4=12>>12.\n#### " + draw.choice(("{}", "{:,}")).format(
            right
        )
        assert math(f"5 + 6.\n#### {response}", answer, {}) == gsm8k(
            f"#### {response}", answer
        ), (response, answer)


# ----------------------------------------------------------------------------- words, functions, degrees and products

# what a word behind a number n makes of it; `or more` is no value, but a thing of its own
WORDS = {
    "hundred": lambda n: n * 100,
    "thousand": lambda n: n * 1000,
    "million": lambda n: n * 10**6,
    "billion": lambda n: n * 10**9,
    "trillion": lambda n: n * 10**12,
    "dozen": lambda n: n * 12,
    "squared": lambda n: n**2,
    "cubed": lambda n: n**3,
    "factorial": sympy.factorial,
    "half": lambda n: n / 2,
    "thirds": lambda n: n / 3,
    "hundredths": lambda n: n / 100,
    "plus x": lambda n: n + X,
    "minus y": lambda n: n - Y,
    "times x": lambda n: n * X,
    "over k": lambda n: n / K,
    "choose k": lambda n: sympy.binomial(n, K),
    "choose 2": lambda n: sympy.binomial(n, 2),
    "mod 7": lambda n: n % 7,
    "to the k": lambda n: n**K,
    "or more": sympy.Function("ormore"),
    "or less": sympy.Function("orless"),
}
SCALED = ("hundred", "thousand", "million", "billion", "trillion")
X, Y, K, A, B, C, Z = sympy.symbols("x y k a b c z")
PRODUCTS = {"xyz": X * Y * Z, "abc": A * B * C, "x": X, "xy": X * Y, "kx": K * X, "k": K}
FUNCTIONS = {"sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "log": sympy.log}
UNITS = r"cm;meters;km;dollars;inches;ft;km per hour;apples;\text{ cm}^2;\text{ m/s};\%;^\circ"
UNITS = [*UNITS.split(";"), r"^{\circ}", "\u00b0", " people", r"\text{ square units}"]


def worded(draw: random.Random, n: Fraction) -> tuple[list[str], sympy.Expr, bool]:
    """A number with something behind it: its spellings, what it is, and whether these must be read."""
    form = draw.choice(forms_of(n)[:6]) if n.denominator > 1 else str(n)
    value = sympy.Rational(n.numerator, n.denominator)
    kind = draw.randrange(5)
    if kind == 0:
        word, function = draw.choice(list(WORDS.items()))
        if (n.denominator > 1 or n > 99) and word.startswith(("choose", "factorial", "mod")):
            word, function = "squared", WORDS["squared"]
        known = word in SCALED
        return [f"{form} {word}", rf"{form}\text{{ {word}}}"], function(value), known
    if kind == 1:
        letters, product = draw.choice(list(PRODUCTS.items()))
        return [f"{form}{letters}", f"{form}{letters}"], value * product, False
    if kind == 2:
        name, function = draw.choice(list(FUNCTIONS.items()))
        forms = [f"{form}{name}(x)", rf"{form}\{name}(x)", f"{form} {name} x"]
        return forms, value * function(X), False
    if kind == 3:
        unit = draw.choice(UNITS)
        blank = " " if unit[0].isalpha() else ""
        return [f"{form}{blank}{unit}"], value, True
    return [form], value, True


def alike(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Whether two values are equal where their letters have some values, to 25 digits."""
    letters = {
        letter: sympy.Rational(7 * i + 3, 5) for i, letter in enumerate((X, Y, K, A, B, C, Z))
    }
    gap = (one - other).subs(letters)
    unknown = gap.atoms(AppliedUndef)
    return one == other or (not unknown and abs(complex(gap.evalf(25))) < 1e-15)


@pytest.mark.parametrize("seed", range(2))
def test_agrees_with_sympy_on_words_functions_degrees_and_products(seed):
    """Never right where sympy finds another value; and right where words and units are known ones."""
    draw, wrong = random.Random(seed), []
    places = (r"\boxed{{{}}}", r"so $\boxed{{{}}}$, not 3", "#### {}", "#### {}\n", "it is {}.")
    places += ("The answer is {}", "{}", "**Answer:** {}")
    for _ in range(1_500):
        n = abs(values(draw)) if draw.random() < 0.3 else Fraction(draw.randint(1, 99))
        forms, given, readable = worded(draw, n)
        response = draw.choice(places).format(draw.choice(forms))
        right = sympy.Rational(n.numerator, n.denominator)
        answers, expected = [str(n)], right
        if draw.random() < 0.4:
            answers, expected, known = worded(draw, n)
            readable &= known
        elif draw.random() < 0.4 and given.is_Rational:
            answers, expected = [str(given)], given
        answer = draw.choice(answers)
        equal = alike(given, expected)
        reward = math(response, answer, {})
        if reward > equal or (readable and reward < equal):
            wrong.append((response, answer, given, expected))
    assert not wrong, f"{len(wrong)}: " + "\n".join(map(str, wrong[:40]))
