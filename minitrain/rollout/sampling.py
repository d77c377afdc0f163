"""From logits to tokens: the distribution that a request asks for, and a draw from it that no neighbour can change.

A token is drawn by the Gumbel-max trick: argmax(logits / temperature + g) is a sample of softmax(logits / temperature)
if the g are independent -log(-log(u)). Here u is a hash of (seed, request, position, vocabulary id), not the state of a
generator. So a request draws the same noise alone or among others, before and after it was interrupted, whatever the
order; and with a vocabulary split over ranks each one makes the noise of its own part, and only the best candidates
and a sum meet.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minitrain.errors import InputError


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    temperature: logits are divided by it; 0: the likeliest token (its log-probability is then that of temperature 1).
    top_k, top_p, min_p, in this order: keep the k likeliest tokens (0: all); of those the fewest that hold a share
    top_p of the probability; of those the ones at least min_p times as likely as the likeliest.
    max_tokens: at most so many are produced. n: samples per prompt.
    stop_tokens: ids that end a sample; such a token is its last. stop: strings that do, if the sampler has a tokenizer;
    the tokens that wrote one stay.
    seed: with a sample's request number, what all its randomness comes from.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 128
    n: int = 1
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self):
        for name in ("temperature", "top_k"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"sampling {name}={getattr(self, name)} must be at least 0")
        for name in ("max_tokens", "n"):
            if getattr(self, name) < 1:
                raise InputError(f"sampling {name}={getattr(self, name)} must be at least 1")
        if not 0 < self.top_p <= 1:
            raise InputError(f"sampling top_p={self.top_p} must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"sampling min_p={self.min_p} must be between 0 and 1")


@dataclass
class Completion:
    """One sample of a prompt.

    tokens: what follows the prompt. logprobs: of each token under the distribution that it was drawn from.
    finish_reason: "stop" (a stop token or string), "length" (max_tokens or the model's positions) or "cancelled".
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
