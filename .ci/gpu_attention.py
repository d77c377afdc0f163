"""Time attention out of cuDNN's own parts on one GPU: python .ci/gpu_attention.py FILE

A flash kernel's backward pass needs the output and the log-sum-exp of whatever softmax it belongs to, so exact
attention can be put together from calls of a library's kernels:

- sinks: the kernel's output is scaled, and its log-sum-exp raised, by one more key of no value;
- context parallelism: a chunk of queries is causal with its own keys and sees all earlier ones; both parts are
  merged by their log-sum-exps, and each part's backward pass takes the merged ones.

Beside each stands what it would replace: FlexAttention, or one causal call. Also timed: windows by FlashAttention 2,
and two ways to add up the rows of a token's experts. Each line of FILE is a JSON object: kernel, shape, milliseconds,
TFLOP/s or GB/s, and for what has a twin the relative error to it. Whatever fails is told, and does not stop the rest.
"""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from gpu_rates import bf16, heads_of, masked_flex, milliseconds, tell
from torch import Tensor

aten = torch.ops.aten
GPT_OSS = (2, 64, 8, 4096, 64)  # batch, heads, key-value heads, length, channels of a head
LLAMA = (1, 32, 8, 8192, 128)
WINDOW = 128
QWEN3 = (16384, 8, 2048)  # tokens, experts of each, hidden size


def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool):
    """Return output, log-sum-exp [batch, heads, queries, 1] and the two tensors of dropout's state."""
    out, log_sum, *_, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal
    )
    return out, log_sum, seed, offset


def cudnn_backward(
    grad: Tensor,
    q,
    k,
    v,
    out: Tensor,
    log_sum: Tensor,
    seed: Tensor,
    offset: Tensor,
    causal: bool,
):
    """Return the gradients of q, k and v, of a softmax that has this output and log-sum-exp."""
    saved = grad, q, k, v, out, log_sum, seed, offset
    lengths = q.shape[2], k.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        *saved, None, None, None, *lengths, 0.0, causal
    )


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor):
    """Causal attention whose softmax has one more logit a head, of `sinks` [heads]."""
    out, log_sum, *state = cudnn(q, k, v, causal=True)
    whole = torch.logaddexp(log_sum, sinks[:, None, None])
    return out * (log_sum - whole).exp().to(out.dtype), whole, state


def in_two_parts(q: Tensor, k: Tensor, v: Tensor):
    """Attention of the last queries of a causal sequence: k and v are longer by the earlier ones."""
    earlier = k.shape[2] - q.shape[2]
    own = cudnn(q, k[:, :, earlier:], v[:, :, earlier:], causal=True)
    before = cudnn(q, k[:, :, :earlier], v[:, :, :earlier], causal=False)
    whole = torch.logaddexp(own[1], before[1])
    out = sum(part[0] * (part[1] - whole).exp() for part in (own, before))
    return out.to(q.dtype), whole, own[2:], before[2:]


def in_two_parts_backward(grad: Tensor, q, k, v, out, whole, own, before):
    """Return the gradients of q, and of all of k and v."""
    earlier = k.shape[2] - q.shape[2]
    parts = (
        cudnn_backward(grad, q, k[:, :, :earlier], v[:, :, :earlier], out, whole, *before, False),
        cudnn_backward(grad, q, k[:, :, earlier:], v[:, :, earlier:], out, whole, *own, True),
    )
    dq, dk, dv = zip(*parts, strict=True)
    return sum(dq), torch.cat(dk, 2), torch.cat(dv, 2)


def measure_sinks(record) -> None:
    q, k, v = heads_of(*GPT_OSS)
    grad = torch.randn_like(q)
    sinks = torch.randn(q.shape[1], device=q.device)
    flops = causal_flops(*GPT_OSS)
    out, whole, state = with_sinks(q, k, v, sinks)
    record("cudnn, sinks, forward", GPT_OSS, partial(with_sinks, q, k, v, sinks), flops)
    backward = partial(cudnn_backward, grad, q, k, v, out, whole, *state, True)
    record("cudnn, sinks, backward", GPT_OSS, backward, 2.5 * flops)
    ours = out, *backward()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    theirs = masked_flex(q.shape[2], sinks=sinks)(*inputs)
    wanted = theirs, *torch.autograd.grad(theirs, inputs, grad)
    record.errors("cudnn, sinks, to flex", ours, wanted)


def measure_context(record) -> None:
    """The second half of a causal sequence, in two parts, and by one causal call of all of it."""
    q, k, v = heads_of(*LLAMA)
    half = LLAMA[3] // 2
    late = q[:, :, half:].contiguous()
    grad = torch.randn_like(late)
    flops = 0.75 * causal_flops(*LLAMA)  # of the pairs three quarters belong to the second half
    out, whole, own, before = in_two_parts(late, k, v)
    record("cudnn, two parts, forward", LLAMA, partial(in_two_parts, late, k, v), flops)
    backward = partial(in_two_parts_backward, grad, late, k, v, out, whole, own, before)
    record("cudnn, two parts, backward", LLAMA, backward, 2.5 * flops)
    all_out, all_log_sum, *state = cudnn(q, k, v, causal=True)
    all_grad = torch.cat([torch.zeros_like(grad), grad], 2)
    dq, dk, dv = cudnn_backward(all_grad, q, k, v, all_out, all_log_sum, *state, True)
    wanted = all_out[:, :, half:], dq[:, :, half:], dk, dv
    record.errors("cudnn, two parts, to one call", (out, *backward()), wanted)


def measure_window(record) -> None:
    """Windows by FlashAttention 2, whose tensors are [batch, length, heads, channels]."""
    q, k, v = heads_of(*GPT_OSS)
    length = q.shape[2]
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    sizes = {"window_size_left": WINDOW - 1, "window_size_right": 0}
    pairs = length * WINDOW - WINDOW**2 / 2
    flops = 4 * q.shape[0] * q.shape[1] * pairs * q.shape[3]
    lengths = None, None, length, length, 0.0, True
    forward = partial(aten._flash_attention_forward, *turned, *lengths, False, **sizes)
    out, log_sum, seed, offset, _ = forward()
    record(f"flash, window {WINDOW}, forward", GPT_OSS, forward, flops)
    wanted = masked_flex(length, WINDOW)(q, k, v)
    record.errors("flash, window, to flex", [out.transpose(1, 2)], [wanted])
    grad = torch.randn_like(out)
    saved = grad, *turned, out, log_sum
    backward = partial(aten._flash_attention_backward, *saved, *lengths, seed, offset, **sizes)
    record(f"flash, window {WINDOW}, backward", GPT_OSS, backward, 2.5 * flops)


def measure_row_sums(record) -> None:
    """The sum of a token's rows, one from each of its experts."""
    tokens, top_k, width = QWEN3
    rows = tokens * top_k
    x, order = bf16(rows, width), torch.randperm(rows, device="cuda")
    begins = torch.arange(0, rows, top_k, device="cuda")

    @torch.compile
    def select_and_add(x, order):
        return x.index_select(0, order).unflatten(0, (tokens, top_k)).sum(1)

    moved = x.nbytes + tokens * width * x.itemsize
    bag = partial(F.embedding_bag, order, x, begins, mode="sum")
    record("embedding_bag", QWEN3, bag, moved=moved)
    record("index_select and sum", QWEN3, partial(select_and_add, x, order), moved=moved)


def causal_flops(batch: int, heads: int, kv_heads: int, length: int, width: int) -> float:
    return 2 * batch * heads * length**2 * width


class Record:
    """Write the time of a kernel, and its FLOPs or bytes a second, to a file of JSON lines."""

    def __init__(self, file: str):
        self.file = file

    def __call__(self, kernel: str, shape: tuple, function, flops: float = 0, moved: float = 0):
        function()  # compiles
        spent = milliseconds(function)
        outcome = {"group": "parts", "kernel": kernel, "shape": str(shape), "ms": round(spent, 4)}
        outcome |= {"tflops": round(flops / spent / 1e9, 1)} if flops else {}
        outcome |= {"gb_per_s": round(moved / spent / 1e6)} if moved else {}
        tell(self.file, outcome)

    def errors(self, kernel: str, ours, theirs) -> None:
        """Write the norm of each tensor's difference, relative to that of theirs."""
        pairs = [
            (a.detach().float(), b.detach().float()) for a, b in zip(ours, theirs, strict=True)
        ]
        errors = [float((a - b).norm() / b.norm()) for a, b in pairs]
        tell(self.file, {"group": "parts", "kernel": kernel, "relative_errors": errors})


def main() -> None:
    record = Record(sys.argv[1])
    for measure in (measure_sinks, measure_context, measure_window, measure_row_sums):
        try:
            measure(record)
        except Exception as error:
            told = {"group": "parts", "kernel": measure.__name__, "error": str(error)[:300]}
            tell(record.file, told)


if __name__ == "__main__":
    main()
