"""Supervised fine-tuning data: chats packed into rows. Row n is a pure function of (seed, n).

Samples that share a row do not see each other, so packing changes nothing but the number of empty
slots: the gradients are those of one sample per row (`data.packed: false`). The packing is made
once; each epoch visits its rows in another order. All samples are tokenized at the start and stay
in memory. Left out: streaming.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from minitrain.data.chat.chat_templates import ChatTemplate, choose_template
from minitrain.data.chat.chats import (
    encode_chat,
    make_sample,
    read_messages,
    read_shown,
    split_reply,
)
from minitrain.data.faults.wording import SETTINGS, Wording
from minitrain.data.files import find_files
from minitrain.data.held_out import split_off
from minitrain.data.records import Skips, counted, other_task, read_records
from minitrain.data.sample import Sample
from minitrain.data.text.text_rows import Mock, Row
from minitrain.data.tokenizer import Tokenizer, fitting_tokenizer
from minitrain.errors import InputError
from minitrain.hashing import nth
from minitrain.settings import Config, Data
from minitrain.training.loss import IGNORE
from minitrain.training.packing import PADDING, first_fit_decreasing, pack_row


def open_chats(config: Config) -> "tuple[Chats | Mock, Chats | Mock | None]":
    """Return the training samples in rows, and the held-out ones.

    The latter are None if data.validation is 0; mock data always has some. Rows are as those of
    `open_data`, with the document id -1 in padding. Without data.packed they have neither
    `positions` nor `document_ids`, unless experts are balanced: padding must not count there. Then
    mock data is that of pretraining. Raises InputError, with FILE:LINE, for a line that is no chat.
    """
    data = config.data
    seq_len = config.batch.seq_len
    seed = config.seed
    packed = data.packed is not False
    model = config.model.config
    numbered = packed or model.bias_update_speed > 0 or model.router_aux_loss_coef > 0
    if data.kind == "mock":
        mock = partial(MockChats if packed else Mock, seq_len, model.vocab_size, seed)
        return mock(split=0), mock(split=1)
    skips = Skips(data.on_error == "skip")
    tokenizer = fitting_tokenizer(data.tokenizer, model.vocab_size)
    template = choose_template(data.template, tokenizer)
    samples, counts = fit(read_samples(data, template, tokenizer, skips), seq_len, data.over_long)
    counts += skips.aside
    if not samples:
        raise InputError(
            f"data.path={data.path} holds no chat to learn from with batch.seq_len={seq_len}{counts}"
        )
    in_rows = partial(Chats, seq_len=seq_len, seed=seed, packed=packed, numbered=numbered)
    held = None
    if data.validation:
        samples, held = split_off(samples, data.validation, seed)
        held = in_rows(held)
    return in_rows(samples, note=counts, template=template), held


def read_samples(
    data: Data,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    skips: Skips,
    words: Wording = SETTINGS,
) -> Iterator[Sample]:
    """Yield the samples of all lines of all files, in order and however long."""

    def read(record: dict) -> Sample:
        if other := other_task(record, words, "pair"):
            raise InputError(other)
        messages = read_messages(record, words)
        return make_sample(*encode_chat(messages, template, tokenizer, read_shown(record)))

    return read_records(find_files(data, words), read, skips, words)


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


class Chats:
    """Samples, of at most seq_len tokens each, in rows: packed, or one in each.

    numbered: rows have `positions` and `document_ids`. template: it wrote the samples, and counted
    them.
    """

    noun = "chat"

    def __init__(
        self,
        samples: list[Sample],
        seq_len: int,
        seed: int,
        packed: bool,
        numbered: bool,
        note: str = "",
        template: ChatTemplate | None = None,
    ):
        self.samples = samples
        self.seq_len = seq_len
        self.seed = seed
        self.numbered = numbered
        lengths = [len(sample.tokens) for sample in samples]
        self.rows = [[i] for i in range(len(samples))]
        if packed:
            self.rows = first_fit_decreasing(lengths, seq_len)
        self.fill = sum(lengths) / (len(self.rows) * seq_len)
        rows = f"{counted(len(self.rows), 'row')} of {seq_len:,} tokens, {self.fill:.1%} filled"
        notes = template.notes if template else []
        self.about = "\nnote: ".join(
            [f"{counted(len(samples), self.noun)}{note} in {rows}", *notes]
        )
        self.asks = template.asks if template else None

    def __len__(self) -> int:
        return len(self.rows)

    def questions(self, count: int) -> list[tuple[list[int], list[int]]]:
        """Return the first `count` samples, each split before its last reply."""
        return [split_reply(sample) for sample in self.samples[:count]]

    def row(self, n: int) -> Row:
        row = pack_row([self.samples[i]._asdict() for i in self.chosen(n)], self.seq_len, PADDING)
        return row if self.numbered else {key: row[key] for key in PADDING}

    def origin(self, n: int) -> str:
        """Return the numbers of row n's chats, counted as they were kept."""
        return f"chats {', '.join(str(i + 1) for i in self.chosen(n))}"

    def chosen(self, n: int) -> list[int]:
        """Return the indices of row n's samples."""
        _, number = nth(n, len(self), self.seed)
        return self.rows[number]


class MockChats(Mock):
    """Random tokens in the shape of packed SQuAD, as in the published fine-tuning tables.

    The tables' counts imply rows with 17 slots without a token, and sample lengths s with
    sum(s^2) / sum(s) = 208. Log-normal lengths have that; a row's last sample is cut to fit.
    `split` 0 and 1 differ.
    """

    # slots of a row without a token; tokens of a chat that are predicted
    EMPTY = 17
    ANSWER = 5

    def row(self, n: int) -> Row:
        random = self.random(n)
        lengths = []
        room = max(1, self.seq_len - self.EMPTY)
        while room:
            drawn = max(self.ANSWER, round(random.lognormal(5.109, 0.410)))
            lengths.append(min(drawn, room))
            room -= lengths[-1]
        return pack_row(
            [self._sample(random, length) for length in lengths], self.seq_len, PADDING
        )

    def _sample(self, random: np.random.Generator, length: int) -> dict[str, np.ndarray]:
        tokens = random.integers(self.vocab_size, size=length + 1)
        labels = np.where(np.arange(length) < length - self.ANSWER, IGNORE, tokens[1:])
        return {"tokens": tokens[:-1], "labels": labels}
