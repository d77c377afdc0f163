"""Cross-entropy of a linear output head, without ever holding the logits of all tokens.

For a 128k vocabulary the logits of 8192 tokens are 4 GB in fp32, and autograd would keep several
copies. Here the head and the loss are one autograd function that takes `CHUNK` tokens at a time and
computes their gradients right away, while their logits are at hand: memory no longer grows with
tokens x vocabulary, and backward only scales. On CUDA what lies between the matrix products is
compiled, also where the model is not: else it would read and write a chunk's logits about ten
times, in fp32, and take as long as one of the products.

Where tensor parallelism splits the head by vocabulary, each rank computes the logits and gradients
of its own part, and the ranks tell each other three numbers per token: the peak, the sum of
exponentials and the label's logit of each part.

`linear_log_probs` gives each token's log-probability instead of their sum, for objectives that are
other functions of them. How much a token matters is then not known before the backward pass, which
computes the logits again.
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


class Part(NamedTuple):
    """Which part of the vocabulary this process has; by default, all of it."""

    first: int = 0
    group: dist.ProcessGroup | None = None  # who has the others

    def gather(self, x: Tensor) -> Tensor:
        """All parts' `x`, stacked along a new first dimension."""
        if self.group is None:
            return x[None]
        parts = x.new_empty(self.group.size(), *x.shape)
        dist.all_gather(list(parts.unbind()), x, group=self.group)
        return parts


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight^T)[label], in fp32; tokens labelled IGNORE
    count nothing.

    hidden: [..., dim]; weight: [vocab, dim], whole or a DTensor split evenly by vocabulary, whose
    ranks all have the same hidden and labels; labels: int [...]. Returns a scalar: divide by the
    number of valid labels. With a split weight, the gradient of `hidden` is this rank's term of a
    sum over ranks.
    """
    hidden = hidden.flatten(0, -2)
    labels = labels.flatten()
    weight, part = local_part(weight)
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(hidden, weight, labels, part)
    chunks = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
    return sum(fused(_loss_and_grad, weight)(matmul(x, weight.T), y, part)[0] for x, y in chunks)


_compiled = cache(torch.compile)


def fused(function: Callable, weight: Tensor) -> Callable:
    """`function`, as a kernel or two where the weight is on CUDA."""
    return _compiled(function) if weight.is_cuda else function


def local_part(weight: Tensor) -> tuple[Tensor, Part]:
    """This process's rows of a head's weight, and which part of the vocabulary they are."""
    if not isinstance(weight, DTensor):
        return weight, Part()
    mesh = weight.device_mesh
    weight = weight.to_local()
    return weight, Part(mesh.get_local_rank() * len(weight), mesh.get_group())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, part):
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)

        def grad_of(logits: Tensor, chunk: slice) -> Tensor:
            chunk_loss, grad = fused(_loss_and_grad, weight)(logits, labels[chunk], part)
            loss.add_(chunk_loss)
            return grad

        ctx.save_for_backward(*_gradients(hidden, weight, ctx.needs_input_grad, grad_of))
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = _scaled(grad_hidden, grad_loss, grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = _scaled(grad_weight, grad_loss, ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply x by an fp32 scalar in one pass. Only the product is rounded: 1 / 3 in bf16 is 0.2 %
    off.
    """
    # torch's own kernel for two types took 2.4 ms of a head's gradient on an H200, at 1.3 TB/s
    if x.is_cuda:
        return _compiled(_product)(x, factor, dtype)
    # a scalar would take x's type first
    return torch.mul(x, factor.view(1), out=x.new_empty(x.shape, dtype=dtype))


def _product(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() * factor).to(dtype)


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    needed: tuple[bool, ...],
    grad_of: Callable[[Tensor, slice], Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden and, in fp32, of weight, as far as they are needed: those that give a
    chunk's logits the gradient grad_of(logits, chunk). The logits are computed here and may be
    overwritten."""
    need_hidden, need_weight, *_ = needed
    grad_hidden = torch.empty_like(hidden) if need_hidden else None
    # the first product overwrites it, if there is one
    new = torch.empty if len(hidden) else torch.zeros
    grad_weight = (
        new(weight.shape, dtype=torch.float32, device=weight.device) if need_weight else None
    )
    for start in range(0, len(hidden), CHUNK):
        chunk = slice(start, start + CHUNK)
        grad_logits = grad_of(matmul(hidden[chunk], weight.T), chunk)
        if need_hidden:
            matmul(grad_logits, weight, out=grad_hidden[chunk])
        if need_weight:
            _add_product(grad_weight, grad_logits.T, hidden[chunk], start > 0)
    return grad_hidden, grad_weight


def _loss_and_grad(logits: Tensor, labels: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """Of a chunk of logits [tokens, part], which are overwritten in fp32: the sum of its tokens'
    losses, in fp32, and its gradient softmax(logits) - onehot(labels), in the logits' type."""
    dtype = logits.dtype
    logits = logits.float()
    valid, mine, columns = _find(labels, part, logits.shape[1])
    peak = logits.amax(-1, keepdim=True)
    target = logits.gather(1, columns)
    exponentials = logits.sub_(peak).exp_()
    total = exponentials.sum(-1, keepdim=True)
    peaks, totals, targets = part.gather(torch.stack([peak, total, target * mine])).unbind(1)
    highest = peaks.amax(0)
    total = (totals * (peaks - highest).exp()).sum(0)
    loss = ((total.log() + highest - targets.sum(0)) * valid).sum()
    scale = valid * (peak - highest).exp() / total
    at_labels = (target - peak).exp() * scale - mine.float()
    grad = exponentials.mul_(scale).to(dtype)
    return loss, grad.scatter_(1, columns, at_labels.to(dtype))


def _find(labels: Tensor, part: Part, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which labels count, which are among this part's `size` columns, and in which (else 0); each
    [tokens, 1].
    """
    valid = (labels != IGNORE)[:, None]
    columns = labels[:, None] - part.first
    mine = valid & (columns >= 0) & (columns < size)
    return valid, mine, columns * mine


def _add_product(total: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """total += a @ b, or total = a @ b, with total in fp32 also where a and b are bf16."""
    if a.dtype == total.dtype and not multiplies(a, b):
        total.addmm_(a, b, beta=int(add))
    elif total.is_cuda:
        # its kernel adds: the product is not rounded, nor written and read again
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=int(add), out=total)
    elif add:
        total += matmul(a, b)
    else:
        total.copy_(matmul(a, b))


# ------------------------------------------------------------------------------------------------------- every token's


def linear_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight^T / temperature)[label], and that distribution's entropy; 0 where
    label is IGNORE.

    Arguments as in `linear_cross_entropy`, with the same rule for the gradient of `hidden` where
    the weight is split. Returns two fp32 tensors of labels' shape; only the first can be
    differentiated.
    """
    local, part = local_part(weight)
    log_probs, entropy = _LinearLogProbs.apply(
        hidden.flatten(0, -2), local, labels.flatten(), temperature, part
    )
    return log_probs.view(labels.shape), entropy.view(labels.shape)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature, part):
        chunks = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
        results = [
            fused(_log_prob_entropy_norm, weight)(matmul(x, weight.T), y, temperature, part)
            for x, y in chunks
        ]
        log_probs, entropy, log_total = map(torch.cat, zip(*results, strict=True))
        ctx.save_for_backward(hidden, weight, labels, log_total)
        ctx.temperature = temperature
        ctx.part = part
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, labels, log_total = ctx.saved_tensors

        def grad_of(logits: Tensor, chunk: slice) -> Tensor:
            return fused(_log_prob_grad, weight)(
                logits,
                labels[chunk],
                ctx.temperature,
                ctx.part,
                log_total[chunk, None],
                grad[chunk, None],
            )

        grad_hidden, grad_weight = _gradients(hidden, weight, ctx.needs_input_grad, grad_of)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
            None,
        )


def _log_prob_grad(
    logits: Tensor, labels: Tensor, temperature: float, part: Part, log_total: Tensor, grad: Tensor
) -> Tensor:
    """Of a chunk of logits [tokens, part], which are overwritten in fp32: its gradient, in the
    logits' type, from that of the labels' log-probabilities. log_total, grad: fp32 [tokens, 1]."""
    dtype = logits.dtype
    logits = logits.float().div_(temperature)
    valid, mine, columns = _find(labels, part, logits.shape[1])
    scale = grad * valid / temperature
    at_labels = scale * (mine.float() - (logits.gather(1, columns) - log_total).exp())
    grad = logits.sub_(log_total).exp_().mul_(-scale).to(dtype)
    return grad.scatter_(1, columns, at_labels.to(dtype))


def _log_prob_entropy_norm(
    logits: Tensor, labels: Tensor, temperature: float, part: Part
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a chunk of logits [tokens, part], which are overwritten in fp32: the label's
    log-probability, the entropy, the log of the sum of exponentials; each [tokens].

    With shifted logits s = logit - highest and their sum of exponentials T, the entropy is log T -
    sum(s e^s) / T. A part that has them shifted by its own peak, with T' and M' = sum(s' e^s'),
    adds T' e^d to T and (M' + T' d) e^d to the sum, where d = peak - highest.
    """
    logits = logits.float().div_(temperature)
    valid, mine, columns = _find(labels, part, logits.shape[1])
    peak = logits.amax(-1, keepdim=True)
    target = logits.gather(1, columns) * mine
    shifted = logits.sub_(peak)
    exponentials = shifted.exp()
    total = exponentials.sum(-1, keepdim=True)
    weighted = torch.linalg.vecdot(exponentials, shifted)[:, None]
    peaks, totals, weighted, targets = part.gather(
        torch.stack([peak, total, weighted, target])
    ).unbind(1)
    highest = peaks.amax(0)
    d = peaks - highest
    total = (totals * d.exp()).sum(0)
    mean = ((weighted + totals * d) * d.exp()).sum(0) / total
    log_total = total.log() + highest
    results = (targets.sum(0) - log_total) * valid, (total.log() - mean) * valid, log_total
    return tuple(result.squeeze(1) for result in results)
