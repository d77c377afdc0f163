"""Supervised fine-tuning data: chats packed into rows. Row n is a pure function of (seed, n).

All samples are tokenized at the start and stay in memory. Left out: streaming.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from minitrain.data.chat.chat_templates import ChatTemplate, choose_template
from minitrain.data.chat.chats import encode_chat, make_sample, split_reply
from minitrain.data.chat.read_chats import read_messages
from minitrain.data.chat.read_tools import read_shown
from minitrain.data.chat.reply_counts import ReplyCounts
from minitrain.data.chat.sample_rows import SampleRows, fit
from minitrain.data.faults.other_task import other_task
from minitrain.data.faults.skips import Skips
from minitrain.data.faults.wording import SETTINGS, Wording
from minitrain.data.files import find_files
from minitrain.data.held_out import split_off
from minitrain.data.records import read_records
from minitrain.data.sample import Sample
from minitrain.data.text.text_rows import Mock, Row
from minitrain.data.tokenizer import Tokenizer, fitting_tokenizer
from minitrain.errors import InputError
from minitrain.settings import Config, Data
from minitrain.training.loss import IGNORE
from minitrain.training.packing import PADDING, pack_row


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
    counts = ReplyCounts()
    read = read_samples(data, template, tokenizer, skips, counts)
    samples, note = fit(read, seq_len, data.over_long)
    note += skips.aside
    if not samples:
        raise InputError(
            f"data.path={data.path} holds no chat to learn from with batch.seq_len={seq_len}{note}"
        )
    in_rows = partial(Chats, seq_len=seq_len, seed=seed, packed=packed, numbered=numbered)
    held = None
    if data.validation:
        samples, held = split_off(samples, data.validation, seed)
        held = in_rows(held)
    return in_rows(samples, note=note, counts=counts), held


def read_samples(
    data: Data,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    skips: Skips,
    counts: ReplyCounts | None = None,
    words: Wording = SETTINGS,
) -> Iterator[Sample]:
    """Yield the samples of all lines of all files, in order and however long.

    counts: gets the replies.
    """

    def read(record: dict) -> Sample:
        if other := other_task(record, words, "pair"):
            raise InputError(other)
        messages = read_messages(record, words)
        shown = read_shown(record)
        return make_sample(*encode_chat(messages, template, tokenizer, shown, counts))

    return read_records(find_files(data, words), read, skips, words)


class Chats(SampleRows):
    """Chats in rows. numbered: rows have `positions` and `document_ids`."""

    def __init__(
        self,
        samples: list[Sample],
        seq_len: int,
        seed: int,
        packed: bool,
        numbered: bool,
        note: str = "",
        counts: ReplyCounts | None = None,
    ):
        lengths = [len(sample.tokens) for sample in samples]
        super().__init__(lengths, seq_len, seed, packed, "chat", note, counts)
        self.samples = samples
        self.numbered = numbered

    def questions(self, count: int) -> list[tuple[list[int], list[int]]]:
        """Return the first `count` samples, each split before its last reply."""
        return [split_reply(sample) for sample in self.samples[:count]]

    def row(self, n: int) -> Row:
        row = pack_row([self.samples[i]._asdict() for i in self.chosen(n)], self.seq_len, PADDING)
        return row if self.numbered else {key: row[key] for key in PADDING}


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
