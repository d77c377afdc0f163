"""Hold documents, chats or videos out of training, to validate on them."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np

from minitrain.errors import InputError
from minitrain.hashing import shuffled


def hold_out(documents: int, share: float, seed: int, lone: bool = False) -> np.ndarray:
    """Return bool [documents], true for a random `share`, chosen by (seed, index).

    At least one is true and one false. lone: they are the two sides of one document, of which the
    second is held out.
    """
    if documents < 2:
        raise InputError(
            f"data.validation={share} needs 2 documents, one for each side, but there is {documents}"
        )
    if lone:
        return np.array([False, True])
    count = min(max(1, round(share * documents)), documents - 1)
    held = np.zeros(documents, bool)
    held[[shuffled(i, documents, seed) for i in range(count)]] = True
    return held


def split_off(items: Sequence, share: float, seed: int) -> tuple[list, list]:
    """Return the items to train on, and those that `hold_out` chooses, each in order."""
    sides = [], []
    for item, held in zip(items, hold_out(len(items), share, seed), strict=True):
        sides[int(held)].append(item)
    return sides


def split_lone(documents: Iterator[str], share: float) -> tuple[Iterator[str], bool]:
    """Split a document that is the only one before its tail of a `share`.

    Returns all documents, and True if there was one alone. Empty ones are left out.
    """
    documents = filter(None, documents)
    first = list(islice(documents, 2))
    if len(first) != 1:
        return chain(first, documents), False
    text = first[0]
    cut = round(len(text) * (1 - share))
    return iter((text[:cut], text[cut:])), True
