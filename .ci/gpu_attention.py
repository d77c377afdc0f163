"""Time attention composed of cuDNN's kernels on one GPU: python .ci/gpu_attention.py FILE

A flash kernel's backward pass needs only the output and the log-sum-exp of the softmax that it belongs to. So exact
attention can be composed of several calls of a library's kernels:

- sinks: the output is scaled, and the log-sum-exp raised, by one more key whose value is 0;
- context parallelism: a chunk of queries attends causally to its own keys and fully to all earlier ones; both parts are
  merged by their log-sum-exps, and the backward pass of each part takes the merged output and log-sum-exp.

Each is compared with what it would replace: FlexAttention, or one causal call. Also timed: sliding windows by
FlashAttention 2, and two ways to add up the rows of a token's experts. Each line of FILE is a JSON object: the kernel,
its shape, milliseconds, and TFLOP/s or GB/s; or relative errors. A failure is written too, and does not stop the rest.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from gpu_kernels import Heads, Kernel, bf16, masked_flex, measure, write
from torch import Tensor

aten = torch.ops.aten
GPT_OSS = Heads(batch=2, heads=64, kv_heads=8, length=4096, width=64)
LLAMA = Heads(batch=1, heads=32, kv_heads=8, length=8192, width=128)
WINDOW = 128
# tokens, experts of each token, hidden size
QWEN3 = (16384, 8, 2048)


def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool):
    """Return output, log-sum-exp [batch, heads, queries, 1], and dropout's seed and offset."""
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
    """Return the gradients of q, k and v for a softmax with this output and log-sum-exp."""
    saved = grad, q, k, v, out, log_sum, seed, offset
    lengths = q.shape[2], k.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        *saved, None, None, None, *lengths, 0.0, causal
    )


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor):
    """Compute causal attention with one more logit per head in the softmax: `sinks` [heads]."""
    out, log_sum, *state = cudnn(q, k, v, causal=True)
    whole = torch.logaddexp(log_sum, sinks[:, None, None])
    return out * (log_sum - whole).exp().to(out.dtype), whole, state


def in_two_parts(q: Tensor, k: Tensor, v: Tensor):
    """Compute attention of a causal sequence's last queries; k and v are those of all tokens."""
    earlier = k.shape[2] - q.shape[2]
    own = cudnn(q, k[:, :, earlier:], v[:, :, earlier:], causal=True)
    before = cudnn(q, k[:, :, :earlier], v[:, :, :earlier], causal=False)
    whole = torch.logaddexp(own[1], before[1])
    out = sum(part[0] * (part[1] - whole).exp() for part in (own, before))
    return out.to(q.dtype), whole, own[2:], before[2:]


def in_two_parts_backward(grad: Tensor, q, k, v, out, whole, own, before):
    """Return the gradients of q, k and v of `in_two_parts`."""
    earlier = k.shape[2] - q.shape[2]
    parts = (
        cudnn_backward(grad, q, k[:, :, :earlier], v[:, :, :earlier], out, whole, *before, False),
        cudnn_backward(grad, q, k[:, :, earlier:], v[:, :, earlier:], out, whole, *own, True),
    )
    dq, dk, dv = zip(*parts, strict=True)
    return sum(dq), torch.cat(dk, 2), torch.cat(dv, 2)


def measure_sinks(results: "Results") -> None:
    """Time attention with sinks, and compare it with FlexAttention."""
    q, k, v = GPT_OSS.tensors()
    grad = torch.randn_like(q)
    sinks = torch.randn(q.shape[1], device=q.device)
    flops = causal_flops(GPT_OSS)
    out, whole, state = with_sinks(q, k, v, sinks)
    forward = partial(with_sinks, q, k, v, sinks)
    results.time(Kernel("cudnn, sinks, forward", forward, flops), GPT_OSS)
    backward = partial(cudnn_backward, grad, q, k, v, out, whole, *state, True)
    results.time(Kernel("cudnn, sinks, backward", backward, 2.5 * flops), GPT_OSS)
    ours = out, *backward()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    theirs = masked_flex(q.shape[2], sinks=sinks)(*inputs)
    wanted = theirs, *torch.autograd.grad(theirs, inputs, grad)
    results.compare("cudnn, sinks, to flex", ours, wanted)


def measure_context(results: "Results") -> None:
    """Time a causal sequence's second half in two parts, and compare it with one causal call of all."""
    q, k, v = LLAMA.tensors()
    half = LLAMA.length // 2
    late = q[:, :, half:].contiguous()
    grad = torch.randn_like(late)
    # the second half has three quarters of the pairs
    flops = 0.75 * causal_flops(LLAMA)
    out, whole, own, before = in_two_parts(late, k, v)
    forward = partial(in_two_parts, late, k, v)
    results.time(Kernel("cudnn, two parts, forward", forward, flops), LLAMA)
    backward = partial(in_two_parts_backward, grad, late, k, v, out, whole, own, before)
    results.time(Kernel("cudnn, two parts, backward", backward, 2.5 * flops), LLAMA)
    all_out, all_log_sum, *state = cudnn(q, k, v, causal=True)
    all_grad = torch.cat([torch.zeros_like(grad), grad], 2)
    dq, dk, dv = cudnn_backward(all_grad, q, k, v, all_out, all_log_sum, *state, True)
    wanted = all_out[:, :, half:], dq[:, :, half:], dk, dv
    results.compare("cudnn, two parts, to one call", (out, *backward()), wanted)


def measure_window(results: "Results") -> None:
    """Time sliding windows by FlashAttention 2, whose tensors are [batch, length, heads, channels]."""
    q, k, v = GPT_OSS.tensors()
    length = GPT_OSS.length
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    sizes = {"window_size_left": WINDOW - 1, "window_size_right": 0}
    flops = GPT_OSS.flops(pairs=length * WINDOW - WINDOW**2 / 2)
    lengths = None, None, length, length, 0.0, True
    forward = partial(aten._flash_attention_forward, *turned, *lengths, False, **sizes)
    out, log_sum, seed, offset, _ = forward()
    results.time(Kernel(f"flash, window {WINDOW}, forward", forward, flops), GPT_OSS)
    wanted = masked_flex(length, WINDOW)(q, k, v)
    results.compare("flash, window, to flex", [out.transpose(1, 2)], [wanted])
    grad = torch.randn_like(out)
    saved = grad, *turned, out, log_sum
    backward = partial(aten._flash_attention_backward, *saved, *lengths, seed, offset, **sizes)
    results.time(Kernel(f"flash, window {WINDOW}, backward", backward, 2.5 * flops), GPT_OSS)


def measure_row_sums(results: "Results") -> None:
    """Time the sum of a token's rows, one from each of its experts."""
    tokens, top_k, width = QWEN3
    rows = tokens * top_k
    x = bf16(rows, width)
    order = torch.randperm(rows, device=x.device)
    begins = torch.arange(0, rows, top_k, device=x.device)

    @torch.compile
    def select_and_add(x, order):
        return x.index_select(0, order).unflatten(0, (tokens, top_k)).sum(1)

    moved = x.nbytes + tokens * width * x.itemsize
    bag = partial(F.embedding_bag, order, x, begins, mode="sum")
    results.time(Kernel("embedding_bag", bag, moved=moved), QWEN3)
    selecting = partial(select_and_add, x, order)
    results.time(Kernel("index_select and sum", selecting, moved=moved), QWEN3)


def causal_flops(heads: Heads) -> float:
    return heads.flops(pairs=heads.length**2 / 2)


class Results:
    """A file of results, a JSON object per line."""

    def __init__(self, file: str):
        self.file = file

    def time(self, kernel: Kernel, shape: object) -> None:
        """Write a kernel's milliseconds, and its TFLOP/s or GB/s."""
        # compiles it
        kernel.run()
        write(self.file, measure(kernel, "parts", str(shape)))

    def compare(self, kernel: str, ours: list[Tensor], theirs: list[Tensor]) -> None:
        """Write the norm of each tensor's difference, relative to the norm of theirs."""
        errors = []
        for a, b in zip(ours, theirs, strict=True):
            a = a.detach().float()
            b = b.detach().float()
            errors.append(float((a - b).norm() / b.norm()))
        write(self.file, {"group": "parts", "kernel": kernel, "relative_errors": errors})


MEASUREMENTS: tuple[Callable[[Results], None], ...] = (
    measure_sinks,
    measure_context,
    measure_window,
    measure_row_sums,
)


def main() -> None:
    results = Results(sys.argv[1])
    for measurement in MEASUREMENTS:
        try:
            measurement(results)
        except Exception as error:
            failure = {"group": "parts", "kernel": measurement.__name__}
            write(results.file, failure | {"error": str(error)[:300]})


if __name__ == "__main__":
    main()
