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

Other losses of a token's logits are chunked alike (`chunked_loss`; distillation.py has some).
Objectives that are other functions of each token's log-probability use log_probs.py.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from minitrain.models.cpu import add_matmul, matmul
from minitrain.parallel.collectives import gather_ranks

# the label of a token that is not predicted
IGNORE = -100
# tokens at a time: matrix products still run at full rate, and the logits of a chunk fit
CHUNK = 2048
# from the logits of a chunk of tokens, and which these are: see `chunked_loss`
LossOfChunk = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


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
        return gather_ranks(x, self.group)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, losses: Tensor | None = None
) -> Tensor:
    """Return the sum over tokens of -log softmax(hidden @ weight^T)[label], an fp32 scalar.

    hidden: [..., dim].
    weight: [vocab, dim], or a DTensor split evenly by vocabulary, whose ranks all have the same
        hidden and labels. The gradient of `hidden` is then this rank's term of a sum over ranks.
    labels: int [...]; those that are IGNORE add nothing. Divide by the number of the others.
    losses: fp32 [tokens], filled with each token's loss, with gradients or without.
    """
    # [tokens, dim]
    hidden = hidden.flatten(0, -2)
    labels = labels.flatten()
    weight, shard = vocab_shard(weight)

    def of_chunk(logits: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        if losses is None:
            return fused(_loss_and_grad, weight)(logits, labels[chunk], shard)
        losses[chunk], grad = fused(_losses_and_grad, weight)(logits, labels[chunk], shard)
        return losses[chunk].sum(), grad

    return chunked_loss(hidden, weight, of_chunk)


def chunked_loss(hidden: Tensor, weight: Tensor, of_chunk: LossOfChunk) -> Tensor:
    """Return the sum over chunks of a loss that each token has of its logits, an fp32 scalar.

    hidden: [tokens, dim]; weight: this rank's rows of the head, [vocab / tp, dim].
    of_chunk(logits, chunk): returns a chunk's loss, a scalar, and its gradient, as the logits
        [tokens of the chunk, vocab / tp], which it may overwrite. It runs in the forward pass.
    """
    if torch.is_grad_enabled():
        return _ChunkedLoss.apply(hidden, weight, of_chunk)
    chunks = (slice(n, n + CHUNK) for n in range(0, max(1, len(hidden)), CHUNK))
    return sum(of_chunk(matmul(hidden[chunk], weight.T), chunk)[0] for chunk in chunks)


@torch.no_grad()
def linear_argmax(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the likeliest tokens of hidden [..., dim], int64 [...]. weight: as above."""
    local, shard = vocab_shard(weight)
    pairs = [matmul(x, local.T).max(-1) for x in hidden.flatten(0, -2).split(CHUNK)]
    peaks, columns = map(torch.cat, zip(*pairs, strict=True))
    # each [shards, tokens]
    peaks = shard.gather(peaks)
    tokens = shard.gather(columns + shard.first)
    return tokens.gather(0, peaks.argmax(0, keepdim=True)).view(hidden.shape[:-1])


def split_chunks(hidden: Tensor, labels: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Return hidden [tokens, dim] and labels [tokens] in chunks of at most CHUNK tokens."""
    return zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)


# one compiled function for each function
_compiled = cache(torch.compile)


def fused(function: Callable, weight: Tensor) -> Callable:
    """Return `function`, compiled if the weight [vocab, dim] is on CUDA."""
    return _compiled(function) if weight.is_cuda else function


def vocab_shard(weight: Tensor) -> tuple[Tensor, VocabShard]:
    """Return this rank's rows [vocab / tp, dim] of a head's weight, and which they are."""
    if not isinstance(weight, DTensor):
        return weight, VocabShard()
    mesh = weight.device_mesh
    weight = weight.to_local()
    return weight, VocabShard(mesh.get_local_rank() * len(weight), mesh.get_group())


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, of_chunk):
        # hidden: [tokens, dim]; weight: [vocab / tp, dim]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)

        def grad_of(logits: Tensor, chunk: slice) -> Tensor:
            # logits, and what is returned: [tokens of the chunk, vocab / tp]
            chunk_loss, grad = of_chunk(logits, chunk)
            loss.add_(chunk_loss)
            return grad

        # the gradients are complete here, but for the factor grad_loss; `grad_of` sums the loss
        ctx.save_for_backward(*head_gradients(hidden, weight, ctx.needs_input_grad, grad_of))
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = fused(_scaled, grad_hidden)(grad_hidden, grad_loss, grad_hidden.dtype)
        if grad_weight is not None:
            # compiled: torch's own kernel for bf16 = fp32 x fp32 reaches only 1.3 TB/s on an H200,
            # 2.4 ms for a head of 128k x 4096
            grad_weight = fused(_scaled, grad_weight)(grad_weight, grad_loss, ctx.weight_dtype)
        return grad_hidden, grad_weight, None


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply x [...] by `factor`, an fp32 scalar, and round only the product.

    The scalar rounded to bf16 would scale all gradients wrongly: 1 / 3 by 0.2 %.
    """
    # as [1] the factor promotes the product to fp32; as a scalar it would be cast to x's type
    return (x * factor.view(1)).to(dtype)


def head_gradients(
    hidden: Tensor,
    weight: Tensor,
    needed: tuple[bool, ...],
    grad_of: Callable[[Tensor, slice], Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of hidden and, in fp32, of weight; None for those not `needed`.

    hidden: [tokens, dim]; weight: [vocab / tp, dim]; the gradients have their shapes.
    grad_of(logits, chunk): returns d loss / d logits of a chunk, [tokens of the chunk, vocab / tp];
        it may overwrite the logits.
    """
    need_hidden, need_weight, *_ = needed
    grad_hidden = None
    grad_weight = None
    if need_hidden:
        grad_hidden = torch.empty_like(hidden)
    if need_weight:
        # the first chunk overwrites all of it; without tokens there is none
        new = torch.empty if len(hidden) else torch.zeros
        grad_weight = new(weight.shape, dtype=torch.float32, device=weight.device)
    for start in range(0, len(hidden), CHUNK):
        chunk = slice(start, start + CHUNK)
        grad_logits = grad_of(matmul(hidden[chunk], weight.T), chunk)
        if need_hidden:
            matmul(grad_logits, weight, out=grad_hidden[chunk])
        if need_weight:
            # [vocab / tp, tokens of the chunk] @ [tokens of the chunk, dim]
            _add_product(grad_weight, grad_logits.T, hidden[chunk], start > 0)
    return grad_hidden, grad_weight


def _loss_and_grad(logits: Tensor, labels: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Return the sum of `_losses_and_grad`'s losses, an fp32 scalar, and the gradient.

    logits: [tokens, vocab / tp], as the gradient; labels: [tokens].
    """
    losses, grad = _losses_and_grad(logits, labels, shard)
    return losses.sum(), grad


def _losses_and_grad(logits: Tensor, labels: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Return a chunk's losses, fp32 [tokens], and their gradient softmax(logits) - onehot(labels).

    logits: [tokens, vocab / tp]; overwritten if they are fp32. The gradient has their shape and
        type.
    """
    dtype = logits.dtype
    logits = logits.float()
    # all but exponentials, [tokens, vocab / tp], and what is gathered: [tokens, 1]
    valid, mine, columns = find_labels(labels, shard, logits.shape[1])
    peak = logits.amax(-1, keepdim=True)
    target = logits.gather(1, columns)
    exponentials = logits.sub_(peak).exp_()
    total = exponentials.sum(-1, keepdim=True)
    # each [shards, tokens, 1]
    peaks, totals, targets = shard.gather(torch.stack([peak, total, target * mine])).unbind(1)
    # each shard's sum is relative to its own maximum: make all relative to the highest
    highest = peaks.amax(0)
    total = (totals * (peaks - highest).exp()).sum(0)
    losses = (total.log() + highest - targets.sum(0)) * valid
    # times this, the exponentials are probabilities; 0 for a token without a label
    scale = valid * (peak - highest).exp() / total
    # a label's own gradient, p - 1, is subtracted in fp32: in bf16, p near 1 would leave nothing
    at_labels = (target - peak).exp() * scale - mine.float()
    grad = exponentials.mul_(scale).to(dtype)
    return losses[:, 0], grad.scatter_(1, columns, at_labels.to(dtype))


def find_labels(labels: Tensor, shard: VocabShard, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the labels [tokens] among the columns of a shard; return three tensors [tokens, 1].

    valid: the label is not IGNORE. mine: it is among the `size` columns of this shard.
    columns: its column, or 0.
    """
    valid = (labels != IGNORE)[:, None]
    columns = labels[:, None] - shard.first
    mine = valid & (columns >= 0) & (columns < size)
    return valid, mine, columns * mine


def _add_product(total: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """Compute total += a @ b, or total = a @ b. total: fp32 [rows, columns], of a and b any type.

    a: [rows, inner]; b: [inner, columns].
    """
    if total.is_cuda and a.dtype != total.dtype:
        # cuBLAS accumulates into the output: the product is not rounded to bf16 first
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=int(add), out=total)
    else:
        add_matmul(total, a, b, add)
