"""Problems for GRPO that a small model learns in minutes: strings of digits to be reversed."""

import numpy as np

from minitrain.data.chat.messages import Chat, Message


def reversals(digits: int) -> list[tuple[Chat, str, dict]]:
    """Return up to 4,000 different strings of digits to be reversed, always the same ones.

    Each as the messages that ask, the right answer, and the line of data.
    """
    count = min(4000, 10**digits)
    draws = np.random.default_rng(digits).integers(10, size=(4 * count, digits))
    texts = dict.fromkeys("".join(map(str, draw)) for draw in draws.tolist())
    return [
        ([Message("user", text)], text[::-1], {"prompt": text}) for text in list(texts)[:count]
    ]
