"""What a document or a chat becomes, before it is packed into a row."""

from typing import NamedTuple

import numpy as np


class Sample(NamedTuple):
    """A model's input tokens and labels (next token or IGNORE), int64 [n] each.

    It ends with the last token that has a label, because later ones would not be trained on.
    """

    tokens: np.ndarray
    labels: np.ndarray
