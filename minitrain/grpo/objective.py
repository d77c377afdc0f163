"""The policy-gradient losses of GRPO and its relatives, as one objective with independent choices.

Every response token has a log-probability under four policies:

    sampled     the sampler that drew it
    old         the trainer's weights when the step began
    log_probs   the weights now
    reference   a reference model

The loss of a token, whose sequence has the advantage A (grpo/advantages.py), is

    w * (surrogate(r, A) + kl * estimator(log_probs, reference))

    r   exp(log_probs - old), the probability ratio of PPO. With ratio=sequence it is the geometric
        mean over the sequence, the same for all of its tokens
    w   exp(old - sampled), the importance weight, truncated or masked (`importance`): the sampler's
        kernels, precision or weights may differ from the trainer's. A constant in the gradient

On-policy distillation (Agarwal et al. 2023; Thinking Machines 2025) learns from a teacher in place
of rewards: a token's A is log p(teacher) - old. Its mean over samples of the policy is
-KL(policy || teacher), per token, and the policy gradient with it lowers that divergence.

The loss of a step is the weighted sum over all response tokens, on all ranks and in all
micro-batches, divided once:

    aggregation   weight of a token            divided by
    token         1                            number of tokens: long sequences count more
    sequence      1 / tokens of its sequence   number of sequences: tokens of long sequences count less
    constant      1                            number of sequences x longest possible response: neither

Published methods are points in this space (G: samples of a prompt, R: reward):

    method                               settings
    NeMo RL's GRPO, the defaults here    baseline=leave_one_out std_scaling=true aggregation=token clip_low=0.2
                                         clip_high=0.2
    GRPO (Shao et al. 2024)              baseline=group std_scaling=true aggregation=sequence clip_low=0.2 clip_high=0.2
                                         kl=0.04
    Dr. GRPO (Liu et al. 2025)           baseline=group std_scaling=false aggregation=constant
    RLOO (Ahmadian et al. 2024)          baseline=leave_one_out std_scaling=false surrogate=reinforce
    DAPO (Yu et al. 2025)                baseline=group std_scaling=true aggregation=token clip_low=0.2 clip_high=0.28
                                         generations=10 overlong_buffer=4096 (or
                                         overlong_filter=true)
    GSPO (Zheng et al. 2025)             baseline=group std_scaling=true ratio=sequence aggregation=sequence
                                         clip_low=3e-4 clip_high=4e-4
    CISPO (MiniMax 2025)                 baseline=group std_scaling=true surrogate=cispo clip_low=1 clip_high=4
                                         aggregation=token
    dual clip (Ye et al. 2020)           dual_clip=3
    truncated importance sampling        importance=truncate importance_high=2
    IcePop (Ling team 2025)              importance=mask importance_low=0.5 importance_high=5

In NeMo RL leave_one_out also leaves the sample out of the standard deviation; here that is always
the whole group's. Its recipes add kl=0.01. Left out: an entropy bonus, value networks, rewards per
token.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module

from minitrain.settings import GRPO
from minitrain.training.log_probs import linear_log_probs, run_with_head
from minitrain.training.loss import IGNORE
from minitrain.training.mtp_loss import MTPLoss
from minitrain.training.packing import Batch

# log-ratios are clamped to +- this before exp, which would overflow
LOG_RATIO_LIMIT = 20.0


# --- the formulas


def bounded(log_ratio: Tensor) -> Tensor:
    # [rows, seq]
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k3(gap: Tensor) -> Tensor:
    """Return e^g - 1 - g, in gap's shape [rows, seq], see `kl_estimate`."""
    return gap.expm1() - gap


def surrogate(
    settings: GRPO, log_probs: Tensor, log_ratio: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each token's surrogate loss, and where a limit changes it, bool; all [rows, seq].

    log_ratio: log r.

    clip: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), PPO's pessimistic bound (Schulman et
        al. 2017): moving beyond the limits gains nothing. With dual_clip=c it is at most -c A where
        A < 0, so that no token whose r is huge outweighs all others.
    cispo: -clip(r) A log_probs, with clip(r) a constant: every token keeps its gradient, and only
        its weight is limited.
    reinforce: -A log_probs, the policy gradient itself, right for samples of the current policy.
    """
    if settings.surrogate == "reinforce":
        return -advantages * log_probs, torch.zeros_like(advantages, dtype=torch.bool)
    ratio = bounded(log_ratio).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    # where nothing is clipped, both have the gradient -r A of log_probs
    if settings.surrogate == "cispo":
        loss = -clipped.detach() * advantages * log_probs
        return loss, (clipped != ratio) & (advantages != 0)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if settings.dual_clip is not None:
        most = -settings.dual_clip * advantages
        loss = torch.where(advantages < 0, torch.minimum(loss, most), loss)
    return loss, loss != -ratio * advantages


def kl_estimate(kind: str, log_probs: Tensor, reference: Tensor, old: Tensor) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token, with the right expected gradient.

    All tensors are [rows, seq]. With g = reference - log_probs (Schulman 2020, "Approximating KL
    divergence"):

        k1   -g             unbiased
        k2   g^2 / 2        of low variance
        k3   e^g - 1 - g    unbiased, never negative, of low variance

    The gradient of an estimate is not yet an estimate of the gradient: the distribution that tokens
    are drawn from moves too. Therefore k1 and k3 are multiplied by r = exp(log_probs - old): it is
    about 1, and its gradient is the missing part. k2's own gradient, -g times that of log_probs, is
    right, so there r is a constant.
    """
    # [rows, seq], as all that follows
    gap = bounded(reference - log_probs)
    ratio = bounded(log_probs - old).exp()
    if kind == "k1":
        return -gap * ratio
    return gap.square() / 2 * ratio.detach() if kind == "k2" else k3(gap) * ratio


def importance_weights(
    settings: GRPO, old: Tensor, sampled: Tensor, mean: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return w = exp(old - sampled), a constant factor of each token's loss. All are [rows, seq].

    none: 1. truncate: clamped between low and high (truncated importance sampling). mask: 0 outside
    of these bounds (IcePop). sequence-mask: 0 in sequences whose geometric mean is outside.
    mean(x): returns at each token the mean of x over its sequence, see `sequence_mean`.
    """
    if settings.importance == "none":
        return torch.ones_like(old)
    low = settings.importance_low
    high = settings.importance_high
    log_weight = old - sampled
    weight = bounded(log_weight).exp()
    if settings.importance == "truncate":
        return weight.clamp(low, high)
    # the weight that the bounds apply to: the token's own, or its sequence's
    judged = weight if settings.importance == "mask" else mean(log_weight).exp()
    return weight * ((judged >= low) & (judged <= high))


def sequence_mean(x: Tensor, valid: Tensor, document_ids: Tensor) -> Tensor:
    """Return at every token the mean of x over its sequence's valid tokens; all [rows, seq].

    document_ids: the number of a token's sequence in its row, or negative for padding, never valid.
    """
    # padding adds its zeros to sequence 0
    document_ids = document_ids.clamp(min=0)
    # [rows, seq]: column n is for sequence n, of which there are at most as many as tokens
    sums = torch.zeros_like(x).scatter_add(1, document_ids, x * valid)
    counts = torch.zeros_like(x).scatter_add(1, document_ids, valid.to(x.dtype)).clamp(min=1)
    return (sums / counts).gather(1, document_ids)


# --- the objective


class PolicyGradient:
    """The loss above, for micro-batches as grpo/batches.py makes them; every field is [rows, seq].

    tokens, positions, document_ids: packed sequences.
    labels: the next token where that is part of a response, or IGNORE.
    advantages: the advantage of the label's sequence.
    sampled, old, reference, teacher: the label's log-probability under these policies, the last
        three where they are needed. Without `old` the log-probabilities of this pass stand for it: r is
        1, with a gradient.
    weights: of the label in the sum. starts: 1 at a sequence's first label.

    temperature: that of the sampler. longest: tokens of the longest possible response.
    mtp: the loss of multi-token prediction, if that is trained along, on the responses.
    """

    # run/config/checks.py refuses cp with terms of whole sequences
    layouts = ("cp", "pp")

    def __init__(
        self, settings: GRPO, temperature: float, longest: int, mtp: MTPLoss | None = None
    ):
        self.settings = settings
        self.mtp = mtp
        self.temperature = temperature
        self.longest = longest
        self.totals: dict[str, Tensor] = {}

    def count(self, batch: Batch) -> int:
        """Return what the sum of losses is divided by, of a batch [micro, seq]."""
        if self.settings.aggregation == "token":
            return int((batch["labels"] != IGNORE).sum())
        each = self.longest if self.settings.aggregation == "constant" else 1
        return int(batch["starts"].sum()) * each

    def loss(self, model: Module, batch: Batch) -> Tensor:
        """Return the weighted sum of token losses of a batch [micro, seq], a scalar."""
        return run_with_head(model, batch, partial(self.head, batch), self.mtp)

    def head(self, batch: Batch, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted sum of token losses, a scalar. The model calls this as its head.

        hidden: [micro, seq, hidden]; weight: [vocab, hidden]; labels: [micro, seq].
        """
        # both [micro, seq]
        log_probs, entropy = linear_log_probs(hidden, weight, labels, self.temperature)
        losses, terms = token_losses(self.settings, log_probs, batch)
        self.add({"entropy": entropy} | terms, labels != IGNORE)
        return (losses * batch["weights"]).sum()

    @torch.no_grad()
    def add(self, terms: dict[str, Tensor], valid: Tensor) -> None:
        """Add a micro-batch's terms, each [micro, seq], to the sums of which `metrics` takes means."""
        terms = terms | {"tokens": valid.float()}
        for name, value in terms.items():
            self.totals[name] = self.totals.get(name, 0) + (value * valid).sum()

    def sums(self) -> Tensor:
        """Return the step's sums, one for each of NAMES, and those of multi-token prediction."""
        # only a pipeline's last stage has sums; the others take part with zeros
        device = next((value.device for value in self.totals.values()), None)
        values = [torch.as_tensor(self.totals.get(name, 0.0), device=device) for name in NAMES]
        self.totals = {}
        sums = torch.stack(values)
        return torch.cat([sums, self.mtp.take_sums(training=True)]) if self.mtp else sums

    def metrics(self, sums: list[float]) -> dict[str, float]:
        """Return the means of entropy and of `token_losses`'s terms over the step's response tokens.

        They are NaN if there is no token.
        """
        count = len(NAMES)
        tokens, *totals = sums[:count]
        means = {
            name: total / tokens if tokens else math.nan
            for name, total in zip(NAMES[1:], totals, strict=True)
        }
        mtp = self.mtp.metrics(sums[count:], training=True) if self.mtp else {}
        return means | mtp


TERMS = (
    "clip_fraction",
    "kl",
    "importance",
    "masked",
    "token_mult_prob_error",
    "generation_kl_error",
)
# of a step's sums: the number of response tokens, and what is averaged over them
NAMES = ("tokens", "entropy", *TERMS)


def token_losses(
    settings: GRPO, log_probs: Tensor, batch: Batch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return each token's loss, 0 without a label, and terms to log; all [rows, seq].

    clip_fraction: 1 where a limit of the surrogate changes a token's loss or its weight.
    kl: k3 to the reference, without one to the teacher, or to the weights that the step began with.
    importance: w. masked: 1 where w is 0.
    Two terms show how far sampler and trainer differ; they are 1 and 0 if they agree:
    token_mult_prob_error: exp |sampled - old|. generation_kl_error: k3 of KL(sampler || trainer).
    """
    valid = batch["labels"] != IGNORE
    # one value a token, [rows, seq], in all that follows
    sampled = batch["sampled"]
    advantages = batch["advantages"]
    # without `old` this is the step's only update, and the weights are still the old ones
    old = batch.get("old", log_probs.detach())
    reference = batch.get("reference", old)
    if "teacher" in batch:
        advantages = batch["teacher"] - old
        reference = batch.get("reference", batch["teacher"])
    mean = partial(sequence_mean, valid=valid, document_ids=batch["document_ids"])
    log_ratio = log_probs - old
    if settings.ratio == "sequence":
        log_ratio = mean(log_ratio)
    losses, clipped = surrogate(settings, log_probs, log_ratio, advantages)
    if settings.kl:
        losses = losses + settings.kl * kl_estimate(
            settings.kl_estimator, log_probs, reference, old
        )
    weight = importance_weights(settings, old, sampled, mean)
    # numbers for the log
    with torch.no_grad():
        gap = bounded(old - sampled)
        kl = k3(bounded(reference - log_probs))
        terms = clipped, kl, weight, weight == 0, gap.abs().exp(), k3(gap)
    return losses * weight * valid, dict(zip(TERMS, terms, strict=True))
