"""From logits to tokens: the distribution that a request asks for, and a draw from it that no
neighbour can change.

A token is drawn by the Gumbel-max trick: argmax(logits / temperature + g) is a sample of
softmax(logits / temperature) if the g are independent -log(-log(u)). Here u is a hash of (seed,
request, position, vocabulary id), not the state of a generator. So a request draws the same noise
alone or among others, before and after it was interrupted, whatever the order; and with a
vocabulary split over ranks each one makes the noise of its own part, and only the best candidates
and a sum meet.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import get_origin

import torch
from torch import Tensor

from minitrain.errors import InputError
from minitrain.hashing import mix, mix_int
from minitrain.models.attention import COMPILING
from minitrain.training.loss import VocabShard

# random numbers that are made at once, on the CPU: what stays in its caches
CHUNK = 1 << 17
# in a probability of 1, for top_p
UNITS = 2.0**40


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    temperature: logits are divided by it; 0: the likeliest token (its log-probability is then that
    of temperature 1). top_k, top_p, min_p, in this order: keep the k likeliest tokens (0: all); of
    those the fewest that hold a share top_p of the probability; of those the ones at least min_p
    times as likely as the likeliest.
    max_tokens: at most so many are produced. n: samples per prompt.
    stop_tokens: ids that end a sample, besides the model's own; such a token is its last. stop:
    strings that do, which may hold special tokens, if the sampler has a tokenizer; the tokens that
    wrote one stay.
    seed: with a sample's request number, what all its randomness comes from.
    ignore_eos: go on after the tokens at which the model ends a text.
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
    ignore_eos: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check_type(field.name, getattr(self, field.name), field.type)
        if not (self.temperature == 0 or COLDEST <= self.temperature < float("inf")):
            raise InputError(
                f"sampling temperature={self.temperature} must be 0, or at least {COLDEST}"
            )
        if not 0 <= self.top_k < 1 << 31:
            raise InputError(f"sampling top_k={self.top_k} must be at least 0, and below {1 << 31}")
        if "" in self.stop:
            raise InputError(
                f"sampling stop={self.stop!r} must be a list of texts, none of them empty"
            )
        for name in ("max_tokens", "n"):
            if getattr(self, name) < 1:
                raise InputError(f"sampling {name}={getattr(self, name)} must be at least 1")
        if not 0 < self.top_p <= 1:
            raise InputError(f"sampling top_p={self.top_p} must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"sampling min_p={self.min_p} must be between 0 and 1")


def check_type(name: str, value: object, wanted: type) -> None:
    """Raise InputError for a setting of a type that is not its own; integers are numbers, too."""
    kinds = {
        float: (Real, "a number"),
        int: (Integral, "an integer"),
        bool: (bool, "true or false"),
        tuple[int, ...]: (Integral, "a list of token ids"),
        tuple[str, ...]: (str, "a list of texts, none of them empty"),
    }
    kind, description = kinds[wanted]
    if get_origin(wanted) is None:
        fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    else:
        fits = isinstance(value, list | tuple) and all(isinstance(item, kind) for item in value)
    if not fits:
        raise InputError(f"sampling {name}={value!r} must be {description}")


@dataclass
class Completion:
    """One sample of a prompt.

    tokens: what follows the prompt. logprobs: of each token under the distribution that it was
    drawn from.
    finish_reason: "stop" (a stop token or string), "length" (max_tokens or the model's positions)
    or "cancelled".
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str


def sample_key(seed: int, number: int, sample: int) -> int:
    """From what all noise of a sample comes: the seed, the request's number and which of its
    samples it is.
    """
    key = 0
    for part in (seed, seed >> 32, number, sample):
        key = mix_int(key ^ (part & 0xFFFFFFFF)) + 0x9E3779B9 & 0xFFFFFFFF
    # as int32
    return key - (1 << 32) if key >> 31 else key


@cache
def _vocabulary(first: int, size: int, device: torch.device) -> Tensor:
    return mix(torch.arange(first, first + size, dtype=torch.int32, device=device))


def token_keys(keys: Tensor, positions: Tensor) -> Tensor:
    """int32 [rows], for one token of each sample, from the samples' (see `sample_key`); positions:
    int64 [rows].
    """
    return mix(keys ^ mix(positions.to(torch.int32)))


def waiting_times(keys: Tensor, first: int, size: int) -> Tensor:
    """Exponential random numbers, fp32 [rows, size], for ids first, first + 1, ... keys: see
    `token_keys`.

    All are finite and above 0: a token that has all the probability always wins. The least of them
    divided by the probabilities falls on a token with just its probability: that is the Gumbel-max
    trick, with one logarithm less.
    """
    # of caches the compiler warns
    ids = _vocabulary.__wrapped__ if torch.compiler.is_compiling() else _vocabulary
    bits = mix(keys[:, None] ^ ids(first, size, keys.device)).bitwise_and_(0x7FFFFFFF)
    # fp32 rounds the last 64 to -1
    uniform = bits.float().add_(0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1)
    # exact for small numbers, which win
    return uniform.log1p_().neg_()


@dataclass
class Choice:
    """How each row's token is chosen; all tensors have one number per row.

    greedy, noisy, filtered: is there a row without a temperature, one with, one with top_k, top_p
    or min_p?
    """

    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    greedy: bool = True
    noisy: bool = True
    filtered: bool = True


def choose(
    logits: Tensor, choice: Choice, positions: Tensor, part: VocabShard
) -> tuple[Tensor, Tensor]:
    """A token for each row, int64 [rows], and its log-probability, fp32 [rows].

    logits: [rows, vocab], or this rank's `part` of the vocabulary, for which ranks exchange five
    numbers per row; only with top_k, top_p or min_p do they gather all logits. positions: int64
    [rows], of the tokens that are chosen.
    """
    if choice.filtered and part.group is not None:
        logits = part.gather(logits).transpose(0, 1).flatten(1)
        part = VocabShard()
    greedy = choice.temperature == 0
    logits = logits.float()
    temperature = torch.where(greedy, 1, choice.temperature)[:, None]
    if choice.filtered:
        logits = keep_likely(logits / temperature, choice)
        temperature = 1.0
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak).div_(temperature).exp_()
    total = weights.sum(-1, keepdim=True)
    peak = peak / temperature
    if choice.noisy:
        race = divide_by_waiting_times(weights, token_keys(choice.keys, positions), part.first)
        best = first_largest(race)
        score = race.gather(1, best).log() + peak
    if choice.greedy:
        likeliest = first_largest(logits)
        best = torch.where(greedy[:, None], likeliest, best) if choice.noisy else likeliest
        score = torch.where(greedy[:, None], peak, score) if choice.noisy else peak
    logit = logits.gather(1, best) / temperature
    if part.group is None:
        return best[:, 0], (logit - peak - total.log())[:, 0]
    return _best_of_parts(torch.cat([score, logit, peak, total, best + part.first], dim=1), part)


@cache
def compiled_choose() -> Callable:
    """`choose` as a few kernels, in place of about 40; for each kind of `choice` compiled anew."""
    from torch._dynamo import config  # takes seconds to import

    return config.patch(COMPILING)(torch.compile(choose))


def divide_by_waiting_times(weights: Tensor, keys: Tensor, first: int) -> Tensor:
    """weights [rows, vocab], in place; on the CPU in pieces that stay in its caches."""
    step = max(1, CHUNK // len(weights)) if uncompiled_on_cpu(weights) else weights.shape[1]
    for start in range(0, weights.shape[1], step):
        piece = weights[:, start : start + step]
        piece.div_(waiting_times(keys, first + start, piece.shape[1]))
    return weights


def uncompiled_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def first_largest(x: Tensor) -> Tensor:
    """x.argmax(-1, keepdim=True) of a matrix; on the CPU, where argmax is slow and amax is not, in
    two stages.
    """
    block = 64
    if not uncompiled_on_cpu(x) or x.shape[1] % block:
        return x.argmax(-1, keepdim=True)
    blocks = x.unflatten(1, (-1, block))
    first = blocks.amax(-1).argmax(-1)
    inside = blocks[torch.arange(len(x)), first].argmax(-1)
    return (first * block + inside)[:, None]


def _best_of_parts(mine: Tensor, part: VocabShard) -> tuple[Tensor, Tensor]:
    """mine: [rows, 5], a part's best score, that token's logit, the peak, the sum of exponentials,
    and the token.
    """
    # each [parts, rows]
    score, logit, peak, total, token = part.gather(mine).unbind(-1)
    highest = peak.amax(0)
    log_sum = (total * (peak - highest).exp()).sum(0).log() + highest
    winner = score.argmax(0, keepdim=True)
    return token.gather(0, winner)[0].long(), logit.gather(0, winner)[0] - log_sum


def keep_likely(logits: Tensor, choice: Choice) -> Tensor:
    """Minus infinity for tokens that top_k, then top_p, then min_p leave out; of equally likely
    ones none or all.
    """
    ordered = logits.sort(-1, descending=True).values
    rank = torch.arange(logits.shape[1], device=logits.device)
    top_k = torch.where(choice.top_k == 0, logits.shape[1], choice.top_k)[:, None]
    ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    probability = ordered.softmax(-1)
    # whole numbers, whose sums fp64 holds exactly: CUDA adds in no fixed order, but ranks must keep
    # the same tokens
    units = (probability * UNITS).floor_()
    before = units.cumsum(-1, dtype=torch.float64) - units
    # rounded sums reach 1 too early
    top_p = torch.where(choice.top_p == 1, torch.inf, choice.top_p)[:, None]
    kept = (before < top_p * UNITS) & (probability >= choice.min_p[:, None] * probability[:, :1])
    kept &= ordered > -torch.inf
    last = kept.sum(-1, keepdim=True) - 1
    # of NaN nothing is kept
    least = ordered.gather(1, last.clamp(min=0))
    return logits.masked_fill(logits < least, -torch.inf)


# temperature of sampling above 0: for less, fp32 cannot hold logits divided by it
COLDEST = 1e-6
