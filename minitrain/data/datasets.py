"""Open the datasets of a config, and mix several by weight.

The source of row n of a mixture depends only on n and the weights: it is the source that is furthest
behind its share, as in Megatron-LM's BlendedDataset, so every stretch of rows is mixed evenly. The
order of sources repeats after BLOCK rows, and shares are exact to 1 / BLOCK. Each source has its own
epochs and its own shuffled order.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from minitrain.data.sources import data_by_source, train_and_held_out
from minitrain.errors import InputError
from minitrain.settings import Config
from minitrain.tasks import TASKS
from minitrain.training.packing import ENDLESS, Dataset
from minitrain.user_code import load_from

BLOCK = 10_000


def open_dataset(config: Config) -> tuple[Dataset, Dataset | None]:
    """Return the training dataset, and the held-out one or None; text_rows.open_data describes them.

    Raises InputError for files that are missing, damaged or do not fit the model.
    """
    if config.data.validation_path:
        trained, held = map(open_dataset, train_and_held_out(config))
        # datasets of videos have a validation side with fixed noise: use that of the held-out files
        return trained[0], held[1] or held[0]
    if config.data.sources:
        return open_sources(config)
    return load_from(TASKS[config.task].data)(config)


def open_sources(config: Config) -> "tuple[Mixed, Mixed | None]":
    """Return the training datasets of all sources mixed, and the held-out ones mixed alike, or None."""
    sources = data_by_source(config.data)
    weights = [source.weight for source in config.data.sources]
    opened = [open_dataset(replace(config, data=data)) for data in sources.values()]
    trained, held = zip(*opened, strict=True)
    names = list(sources)
    mixed_held = None
    if config.data.validation:
        mixed_held = Mixed(held, names, weights)
    return Mixed(trained, names, weights), mixed_held


def with_steps(config: Config, rows: int, per_step: int) -> Config:
    """Return the config with its epochs converted to steps. rows: per epoch; per_step: rows per step."""
    if not config.epochs:
        return config
    if rows >= ENDLESS:
        raise InputError(
            f"epochs={config.epochs:g} needs data that ends, and data.kind={config.data.kind} has no end here "
            f"(use steps)"
        )
    # the decimal number as written: 1.1 as a float is a little more, which could add a step
    epochs = Fraction(str(config.epochs))
    return replace(config, steps=math.ceil(epochs * rows / per_step), epochs=0.0)


class Mixed:
    """Rows of several datasets. `sources` of a row is the number of its dataset, at every token.

    names, weights: of the datasets; a share is a weight over the sum of weights.
    """

    def __init__(self, datasets: Sequence, names: Sequence[str], weights: Sequence[float]):
        self.datasets = datasets
        self.names = names
        shares = np.array(weights) / sum(weights)
        # [BLOCK]: the source of each row, and the number of earlier rows from this source
        self.source = np.zeros(BLOCK, np.int64)
        self.before = np.zeros(BLOCK, np.int64)
        self.counts = np.zeros(len(datasets), np.int64)
        for n in range(BLOCK):
            source = np.argmax(shares * (n + 1) - self.counts)
            self.source[n] = source
            self.before[n] = self.counts[source]
            self.counts[source] += 1
        lines = []
        for name, share, count, dataset in zip(names, shares, self.counts, datasets, strict=True):
            if not count:
                raise InputError(
                    f"data.sources: {name!r} has {share:.2g} of all weights, which is less than a row in {BLOCK:,} "
                    f"(give it more)"
                )
            lines.append(f"{name}: {share:.2%} of the rows, {len(dataset):,} in all")
            if about := getattr(dataset, "about", ""):
                lines.append(f"{name}: {about}")
        self.about = "\n".join(lines)
        # for chats, the prompt before replies, if it is the same in all datasets
        asked = {getattr(dataset, "asks", None) for dataset in datasets}
        self.asks = asked.pop() if len(asked) == 1 else None

    def __len__(self) -> int:
        """Return the number of rows before any row is repeated."""
        ends = []
        for source, dataset in enumerate(self.datasets):
            block, rest = divmod(len(dataset), int(self.counts[source]))
            places = np.flatnonzero(self.source == source)
            ends.append(block * BLOCK + int(places[rest]))
        return min(ends)

    def place(self, n: int) -> tuple[int, int]:
        """Return the source of row n, and the number of the row in this source."""
        block, n = divmod(int(n), BLOCK)
        source = int(self.source[n])
        number = block * self.counts[source] + self.before[n]
        return source, int(number)

    def row(self, n: int) -> dict[str, Tensor]:
        source, number = self.place(n)
        row = self.datasets[source].row(number)
        return row | {"sources": torch.full_like(row["tokens"], source)}

    def origin(self, n: int) -> str:
        source, number = self.place(n)
        return f"{self.names[source]}: {self.datasets[source].origin(number)}"
