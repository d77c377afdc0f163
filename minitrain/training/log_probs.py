"""Log-probability and entropy of each token from a linear output head, in chunks as in loss.py.

For objectives that are other functions of these than a sum. The gradient of each token is unknown
until the backward pass, which therefore computes the logits again.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Module

from minitrain.models.cpu import matmul
from minitrain.models.router import replay_routing
from minitrain.training.loss import (
    VocabShard,
    find_labels,
    fused,
    head_gradients,
    split_chunks,
    vocab_shard,
)
from minitrain.training.mtp_loss import MTPLoss
from minitrain.training.packing import Batch


def label_log_probs(model: Module, batch: Batch, temperature: float = 1.0) -> Tensor:
    """Return the log-probabilities of a batch's labels, fp32 [micro, seq]: see `Trainer.outputs`."""

    def head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        # [micro, seq]
        log_probs, _ = linear_log_probs(hidden, weight, labels, temperature)
        return log_probs

    return run_with_head(model, batch, head)


def run_with_head(
    model: Module, batch: Batch, head: Callable[..., Tensor], mtp: MTPLoss | None = None
) -> Tensor:
    """Return head(hidden [micro, seq, hidden], weight [vocab, hidden], labels) for a batch.

    mtp: the loss of multi-token prediction, whose gradient is added.
    """
    # a pipeline's stage comes as a function without routers, and its batches have no routes
    if "routes" in batch:
        replay_routing(model, batch["routes"])
    inputs = {key: batch[key] for key in ("positions", "document_ids", "labels")}
    if mtp:
        inputs |= mtp.inputs(batch)
    return model(batch["tokens"], **inputs, head=head)


def linear_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log softmax(hidden @ weight^T / temperature)[label] and that distribution's entropy.

    Arguments, and the gradient of `hidden`, are as in `linear_cross_entropy`.
    Both results are fp32 and have the shape of labels; 0 where the label is IGNORE. Only the first
    is differentiable.
    """
    local, shard = vocab_shard(weight)
    log_probs, entropy = _LinearLogProbs.apply(
        hidden.flatten(0, -2), local, labels.flatten(), temperature, shard
    )
    return log_probs.view(labels.shape), entropy.view(labels.shape)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature, shard):
        log_probs_of = fused(_log_prob_entropy_norm, weight)
        chunks = split_chunks(hidden, labels)
        results = [log_probs_of(matmul(x, weight.T), y, temperature, shard) for x, y in chunks]
        log_probs, entropy, log_total = map(torch.cat, zip(*results, strict=True))
        # log_total, fp32 [tokens], saves the backward pass a reduction over the vocabulary
        ctx.save_for_backward(hidden, weight, labels, log_total)
        ctx.temperature = temperature
        ctx.shard = shard
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, labels, log_total = ctx.saved_tensors
        grad_of_chunk = fused(_log_prob_grad, weight)

        def grad_of(logits: Tensor, chunk: slice) -> Tensor:
            # logits, and what is returned: [tokens of the chunk, vocab / tp]
            norms = log_total[chunk, None]
            given = grad[chunk, None]
            return grad_of_chunk(logits, labels[chunk], ctx.temperature, ctx.shard, norms, given)

        grad_hidden, grad_weight = head_gradients(hidden, weight, ctx.needs_input_grad, grad_of)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def _log_prob_grad(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    shard: VocabShard,
    log_total: Tensor,
    grad: Tensor,
) -> Tensor:
    """Return the gradient of a chunk's logits, from `grad`, that of the labels' log-probabilities.

    logits: [tokens, vocab / tp]; overwritten if they are fp32. The result has their shape and type.
    log_total: the log of the sum of exponentials, fp32 [tokens, 1].
    grad: fp32 [tokens, 1].
    """
    dtype = logits.dtype
    logits = logits.float().div_(temperature)
    valid, mine, columns = find_labels(labels, shard, logits.shape[1])
    scale = grad * valid / temperature
    # a label's own gradient, 1 - p, is computed in fp32: in bf16, p near 1 would leave nothing
    at_labels = scale * (mine.float() - (logits.gather(1, columns) - log_total).exp())
    grad = logits.sub_(log_total).exp_().mul_(-scale).to(dtype)
    return grad.scatter_(1, columns, at_labels.to(dtype))


def _log_prob_entropy_norm(
    logits: Tensor, labels: Tensor, temperature: float, shard: VocabShard
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the label's log-probability, the entropy and log sum exp, each fp32 [tokens].

    logits: [tokens, vocab / tp]; overwritten if they are fp32.

    With shifted logits s = logit - max and their sum of exponentials T, the entropy is
    log T - sum(s e^s) / T. A shard has them shifted by its own maximum, with T' and
    M' = sum(s' e^s'). It adds T' e^d to T and (M' + T' d) e^d to the sum, where d is its maximum
    minus that of all shards.
    """
    logits = logits.float().div_(temperature)
    valid, mine, columns = find_labels(labels, shard, logits.shape[1])
    # [tokens, 1], as target, total and weighted
    peak = logits.amax(-1, keepdim=True)
    target = logits.gather(1, columns) * mine
    shifted = logits.sub_(peak)
    exponentials = shifted.exp()
    total = exponentials.sum(-1, keepdim=True)
    weighted = torch.linalg.vecdot(exponentials, shifted)[:, None]
    # each [shards, tokens, 1]
    gathered = shard.gather(torch.stack([peak, total, weighted, target]))
    peaks, totals, weighted, targets = gathered.unbind(1)
    # d is [shards, tokens, 1] as in the docstring; sums over the shards are [tokens, 1] again
    highest = peaks.amax(0)
    d = peaks - highest
    total = (totals * d.exp()).sum(0)
    mean = ((weighted + totals * d) * d.exp()).sum(0) / total
    log_total = total.log() + highest
    log_prob = (targets.sum(0) - log_total) * valid
    entropy = (total.log() - mean) * valid
    return log_prob.squeeze(1), entropy.squeeze(1), log_total.squeeze(1)
