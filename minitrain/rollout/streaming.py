"""Detokenize incrementally."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minitrain.rollout.texts import TextTokenizer

# bytes that are not UTF-8 decode to it
REPLACEMENT = "\ufffd"


def stream(
    tokenizer: "TextTokenizer", ids: Iterable[int], prompt: Iterable[int] = ()
) -> Iterator[str]:
    """Yield the text of `ids`, which follow `prompt`, in pieces: each as soon as it is certain.

    A character whose bytes have not all come decodes to the replacement character, so a text that
    ends in one waits, at most for the last token. The last piece is decoded again with the next, as
    context: many vocabularies drop a space at the start of a text.
    """
    context = list(prompt)
    pending = []

    def text_so_far() -> str:
        return tokenizer.decode(context + pending)[len(tokenizer.decode(context)) :]

    for token in ids:
        pending.append(token)
        text = text_so_far()
        if text and not text.endswith(REPLACEMENT):
            yield text
            context = pending
            pending = []
    if rest := text_so_far():
        yield rest
