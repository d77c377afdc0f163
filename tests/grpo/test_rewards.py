"""Rewards on answers whose worth is known, on hostile texts, and on functions of one's own."""

import time

import pytest

from minitrain.errors import InputError
from minitrain.grpo.rewards import load_reward, overlong

math = load_reward("math")


@pytest.mark.parametrize(
    "response, answer, reward",
    [
        (r"so \boxed{42}.", "42", 1),
        (r"\boxed{41} no, \boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{\dfrac{3}{4}}", r"\frac34", 1),
        (r"\boxed{\dfrac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}", 1),
        (r"\boxed{\frac1{2}}", "0.5", 1),
        (r"\boxed{2\frac{x}{3}}", r"\frac{2x}{3}", 1),
        (r"\boxed{1\frac{1}{2}}", r"1\tfrac12", 1),
        (r"\boxed{1\frac{1}{2}}", "11/2", 0),
        (r"\boxed{1 1/2}", "11/2", 0),
        (r"\boxed{11/2}", "1 1/2", 0),
        (r"\boxed{1\,\frac{ 1 }{2}}", "11/2", 0),
        (r"\boxed{1\ \frac {1} {2}}", "1 1 / 2", 1),
        (r"\boxed{1\frac{1}{2}}", "1 1/2", 1),
        (r"\boxed{10\,000}", "10 000", 1),
        (r"\boxed{\frac 1 2}", "1 / 2", 1),
        (r"\boxed{\text{Paris}}", "paris", 1),
        (r"\boxed{x^{2}+\sqrt{3}}", r"x^{2} + \sqrt{3}", 1),
        (r"\boxed{1,234,567}", "1234567", 1),
        (r"\boxed{90^\circ}", "90", 1),
        (r"\boxed{\$5.00}", "5", 1),
        (r"\boxed{50\%}", "50", 1),
        (r"\boxed{x = -5}", "-5", 1),
        (r"\boxed{2x+1}", "$y = 2x + 1$", 1),
        (r"\boxed{1+1=2}", "2", 0),
        (r"\boxed{(1,2)}", r"\left(1, 2\right)", 1),
        ("#### 18", "she makes 9 * 2 = <<9*2=18>>18 dollars.\n#### 18", 1),
        ("#### 18\nThat is all.", "#### 18", 1),
        ("the answer is 3, or rather -7.5", "-15/2", 1),
        ("it is 12, I think: 12, no more", "12", 1),
        ("some $1,234.50, or so", "1234.5", 1),
        ("the roots are 3,4", "4", 1),
        ("on pages 5-7", "7", 1),
        ("half of it, 1/2.", "0.5", 1),
        (r"the probability is $\frac{3}{4}$.", "3/4", 1),
        (r"the probability is $\frac{3}{4}$.", "4", 0),
        (r"it is $1\tfrac12$", "11/2", 0),
        (r"it is $1\tfrac12$", "1/2", 0),
        ("it is 1 1/2", "1/2", 0),
        ("it is 1 1/2", r"1\frac12", 1),
        (r"it is $-\frac12$", "-1/2", 1),
        ("first 1, then 1/2", "1/2", 1),
        ("the 1st of 2:\n1/2", "1/2", 1),
        ("it is 3 / 4", "0.75", 1),
        ("\u22125", r"\boxed{-5}", 1),
        (r"\boxed{12{,}345}", "12,345", 1),
        ("1/3", "0.3333", 0),
        (r"\boxed{12}", "13", 0),
        (r"\boxed{12", "12", 1),  # the braces never close: the last number counts
        (r"\boxed{4}, or \boxed{5", "4", 1),  # those of an earlier one do
        (r"\boxed{x+1}", "x+2", 0),  # no numbers, and not alike for that
        (r"\boxed{+5}", "5", 1),
        (r"\boxed{Paris.}", "Paris", 1),
        ("I do not know", "12", 0),
        ("", "12", 0),
        (r"\boxed{1/0}", "0", 0),
        (r"\boxed{(1,2)}", "12", 0),
        (r"\boxed{(1,2345)}", "(12345)", 0),  # a pair, too
        ("the year is 2", "-2", 0),
        # a sum above the line, a product or a sum below it
        (r"\boxed{\frac{x+1}{2}}", r"x+\frac12", 0),
        (r"\boxed{\frac{3}{4x}}", r"\frac{3}{4}x", 0),
        (r"\boxed{\frac{n}{2}+1}", r"\frac{n}{2+1}", 0),
        (r"\boxed{\frac{2}{3\pi}}", r"\frac{2}{3} \pi", 0),
        (r"\boxed{(x+1)/(2y)}", r"\dfrac{x + 1}{2y}", 1),
        (r"\boxed{2(x+1)/3}", r"\frac{2(x+1)}{3}", 1),
        (r"\boxed{-2\pi/3}", r"\frac{-2\pi}{3}", 1),
        (r"\boxed{\frac{1}{-2}}", "-0.5", 1),
        (r"\boxed{6\frac34}", r"\frac{27}{4}", 1),  # mixed numbers are numbers, too
        (r"\boxed{1 1/2}", "1.5", 1),
        (r"\boxed{-1\frac12}", "-1/2", 0),
        (r"\boxed{x^{2} + a_{1}}", "x^2+a_1", 1),  # TeX needs no braces around one character
        (r"\boxed{\frac{x^{2}}{\sqrt{3}}}", r"\frac{x^2}{\sqrt3}", 1),
        (r"\boxed{x^{12}}", "x^{1}2", 0),
        (r"\boxed{\sqrt{23}}", r"\sqrt{2}3", 0),
        ("\\boxed{90\u00b0}", r"90^\circ", 1),
        (r"\boxed{-1+\frac12}", r"-1\frac12", 0),
        (r"\boxed{-3/2}", r"-1\frac12", 1),
        ("so $19{,}934$", "934", 0),
        ("so $19{,}934$", "19934", 1),
        (r"\boxed{\frac{1}{2}3}", "1/23", 0),
        (r"\boxed{\frac{1}{2}3}", "1/2", 0),
        (r"\boxed{2, 100}", "2100", 0),
        (r"\boxed{2,100}", "2100", 1),
        ("#### **18**", "18", 1),
        ("#### __18__", "18", 1),
        (r"\boxed{2^{10}}", "1024", 1),
        (r"\boxed{2^{10}}", "210", 0),
        ("it is $2^{10}$", "10", 0),
        ("it is $10^6$", "6", 0),
        ("it is $10^6$", "1000000", 1),
        (r"\boxed{1.5\times10^{3}}", "1500", 1),
        (r"the answer is $2\sqrt{3}$", "3", 0),
        (r"the answer is $2\sqrt{3}$", r"2\sqrt3", 1),
        ("the answer is $x^2$", "2", 0),
        (r"\boxed{18 \text{ or } 19}", "18", 0),
        (r"\boxed{18 or 19}", "18", 0),
        (r"\boxed{3 apples and 4 pears}", "3", 0),
        (r"\boxed{12*13}", "156", 0),
        (r"\boxed{(12)(13)}", "156", 0),
        (r"\boxed{1+1}", "2", 0),
        (r"\boxed{(-3)}", "-3", 1),
        (r"\boxed{-(3)}", "-3", 1),
        (r"\boxed{5\text{ and }6}", "5", 0),
        (r"\boxed{1,234 and 5}", "12345", 0),
        (r"\boxed{(1,234)}", "(1, 234)", 1),
        (r"\boxed{\{1,234\}}", r"\{1, 234\}", 1),
        (r"\boxed{1,000, 2,000}", "1000, 2000", 1),
        (r"\boxed{(0.5, 3)}", r"(\frac12, 3)", 1),
        (r"\boxed{\frac{-x}{2}}", r"-\frac{x}{2}", 1),
        (r"\boxed{-\frac{2\pi}{3}}", r"\frac{-2\pi}{3}", 1),
        (r"\boxed{-\frac{2\pi}{3}}", r"-2\pi/3", 1),
        (r"\boxed{x - \frac12}", r"x\frac{-1}{2}", 0),
        (r"\boxed{3 - 1/2}", "5/2", 0),
        (r"\boxed{x^2/3}", "x^{2/3}", 0),
        (r"\boxed{\frac{x^2}{3}}", "x^2/3", 1),
        ("The answer is 5 apples - 3 are left.", "3", 1),
        ("Final answer - 42", "42", 1),
        ("= - 3", "-3", 1),
        ("is: -3", "-3", 1),
        ("- 3", "-3", 1),
        ("-$3", "-3", 1),
        ("x=-3", "-3", 1),
        ("5-7", "7", 1),
        (r"\boxed{18cm}", "18", 1),
        (r"\boxed{18 cm}", "18", 1),
        (r"\boxed{18x}", "18", 0),
        (r"\boxed{5 pi}", "5", 0),
        (r"\boxed{5 sqrt(2)}", "5", 0),
        (r"\boxed{1e3}", "1000", 1),
        (r"\boxed{1e1000}", "1", 0),
        ("3.50 dollars", "3.5", 1),
        ("$1,234.50", "1234.5", 1),
        (r"\boxed{1.234,5}", "1234.5", 0),
        (r"\boxed{2\%}", "2", 1),
        ("#### 1/2 cup", "0.5", 1),
        ("#### x = 5", "5", 1),
        ("#### 1, 2", "1", 0),
        ("#### 2x+1", "2", 0),
        ("#### Paris", "paris", 1),
        (r"\boxed{\mathbf{18}}", "18", 1),
        (r"\boxed{ \$18 }", "18", 1),
        ("\\boxed{\u20ac18}", "18", 1),
        (r"\boxed{18\,\text{m/s}}", "18", 1),
        (r"\boxed{5\;\text{m}^2}", "5", 1),
        (r"\boxed{5 \, m^2}", "5", 0),
        (r"\boxed{\text{(B)}}", "B", 1),
        (r"\boxed{B}", r"\text{(B)}", 1),
        (r"\fbox{3}", "3", 1),
        (r"\boxed{0.1}", "1/10", 1),
        (r"\boxed{-0}", "0", 1),
        (r"\boxed{007}", "7", 1),
        (r"\boxed{\frac{1}{3}}", "0.333", 0),
        (r"\boxed{+\frac12}", "1/2", 1),
        (r"\boxed{\pm 3}", "3", 0),
        (r"\boxed{3\frac{1}{2}\text{ ft}}", "7/2", 1),
        (r"\boxed{10\!\!,000}", "10000", 1),
        ("so it's (3/4).", "3/4", 1),
        (r"\(\boxed{3}\)", "3", 1),
        (r"the answer is \(-\frac{3}{4}\).", "-3/4", 1),
        ("**-3/4**", "-3/4", 1),
        ("x \u2248 3.14", "3.14", 1),
        ("1 000 000 people", "1000000", 1),
        ("in 2020 300 people", "300", 1),
        ("value: 1.5e-3", "3/2000", 1),
        (r"\boxed{\tfrac 1 2 \text{ hour}}", "0.5", 1),
        (r"\boxed{100\text{ cm}^{2}}", "100", 1),
        (r"\boxed{100 \mathrm{~cm}^{3}}", "100", 1),
        (r"\boxed{x\in\{1\}}", "1", 0),
        (r"\boxed{(3)(4)}", "34", 0),
        (r"\boxed{2**4}", "24", 0),  # what is dropped between digits does not join them
        (r"\boxed{2**4}", "16", 1),
        (r"\boxed{2%4}", "24", 0),
        (r"\boxed{2\%4}", "24", 0),
        (r"\boxed{2$4}", "24", 0),
        ("it is $2$$4$", "24", 0),
        ("it is 2`4`", "24", 0),
        (r"\boxed{5^\circ30}", "530", 0),
        ("12\u00b0345", "12345", 0),
        ("5\u00bd", "5", 0),  # Unicode's fractions and exponents are parts of a number
        ("10\u2077", "10", 0),
        ("10\u2077", "107", 0),
        ("5\u00bd", "5.5", 1),
        ("it is \uff14\uff12", "42", 1),
        # a word, a letter or a function behind a number is no unit; \circ leaves the box its brace
        (r"\boxed{2sin(x)}", r"2cos(x)", 0),
        (r"\boxed{5sin(x)}", r"5", 0),
        (r"\boxed{3log x}", r"3", 0),
        (r"\boxed{6xyz}", r"6abc", 0),
        (r"\boxed{6xyz}", r"6", 0),
        (r"\boxed{3+5abc}", r"3+5xyz", 0),
        (r"\boxed{4xyz^2}", r"4", 0),
        (r"\boxed{5 million}", r"5", 0),
        (r"#### 3 million", r"3", 0),
        (r"He earned 3 million dollars", r"3", 0),
        (r"\boxed{3\text{ hundred}}", r"3", 0),
        (r"5 thousand", r"5", 0),
        (r"5 dozen", r"5", 0),
        (r"\boxed{3 squared}", r"3", 0),
        (r"\boxed{12 factorial}", r"12", 0),
        (r"9 half", r"9", 0),
        (r"\boxed{5 plus x}", r"5", 0),
        (r"5 times x", r"5", 0),
        (r"12 over n", r"12", 0),
        (r"8 choose k", r"8", 0),
        (r"\boxed{5 \text{ or more}}", r"5", 0),
        (r"\boxed{45^\circ}, as 2 of them make 90.", r"90", 0),
        (r"first \boxed{7}. Then corrected: \boxed{45^\circ}", r"7", 0),
        (r"The cost is 5k.", r"5", 0),
        (r"$5M.", r"5", 0),
        (r"\boxed{\frac{1}{2}\frac{345}{4}}", r"1/2345/4", 0),
        (r"\boxed{\frac{1}{2}345}", r"1/2345", 0),
        (r"so it is $2 \pi$", r"2", 0),
        (r"so it is $2x$", r"2", 0),
        (r"y = 5 + x", r"5", 0),
        (r"y = 2x + 5", r"5", 0),
        (r"it is \sin 30", r"30", 0),
        (r"it is sin(30)", r"30", 0),
        (r"it is \sqrt 3", r"3", 0),
        (r"\boxed{7 billion people}", r"7", 0),
        (r"\boxed{7 nonillion}", r"7", 0),
        (r"\boxed{3 gross}", r"3", 0),
        (r"\boxed{5 mod 7}", r"5", 0),
        (r"\boxed{2 arctan(x)}", r"2", 0),
        (r"\boxed{2\arctan x}", r"2", 0),
        (r"\boxed{3 tenths}", r"3", 0),
        (r"\boxed{3x cm}", r"3", 0),
        (r"\boxed{5\text{ and }6}", r"5", 0),
        (r"\boxed{2 minus}", r"2", 0),
        (r"#### 5 squared", r"5", 0),
        (r"#### 5 dozen eggs", r"5", 0),
        (r"#### 8 choose 3", r"8", 0),
        (r"#### 8 choose 3", r"3", 0),
        (r"the answer is 8 choose 3", r"3", 0),
        (r"the answer is \frac{x}{2}", r"2", 0),
        (r"the answer is x/2", r"2", 0),
        (r"the answer is f(3)", r"3", 0),
        (r"the answer is |3x - 5|", r"5", 0),
        (r"the answer is 10^{x}", r"10", 0),
        (r"\boxed{3!}", r"3", 0),
        (r"\boxed{x = 3 or x = 4}", r"4", 0),
        (r"\boxed{3i}", r"3", 0),
        (r"\boxed{3e}", r"3", 0),
        (r"it is 3e", r"3", 0),
        (r"\boxed{90^\circ + x}", r"90", 0),
        (r"\boxed{2_8}", r"2", 0),
        (r"\boxed{5 million}", r"5000000", 1),
        (r"\boxed{5 million}", r"5,000,000", 1),
        (r"#### 3 million dollars", r"3000000", 1),
        (r"He earned $3 million dollars.", r"3,000,000", 1),
        (r"\boxed{1.5\text{ billion dollars}}", r"1500000000", 1),
        (r"\boxed{\frac{1}{2} million}", r"500000", 1),
        (r"\boxed{3\text{ hundred}}", r"300", 1),
        (r"The angle is $\boxed{45^\circ}$, as 2 of them make 90.", r"45", 1),
        (r"So the answer is 45.", r"$\boxed{45^\circ}$, from 2 times 22.5", 1),
        (r"\boxed{45^{\circ}}", r"45", 1),
        (r"\boxed{45^\circ C}", r"45", 1),
        (r"\boxed{45^{ \circ }}", r"45", 1),
        (r"\boxed{\frac{45^\circ}{2}}", r"45/2", 1),
        (r"\boxed{\angle A = 45^\circ}", r"\angle A = 45", 1),
        (r"\boxed{18 eggs}", r"18", 1),
        (r"\boxed{18cm}", r"18", 1),
        (r"\boxed{60 km/h}", r"60", 1),
        (r"\boxed{60 miles per hour}", r"60", 1),
        (r"#### 18 trees left", r"18", 1),
        (r"She has 5 more.", r"5", 1),
        (r"It happened 5 times.", r"5", 1),
        (r"He ate 12 over the weekend", r"12", 1),
        (r"\boxed{5 \text{ degrees Celsius}}", r"5", 1),
        (r"\boxed{100 \text{ mL}}", r"100", 1),
        (r"\boxed{9.8 \text{ m/s}^2}", r"9.8", 1),
        (r"\boxed{9.8\,\mathrm{m\,s}}", r"9.8", 1),
        (r"\boxed{20\pi\text{ cm}^2}", r"20\pi", 1),
        (r"\boxed{12\text{ sq. cm}}", r"12", 1),
        (r"\boxed{12\text{ sq cm}}", r"12", 1),
        (r"\boxed{12 \text{ square feet}}", r"12", 1),
        (r"\boxed{12\text{ kilometers}}", r"12", 1),
    ],
)
def test_math(response, answer, reward):
    assert math(response, answer, {}) == reward


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 200_000,
        r"\boxed{" + "9" * 1_000_000,
        "1" * 1_000_000 + "/3",
        "1e999999999",
        r"\frac{" * 100_000,
        "{" * 500_000,
        ",1" * 500_000,
        "-" * 500_000,
        "#" * 500_000,
        r"\text{" * 100_000,
        r"\boxed{1/1e999999999}",
        ",111" * 250_000,
        "1," * 500_000,
        "1/" * 500_000,
        r"\frac{" + "(" * 500_000 + "}{2}",
        "^{ " * 300_000,
        r"\boxed{\frac{1}{" + "(1" * 500_000 + "}}",
        # its 999th power has a million digits
        "9e999^{999} " * 1_666,
        r"\boxed{3 " + "cm " * 6_000 + "!}",
        r"\boxed{3\text{" + "m " * 9_000 + "!}}",
        "3 " + "cm a " * 4_000,
        "sin " * 5_000,
        "x - " * 5_000,
        "1/2e*999999999",
    ],
)
def test_hostile_texts_take_no_time(text):
    """Not by the clock: other processes may have the core. A number of that size, or a square of that length, takes
    minutes."""
    began = time.thread_time()
    assert math(text, "7", {}) == 0
    assert math("7", text, {}) == 0
    assert time.thread_time() - began < 5


def test_of_a_long_text_the_end_counts():
    for text, reward in ((r"\boxed{4}" + "a" * 19_991, 1), (r"\boxed{4}" + "a" * 20_000, 0)):
        assert math(text, "4", {}) == math("4", text, {}) == reward


@pytest.mark.parametrize(
    "response, final",
    [(r"#### 5 \boxed{7} 9", "7"), ("5 #### 6", "6"), ("5 and 6,000 apples", "6,000")],
)
def test_the_final_answer_is_the_box_then_the_mark_then_the_last_number(response, final):
    assert [math(response, answer, {}) for answer in (final, "5", "9")] == [1, 0, 0]


def test_exact():
    reward = load_reward("exact")
    assert [reward(text, "4321", {}) for text in ("4321", " 4321\n", "4321.", "")] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    "response, answer, reward",
    [
        (r"so \boxed{2\sqrt{2}}", r"\sqrt{8}", 1),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{8}", 0),
        (r"\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1),
        (r"\boxed{12}", "3 * 4 = <<3*4=12>>12.\n#### 12", 1),
        (r"\boxed{4}", "3 * 4 = <<3*4=12>>12.\n#### 12", 0),
        ("I do not know", "12", 0),
    ],
)
def test_math_verify(response, answer, reward):
    pytest.importorskip("math_verify")
    assert load_reward("math_verify")(response, answer, {}) == reward


def test_math_verify_without_its_package_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="^grpo.reward=math_verify needs a package: pip install"):
        load_reward("math_verify")


@pytest.mark.parametrize(
    "tokens, reward", [(0, 0), (80, 0), (90, -0.25), (100, -0.5), (120, -0.5)]
)
def test_overlong(tokens, reward):
    assert overlong(tokens, longest=100, buffer=20, penalty=0.5) == reward
    assert overlong(tokens, longest=100, buffer=0, penalty=0.5) == 0


def test_a_function_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text(
        "def score(response, answer, row):\n    return row['scale'] * len(response)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert load_reward("my_reward:score")("abc", "", {"scale": 2}) == 6


UNNAMED = "is not exact, math, math_verify, a reward model's folder or package.module:function"


@pytest.mark.parametrize(
    "name, message",
    [
        ("exakt", UNNAMED),
        (":f", UNNAMED),
        (".x:f", UNNAMED),
        ("no_such_module_x:f", "cannot be imported: ModuleNotFoundError.*No module"),
        ("minitrain.errors:missing", "cannot be imported: .* no attribute 'missing'"),
        ("minitrain:__all__", "is a list, not a function"),
        ("minitrain.grpo.math_answers:plain", "must take .response, answer, row.: too many"),
        ("builtins:max", "must take .response, answer, row.: no signature"),
    ],
)
def test_unknown_rewards_are_refused(name, message):
    with pytest.raises(InputError, match=f"^grpo.reward='{name}' {message}"):
        load_reward(name)


@pytest.mark.parametrize(
    "text, told",
    [
        ("def f(:", r"SyntaxError\('invalid syntax'"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(3)", r"SystemExit\(3\)"),
        ("import no_such_module_x", "ModuleNotFoundError"),
        ("f = open('nowhere')", "FileNotFoundError"),
    ],
)
def test_a_module_that_does_not_import_is_one_line(tmp_path, monkeypatch, text, told):
    (tmp_path / "broken_reward.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        InputError, match=f"^grpo.reward='broken_reward:f' cannot be imported: {told}"
    ):
        load_reward("broken_reward:f")
