"""The example environments: a calculator that is exact, and a game that is learned by its own rules."""

import random
from fractions import Fraction

import pytest

from minitrain.data.chat.chat_templates import choose_template
from minitrain.data.chat.dialogs import ChatDialog
from minitrain.examples.calculator import Calculator, calculate
from minitrain.examples.guessing import Guessing, OneToThree
from minitrain.grpo.environments import Reply
from tests.helpers.chats import published, specials_in, tokenizer_with


def test_expressions_are_exact():
    """Against fractions in Python's own arithmetic, over made-up expressions."""
    generator = random.Random(0)

    def expression(depth):
        if not depth:
            number = generator.choice(["7", "0.1", "12.50", "3", "100"])
            return number, Fraction(number)
        (left, a), (right, b) = expression(depth - 1), expression(generator.randrange(depth))
        sign = generator.choice("+-*/" if b else "+-*")
        return f"({left} {sign} -({right}))", value_of[sign](a, b)

    value_of = {
        "+": lambda a, b: a - b,
        "-": lambda a, b: a + b,
        "*": lambda a, b: -a * b,
        "/": lambda a, b: -a / b,
    }
    for _ in range(500):
        text, value = expression(generator.randint(1, 4))
        assert Fraction(calculate(text).partition(" ")[0]) == value
    assert calculate("0.1 + 0.2") == "0.3" and calculate(" 2 * 3") == "6"
    assert calculate("1 / 3") == "1/3 (about 0.3333333333)" and calculate("-1/8") == "-0.125"


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "2 ** 9999",
        "x",
        "True",
        "'a' * 9",
        "1 if 1 else 2",
        "[1]",
        "f(1)",
        "1 < 2",
        "1+" * 101 + "1",
        # a number of so many digits, in one call that no thread can interrupt
        "1e999999999",
        "1E-999999999",
        "1e200*1e200/3",
    ],
)
def test_nothing_else_is_computed(text):
    with pytest.raises((ValueError, SyntaxError)):
        calculate(text)


def test_a_calculator_in_a_chat(tmp_path):
    """With Qwen's template, in which tools are shown, called and answered."""
    jinja = published("qwen2_5")
    marks = ["<tool_call>", "</tool_call>"]
    tokenizer, _ = tokenizer_with(tmp_path, jinja, [*specials_in(jinja), *marks])
    dialog = ChatDialog(choose_template("auto", tokenizer), tokenizer)
    game, row = Calculator(), {"question": "How much is 17 * 3 + 1?", "answer": "so\n#### 52"}
    prompt = tokenizer.decode(dialog.ask(game.reset(row), row, game.tools), special=True)
    assert '"name": "calculate"' in prompt and "17 * 3 + 1?" in prompt

    def say(text):
        reply = dialog.hear(tokenizer.encode(f"{text}<|im_end|>"), True)
        messages, reward, done = game.step(reply)
        return (
            reward,
            done,
            None if done else tokenizer.decode(dialog.tell(messages), special=True),
        )

    for written, answer in {
        '{"name": "calculate", "arguments": {"expression": "17 * 3"}}': "51",
        '{"name": "calculate", "arguments": {"expression": "17 *"}}': "error: invalid syntax",
        '{"name": "calculate", "arguments": {"expression": "1/0"}}': "error: Fraction(1, 0)",
        '{"name": "calculate", "arguments": {}}': "error: call calculate with",
        '{"name": "search", "arguments": {"expression": "1"}}': "error: call calculate with",
        "17 * 3": "error: call calculate with",
    }.items():
        reward, done, told = say(f"<tool_call>\n{written}\n</tool_call>")
        assert (reward, done) == (0.0, False)
        assert f"<tool_response>\n{answer}" in told and told.endswith("<|im_start|>assistant\n")
    assert say("It is 51.") == (0.0, True, None)
    assert say("The answer is 52.") == (1.0, True, None)


def test_the_rules_of_the_game():
    row = {"prompt": "1 to 3?", "answer": "2"}
    for guesses, told, reward in [
        (["2"], [], 1.0),
        (["1", " 2\n"], ["more"], 1.0),
        (["3", "1", "2"], ["less", "more"], 1.0),
        (["two"], [], 0.0),
        (["\u0662"], [], 0.0),
        (["9" * 5000], [], 0.0),
    ]:
        game = Guessing()
        assert game.reset(row) == [{"role": "user", "content": "1 to 3?"}]
        heard = []
        for guess in guesses:
            messages, found, done = game.step(Reply(guess))
            heard += [message["content"] for message in messages]
        assert (heard, found, done) == (told, reward, True)


def test_who_listens_always_wins_the_recipes_game():
    """In two turns, whatever the digit: ten of them make three, four and three games of each number."""
    numbers = []
    for digit in "0123456789":
        game = OneToThree()
        assert game.reset({"prompt": digit}) == [{"role": "user", "content": "1 to 3?"}]
        messages, reward, done = game.step(Reply("2"))
        if not done:
            guess = {"more": "3", "less": "1"}[messages[0]["content"]]
            messages, reward, done = game.step(Reply(guess))
        assert (reward, done) == (1.0, True)
        numbers.append(game.number)
    assert [numbers.count(number) for number in (1, 2, 3)] == [4, 3, 3]
