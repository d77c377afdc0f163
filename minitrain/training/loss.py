"""Cross-entropy of a linear output head, without the logits of all tokens in memory.

With a vocabulary of 128k the logits of 8192 tokens are 4 GB in fp32, and autograd keeps several
copies. Here the head and the loss are one autograd function. It takes `CHUNK` tokens at a time and
computes their gradients in the forward pass, while their logits are in memory. So memory does not
grow with tokens x vocabulary, and the backward pass only scales. On CUDA the code between the
matrix products is always compiled. Eager, it would read and write a chunk's logits about ten times
in fp32, and take as long as one of the products.

Under tensor parallelism the head is split by vocabulary. Each rank computes the logits and
gradients of its shard, and the ranks exchange three numbers per token and shard: the maximum, the
sum of exponentials and the label's logit.

`linear_log_probs` returns each token's log-probability, for objectives that are other functions of
these. The gradient of each token is then unknown until the backward pass, which computes the logits
again.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from minitrain.models.onednn import matmul, multiplies

# the label of a token that is not predicted
IGNORE = -100
# tokens at a time: matrix products still run at full rate, and the logits of a chunk fit
CHUNK = 2048


class VocabShard(NamedTuple):
    """The rows of the head on this rank; by default, the whole vocabulary.

    first: token id of the first row.
    group: the ranks that share the vocabulary.
    """

    first: int = 0
    group: dist.ProcessGroup | None = None

    def gather(self, x: Tensor) -> Tensor:
        """Return the `x` of all shards as [shards, *x.shape]."""
        if self.group is None:
            return x[None]
        gathered = x.new_empty(self.group.size(), *x.shape)
        dist.all_gather(list(gathered.unbind()), x, group=self.group)
        return gathered


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over tokens of -log softmax(hidden @ weight^T)[label], an fp32 scalar.

    hidden: [..., dim].
    weight: [vocab, dim], or a DTensor split evenly by vocabulary, whose ranks all have the same
        hidden and labels. The gradient of `hidden` is then this rank's term of a sum over ranks.
    labels: int [...]; those that are IGNORE add nothing. Divide by the number of the others.
    """
    # [tokens, dim]
    hidden = hidden.flatten(0, -2)
    labels = labels.flatten()
    weight, shard = vocab_shard(weight)
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(hidden, weight, labels, shard)
    chunks = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
    loss_and_grad = fused(_loss_and_grad, weight)
    return sum(loss_and_grad(matmul(x, weight.T), y, shard)[0] for x, y in chunks)


_compiled = cache(torch.compile)


def fused(function: Callable, weight: Tensor) -> Callable:
    """Return `function`, compiled if the weight is on CUDA."""
    return _compiled(function) if weight.is_cuda else function


def vocab_shard(weight: Tensor) -> tuple[Tensor, VocabShard]:
    """Return this rank's rows [vocab / tp, dim] of a head's weight, and which they are."""
    if not isinstance(weight, DTensor):
        return weight, VocabShard()
    mesh = weight.device_mesh
    weight = weight.to_local()
    return weight, VocabShard(mesh.get_local_rank() * len(weight), mesh.get_group())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, shard):
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)

        def grad_of(logits: Tensor, chunk: slice) -> Tensor:
            chunk_loss, grad = fused(_loss_and_grad, weight)(logits, labels[chunk], shard)
            loss.add_(chunk_loss)
            return grad

        ctx.save_for_backward(*_gradients(hidden, weight, ctx.needs_input_grad, grad_of))
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = fused(_scaled, grad_hidden)(grad_hidden, grad_loss, grad_hidden.dtype)
        if grad_weight is not None:
            # torch's kernel for mixed types took 2.4 ms for a head on an H200 (1.3 TB/s)
            grad_weight = fused(_scaled, grad_weight)(grad_weight, grad_loss, ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply x by an fp32 scalar, and round only the product.

    The scalar rounded to bf16 would scale all gradients wrongly: 1 / 3 by 0.2 %.
    """
    # with one dimension the factor keeps its type; a scalar would be cast to x's
    return (x * factor.view(1)).to(dtype)


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    needed: tuple[bool, ...],
    grad_of: Callable[[Tensor, slice], Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of hidden and, in fp32, of weight; None for those not `needed`.

    grad_of(logits, chunk): returns d loss / d logits of a chunk [chunk, vocab]; it may overwrite
        the logits.
    """
    need_hidden, need_weight, *_ = needed
    grad_hidden = None
    grad_weight = None
    if need_hidden:
        grad_hidden = torch.empty_like(hidden)
    if need_weight:
        # the first chunk overwrites it, if there is one
        new = torch.empty if len(hidden) else torch.zeros
        grad_weight = new(weight.shape, dtype=torch.float32, device=weight.device)
    for start in range(0, len(hidden), CHUNK):
        chunk = slice(start, start + CHUNK)
        grad_logits = grad_of(matmul(hidden[chunk], weight.T), chunk)
        if need_hidden:
            matmul(grad_logits, weight, out=grad_hidden[chunk])
        if need_weight:
            _add_product(grad_weight, grad_logits.T, hidden[chunk], start > 0)
    return grad_hidden, grad_weight


def _loss_and_grad(logits: Tensor, labels: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Return the loss of a chunk, an fp32 scalar, and its gradient softmax(logits) - onehot(labels).

    logits: [tokens, vocab / tp]; overwritten if they are fp32. The gradient has their shape and
        type.
    """
    dtype = logits.dtype
    logits = logits.float()
    valid, mine, columns = _find(labels, shard, logits.shape[1])
    peak = logits.amax(-1, keepdim=True)
    target = logits.gather(1, columns)
    exponentials = logits.sub_(peak).exp_()
    total = exponentials.sum(-1, keepdim=True)
    # each [shards, tokens, 1]
    peaks, totals, targets = shard.gather(torch.stack([peak, total, target * mine])).unbind(1)
    highest = peaks.amax(0)
    total = (totals * (peaks - highest).exp()).sum(0)
    loss = ((total.log() + highest - targets.sum(0)) * valid).sum()
    scale = valid * (peak - highest).exp() / total
    at_labels = (target - peak).exp() * scale - mine.float()
    grad = exponentials.mul_(scale).to(dtype)
    return loss, grad.scatter_(1, columns, at_labels.to(dtype))


def _find(labels: Tensor, shard: VocabShard, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the labels among the columns of a shard; return three tensors [tokens, 1].

    valid: the label is not IGNORE. mine: it is among the `size` columns of this shard.
    columns: its column, or 0.
    """
    valid = (labels != IGNORE)[:, None]
    columns = labels[:, None] - shard.first
    mine = valid & (columns >= 0) & (columns < size)
    return valid, mine, columns * mine


def _add_product(total: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """Compute total += a @ b, or total = a @ b; total is fp32 also if a and b are bf16."""
    if a.dtype == total.dtype and not multiplies(a, b):
        total.addmm_(a, b, beta=int(add))
    elif total.is_cuda:
        # cuBLAS accumulates into the output: the product is not rounded to bf16 first
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=int(add), out=total)
    elif add:
        total += matmul(a, b)
    else:
        total.copy_(matmul(a, b))


# --- log-probabilities of each token


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
        chunks = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
        results = [log_probs_of(matmul(x, weight.T), y, temperature, shard) for x, y in chunks]
        log_probs, entropy, log_total = map(torch.cat, zip(*results, strict=True))
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
            norms = log_total[chunk, None]
            given = grad[chunk, None]
            return grad_of_chunk(logits, labels[chunk], ctx.temperature, ctx.shard, norms, given)

        grad_hidden, grad_weight = _gradients(hidden, weight, ctx.needs_input_grad, grad_of)
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
    valid, mine, columns = _find(labels, shard, logits.shape[1])
    scale = grad * valid / temperature
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
    valid, mine, columns = _find(labels, shard, logits.shape[1])
    peak = logits.amax(-1, keepdim=True)
    target = logits.gather(1, columns) * mine
    shifted = logits.sub_(peak)
    exponentials = shifted.exp()
    total = exponentials.sum(-1, keepdim=True)
    weighted = torch.linalg.vecdot(exponentials, shifted)[:, None]
    # each [shards, tokens, 1]
    gathered = shard.gather(torch.stack([peak, total, weighted, target]))
    peaks, totals, weighted, targets = gathered.unbind(1)
    highest = peaks.amax(0)
    d = peaks - highest
    total = (totals * d.exp()).sum(0)
    mean = ((weighted + totals * d) * d.exp()).sum(0) / total
    log_total = total.log() + highest
    log_prob = (targets.sum(0) - log_total) * valid
    entropy = (total.log() - mean) * valid
    return log_prob.squeeze(1), entropy.squeeze(1), log_total.squeeze(1)
