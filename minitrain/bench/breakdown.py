"""Where a measured step's seconds go: matrix products, attention, other kernels, messages that
nothing hides, gaps.

torch's profiler records one step more. On CUDA it records kernels, which are told apart by their
names; where several run at once, time counts for the one that began first, and messages count where
nothing else runs. On CPU it records operators, each without those that it calls. Gaps are what is
left of the step as it was timed, without the profiler: there the device waits for the host.

Matrix products with less than THIN FLOPs per byte, as of adapters, are `thin gemm`: memory bounds
them, not arithmetic. A CUDA graph's kernels have no operator that tells their shapes, so there all
are `gemm`.
"""

import gzip
import json
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate, count
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

MESSAGES = "exposed communication"
KINDS = {  # by what a name contains; the first that fits
    MESSAGES: ("nccl", "c10d", "gloo:"),
    "attention": (
        "sdpa",
        "flash",
        "fmha",
        "flex_attention",
        "scaled_dot_product",
        "dot_do_o",
        "convert_dq",
    ),
    "grouped": ("grouped",),
    "gemm": (
        "gemm",
        "gemv",
        "nvjet",
        "cutlass",
        "splitk",
        "triton_tem",
        "linear_pointwise",
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_scaled_mm",
    ),
}

PRODUCTS = ("aten::mm", "aten::addmm", "aten::_scaled_mm")
THIN = 100  # FLOPs per byte

Span = tuple[float, float, str]  # begin and end in microseconds, and a kind


def profiled(
    row: str,
    step: Callable[[], object],
    seconds: float,
    device: torch.device,
    folder: str | None = None,
) -> dict[str, dict]:
    """`breakdown_s` for a row's result; nothing but a warning if there can be none, as what was
    measured is not to be lost. folder: write the recorded trace to a file there, named after the
    row. Other arguments as of `step_breakdown`.
    """
    try:
        return {
            "breakdown_s": step_breakdown(step, seconds, device, folder and new_file(folder, row))
        }
    except RuntimeError as error:
        print(
            f"warning: {row}: no profile: {str(error).splitlines()[0]}", file=sys.stderr, flush=True
        )
        return {}


def new_file(folder: str, row: str) -> Path:
    """Return a path for the row's trace that no earlier run of it has."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.-]+", "-", row)
    names = (f"{stem}{f'-{number}' * (number > 1)}.json.gz" for number in count(1))
    return next(path for name in names if not (path := Path(folder, name)).exists())


def step_breakdown(
    step: Callable[[], object], seconds: float, device: torch.device, file: Path | None = None
) -> dict[str, float]:
    """Seconds by kind, of which the last is `gaps`. step: runs one; seconds: what it takes without
    the profiler.
    file: for the Chrome trace, compressed.

    Raises RuntimeError if the profiler cannot record, as where a driver does not let it.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    events = recorded(step, activities, file, record_shapes=on_gpu)
    parts = kernel_times(events) if on_gpu else operator_times(events)
    if not parts.total():
        raise RuntimeError("the profiler recorded nothing")
    spent = {kind: time / 1e6 for kind, time in sorted(parts.items())}
    return spent | {"gaps": max(0.0, seconds - sum(spent.values()))}


def recorded(
    function: Callable[[], object],
    activities: list[ProfilerActivity],
    file: Path | None = None,
    **options,
) -> list[dict]:
    """The events of a Chrome trace of `function()`, which is kept in `file` (.json.gz) if that is
    given.
    """
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # or the profiler announces its start on the terminal
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*Profiler clears events"
        )  # which torch 2.11 says though it is not done
        with profile(activities=activities, **options) as profiler:
            function()
            if ProfilerActivity.CUDA in activities:
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = file or Path(folder, "trace.json.gz")
        profiler.export_chrome_trace(str(file))
        with gzip.open(file, "rt", encoding="utf-8") as trace:
            return json.load(trace)["traceEvents"]


def kind_of(name: str) -> str:
    """What a kernel or operator does, or `memory`."""
    name = name.lower()
    if name.startswith("triton_") and not name.startswith(
        "triton_tem"
    ):  # fused, and named after all that is near it
        return "memory"
    return next(
        (kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "memory"
    )


def kernel_times(events: list[dict]) -> Counter[str]:
    """Microseconds by kind of what ran on the device."""
    thin = {
        event["args"]["External id"]
        for event in events
        if event.get("cat") == "cpu_op" and is_thin(event)
    }
    spans = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            kind = kind_of(event["name"])
            if kind == "gemm" and event.get("args", {}).get("External id") in thin:
                kind = "thin gemm"
            spans.append((event["ts"], event["ts"] + event["dur"], kind))
    parts = covered(span for span in spans if span[2] != MESSAGES)
    parts[MESSAGES] = covered(spans).total() - parts.total()
    return parts


def is_thin(operator: dict) -> bool:
    """Whether it is a matrix product that moves a byte for less than THIN FLOPs, by the recorded
    shapes, in bf16.
    """
    if operator["name"] not in PRODUCTS or "args" not in operator:
        return False
    shapes = operator["args"]["Input Dims"]
    (rows, inner), (_, columns) = shapes[1:3] if operator["name"] == "aten::addmm" else shapes[:2]
    size = 2 * (rows * inner + inner * columns + rows * columns)
    return 2 * rows * inner * columns < THIN * size


def covered(spans: Iterable[Span]) -> Counter[str]:
    """Microseconds by kind, where each moment counts for the span that began first."""
    parts = Counter()
    until = 0.0
    for begin, end, kind in sorted(spans):
        parts[kind] += max(0.0, end - max(begin, until))
        until = max(until, end)
    return parts


def operator_times(events: list[dict]) -> Counter[str]:
    """Microseconds by kind of operators on the host, each without those that it calls."""
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    # who is running: (thread, end, kind)
    parts = Counter()
    callers = []
    for event in sorted(operators, key=lambda event: (event["tid"], event["ts"], -event["dur"])):
        thread = event["tid"]
        begin = event["ts"]
        kind = kind_of(event["name"])
        while callers and (callers[-1][0] != thread or callers[-1][1] <= begin):
            callers.pop()
        if callers:
            parts[callers[-1][2]] -= event["dur"]
        parts[kind] += event["dur"]
        callers.append((thread, begin + event["dur"], kind))
    return parts


def working_memory(function: Callable[[], object], device: torch.device) -> int:
    """The most bytes on `device` that torch's allocator has lent during `function()`, beyond those
    lent before it.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    events = recorded(function, [ProfilerActivity.CPU], profile_memory=True)
    memory = sorted(
        (event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]
    )
    return max(
        accumulate((event["args"]["Bytes"] for event in memory), initial=0)
    )  # releases are below 0
