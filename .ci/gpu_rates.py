"""Measure the rates of single kernels on one GPU: python .ci/gpu_rates.py FILE [SECONDS [GROUP...]]

Each line of FILE is a JSON object with the kernel, its shape, milliseconds, TFLOP/s and GB/s. Several processes
compile kernels at the same time; only one kernel is timed at a time. No kernel is started after SECONDS (default 90).
"""

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_kernels import DEVICE, Heads, Kernel, bf16, masked_flex, measure, write
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

PROCESSES = 12
TOKENS = 8192
RANK = 16
# (in features, out features) of the Linears of Llama 3 8B
LLAMA = {
    "q, o": (4096, 4096),
    "k, v": (4096, 1024),
    "gate, up": (4096, 14336),
    "down": (14336, 4096),
}


@dataclass(frozen=True)
class Experts:
    """The shape of a layer of experts."""

    hidden: int
    # intermediate size of an expert
    inner: int
    experts: int
    # rows per expert
    rows: int

    def __str__(self) -> str:
        return str(tuple(asdict(self).values()))


EXPERTS = {
    "qwen3-30b, 16 experts": Experts(2048, 768, 16, 4096),
    "qwen3-30b, 16 experts, few rows": Experts(2048, 768, 16, 512),
    "qwen3-30b, all": Experts(2048, 768, 128, 512),
    "gpt-oss-20b": Experts(2880, 2880, 4, 8192),
    "deepseek-v3": Experts(7168, 2048, 8, 4096),
    "mixtral-8x7b": Experts(4096, 14336, 4, 4096),
}

LLAMA_HEADS = Heads(batch=1, heads=32, kv_heads=8, length=8192, width=128)
SHORT_LLAMA_HEADS = replace(LLAMA_HEADS, batch=2, length=4096)
GPT_OSS_HEADS = Heads(batch=2, heads=64, kv_heads=8, length=4096, width=64)
WAN_HEADS = Heads(batch=1, heads=40, kv_heads=40, length=37440, width=128)

# options to try in FlexAttention's decoding kernel
DECODING = (
    {"num_stages": 3},
    {"num_stages": 3, "num_warps": 4},
    {"num_stages": 3, "SPLIT_KV": 2},
    {"num_stages": 3, "SPLIT_KV": 2, "num_warps": 4},
    {"num_stages": 3, "SPLIT_KV": 4},
    {"num_stages": 3, "SPLIT_KV": 4, "num_warps": 4},
    {"num_stages": 3, "BLOCK_N": 64},
    {"num_stages": 4, "BLOCK_N": 64, "num_warps": 4},
    {"num_stages": 3, "BLOCK_N": 32},
    {"num_stages": 2, "num_warps": 4},
)
# and in its kernels for training
TRAINING = ({"BLOCK_M1": 32, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 32}, {"num_warps": 8})


@dataclass
class Job:
    """Kernels that one process makes, compiles and measures."""

    group: str
    # the name of the shape in the results
    shape: str
    make: Callable[[], Iterable[Kernel]]


def jobs() -> Iterator[Job]:
    """Yield all measurements, the most important first."""
    yield Job("product", f"{TOKENS} tokens", products)
    yield Job("product", "8192^3", fp8_products)
    yield Job("product", "8192^3", fp8_forms)
    yield Job("product", "4096^3", unaligned_scale)
    yield Job("thin", f"{TOKENS} tokens, rank {RANK}", thin_products)
    yield Job("memory", "", memory)
    for name, shape in EXPERTS.items():
        yield Job("grouped", f"{name} {shape}", partial(grouped, shape))
    for heads in (SHORT_LLAMA_HEADS, LLAMA_HEADS, GPT_OSS_HEADS):
        yield Job("attention", str(heads), partial(sdpa, heads, causal=True))
    yield Job("attention", str(WAN_HEADS), partial(sdpa, WAN_HEADS, causal=False))
    yield Job("attention", str(LLAMA_HEADS), partial(flex, LLAMA_HEADS))
    for window in (0, 128):
        make = partial(flex, GPT_OSS_HEADS, window, sinks=True)
        yield Job("attention", str(GPT_OSS_HEADS), make)
    for rows in (64, 192, 16, 1):
        for options in DECODING:
            yield Job(
                "decode", f"{rows} rows, 1152 tokens", partial(decode, rows, 1152, **options)
            )
    for options in TRAINING:
        make = partial(flex, GPT_OSS_HEADS, sinks=True, **options)
        yield Job("attention", str(GPT_OSS_HEADS), make)


# --- matrix products, memory


def products() -> Iterator[Kernel]:
    """Yield products of Llama 3 8B."""
    for name, (inner, out) in LLAMA.items():
        x = bf16(TOKENS, inner)
        w = bf16(out, inner)
        moved = 2 * (TOKENS * inner + inner * out + TOKENS * out)
        run = partial(torch.mm, x, w.t())
        yield Kernel(f"bf16 {name}", run, 2 * TOKENS * inner * out, moved)
    x = bf16(2048, 4096)
    w = bf16(128256, 4096)
    run = partial(torch.mm, x, w.t())
    yield Kernel("bf16 head, 2,048 tokens", run, 2 * 2048 * 4096 * 128256, 2 * 2048 * 128256)


def fp8_products() -> Iterator[Kernel]:
    """Yield square products with both formats of the left factor and both accumulations."""
    size = 8192
    one = torch.ones((), device=DEVICE)
    for left in (torch.float8_e4m3fn, torch.float8_e5m2):
        for fast in (True, False):
            a = bf16(size, size).to(left)
            b = bf16(size, size).to(torch.float8_e4m3fn).t()
            run = partial(
                torch._scaled_mm,
                a,
                b,
                scale_a=one,
                scale_b=one,
                out_dtype=torch.bfloat16,
                use_fast_accum=fast,
            )
            name = f"fp8 {str(left)[13:17]} x e4m3, {'fast' if fast else 'fp32'} accumulation"
            yield Kernel(name, run, 2 * size**3, 4 * size**2)


def fp8_forms() -> Iterator[Kernel]:
    """Yield products in each form of scaled FP8 that this GPU has units for, and their rounding.

    Scales are laid out for the units each time, as in training.
    """
    from minitrain.models.fp8_forms import FORMS, multiply_in_form
    from minitrain.models.quantize import E4M3, quantize

    size = 8192
    for form, row in FORMS.items():
        if form == "tensor" or not row.has_kernel(torch.cuda.get_device_capability()):
            continue
        x, x_scale = quantize(bf16(size, size), E4M3, row.block)
        w, w_scale = quantize(bf16(size, size), E4M3, row.weight_block)
        run = partial(multiply_in_form, x, w.t(), x_scale, w_scale, form, torch.bfloat16, False)
        yield Kernel(f"fp8 {form}", run, 2 * size**3, 4 * size**2)
        rounding = torch.compile(partial(quantize, dtype=E4M3, block=row.block))
        yield Kernel(f"fp8 {form}, rounding", partial(rounding, bf16(size, size)), 0, 3 * size**2)


def unaligned_scale() -> Iterator[Kernel]:
    """Yield a product whose scale is not aligned to 16 bytes, which cuBLAS is said to refuse."""
    a, b = (bf16(4096, 4096).to(torch.float8_e4m3fn) for _ in range(2))
    one, other = torch.ones(8, device=DEVICE).view(2, 4)[:, 1]
    run = partial(torch._scaled_mm, a, b.t(), one, other, out_dtype=torch.bfloat16)
    yield Kernel("fp8, unaligned scale", run, 2 * 4096**3)


def thin_products() -> Iterator[Kernel]:
    """Yield LoRA's products with its low-rank factors, forward and backward."""
    for inner, out in LLAMA.values():
        x = bf16(TOKENS, inner)
        y = bf16(TOKENS, out)
        a = bf16(RANK, inner)
        b = bf16(out, RANK)
        h = bf16(TOKENS, RANK)
        flops = 2 * TOKENS * RANK
        x_bytes = 2 * TOKENS * inner
        y_bytes = 2 * TOKENS * out
        yield Kernel(f"x A^T, {inner}", partial(torch.mm, x, a.t()), flops * inner, x_bytes)
        yield Kernel(f"h B^T, {out}", partial(torch.mm, h, b.t()), flops * out, y_bytes)
        add = partial(torch.addmm, y, h, b.t())
        yield Kernel(f"y + h B^T, {out}", add, flops * out, 2 * y_bytes)
        yield Kernel(f"dy B, {out}", partial(torch.mm, y, b), flops * out, y_bytes)
        yield Kernel(f"dy^T h, {out}", partial(torch.mm, y.t(), h), flops * out, y_bytes)
        yield Kernel(f"dh^T x, {inner}", partial(torch.mm, h.t(), x), flops * inner, x_bytes)


def memory() -> Iterator[Kernel]:
    """Yield a copy and an addition of large tensors."""
    a = bf16(2**30)
    b = bf16(2**30)
    yield Kernel("copy", partial(b.copy_, a), moved=2 * a.nbytes)
    yield Kernel("add", partial(torch.add, a, b, out=a), moved=3 * a.nbytes)


def grouped(shape: Experts) -> Iterator[Kernel]:
    """Yield grouped products of experts, forward and backward."""
    counts = torch.arange(1, shape.experts + 1, device=DEVICE, dtype=torch.int32)
    offsets = counts * shape.rows
    rows = shape.experts * shape.rows
    weights = {"gate_up": (shape.hidden, 2 * shape.inner), "down": (shape.inner, shape.hidden)}
    for name, (inner, out) in weights.items():
        x = bf16(rows, inner)
        w = bf16(shape.experts, out, inner)
        y = bf16(rows, out)
        runs = {
            "forward": partial(F.grouped_mm, x, w.transpose(-2, -1), offs=offsets),
            "dgrad": partial(F.grouped_mm, y, w, offs=offsets),
            "wgrad": partial(F.grouped_mm, y.t(), x, offs=offsets),
        }
        for direction, run in runs.items():
            moved = x.nbytes + w.nbytes + y.nbytes
            yield Kernel(f"{name} {direction}", run, 2 * rows * inner * out, moved)


# --- attention


def sdpa(heads: Heads, causal: bool) -> Iterator[Kernel]:
    """Yield scaled_dot_product_attention, forward and backward."""
    gqa = heads.heads != heads.kv_heads
    attend = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=gqa)
    name = f"sdpa {'causal' if causal else 'full'}"
    pairs = heads.length**2 / (2 if causal else 1)
    yield from forward_and_backward(name, attend, heads.tensors(), heads.flops(pairs))


def flex(heads: Heads, window: int = 0, sinks: bool = False, **options) -> Iterator[Kernel]:
    """Yield FlexAttention, forward and backward. FLOPs: only of pairs that the mask allows."""
    logits = torch.zeros(heads.heads, device=DEVICE) if sinks else None
    attend = masked_flex(heads.length, window, logits, **options)
    pairs = heads.length * window - window**2 / 2 if window else heads.length**2 / 2
    mask = f"window {window}" if window else "causal"
    name = f"flex {mask}{', sinks' * sinks}{f' {options}' if options else ''}"
    yield from forward_and_backward(name, attend, heads.tensors(), heads.flops(pairs))


def forward_and_backward(
    name: str, attend: Callable[..., Tensor], inputs: list[Tensor], flops: float
) -> Iterator[Kernel]:
    """Yield both passes of an attention function. flops: of the forward pass."""
    for tensor in inputs:
        tensor.requires_grad_()
    out = attend(*inputs)
    gradient = torch.randn_like(out)
    yield Kernel(f"{name} forward", partial(attend, *inputs), flops)
    backward = partial(torch.autograd.grad, out, inputs, gradient, retain_graph=True)
    yield Kernel(f"{name} backward", backward, 2.5 * flops)


def decode(rows: int, context: int, **options) -> Iterator[Kernel]:
    """Yield a decoding step's attention of Llama 3 8B over pages of 128 tokens, as in rollout/kv_cache.py."""
    from minitrain.rollout.steps import DecodingStep

    size = 128
    heads = 8
    width = 128
    pages = -(-context // size)
    pool = rows * pages + 1
    table = torch.randperm(rows * pages, device=DEVICE).view(rows, pages)
    positions = torch.full((rows,), context - 1, device=DEVICE)
    step = DecodingStep(positions, table, torch.arange(rows, device=DEVICE), size, pool)
    step.begin()
    blocks = step.page_mask(None, 4)
    q = bf16(rows, heads, 4, width)
    k, v = (bf16(pool, size, heads, width).flatten(0, 1).transpose(0, 1)[None] for _ in range(2))
    compiled = torch.compile(flex_attention, dynamic=False)
    attend = partial(compiled, q, k, v, block_mask=blocks, kernel_options=options or None)
    yield Kernel(f"decode {options}", attend, moved=2 * 2 * rows * context * heads * width)


# --- running


def sustained(seconds: float = 5.0) -> dict:
    """Return TFLOP/s of bf16 products over some seconds without a pause, as in training."""
    size = 8192
    a = bf16(size, size)
    b = bf16(size, size)
    rates = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        # a burst of about a tenth of a second
        start = time.perf_counter()
        for _ in range(60):
            a @ b
        torch.cuda.synchronize()
        rates.append(60 * 2 * size**3 / (time.perf_counter() - start) / 1e12)
    return {
        "kernel": "bf16 sustained",
        "shape": "8192^3",
        "first": max(rates[:3]),
        "last": sum(rates[-10:]) / 10,
    }


def work(queue, file: str, lock, deadline: float) -> None:
    """Measure jobs from the queue until it yields None; after the deadline, only empty it."""
    while (job := queue.get()) is not None:
        if time.time() > deadline:
            continue
        try:
            for kernel in job.make():
                # compiles it
                kernel.run()
                torch.cuda.synchronize()
                with lock:
                    write(file, measure(kernel, job.group, job.shape))
        except Exception as error:
            arguments = getattr(job.make, "keywords", {})
            failure = {"group": job.group, "shape": job.shape, "arguments": arguments}
            with lock:
                write(file, failure | {"error": str(error)[:300]})
        # otherwise kernels of all jobs together would reach the recompile limit
        torch.compiler.reset()
        torch.cuda.empty_cache()


def main() -> None:
    file = sys.argv[1]
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 90
    groups = sys.argv[3:]
    sys.path.insert(0, str(Path(__file__).parent.parent))
    context = multiprocessing.get_context("spawn")
    lock = context.Lock()
    queue = context.Queue()
    deadline = time.time() + seconds
    for job in jobs():
        if not groups or job.group in groups:
            queue.put(job)
    for _ in range(PROCESSES):
        queue.put(None)
    arguments = (queue, file, lock, deadline)
    workers = [context.Process(target=work, args=arguments) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()
    # while the others start and compile
    with lock:
        write(file, sustained())
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
