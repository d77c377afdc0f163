"""Preference data: pairs of chats that differ in their last replies, side by side in a row.

A line is {"prompt": ..., "chosen": ..., "rejected": ...}, as TRL has it: texts or lists of messages;
a reply may also be one message, and the prompt `messages` or `conversations`, as LLaMA-Factory and
axolotl have them, or what both lists begin with. Only what follows is learned. Tools, a system text
and masks stand beside them as in data/chat/chats.py.
"""

from itertools import takewhile

import numpy as np
import torch

from minitrain.data.chat.chat_templates import Chat, Message, choose_template
from minitrain.data.chat.chats import (
    encode_chat,
    is_learned,
    make_sample,
    prompt_of,
    read_shown,
    read_turns,
    refuse_unread,
    usual_key,
    with_system,
    words_of,
)
from minitrain.data.chat.keys import CHATS, LEARNED_LINE, PROMPTS, UNREAD_IN_LINE
from minitrain.data.chat.sft import Chats, fit_sample
from minitrain.data.faults.wording import SETTINGS
from minitrain.data.files import find_files
from minitrain.data.held_out import split_off
from minitrain.data.records import Skips, other_task, read_records
from minitrain.data.sample import Sample
from minitrain.data.text.text_rows import Row
from minitrain.data.tokenizer import fitting_tokenizer
from minitrain.errors import InputError
from minitrain.hashing import nth
from minitrain.settings import Config
from minitrain.training.loss import IGNORE
from minitrain.training.packing import PADDING, pack_row

SIDES = ("chosen", "rejected")
MOCK_PAIRS = 64


def open_pairs(config: Config) -> "tuple[Pairs, Pairs | None]":
    """Return the training pairs in rows, and the held-out ones, or None; see `open_chats`.

    A pair fits a row: a chat of more than half a row is truncated, or its pair dropped, as it is in
    any case with task=reward, for which a chat's last token counts. So is a
    pair whose chats are the same, as far as they fit.
    """
    data = config.data
    half = config.batch.seq_len // 2
    if data.kind == "mock":
        return mock_pairs(config, split=0), mock_pairs(config, split=1)
    tokenizer = fitting_tokenizer(data.tokenizer, config.model.config.vocab_size)
    template = choose_template(data.template, tokenizer)

    def read(record: dict) -> list[Sample]:
        shown = read_shown(record)
        chats = read_pair(record)
        return [make(*encode_chat(chat, template, tokenizer, shown)) for chat in chats]

    make = scored_sample if config.task == "reward" else make_sample
    skips = Skips(data.on_error == "skip")
    pairs = []
    dropped = truncated = alike = 0
    for pair in read_records(find_files(data), read, skips):
        cut = [fit_sample(sample, half, data.over_long) for sample in pair]
        if None in cut:
            dropped += 1
        # nothing tells them apart: the loss is log 2, its gradient the noise of rounding
        elif all(map(np.array_equal, *cut)):
            dropped += 1
            alike += 1
        else:
            pairs.append(cut)
            truncated += any(len(sample.tokens) > half for sample in pair)
    counts = f" ({dropped:,} dropped)" if dropped else ""
    if truncated:
        counts += f", {truncated:,} truncated to {half:,} tokens a reply,"
    if alike:
        counts += f" {alike:,} dropped as both replies are the same so far,"
    counts += skips.aside
    if not pairs:
        raise InputError(
            f"data.path={data.path} holds no pair to learn from with batch.seq_len={2 * half}{counts}"
        )
    held = None
    if data.validation:
        pairs, held = split_off(pairs, data.validation, config.seed)
        held = Pairs(held, config)
    return Pairs(pairs, config, note=counts, template=template), held


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


def read_pair(record: dict) -> list[Chat]:
    """Return the chats with the chosen and the rejected reply; the turns they share are not learned.

    Raises InputError for a line that is no such pair.
    """
    if any(record.get(key) is None for key in SIDES) and (
        other := other_task(record, SETTINGS, "chat", "document")
    ):
        raise InputError(f"{other} (a pair has 'chosen' and 'rejected')")
    beside = {key: value for key, value in record.items() if key not in SIDES}
    refuse_unread(beside, UNREAD_IN_LINE, "the messages")
    asked = read_prompt(beside)
    pair = []
    for key in SIDES:
        turns = read_reply(record, key, asked)
        # some data sets repeat the prompt here
        if turns[: len(asked)] != asked:
            turns = asked + turns
        pair.append(with_system(turns, record))
    alike = takewhile(lambda turns: turns[0] == turns[1], zip(*pair, strict=False))
    shared = len(list(alike))
    if pair[0] == pair[1]:
        raise InputError("'chosen' and 'rejected' are the same, so nothing is to be learned")
    for key, turns in zip(SIDES, pair, strict=True):
        if not any(turn.role == "assistant" for turn in turns[shared:]):
            raise InputError(f"{key!r} has no reply of its own beside the other's")
    if not is_learned(beside, LEARNED_LINE):
        shared = max(map(len, pair))
    marked = []
    for chat in pair:
        before = [turn._replace(learned=False) for turn in chat[:shared]]
        marked.append(before + chat[shared:])
    return marked


def read_prompt(record: dict) -> Chat:
    """Return the messages before both replies; none where the replies' lists hold them."""
    key = usual_key(record, PROMPTS + CHATS)
    if key is None or not record[key]:
        return []
    if isinstance(record[key], list):
        refuse_unread(record, ["context"], "the messages")
        return read_turns(record, key)
    return [Message("user", prompt_of(record, key))]


def read_reply(record: dict, key: str, asked: Chat) -> Chat:
    """Return the messages of a list, or one of a text that answers what is `asked`."""
    if isinstance(record.get(key), dict):
        record = {key: [record[key]]}
    if isinstance(record.get(key), list):
        return read_turns(record, key)
    reply = Message("assistant", words_of(record, key))
    if not asked:
        raise InputError(f"{key!r} is a text, and there is no 'prompt' that it answers")
    return [reply]


class Pairs(Chats):
    """Pairs of samples in rows: documents 2 i and 2 i + 1 of a row are chosen and rejected.

    reference: the log-probabilities of each row's replies, [rows, replies], as training/dpo.py
        computes them; 0 before.
    """

    noun = "pair"

    def __init__(self, pairs: list[list[Sample]], config: Config, **more):
        # the rows are those of samples as long as the pairs
        joined = []
        for pair in pairs:
            tokens = np.concatenate([sample.tokens for sample in pair])
            labels = np.concatenate([sample.labels for sample in pair])
            joined.append(Sample(tokens, labels))
        packed = config.data.packed is not False
        super().__init__(joined, config.batch.seq_len, config.seed, packed, True, **more)
        self.pairs = pairs
        # which `questions` asks
        self.samples = [pair[0] for pair in pairs]
        self.reference = torch.zeros(len(self.rows), 2 * max(map(len, self.rows)))

    def row(self, n: int) -> Row:
        """Return row n, with its index and the reference's log-probabilities."""
        _, number = nth(n, len(self), self.seed)
        samples = []
        for i in self.rows[number]:
            samples += [sample._asdict() for sample in self.pairs[i]]
        row = pack_row(samples, self.seq_len, PADDING)
        row["row"] = torch.tensor(number)
        row["reference"] = self.reference[number]
        return row
