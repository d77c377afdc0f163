"""Preference data: pairs of chats that differ in their last replies, side by side in a row.

read_pairs.py reads a pair from a line.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from minitrain.data.chat.chat_templates import choose_template
from minitrain.data.chat.chats import encode_chat, make_sample, split_reply
from minitrain.data.chat.read_pairs import read_pair
from minitrain.data.chat.read_tools import read_shown
from minitrain.data.chat.reply_counts import ReplyCounts
from minitrain.data.chat.sample_rows import SampleRows, fit_sample
from minitrain.data.faults.skips import Skips
from minitrain.data.files import find_files
from minitrain.data.held_out import split_off
from minitrain.data.records import read_records
from minitrain.data.sample import Sample
from minitrain.data.text.text_rows import Row
from minitrain.data.tokenizer import fitting_tokenizer
from minitrain.errors import InputError
from minitrain.settings import Config
from minitrain.training.loss import IGNORE
from minitrain.training.packing import PADDING, pack_row

# the samples of the chosen and of the rejected chat
Pair = list[Sample]
MOCK_PAIRS = 64


def open_pairs(config: Config) -> "tuple[Pairs, Pairs | None]":
    """Return the training pairs in rows, and the held-out ones, or None; see `open_chats`.

    Raises InputError, with FILE:LINE, for a line that is no pair.
    """
    data = config.data
    half = config.batch.seq_len // 2
    if data.kind == "mock":
        return mock_pairs(config, split=0), mock_pairs(config, split=1)
    skips = Skips(data.on_error == "skip")
    counts = ReplyCounts()
    pairs, note = fit_pairs(read_pairs(config, skips, counts), half, data.over_long)
    note += skips.aside
    if not pairs:
        raise InputError(
            f"data.path={data.path} holds no pair to learn from with batch.seq_len={2 * half}{note}"
        )
    held = None
    if data.validation:
        pairs, held = split_off(pairs, data.validation, config.seed)
        held = Pairs(held, config)
    return Pairs(pairs, config, note, counts), held


def read_pairs(config: Config, skips: Skips, counts: ReplyCounts) -> Iterator[Pair]:
    """Yield the pairs of all lines of all files, in order and however long. counts: gets the replies."""
    data = config.data
    tokenizer = fitting_tokenizer(data.tokenizer, config.model.config.vocab_size)
    template = choose_template(data.template, tokenizer)
    make = scored_sample if config.task == "reward" else make_sample

    def read(record: dict) -> Pair:
        shown = read_shown(record)
        chats = read_pair(record)
        return [make(*encode_chat(chat, template, tokenizer, shown, counts)) for chat in chats]

    return read_records(find_files(data), read, skips)


def fit_pairs(pairs: Iterable[Pair], half: int, over_long: str) -> tuple[list[Pair], str]:
    """Return the pairs that fit a row, and a note on those that did not.

    A chat of more than `half` a row is truncated, or its pair dropped, as it is in any case with
    task=reward, for which a chat's last token counts. So is a pair whose chats are the same, as far
    as they fit.
    """
    kept = []
    dropped = truncated = alike = 0
    for pair in pairs:
        cut = [fit_sample(sample, half, over_long) for sample in pair]
        if None in cut:
            dropped += 1
        # nothing tells them apart: the loss is log 2, its gradient the noise of rounding
        elif all(map(np.array_equal, *cut)):
            dropped += 1
            alike += 1
        else:
            kept.append(cut)
            truncated += any(len(sample.tokens) > half for sample in pair)
    note = f" ({dropped:,} dropped)" if dropped else ""
    if truncated:
        note += f", {truncated:,} truncated to {half:,} tokens a chat,"
    if alike:
        note += f" {alike:,} dropped as both replies are the same so far,"
    return kept, note


def scored_sample(tokens: np.ndarray, said: np.ndarray) -> Sample:
    """Return the sample of a chat that is scored at its last token: there alone is a label, 0."""
    labels = np.full(len(tokens), IGNORE)
    labels[-1:] = np.where(said.any(), 0, IGNORE)
    return Sample(tokens, labels)


def mock_pairs(config: Config, split: int) -> "Pairs":
    """Return pairs of random tokens that fill their rows. `split` 0 and 1 differ."""
    random = np.random.default_rng((config.seed, split))
    vocab = config.model.config.vocab_size
    pairs = []
    for _ in range(MOCK_PAIRS):
        chats = random.integers(vocab, size=(2, config.batch.seq_len // 2 + 1))
        pairs.append([Sample(tokens[:-1], tokens[1:]) for tokens in chats])
    return Pairs(pairs, config)


class Pairs(SampleRows):
    """Pairs of samples in rows: documents 2 i and 2 i + 1 of a row are chosen and rejected.

    reference: the log-probabilities of each row's replies, [rows, replies], as training/dpo.py
        computes them; 0 before.
    """

    def __init__(
        self, pairs: list[Pair], config: Config, note: str = "", counts: ReplyCounts | None = None
    ):
        lengths = [sum(len(sample.tokens) for sample in pair) for pair in pairs]
        packed = config.data.packed is not False
        super().__init__(lengths, config.batch.seq_len, config.seed, packed, "pair", note, counts)
        self.pairs = pairs
        self.reference = torch.zeros(len(self.rows), 2 * max(map(len, self.rows)))

    def questions(self, count: int) -> list[tuple[list[int], list[int]]]:
        """Return the chosen chats of the first `count` pairs, each split before its last reply."""
        return [split_reply(chosen) for chosen, _ in self.pairs[:count]]

    def row(self, n: int) -> Row:
        """Return row n, with its index and the reference's log-probabilities."""
        samples = [sample._asdict() for i in self.chosen(n) for sample in self.pairs[i]]
        row = pack_row(samples, self.seq_len, PADDING)
        number = self.number(n)
        row["row"] = torch.tensor(number)
        row["reference"] = self.reference[number]
        return row
