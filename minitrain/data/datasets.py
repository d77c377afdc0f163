"""Open the datasets of a config, several of which are mixed by weight.

Which row of which source row n of a mixture is, depends on n and the weights alone. Next comes the
source that lacks most of its share, as in Megatron-LM's BlendedDataset: so every stretch of rows is
mixed evenly. That order of BLOCK rows repeats; a share is exact to 1 / BLOCK. Each source has epochs
and a shuffled order of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from minitrain.data.files import apart, held_out_apart
from minitrain.data.text.text_rows import open_data
from minitrain.data.toys import load_from
from minitrain.errors import InputError
from minitrain.settings import Config
from minitrain.training.packing import ENDLESS

BLOCK = 10_000
# what opens the rows of tasks that need more than texts, which no other task imports
OPENED_BY = {
    "sft": "minitrain.data.chat.sft:open_chats",
    "lora": "minitrain.data.chat.sft:open_chats",
    "dpo": "minitrain.data.chat.preferences:open_pairs",
    "diffusion": "minitrain.data.video.latents:open_latents",
}


def open_dataset(config: Config) -> tuple:
    """Return the training dataset, and the held-out one or None; `open_data` describes them.

    Raises InputError for files that are missing, damaged or do not fit the model.
    """
    if config.data.validation_path:
        trained, held = map(open_dataset, held_out_apart(config))
        # videos to validate on are under noise held fixed
        return trained[0], held[1] or held[0]
    if config.data.sources:
        return open_sources(config)
    if config.task in OPENED_BY:
        return load_from(OPENED_BY[config.task])(config)
    return open_data(
        config.data, config.batch.seq_len, config.model.config.vocab_size, config.seed
    )


def open_sources(config: Config) -> "tuple[Mixed, Mixed | None]":
    """Return the sources' training datasets mixed, and their held-out ones likewise."""
    sources = apart(config.data)
    weights = [source.weight for source in config.data.sources]
    opened = [open_dataset(replace(config, data=data)) for data in sources.values()]
    trained, held = zip(*opened, strict=True)
    names = list(sources)
    mixed_held = None
    if config.data.validation:
        mixed_held = Mixed(held, names, weights)
    return Mixed(trained, names, weights), mixed_held


def with_steps(config: Config, rows: int, per_step: int) -> Config:
    """Return the config with its epochs as steps: passes over `rows`, of which a step takes some."""
    if not config.epochs:
        return config
    if rows >= ENDLESS:
        told = f"epochs={config.epochs:g} needs data that ends, and data.kind={config.data.kind}"
        raise InputError(f"{told} has no end here (use steps)")
    # as it is written: 1.1 in binary is a little more, and so would be the number of steps
    epochs = Fraction(str(config.epochs))
    return replace(config, steps=math.ceil(epochs * rows / per_step), epochs=0.0)


class Mixed:
    """Rows of several datasets, each with `sources`, the number of its dataset, at every token.

    names, weights: of the datasets; shares are the weights divided by their sum.
    """

    def __init__(self, datasets: Sequence, names: Sequence[str], weights: Sequence[float]):
        self.datasets = datasets
        self.names = names
        shares = np.array(weights) / sum(weights)
        # [BLOCK]: the source of each row, and how many rows it had before
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
                told = f"data.sources: {name!r} has {share:.2g} of all weights"
                raise InputError(f"{told}, which is less than a row in {BLOCK:,} (give it more)")
            lines.append(f"{name}: {share:.2%} of the rows, {len(dataset):,} in all")
            if about := getattr(dataset, "about", ""):
                lines.append(f"{name}: {about}")
        self.about = "\n".join(lines)
        # of chats: the prompt that replies follow, if it is one for all
        asked = {getattr(dataset, "asks", None) for dataset in datasets}
        self.asks = asked.pop() if len(asked) == 1 else None

    def __len__(self) -> int:
        """Return the number of rows before the first that comes again."""
        ends = []
        for source, dataset in enumerate(self.datasets):
            block, rest = divmod(len(dataset), int(self.counts[source]))
            places = np.flatnonzero(self.source == source)
            ends.append(block * BLOCK + int(places[rest]))
        return min(ends)

    def place(self, n: int) -> tuple[int, int]:
        """Return the source of row n, and which of its rows that is."""
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
