"""Sampling: from logits to tokens, each drawn independently of the rest of the batch.

A token is drawn by the Gumbel-max trick: argmax(logits / temperature + g) is a sample of
softmax(logits / temperature) if the g are independent -log(-log(u)). Here u is a hash of (seed,
request, sample, position, vocabulary id), not the state of a generator. So a request draws the same
tokens alone or in a batch, preempted or not, in any order. With a vocabulary split over ranks, each rank
makes the noise of its own shard, and ranks exchange only their best candidates and a sum.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import get_origin

import numpy as np
import torch
from torch import Tensor
from torch.compiler import config

from minitrain.errors import InputError
from minitrain.hashing import mix_, mix_int
from minitrain.models.flex import COMPILING
from minitrain.training.loss import VocabShard

# random numbers made at once on the CPU, which fit its caches
NOISE_CHUNK = 1 << 17
# fixed-point units of a probability of 1, for top_p
FIXED_POINT = 2.0**40
# the lowest temperature above 0: below, fp32 cannot hold logits divided by it
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """Settings of how to continue a prompt.

    temperature: divides the logits. 0: the likeliest token, with its log-probability at
    temperature 1.
    top_k: keep the k likeliest tokens (0: all).
    top_p: of these, keep the fewest that hold a share top_p of the probability.
    min_p: of these, keep the ones at least min_p times as likely as the likeliest.
    max_tokens: most new tokens. n: samples per prompt.
    stop_tokens: ids that end a sample, besides the model's own; such a token is its last.
    stop: strings that end a sample, if the sampler has a tokenizer. They may hold special tokens;
    the tokens that wrote one stay.
    seed: with the request's number, the source of all randomness.
    ignore_eos: continue after the tokens at which the model ends a text.
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
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < float("inf")):
            raise InputError(
                f"sampling temperature={self.temperature} must be 0, or at least {MIN_TEMPERATURE}"
            )
        if not 0 <= self.top_k < 1 << 31:
            raise InputError(
                f"sampling top_k={self.top_k} must be at least 0, and below {1 << 31}"
            )
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


def with_settings(params: SamplingParams, settings: dict) -> SamplingParams:
    """Return params with the fields that `settings` names. Raises InputError for a wrong one."""
    known = [field.name for field in dataclasses.fields(SamplingParams)]
    for name in settings:
        if name not in known:
            raise InputError(f"sampling has no setting {name!r} (it has {', '.join(known)})")
    return dataclasses.replace(params, **settings)


def check_type(name: str, value: object, wanted: type) -> None:
    """Raise InputError if a setting has the wrong type. Integers count as numbers."""
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

    tokens: those after the prompt.
    logprobs: each token's log-probability under the distribution it was drawn from.
    finish_reason: "stop" (a stop token or string), "length" (max_tokens or the model's positions)
    or "cancelled".
    routes: the experts of prompt and tokens but the last, int16 [tokens - 1, layers x top_k], if the
        sampler records them.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    routes: np.ndarray | None = None


# --- noise


def sample_key(seed: int, number: int, sample: int) -> int:
    """Return the int32 key of a sample's noise: a hash of seed, request number and sample number."""
    key = 0
    for part in (seed, seed >> 32, number, sample):
        key = mix_int(key ^ (part & 0xFFFFFFFF)) + 0x9E3779B9 & 0xFFFFFFFF
    # as int32
    return key - (1 << 32) if key >> 31 else key


def token_keys(keys: Tensor, positions: Tensor) -> Tensor:
    """Hash samples' keys, int32 [rows], with tokens' positions, int64 [rows], to int32 [rows]."""
    return mix_(keys ^ mix_(positions.to(torch.int32)))


@cache
def _hashed_ids(first: int, size: int, device: torch.device) -> Tensor:
    # int32 [size], the same for all rows and steps
    return mix_(torch.arange(first, first + size, dtype=torch.int32, device=device))


def exponential_noise(keys: Tensor, first: int, size: int) -> Tensor:
    """Return exponential random numbers, fp32 [rows, size], for the ids from `first` on.

    keys: [rows], from `token_keys`. The argmax of probabilities / noise is a sample of the
    probabilities: the Gumbel-max trick with one logarithm less. All numbers are finite and above
    0, so a token with all the probability always wins.
    """
    # the compiler warns of caches
    ids = _hashed_ids.__wrapped__ if torch.compiler.is_compiling() else _hashed_ids
    bits = mix_(keys[:, None] ^ ids(first, size, keys.device)).bitwise_and_(0x7FFFFFFF)
    # the clamp keeps the 64 largest above -1, to which fp32 would round them
    uniform = bits.float().add_(0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1)
    # log1p is exact for small numbers, which win
    return uniform.log1p_().neg_()


def divide_by_noise(weights: Tensor, keys: Tensor, first: int, chunk: int | None) -> Tensor:
    """Divide weights [rows, vocab] by noise in place, at most `chunk` numbers at a time."""
    width = max(1, chunk // len(weights)) if chunk else weights.shape[1]
    for start in range(0, weights.shape[1], width):
        part = weights[:, start : start + width]
        part.div_(exponential_noise(keys, first + start, part.shape[1]))
    return weights


# --- sampling


@dataclass
class SamplingState:
    """The sampling parameters of a batch; each tensor is [rows], or [tokens].

    greedy, noisy, filtered: whether any row has temperature 0, any a temperature above 0, and any
    top_k, top_p or min_p.
    """

    keys: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    greedy: bool = True
    noisy: bool = True
    filtered: bool = True

    def of_rows(self, width: int) -> "SamplingState":
        """Return views of those of each row, of the parameters of its `width` tokens."""
        names = ("keys", "top_k", "temperature", "top_p", "min_p")
        return dataclasses.replace(self, **{name: getattr(self, name)[::width] for name in names})


def sample_tokens(
    logits: Tensor, state: SamplingState, positions: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """Sample a token for each row, int64 [rows], with its log-probability, fp32 [rows].

    logits: [rows, vocab], or this rank's `shard` of the vocabulary. Ranks then exchange five
    numbers per row, and gather all logits only for top_k, top_p or min_p.
    positions: int64 [rows], of the new tokens.
    """
    if state.filtered and shard.group is not None:
        logits = shard.gather(logits).transpose(0, 1).flatten(1)
        shard = VocabShard()
    eager_cpu = logits.device.type == "cpu" and not torch.compiler.is_compiling()
    logits = logits.float()
    # [rows, 1]
    temperature = state.temperature[:, None]
    if state.greedy:
        greedy = temperature == 0
        temperature = torch.where(greedy, 1, temperature)
    if state.filtered:
        logits = filter_logits(logits / temperature, state)
        temperature = 1.0
    # [rows, 1]
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak).div_(temperature).exp_()
    total = weights.sum(-1, keepdim=True)
    peak = peak / temperature
    if state.noisy:
        keys = token_keys(state.keys, positions)
        weights = divide_by_noise(weights, keys, shard.first, NOISE_CHUNK if eager_cpu else None)
        best = argmax(weights, eager_cpu)
    if state.greedy:
        likeliest = argmax(logits, eager_cpu)
        best = torch.where(greedy, likeliest, best) if state.noisy else likeliest
    logit = logits.gather(1, best) / temperature
    if shard.group is None:
        logprob = logit - (total.log() + peak)
        return best[:, 0], logprob[:, 0]
    # what the ranks' candidates are compared by
    score = weights.gather(1, best).log() + peak
    if state.greedy:
        score = torch.where(greedy, peak, score)
    mine = torch.cat([score, logit, peak, total, best + shard.first], dim=1)
    return _best_of_shards(mine, shard)


@cache
def compiled_sample_tokens() -> Callable:
    """Return `sample_tokens` compiled: a few kernels instead of about 40."""
    return config.patch(recompile_limit=COMPILING["recompile_limit"])(
        torch.compile(sample_tokens)
    )


def argmax(x: Tensor, in_blocks: bool) -> Tensor:
    """Return x.argmax(-1, keepdim=True), int64 [rows, 1], of x [rows, vocab].

    in_blocks: find the block of 64 first; on the CPU argmax is slow and amax is not.
    """
    block = 64
    if not in_blocks or x.shape[1] % block:
        return x.argmax(-1, keepdim=True)
    # [rows, blocks, 64]
    blocks = x.unflatten(1, (-1, block))
    first = blocks.amax(-1).argmax(-1)
    inside = blocks[torch.arange(len(x)), first].argmax(-1)
    return (first * block + inside)[:, None]


def _best_of_shards(mine: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Combine the vocabulary shards' candidates into tokens and log-probabilities, both [rows].

    mine: [rows, 5], this shard's best score, that token's logit, the largest logit, the sum of
    exponentials, and the token.
    """
    # each [shards, rows]
    score, logit, peak, total, token = shard.gather(mine).unbind(-1)
    highest = peak.amax(0)
    log_sum = (total * (peak - highest).exp()).sum(0).log() + highest
    winner = score.argmax(0, keepdim=True)
    tokens = token.gather(0, winner)[0].long()
    return tokens, logit.gather(0, winner)[0] - log_sum


def filter_logits(logits: Tensor, state: SamplingState) -> Tensor:
    """Set to -inf the logits [rows, vocab] that top_k, then top_p, then min_p exclude.

    Equally likely tokens are all kept or all excluded.
    """
    ordered = logits.sort(-1, descending=True).values
    rank = torch.arange(logits.shape[1], device=logits.device)
    top_k = torch.where(state.top_k == 0, logits.shape[1], state.top_k)[:, None]
    ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    probability = ordered.softmax(-1)
    # whole numbers, whose sums fp64 holds exactly: CUDA adds in no fixed order, but ranks must keep
    # the same tokens
    units = (probability * FIXED_POINT).floor_()
    before = units.cumsum(-1, dtype=torch.float64) - units
    # rounded sums reach 1 too early
    top_p = torch.where(state.top_p == 1, torch.inf, state.top_p)[:, None]
    kept = (before < top_p * FIXED_POINT) & (
        probability >= state.min_p[:, None] * probability[:, :1]
    )
    kept &= ordered > -torch.inf
    # clamped, since of NaN nothing is kept
    last = (kept.sum(-1, keepdim=True) - 1).clamp(min=0)
    return logits.masked_fill(logits < ordered.gather(1, last), -torch.inf)
