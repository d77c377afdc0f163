"""A text game as an environment of task=grpo: guess a number, and be told where to look for it.

By halving what is left, one of 2^n - 1 numbers is found in n turns. A line of data has the question and
the number: {"prompt": "1 to 3?", "answer": "2"}; grpo.turns says how many guesses there are.
"""


class Guessing:
    """The game of one sample. A right guess is worth 1; it ends the game, as does a reply that is no number."""

    def reset(self, row: dict) -> list[dict]:
        self.number = int(row["answer"])
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, response: str) -> tuple[list[dict], float, bool]:
        guess = response.strip()
        if not guess.isdecimal() or len(guess) > 9 or int(guess) == self.number:
            return [], float(guess == str(self.number)), True
        hint = "more" if int(guess) < self.number else "less"
        return [{"role": "user", "content": hint}], 0.0, False


class OneToThree(Guessing):
    """The game of two turns, over data.kind=mock with one digit, which decides the number."""

    def reset(self, row: dict) -> list[dict]:
        number = 1 + int(row["prompt"]) % 3
        return super().reset({"prompt": "1 to 3?", "answer": str(number)})
