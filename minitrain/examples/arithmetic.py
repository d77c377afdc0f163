"""Write short dialogues about sums, as JSONL.

    python -m minitrain.examples.arithmetic FILE [--count N] [--seed S]

    user: 47 + 38        assistant: 7+8=15 4+3+1=8 85
    user: - 19           assistant: 15-9=6 8-1-1=6 66

The second question goes on from the first one's result. Answers are worked out digit by digit from
the lowest, as at school. A small model learns that in minutes; the bare result would take it far
longer.
"""

import json
import random
from itertools import zip_longest
from pathlib import Path
from shlex import quote

from minitrain.run.launch import cli

LARGEST_NUMBER = 99
OPTIONS = {
    # at most about half of all dialogues: drawing the last ones at random would take forever
    "--count": (cli.positive(int, most=500_000), 20_000, "how many dialogues"),
    "--seed": (int, 0, "of the numbers"),
}


def main(arguments: list[str]) -> None:
    prog = "python -m minitrain.examples.arithmetic"
    parser = cli.Parser(OPTIONS, prog=prog, description=__doc__)
    parser.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    options.file.parent.mkdir(parents=True, exist_ok=True)
    with options.file.open("w") as lines:
        for messages in dialogues(options.count, options.seed):
            print(json.dumps({"messages": messages}), file=lines)
    print(f"{options.file} holds {options.count:,} dialogues")
    print(f"next: minitrain train train/arithmetic data.path={quote(str(options.file))}")


def dialogues(count: int, seed: int) -> list[list[dict[str, str]]]:
    """Return `count` different dialogues, each as the messages of a chat."""
    generator = random.Random(seed)
    found = {}
    while len(found) < count:
        messages = dialogue(generator)
        found[json.dumps(messages)] = messages
    return list(found.values())


def dialogue(generator: random.Random) -> list[dict[str, str]]:
    """Return a question about two numbers, and one that goes on from its result.

    No result is above LARGEST_NUMBER or below 0.
    """
    messages = []
    value = generator.randint(0, LARGEST_NUMBER)
    for start in (f"{value} ", ""):
        if generator.random() < 0.5:
            other = generator.randint(0, LARGEST_NUMBER - value)
            sign = "+"
            result = value + other
        else:
            other = generator.randint(0, value)
            sign = "-"
            result = value - other
        steps = working(value, other, sign)
        value = result
        messages.append({"role": "user", "content": f"{start}{sign} {other}"})
        messages.append({"role": "assistant", "content": f"{steps} {value}"})
    return messages


def working(a: int, b: int, sign: str) -> str:
    """Return the columns of a sum or difference from the lowest on, each with a carry or borrow.

    47 + 38 is 7+8=15 4+3+1=8, and 85 - 19 is 15-9=6 8-1-1=6.
    """
    columns = []
    carry = 0
    # the digits of both numbers, as long as one has any
    for digits in zip_longest(reversed(str(a)), reversed(str(b)), fillvalue="0"):
        x, y = map(int, digits)
        carried = f"{sign}1" * carry
        if sign == "+":
            result = x + y + carry
            carry = result // 10
        else:
            borrow = x < y + carry
            x += 10 * borrow
            result = x - y - carry
            carry = borrow
        columns.append(f"{x}{sign}{y}{carried}={result}")
    return " ".join(columns)


if __name__ == "__main__":
    cli.run(main)
