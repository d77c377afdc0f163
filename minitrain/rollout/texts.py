"""The sampler's prompts and samples as text: what is asked, and what is answered, whole or in pieces.

Elsewhere: token ids (engine.py), and which text a token completes (streaming.py).
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from minitrain.errors import InputError
from minitrain.rollout.sampling import SamplingParams, with_settings
from minitrain.rollout.scheduler import Sample
from minitrain.rollout.streaming import stream
from minitrain.rollout.weights import SamplerWeights

# token ids, text, or the messages of a chat
Prompt = Sequence[int] | str | Sequence[dict]
DEFAULTS = SamplingParams()


def is_list(prompt: object) -> bool:
    return isinstance(prompt, list | tuple)


def is_chat(prompt: object) -> bool:
    return is_list(prompt) and len(prompt) > 0 and all(isinstance(each, dict) for each in prompt)


class TextTokenizer(Protocol):
    """A tokenizer as `minitrain.load_tokenizer` gives it.

    eos_id: ends a text; None if no file names it. For chats it also has encode_chat(messages), which
    returns the prompt's token ids and those that end a reply.
    """

    eos_id: int | None

    def encode_prompt(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int], special: bool = False) -> str:
        """Return the text of token ids, with that of special tokens if `special`."""


class TextMethods:
    """The methods of a `Sampler` that take or return text: it inherits them, and has what they use.

    So engine.py is about token ids alone. ends: the tokens that end a text. followed: the samples
    whose text somebody has begun to read.
    """

    tokenizer: TextTokenizer | None
    ends: tuple[int, ...]
    weights: SamplerWeights
    followed: list[Sample]
    submit: Callable[..., list[Sample]]
    step: Callable[[], list[tuple[Sample, list[int]]]]
    cancel: Callable[..., None]

    def _read(self, prompt: Prompt, params: SamplingParams) -> tuple[list[int], SamplingParams]:
        """Return a prompt's token ids, and its parameters with the tokens that end a chat's reply.

        Raises InputError for text, a chat or stop strings without the tokenizer that they need.
        """
        if is_chat(prompt):
            prompt, ends = self._text_tokenizer("a chat", "encode_chat").encode_chat(prompt)
            if not params.ignore_eos:
                params = with_settings(params, {"stop_tokens": (*params.stop_tokens, *ends)})
        if params.stop and self.tokenizer is None:
            raise InputError(
                f"sampling stop={list(params.stop)} needs a sampler with a tokenizer"
            )
        return self.tokens_of(prompt), params

    def tokens_of(self, prompt: Sequence[int] | str) -> list[int]:
        """Return the token ids of a prompt. Raise InputError unless it is text or a list of ids."""
        if not isinstance(prompt, str):
            try:
                # bytes hold integers, but are not token ids: as a list's item they are refused
                return list(
                    map(operator.index, [prompt] if isinstance(prompt, bytes) else prompt)
                )
            except TypeError:
                raise InputError(
                    f"a prompt is {prompt!r:.60}: give a list of token ids, or text"
                ) from None
        tokenizer = self._text_tokenizer(
            f"the prompt {prompt!r:.60} is text, which", "encode_prompt"
        )
        return tokenizer.encode_prompt(prompt)

    def _text_tokenizer(self, what: str, method: str = "decode") -> TextTokenizer:
        """Return the tokenizer. Raises InputError, which says what needs it, without one."""
        if not hasattr(self.tokenizer, method):
            raise InputError(
                f"{what} needs a sampler with a tokenizer (as minitrain.load_tokenizer gives it)"
            )
        return self.tokenizer

    def _wrote_stop(self, sample: Sample, tokens: list[int]) -> bool:
        """Return whether the text's end holds a stop string.

        Only the last tokens are decoded: at most four for each character of the longest string,
        which has up to four bytes, and five more. The first of them is context, whose own text is
        left out: many vocabularies drop a space at the start of a text.
        """
        length = 4 * max(map(len, sample.params.stop)) + 5
        end = (sample.prompt[-1:] + sample.produced[-length:] + tokens)[-length:]
        # a stop string may hold special tokens, or stand around some that are not shown
        for special in (False, True):
            before = self.tokenizer.decode(end[:1], special)
            text = self.tokenizer.decode(end, special)
            if any(stop in text[len(before) :] for stop in sample.params.stop):
                return True
        return False

    @contextmanager
    def _queued(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        settings: dict,
    ) -> Iterator[list[Sample]]:
        """Queue all prompts inside a `with` statement; at its end, cancel what is unfinished.

        So a prompt that is refused, an error and an interrupt leave nothing queued.
        """
        if isinstance(prompts, str):
            raise InputError("prompts must be a list, of texts or of lists of token ids")
        shared = not isinstance(params, list | tuple)
        all_params = [params] * len(prompts) if shared else params
        if len(all_params) != len(prompts):
            raise InputError(
                f"{len(prompts)} prompts and {len(all_params)} SamplingParams: give one, or one per prompt"
            )
        samples = []
        try:
            for number, (prompt, own) in enumerate(zip(prompts, all_params, strict=True)):
                samples += self.submit(prompt, own, number if shared else 0, **settings)
            yield samples
        finally:
            self.cancel(*samples)

    def generate_text(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **settings,
    ) -> list[str]:
        """Return the samples of all prompts in order as text, without the tokens that end them.

        Arguments are those of `generate`.
        """
        self._text_tokenizer("text of samples")
        queued = self._queued(prompts, params or DEFAULTS, settings)
        with queued as samples, self.weights.in_use():
            return ["".join(self.follow(sample)) for sample in samples]

    def chat(
        self, messages: Sequence, params: SamplingParams | None = None, **settings
    ) -> list[str]:
        """Return the n replies to a chat as text; those to several chats in order.

        messages: {"role": "user", "content": "..."}, ..., or a list of such lists. The model's own
        chat template asks for the reply; `stream(messages)` yields it piece by piece.
        """
        several = is_list(messages) and len(messages) and all(map(is_chat, messages))
        chats = messages if several else [messages]
        if not all(map(is_chat, chats)):
            raise InputError(
                f"{messages!r:.60} is no chat (give [{{'role': 'user', 'content': TEXT}}])"
            )
        return self.generate_text(chats, params, **settings)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **settings
    ) -> Iterator[str]:
        """Yield the text that follows a prompt in pieces, each as soon as it is certain.

        The prompt is submitted when the first piece is asked for. Raises InputError as `submit`
        does, and for more than one sample.
        """
        params = with_settings(params or DEFAULTS, settings)
        if params.n > 1:
            raise InputError(f"n={params.n}: a stream is the text of one sample (use n=1)")
        self._text_tokenizer("text of samples")
        yield from self.follow(*self.submit(prompt, params))

    def follow(self, sample: Sample) -> Iterator[str]:
        """Yield the text of a submitted sample as it comes, without the token that ends it.

        If the caller stops before the end, the sample is cancelled; also if it calls `refresh` or
        `free` between two pieces, where the model is as training needs it. Raises InputError if it
        then reads on all the same.
        """
        ends = (*self.ends, *sample.params.stop_tokens)

        def tokens() -> Iterator[int]:
            seen = 0
            while seen < len(sample.produced) or sample.finish_reason is None:
                if seen == len(sample.produced):
                    self.step()
                new = sample.produced[seen:]
                seen += len(new)
                yield from (token for token in new if token not in ends)
            if sample.finish_reason == "cancelled" and sample not in self.followed:
                raise InputError(
                    "the text ends early: the sampler was refreshed or freed while it was read"
                )

        try:
            self.followed.append(sample)
            tokenizer = self._text_tokenizer("text of samples")
            yield from stream(tokenizer, tokens(), sample.prompt)
        finally:
            if sample in self.followed:
                self.followed.remove(sample)
            self.cancel(sample)
