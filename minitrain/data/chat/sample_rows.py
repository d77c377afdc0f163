"""Put samples into rows: several that fit together, or one in each.

Samples that share a row do not see each other, so packing changes nothing but the number of empty
slots: the gradients are those of one sample per row (`data.packed: false`). The packing is made
once; each epoch visits its rows in another order.
"""

from collections.abc import Iterable

import numpy as np

from minitrain.data.chat.reply_counts import ReplyCounts
from minitrain.data.faults.wording import counted
from minitrain.data.sample import Sample
from minitrain.hashing import nth
from minitrain.training.loss import IGNORE
from minitrain.training.packing import first_fit_decreasing


class SampleRows:
    """Which samples stand in which row. A subclass has the samples and makes the rows of tokens.

    lengths: of the samples, in tokens, at most seq_len each. noun: what a sample is. note: on those
    that are left out. counts: of their replies.
    """

    def __init__(
        self,
        lengths: list[int],
        seq_len: int,
        seed: int,
        packed: bool,
        noun: str,
        note: str = "",
        counts: ReplyCounts | None = None,
    ):
        self.seq_len = seq_len
        self.seed = seed
        self.noun = noun
        # the indices of each row's samples
        self.rows = [[i] for i in range(len(lengths))]
        if packed:
            self.rows = first_fit_decreasing(lengths, seq_len)
        self.fill = sum(lengths) / (len(self.rows) * seq_len)
        rows = f"{counted(len(self.rows), 'row')} of {seq_len:,} tokens, {self.fill:.1%} filled"
        notes = counts.notes if counts else []
        self.about = "\nnote: ".join([f"{counted(len(lengths), noun)}{note} in {rows}", *notes])
        # the prompt that replies follow, if it is not the one with which the template asks
        self.asks = counts.asks if counts else None

    def __len__(self) -> int:
        return len(self.rows)

    def number(self, n: int) -> int:
        """Return the place in `rows` of row n; each epoch has all rows in another order."""
        return nth(n, len(self), self.seed)[1]

    def chosen(self, n: int) -> list[int]:
        """Return the indices of row n's samples."""
        return self.rows[self.number(n)]

    def origin(self, n: int) -> str:
        """Return the numbers of row n's samples, counted as they were kept."""
        return f"{self.noun}s {', '.join(str(i + 1) for i in self.chosen(n))}"


def fit(samples: Iterable[Sample], seq_len: int, over_long: str) -> tuple[list[Sample], str]:
    """Return the samples that fit a row, and a note on those that did not.

    over_long: `drop` those, or `truncate` them. A sample that has nothing to predict (any more) is
    dropped in any case.
    """
    kept = []
    truncated = 0
    dropped = 0
    for sample in samples:
        fitting = fit_sample(sample, seq_len, over_long)
        if fitting is None:
            dropped += 1
        else:
            truncated += len(sample.tokens) > seq_len
            kept.append(fitting)
    return kept, f" ({truncated:,} truncated, {dropped:,} dropped)" if truncated + dropped else ""


def fit_sample(sample: Sample, seq_len: int, over_long: str) -> Sample | None:
    """Return a sample cut to fit a row; None if it is to be dropped."""
    predicted = np.flatnonzero(sample.labels[:seq_len] != IGNORE)
    if (len(sample.tokens) > seq_len and over_long == "drop") or not len(predicted):
        return None
    # the row may end within a question
    end = predicted[-1] + 1
    return Sample(sample.tokens[:end], sample.labels[:end])
