"""A calculator as an environment of task=grpo: a tool that a policy may call before it answers.

    python -m minitrain.train --config configs/train/grpo-gsm8k.yaml \
        grpo.environment=minitrain.examples.calculator:Calculator

The reward is that of the reply that calls nothing: 1 if grpo/rewards.py's `math` finds it right.
"""

import ast
import operator
from fractions import Fraction
from typing import ClassVar

from minitrain.data.chat.read_problems import read_problem
from minitrain.grpo.environments import Reply, ToolCall
from minitrain.grpo.rewards import math

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
# characters of an expression: without exponents, no product of so many digits takes long
LONGEST = 200


class Calculator:
    """The calculator of one sample, and the judge of its answer."""

    tools: ClassVar[list[dict]] = [
        {
            "type": "function",
            "function": {
                "name": "calculate",
                "description": "Return the value of an expression of numbers, + - * / and ( ).",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string"}},
                    "required": ["expression"],
                },
            },
        }
    ]

    def reset(self, row: dict) -> list[dict]:
        self.row = row
        messages, self.answer = read_problem(row, "", "")
        return [message.as_dict() for message in messages]

    def step(self, response: Reply) -> tuple[list[dict], float, bool]:
        if not response.tool_calls:
            return [], math(response, self.answer, self.row), True
        answers = [{"role": "tool", "content": result_of(call)} for call in response.tool_calls]
        return answers, 0.0, False


def result_of(call: ToolCall) -> str:
    """Return what a call of the calculator gives, or what is wrong with it."""
    expression = (call.arguments or {}).get("expression")
    if call.name != "calculate" or not isinstance(expression, str):
        return 'error: call calculate with {"expression": "1 + 2"}'
    try:
        return calculate(expression)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
        return f"error: {error}"


def calculate(expression: str) -> str:
    """Return the exact value of an expression where it is a decimal number, else a fraction.

    Raises ValueError for anything but numbers without exponents, + - * / and ( ).
    """
    if len(expression) > LONGEST:
        raise ValueError(f"more than {LONGEST} characters")

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            # the digits as they are written: 0.1 is a tenth
            digits = ast.get_source_segment(source, node).replace("_", "")
            if "e" in digits.lower():
                raise ValueError("write numbers without an exponent")
            return Fraction(digits)
        operation = OPERATORS.get(type(getattr(node, "op", None)))
        if operation and isinstance(node, ast.UnaryOp):
            return operation(value(node.operand))
        if operation and isinstance(node, ast.BinOp):
            return operation(value(node.left), value(node.right))
        raise ValueError("only numbers, + - * / and ( )")

    source = expression.strip()
    number = value(ast.parse(source, mode="eval").body)
    if number.denominator == 1:
        return str(number)
    decimal = f"{float(number):.10g}"
    return decimal if Fraction(decimal) == number else f"{number} (about {decimal})"
