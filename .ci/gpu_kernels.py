"""Time single kernels on one GPU and write what they take: shared by gpu_rates.py and gpu_attention.py."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

DEVICE = "cuda"


@dataclass
class Kernel:
    """A call to time."""

    name: str
    run: Callable[[], object]
    # FLOPs of one call; 0: no rate is written
    flops: float = 0
    # bytes that one call reads and writes; 0: no rate is written
    moved: float = 0


@dataclass(frozen=True)
class Heads:
    """The shape of an attention call."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    # channels per head
    width: int

    def tensors(self) -> list[Tensor]:
        """Return random q, k and v, [batch, heads, length, width]."""
        counts = (self.heads, self.kv_heads, self.kv_heads)
        return [bf16(self.batch, heads, self.length, self.width) for heads in counts]

    def flops(self, pairs: float) -> float:
        """Return the FLOPs of a forward pass. pairs: allowed query-key pairs per row."""
        return 4 * self.batch * self.heads * pairs * self.width

    def __str__(self) -> str:
        return str(tuple(asdict(self).values()))


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def masked_flex(length: int, window: int = 0, sinks: Tensor | None = None, **options):
    """Return causal FlexAttention, with a sliding window if given, as a function of q, k and v.

    sinks: [heads], one more logit in each head's softmax. options: of the kernel.
    """

    def allows(row, head, query, key):
        return (key <= query) & (key > query - window) if window else key <= query

    blocks = create_block_mask(allows, None, None, length, length, device=DEVICE)
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


def measure(kernel: Kernel, group: str, shape: str) -> dict:
    """Return a line of the results: milliseconds, and TFLOP/s and GB/s where these are known."""
    spent = milliseconds(kernel.run)
    line = {"group": group, "kernel": kernel.name, "shape": shape, "ms": round(spent, 4)}
    if kernel.flops:
        line["tflops"] = round(kernel.flops / spent / 1e9, 1)
    if kernel.moved:
        line["gb_per_s"] = round(kernel.moved / spent / 1e6)
    return line


def milliseconds(function: Callable[[], object], seconds: float = 0.1) -> float:
    """Return the least of several timings, because other processes may use the GPU meanwhile.

    Calls shorter than half a millisecond are repeated inside a CUDA graph, so that launches by the
    host do not count.
    """
    once = timed(function)
    calls = max(1, min(20, int(10 / once)))
    repeat = partial(repeated, function, calls)
    if once < 0.5:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            repeat()
        repeat = graph.replay
    times = []
    begin = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begin < seconds:
        times.append(timed(repeat) / calls)
    return min(times)


def repeated(function: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        function()


def timed(function: Callable[[], object]) -> float:
    """Return the milliseconds of one call, between CUDA events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def write(file: str, line: dict) -> None:
    """Print a line of the results, and append it to a file as JSON."""
    print(*line.values(), flush=True)
    with open(file, "a", encoding="utf-8") as results:
        results.write(json.dumps(line) + "\n")
