"""Chats as tokens: messages -> the text of a chat template -> tokens, and which of them are learned.

A model should learn to answer, not to ask: only the assistant's turns are predicted, each with the
token that ends it. A turn is tokenized apart from what stands before it, just as it follows the
prompt when the model generates. Text in a message that spells a special token becomes that token,
as it does in transformers.
"""

import re
from collections.abc import Iterable, Mapping

import numpy as np

from minitrain.data.chat.chat_templates import ChatTemplate
from minitrain.data.chat.jinja import BEGINNING, EOS
from minitrain.data.chat.messages import NO_KEYS, Chat, Message
from minitrain.data.chat.rendering import Rendering
from minitrain.data.chat.reply_counts import ReplyCounts
from minitrain.data.sample import Sample
from minitrain.data.tokenizer import LONGEST_TOKEN, Tokenizer, encode_after
from minitrain.errors import InputError
from minitrain.training.loss import IGNORE


def encode_chat(
    messages: Chat,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    shown: Mapping = NO_KEYS,
    counts: ReplyCounts | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a chat, int64 [n], and which of them the model is to say, bool [n].

    shown: what the template sees beside the messages, as from `read_shown`. counts: gets the chat's
    replies. Raises InputError for what the template does not take.
    """
    chat = Rendering(template, messages, shown)
    encoded = encode_pieces(chat.pieces(), tokenizer)
    if counts is not None:
        counts.add(chat)
    return encoded


def encode_question(
    messages: Chat, template: ChatTemplate, tokenizer: Tokenizer, shown: Mapping = NO_KEYS
) -> list[int]:
    """Return the tokens that a reply to `messages` follows. Raises InputError likewise."""
    text = Rendering(template, messages, shown).question()
    return encode_pieces([(text, False)], tokenizer)[0].tolist()


def end_of_reply(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the token that ends a reply; None if the template does not show where one ends."""
    try:
        chat = [Message("user", "?"), Message("assistant", "!")]
        tokens, said = encode_chat(chat, template, tokenizer)
    except InputError:
        return None
    return int(tokens[said][-1])


def encode_pieces(pieces: Iterable, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of pieces of text, int64 [n], and which the model is to say, bool [n]."""
    tokens = []
    said = []
    before = ""
    for text, is_reply in pieces:
        ids = []
        for part in re.split(f"([{BEGINNING}{EOS}])", text):
            if part == BEGINNING:
                # without eos, which some tokenizers put behind a whole text
                ids += tokenizer.beginning_ids
            elif part == EOS:
                ids.append(tokenizer.eos_id)
                # what follows eos is encoded as at the beginning of a line
                before = "\n"
            else:
                ids += encode_after(before, part, tokenizer.encode)
                before = (before + part)[-LONGEST_TOKEN:]
        tokens += ids
        said += [is_reply] * len(ids)
    return np.array(tokens, np.int64), np.array(said, bool)


def make_sample(tokens: np.ndarray, said: np.ndarray) -> Sample:
    """Return the sample of an encoded chat. The very first token cannot be predicted."""
    labels = np.where(said[1:], tokens[1:], IGNORE)
    stop = int(np.flatnonzero(said).max(initial=0))
    return Sample(tokens[:stop], labels[:stop])


def split_reply(sample: Sample) -> tuple[list[int], list[int]]:
    """Split a sample before its last reply. Returns the tokens of both sides."""
    predicted = sample.labels != IGNORE
    start = len(predicted) - int(np.argmin(np.append(predicted[::-1], False)))
    return sample.tokens[: start + 1].tolist(), sample.labels[start:].tolist()
