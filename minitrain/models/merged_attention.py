"""Exact attention out of a library's kernels for plain masks, merged by their log-sum-exps.

cuDNN's kernels know two masks, causal and full, and are faster than FlexAttention, which knows all.
Two kinds of attention can be put together from them:

- context parallelism: a chunk of a sequence's queries is causal with its own keys, and sees all of
  the earlier ones;
- sinks: a softmax has one more term, a key without a value.

Forward, with the log-sum-exp L_i of the scores of each part i (and L_0 = sink):

    L = log sum_i exp(L_i)        out = sum_i exp(L_i - L) out_i

Backward, a flash kernel computes the weights P = exp(scores - L) and D = rowsum(grad out) again, so
given the merged L and out it returns a part's exact share of the gradients. That of a sink is
-sum exp(sink - L) D.

Memory: as of one call, and the parts' outputs until they are merged. Source: the merge is that of
FlashDecoding and ring attention (Liu et al. 2023).
"""

from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
# channels of a head up to which cuDNN's backward pass runs on all GPUs that have it
MAX_CHANNELS = 128


def takes_parts(q: Tensor, v: Tensor) -> bool:
    """Return whether this device's library has kernels for these [batch, heads, seq, head_dim]."""
    same = q.shape[3] == v.shape[3]
    if not q.is_cuda:
        return q.device.type == "cpu" and same
    half = q.dtype in (torch.float16, torch.bfloat16)
    fits = q.shape[3] <= MAX_CHANNELS and q.shape[3] % 8 == 0
    return same and half and fits and has_cudnn_attention()


@torch.compiler.assume_constant_result
def has_cudnn_attention() -> bool:
    """Return whether cuDNN's attention runs here, and nobody has switched it off.

    Its backward pass adds up in no fixed order.
    """
    allowed = torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cudnn.is_available()
    if not allowed or torch.version.hip or torch.are_deterministic_algorithms_enabled():
        return False
    return torch.cuda.get_device_capability() >= (8, 0)


def merged_attention(
    q: Tensor, k: Tensor, v: Tensor, chunks: Sequence[int], sinks: Tensor | None = None
) -> Tensor:
    """Return causal attention of some chunks of a sequence's queries to all of its keys.

    q: [batch, heads, queries, head_dim], equal chunks of the numbers `chunks`, as k's sequence has
        them: of all queries (0,).
    k, v: [batch, kv_heads, keys, head_dim]. sinks: [heads], see `attention`.
    Returns [batch, heads, queries, head_dim].
    """
    return MergedAttention.apply(q, k, v, sinks, tuple(chunks))


class MergedAttention(torch.autograd.Function):
    """`merged_attention`, for which each part's backward pass is called with the merged outputs."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, chunks):
        merged = []
        for number, queries in zip(chunks, q.chunk(len(chunks), 2), strict=True):
            parts = [
                attention_part(queries, k[:, :, keys], v[:, :, keys], causal)
                for keys, causal in parts_of(number, queries.shape[2])
            ]
            merged.append(merge(parts, sinks))
        # [batch, heads, queries, head_dim] and without head_dim
        out = torch.cat([out for out, _ in merged], 2)
        log_sum = torch.cat([log_sum for _, log_sum in merged], 2)
        ctx.save_for_backward(q, k, v, sinks, out, log_sum)
        ctx.chunks = chunks
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, sinks, out, log_sum = ctx.saved_tensors
        grad_q = []
        grad_k = []
        grad_v = []
        pieces = (x.chunk(len(ctx.chunks), 2) for x in (q, grad, out, log_sum))
        for number, queries, *saved in zip(ctx.chunks, *pieces, strict=True):
            parts = [
                attention_part_backward(queries, k[:, :, keys], v[:, :, keys], *saved, causal)
                for keys, causal in parts_of(number, queries.shape[2])
            ]
            to_q, to_k, to_v = zip(*parts, strict=True)
            grad_q.append(sum(to_q[1:], to_q[0]))
            grad_k.append(up_to_length(to_k, k.shape[2]))
            grad_v.append(up_to_length(to_v, k.shape[2]))
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            share = (sinks.to(log_sum.dtype)[:, None] - log_sum).exp()
            grad_sinks = -(share * (grad.to(share.dtype) * out).sum(-1)).sum((0, 2))
            grad_sinks = grad_sinks.to(sinks.dtype)
        return (
            torch.cat(grad_q, 2),
            sum(grad_k[1:], grad_k[0]),
            sum(grad_v[1:], grad_v[0]),
            grad_sinks,
            None,
        )


def parts_of(number: int, size: int) -> list[tuple[slice, bool]]:
    """Return the keys of a chunk's parts, in order, and whether each is causal.

    number: the chunk's, among those of `size` tokens.
    """
    begin = number * size
    own = slice(begin, begin + size), True
    return [(slice(0, begin), False), own] if begin else [own]


def merge(parts: list[tuple[Tensor, Tensor]], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge outputs [batch, heads, queries, head_dim] and their log-sum-exps, without head_dim."""
    sums = [log_sum for _, log_sum in parts]
    terms = sums
    if sinks is not None:
        terms = [*sums, sinks.to(sums[0].dtype)[:, None]]
    whole = reduce(torch.logaddexp, terms)
    scaled = [out * (log_sum - whole).exp()[..., None] for out, log_sum in parts]
    return sum(scaled[1:], scaled[0]).to(parts[0][0].dtype), whole


def up_to_length(parts: Sequence[Tensor], length: int) -> Tensor:
    """Join gradients of the first keys, in order, with 0 for later ones: [..., length, head_dim]."""
    joined = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
    return F.pad(joined, (0, 0, 0, length - joined.shape[2]))


# --- a part, by a library's kernel


@torch.library.custom_op("minitrain::attention_part", mutates_args=())
def attention_part(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp, [batch, heads, queries] in fp32 (fp64 of fp64).

    q: [batch, heads, queries, head_dim]; k, v: [batch, kv_heads, keys, head_dim]. causal: there are
    as many keys as queries.
    """
    if q.is_cuda:
        out, log_sum, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal
        )
        log_sum = log_sum.view(q.shape[:3])
    else:
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return laid_out_as(out, q), log_sum.contiguous()


@torch.library.custom_op("minitrain::attention_part_backward", mutates_args=())
def attention_part_backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, out: Tensor, log_sum: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, of the softmax that has this output and log-sum-exp.

    grad, out: [batch, heads, queries, head_dim]; log_sum: [batch, heads, queries].
    """
    if q.is_cuda:
        log_sum = log_sum.contiguous()[..., None]
        # the state of dropout, which is not read
        state = (torch.empty((), dtype=torch.long, device=q.device) for _ in range(2))
        lengths = q.shape[2], k.shape[2]
        gradients = aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, log_sum, *state, None, None, None, *lengths, 0.0, causal
        )
    else:
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, keys, values, out, log_sum.contiguous(), 0.0, causal
        )
        # [batch, kv_heads, keys, head_dim]: heads that share a key add up
        to_q, *shared = gradients
        gradients = to_q, *(x.unflatten(1, (-1, group)).sum(2) for x in shared)
    return tuple(laid_out_as(x, like) for x, like in zip(gradients, (q, k, v), strict=True))


def laid_out_as(x: Tensor, like: Tensor) -> Tensor:
    """Return x [...] with its dimensions in memory in the order of those of `like`."""
    wanted = torch.empty_like(like, device="meta").stride()
    # of a dimension of size 1, as often the batch, any stride will do
    strides = zip(x.shape, x.stride(), wanted, strict=True)
    if all(size == 1 or mine == its for size, mine, its in strides):
        return x
    return torch.empty_like(like).copy_(x)


@attention_part.register_fake
def _(q, k, v, causal):
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=kind)


@attention_part_backward.register_fake
def _(q, k, v, grad, out, log_sum, causal):
    return tuple(torch.empty_like(x) for x in (q, k, v))
