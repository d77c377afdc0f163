"""Hold documents, chats or videos out of training, for validation."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np

from minitrain.errors import InputError
from minitrain.hashing import shuffled


def hold_out(documents: int, share: float, seed: int, lone: bool = False) -> np.ndarray:
    """Return bool [documents], true for a random `share`, chosen by (seed, index).

    At least one is true and one false. lone: the documents are two parts of a single one; the second
    part is held out.
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
    """Return the items to train on, and the held-out ones, both in their order."""
    sides = [], []
    for item, held in zip(items, hold_out(len(items), share, seed), strict=True):
        sides[int(held)].append(item)
    return sides


def split_lone(documents: Iterator[str], share: float) -> tuple[Iterator[str], bool]:
    """If there is a single document, split off its last `share` as a second one.

    Returns all documents, without empty ones, and whether one was split.
    """
    documents = filter(None, documents)
    first = list(islice(documents, 2))
    if len(first) != 1:
        return chain(first, documents), False
    text = first[0]
    cut = round(len(text) * (1 - share))
    return iter((text[:cut], text[cut:])), True
