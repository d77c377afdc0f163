"""Cross-entropy of a linear output head, without ever holding the logits of all tokens.

For a 128k vocabulary the logits of 8192 tokens are 4 GB in fp32, and autograd would keep several copies. Here the head
and the loss are one autograd function that takes `CHUNK` tokens at a time and computes their gradients right away,
while their logits are at hand: memory no longer grows with tokens x vocabulary, and backward only scales.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # the label of a token that is not predicted
CHUNK = 2048  # tokens at a time: matrix products still run at full rate, and the logits of a chunk fit


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight^T)[label], in fp32; tokens labelled IGNORE count nothing.

    hidden: [..., dim]; weight: [vocab, dim]; labels: int [...]. Returns a scalar: divide by the number of valid labels.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(hidden, weight, labels)
    chunks = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
    return sum(F.cross_entropy((x @ weight.T).float(), y, ignore_index=IGNORE, reduction="sum") for x, y in chunks)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels):
        need_hidden, need_weight, _ = ctx.needs_input_grad
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_weight else None
        for start in range(0, len(hidden), CHUNK):
            chunk = slice(start, start + CHUNK)
            chunk_loss, grad_logits = _loss_and_grad((hidden[chunk] @ weight.T).float(), labels[chunk])
            loss += chunk_loss
            grad_logits = grad_logits.to(hidden.dtype)
            if need_hidden:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if need_weight:
                _add_product(grad_weight, grad_logits.T, hidden[chunk])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_loss.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None


def _loss_and_grad(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss sum of a chunk and its gradient softmax(logits) - onehot(labels), in place of the logits [tokens, vocab]."""
    valid = (labels != IGNORE)[:, None]
    labels = labels.clamp(min=0)[:, None]
    peak = logits.amax(-1, keepdim=True)
    target = logits.gather(1, labels)
    total = logits.sub_(peak).exp_().sum(-1, keepdim=True)
    loss = ((total.log() + peak - target) * valid).sum()
    grad = logits.mul_(valid / total).scatter_add_(1, labels, -valid.to(logits.dtype))
    return loss, grad


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, with total in fp32 also where a and b are bf16."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
