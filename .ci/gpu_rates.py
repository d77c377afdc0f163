"""Measure the rates of single kernels on one GPU: python .ci/gpu_rates.py FILE [SECONDS [GROUP...]]

Each line of FILE is a JSON object: kernel, shape, milliseconds, TFLOP/s, GB/s. Kernels are compiled by several
processes at once and timed by one at a time. No kernel is begun after SECONDS (default 90).
"""

import json
import multiprocessing
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

DEVICE = "cuda"
PROCESSES = 12
TOKENS = 8192
LLAMA = {
    "q, o": (4096, 4096),
    "k, v": (4096, 1024),
    "gate, up": (4096, 14336),
    "down": (14336, 4096),
}
# hidden size, the experts' intermediate size, experts, rows per expert
EXPERTS = {
    "qwen3-30b, 16 experts": (2048, 768, 16, 4096),
    "qwen3-30b, 16 experts, few rows": (2048, 768, 16, 512),
    "qwen3-30b, all": (2048, 768, 128, 512),
    "gpt-oss-20b": (2880, 2880, 4, 8192),
    "deepseek-v3": (7168, 2048, 8, 4096),
    "mixtral-8x7b": (4096, 14336, 4, 4096),
}

DECODING = (  # options of FlexAttention's decoding kernel
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


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def products():
    """Dense products: name, function, FLOPs, bytes."""
    for name, (inner, out) in LLAMA.items():
        x, w = bf16(TOKENS, inner), bf16(out, inner)
        flops, moved = 2 * TOKENS * inner * out, 2 * (TOKENS * inner + inner * out + TOKENS * out)
        yield f"bf16 {name}", partial(torch.mm, x, w.t()), flops, moved
    x, w = bf16(2048, 4096), bf16(128256, 4096)
    yield (
        "bf16 head, 2,048 tokens",
        partial(torch.mm, x, w.t()),
        2 * 2048 * 4096 * 128256,
        2 * 2048 * 128256,
    )


def fp8_products():
    one, size = torch.ones((), device=DEVICE), 8192
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for left, fast in ((e4m3, True), (e4m3, False), (e5m2, True), (e5m2, False)):
        a, b = bf16(size, size).to(left), bf16(size, size).to(e4m3).t()
        product = partial(
            torch._scaled_mm,
            a,
            b,
            scale_a=one,
            scale_b=one,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )
        name = f"fp8 {str(left)[13:17]} x e4m3, {'fast' if fast else 'fp32'} accumulation"
        yield name, product, 2 * size**3, 4 * size**2


def fp8_forms():
    """Products in each form of scaled FP8 that this GPU has units for, their scales laid out each time."""
    from minitrain.models.fp8_forms import FORMS, multiply_in_form
    from minitrain.models.quantize import E4M3, quantize

    for form, row in FORMS.items():
        if form == "tensor" or not row.has_units(torch.cuda.get_device_capability()):
            continue
        x, w = (quantize(bf16(8192, 8192), E4M3, b) for b in (row.block, row.weight_block))
        scales = x[1], w[1], form, torch.bfloat16, False
        product = partial(multiply_in_form, x[0], w[0].t(), *scales)
        yield f"fp8 {form}", product, 2 * 8192**3, 4 * 8192**2
        round_up = torch.compile(partial(quantize, dtype=E4M3, block=row.block))
        yield f"fp8 {form}, rounding", partial(round_up, bf16(8192, 8192)), 0, 3 * 8192**2


def unaligned_scale():
    """A product with a scale that does not begin at a multiple of 16 bytes, which cuBLAS is said to refuse."""
    a, b = (bf16(4096, 4096).to(torch.float8_e4m3fn) for _ in range(2))
    one, other = torch.ones(8, device=DEVICE).view(2, 4)[:, 1]
    yield (
        "fp8, unaligned scale",
        partial(torch._scaled_mm, a, b.t(), one, other, out_dtype=torch.bfloat16),
        2 * 4096**3,
        0,
    )


def thin_products():
    """Products of LoRA with rank 16, forward and backward."""
    rank = 16
    for inner, out in LLAMA.values():
        x, y, a, b, h = (
            bf16(*s)
            for s in ((TOKENS, inner), (TOKENS, out), (rank, inner), (out, rank), (TOKENS, rank))
        )
        flops, wide, narrow = 2 * TOKENS * rank, 2 * TOKENS * inner, 2 * TOKENS * out
        yield f"x A^T, {inner}", partial(torch.mm, x, a.t()), flops * inner, wide
        yield f"h B^T, {out}", partial(torch.mm, h, b.t()), flops * out, narrow
        yield f"y + h B^T, {out}", partial(torch.addmm, y, h, b.t()), flops * out, 2 * narrow
        yield f"dy B, {out}", partial(torch.mm, y, b), flops * out, narrow
        yield f"dy^T h, {out}", partial(torch.mm, y.t(), h), flops * out, narrow
        yield f"dh^T x, {inner}", partial(torch.mm, h.t(), x), flops * inner, wide


def memory():
    a, b = bf16(2**30), bf16(2**30)
    yield "copy", partial(b.copy_, a), 0, 2 * a.nbytes
    yield "add", partial(torch.add, a, b, out=a), 0, 3 * a.nbytes


def grouped(hidden: int, inner: int, experts: int, rows: int):
    """Grouped products of experts, forward and backward."""
    offsets = torch.arange(1, experts + 1, device=DEVICE, dtype=torch.int32) * rows
    for name, wide, narrow in (("gate_up", hidden, 2 * inner), ("down", inner, hidden)):
        x, w, y = (
            bf16(experts * rows, wide),
            bf16(experts, narrow, wide),
            bf16(experts * rows, narrow),
        )
        flops, moved = 2 * experts * rows * wide * narrow, x.nbytes + w.nbytes + y.nbytes
        yield (
            f"{name} forward",
            partial(F.grouped_mm, x, w.transpose(-2, -1), offs=offsets),
            flops,
            moved,
        )
        yield f"{name} dgrad", partial(F.grouped_mm, y, w, offs=offsets), flops, moved
        yield f"{name} wgrad", partial(F.grouped_mm, y.t(), x, offs=offsets), flops, moved


def forward_and_backward(name: str, attend, inputs: list[Tensor], flops: float):
    for tensor in inputs:
        tensor.requires_grad_()
    out = attend(*inputs)
    gradient = torch.randn_like(out)
    yield f"{name} forward", partial(attend, *inputs), flops, 0
    backward = partial(torch.autograd.grad, out, inputs, gradient, retain_graph=True)
    yield f"{name} backward", backward, 2.5 * flops, 0


def heads_of(batch: int, heads: int, kv_heads: int, length: int, width: int) -> list[Tensor]:
    return [bf16(batch, n, length, width) for n in (heads, kv_heads, kv_heads)]


def sdpa(batch: int, heads: int, kv_heads: int, length: int, width: int, causal: bool):
    attend = partial(
        F.scaled_dot_product_attention, is_causal=causal, enable_gqa=heads != kv_heads
    )
    flops = 4 * batch * heads * length**2 * width / (2 if causal else 1)
    name = f"sdpa {'causal' if causal else 'full'}"
    yield from forward_and_backward(
        name, attend, heads_of(batch, heads, kv_heads, length, width), flops
    )


def masked_flex(length: int, window: int = 0, sinks: Tensor | None = None, **options):
    """Return causal attention by FlexAttention, or one of a window, as a function of q, k and v.

    sinks: a logit of each head that the softmax has besides those of keys.
    """

    def allows(row, head, query, key):
        return (key <= query) & (key > query - window) if window else key <= query

    blocks = create_block_mask(allows, None, None, length, length)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = compiled(
            q,
            k,
            v,
            block_mask=blocks,
            enable_gqa=q.shape[1] != k.shape[1],
            kernel_options=options or None,
            return_aux=None if sinks is None else AuxRequest(lse=True),
        )
        if sinks is None:
            return result
        out, aux = result
        return out * torch.sigmoid(aux.lse - sinks[:, None])[..., None].to(q.dtype)

    return attend


def flex(
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    width: int,
    window: int = 0,
    sinks: bool = False,
    **options,
):
    """FlexAttention; FLOPs are those of the pairs that the mask allows."""
    of_heads = torch.zeros(heads, device=DEVICE) if sinks else None
    attend = masked_flex(length, window, of_heads, **options)
    pairs = length * window - window**2 / 2 if window else length**2 / 2
    mask = f"window {window}" if window else "causal"
    name = f"flex {mask}{', sinks' * sinks}{f' {options}' if options else ''}"
    flops = 4 * batch * heads * pairs * width
    yield from forward_and_backward(
        name, attend, heads_of(batch, heads, kv_heads, length, width), flops
    )


def decode(rows: int, context: int, **options):
    """Attention of a decoding step of Llama 3 8B over pages of 128 tokens, as rollout/caches.py launches it."""
    from minitrain.rollout.caches import DecodingStep

    size, heads, width = 128, 8, 128
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
    yield f"decode {options}", attend, 0, 2 * 2 * rows * context * heads * width


def jobs():
    """All measurements, as (group, shape, function that yields kernels, its arguments), the most telling first."""
    yield "product", f"{TOKENS} tokens", products, {}
    yield "product", "8192^3", fp8_products, {}
    yield "product", "8192^3", fp8_forms, {}
    yield "product", "4096^3", unaligned_scale, {}
    yield "thin", f"{TOKENS} tokens, rank 16", thin_products, {}
    yield "memory", "", memory, {}
    for name, shape in EXPERTS.items():
        yield (
            "grouped",
            f"{name} {shape}",
            grouped,
            dict(zip(("hidden", "inner", "experts", "rows"), shape, strict=True)),
        )
    sizes = ("batch", "heads", "kv_heads", "length", "width")
    for shape, causal in (
        ((2, 32, 8, 4096, 128), True),
        ((1, 32, 8, 8192, 128), True),
        ((2, 64, 8, 4096, 64), True),
        ((1, 40, 40, 37440, 128), False),
    ):
        yield (
            "attention",
            str(shape),
            sdpa,
            dict(zip(sizes, shape, strict=True)) | {"causal": causal},
        )
    gpt_oss, llama = (2, 64, 8, 4096, 64), (1, 32, 8, 8192, 128)
    for shape, others in (
        (llama, {}),
        (gpt_oss, {"sinks": True}),
        (gpt_oss, {"sinks": True, "window": 128}),
    ):
        yield "attention", str(shape), flex, dict(zip(sizes, shape, strict=True)) | others
    for rows in (64, 192, 16, 1):
        for options in DECODING:
            yield (
                "decode",
                f"{rows} rows, 1152 tokens",
                decode,
                {"rows": rows, "context": 1152} | options,
            )
    for options in (
        {"BLOCK_M1": 32, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 32},
        {"num_warps": 8},
    ):
        yield (
            "attention",
            str(gpt_oss),
            flex,
            dict(zip(sizes, gpt_oss, strict=True)) | {"sinks": True} | options,
        )


def milliseconds(function, seconds: float = 0.1) -> float:
    """The least of some repetitions, since other processes may use the GPU while they compile.

    Calls shorter than half a millisecond repeat inside a CUDA graph, so that the host's launches do not count.
    """
    once = timed(function)
    calls = max(1, min(20, int(10 / once)))
    repeat = partial(repeated, function, calls)
    if once < 0.5:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            repeat()
        repeat = graph.replay
    times, begin = [], time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begin < seconds:
        times.append(timed(repeat) / calls)
    return min(times)


def repeated(function, calls: int) -> None:
    for _ in range(calls):
        function()


def timed(function) -> float:
    """Milliseconds, by events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def sustained(seconds: float = 5.0) -> dict:
    """TFLOP/s of bf16 products over some seconds without a pause, as in training, in bursts of a tenth."""
    a, b = bf16(8192, 8192), bf16(8192, 8192)
    rates, begin = [], time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        for _ in range(60):
            a @ b
        torch.cuda.synchronize()
        rates.append(60 * 2 * 8192**3 / (time.perf_counter() - start) / 1e12)
    return {
        "kernel": "bf16 sustained",
        "shape": "8192^3",
        "first": max(rates[:3]),
        "last": sum(rates[-10:]) / 10,
    }


def work(queue, file: str, lock, deadline: float) -> None:
    while (job := queue.get()) is not None:
        group, shape, make, arguments = job
        if time.time() > deadline:
            continue
        try:
            for name, function, flops, moved in make(**arguments):
                function()  # compiles
                torch.cuda.synchronize()
                with lock:
                    spent = milliseconds(function)
                    outcome = {
                        "group": group,
                        "kernel": name,
                        "shape": shape,
                        "ms": round(spent, 4),
                    }
                    outcome |= {"tflops": round(flops / spent / 1e9, 1)} if flops else {}
                    outcome |= {"gb_per_s": round(moved / spent / 1e6)} if moved else {}
                    tell(file, outcome)
        except Exception as error:
            with lock:
                tell(
                    file,
                    {
                        "group": group,
                        "shape": shape,
                        "arguments": arguments,
                        "error": str(error)[:300],
                    },
                )
        torch.compiler.reset()  # each job's kernels would count against the limit of recompilations
        torch.cuda.empty_cache()


def tell(file: str, outcome: dict) -> None:
    print(*outcome.values(), flush=True)
    with open(file, "a", encoding="utf-8") as results:
        results.write(json.dumps(outcome) + "\n")


def main() -> None:
    file, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 90
    sys.path.insert(0, str(Path(__file__).parent.parent))
    context = multiprocessing.get_context("spawn")
    lock, queue, deadline = context.Lock(), context.Queue(), time.time() + seconds
    for job in jobs():
        if job[0] in (sys.argv[3:] or job[0]):
            queue.put(job)
    for _ in range(PROCESSES):
        queue.put(None)
    workers = [
        context.Process(target=work, args=(queue, file, lock, deadline)) for _ in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    with lock:  # while the others start and compile
        tell(file, sustained())
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
