"""Split a measured step's seconds by kind of kernel.

The kinds are matrix products, attention, other kernels, messages that nothing hides, and gaps.

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
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

MESSAGES = "exposed communication"
# by what a name contains; the first that fits
KERNEL_KINDS = {
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
        "aten::_scaled_mm_v2",
        "aten::_scaled_grouped_mm_v2",
    ),
}

PRODUCTS = ("aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_scaled_mm_v2")
# FLOPs per byte
THIN = 100

# begin and end in microseconds, and a kind
MeasuredSpan = tuple[float, float, str]


def profiled(
    row: str,
    step: Callable[[], object],
    seconds: float,
    device: torch.device,
    folder: str | None = None,
) -> dict[str, dict]:
    """Return `breakdown_s` for a row's result; if there can be none, warn, and keep the row.

    folder: write the recorded trace to a file there, named after the row. Other arguments as of
    `step_breakdown`.
    """
    file = new_file(folder, row) if folder else None
    try:
        return {"breakdown_s": step_breakdown(step, seconds, device, file)}
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        print(f"warning: {row}: no profile: {why}", file=sys.stderr, flush=True)
        return {}


def new_file(folder: str, row: str) -> Path:
    """Return a path for the row's trace that no earlier run of it has."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.-]+", "-", row)
    path = Path(folder, f"{stem}.json.gz")
    number = 1
    while path.exists():
        number += 1
        path = Path(folder, f"{stem}-{number}.json.gz")
    return path


def step_breakdown(
    step: Callable[[], object], seconds: float, device: torch.device, file: Path | None = None
) -> dict[str, float]:
    """Return seconds by kind, of which the last is `gaps`.

    step: runs one. seconds: that it takes without the profiler. file: for the Chrome trace,
    compressed.

    Raises RuntimeError if the profiler cannot record, as where a driver does not let it.
    """
    on_gpu = device.type == "cuda"
    events = record_events(step, device, file, record_shapes=on_gpu)
    parts = kernel_times(events) if on_gpu else operator_times(events)
    if not parts.total():
        raise RuntimeError("the profiler recorded nothing")
    spent = {kind: time / 1e6 for kind, time in sorted(parts.items())}
    return spent | {"gaps": max(0.0, seconds - sum(spent.values()))}


def record_events(
    function: Callable[[], object], device: torch.device, file: Path | None = None, **options
) -> list[dict]:
    """Return the events of a Chrome trace of `function()`, kept in `file` (.json.gz) if given."""
    # or the profiler announces its start on the terminal
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with warnings.catch_warnings():
        # torch 2.11 says so though it is not done
        warnings.filterwarnings("ignore", ".*Profiler clears events")
        with profile(activities=activities, **options) as profiler:
            function()
            if device.type == "cuda":
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = file or Path(folder, "trace.json.gz")
        profiler.export_chrome_trace(str(file))
        with gzip.open(file, "rt", encoding="utf-8") as trace:
            return json.load(trace)["traceEvents"]


def kind_of(name: str) -> str:
    """Return the kind of a kernel or operator by its name; `memory` for all others."""
    name = name.lower()
    # a fused kernel is named after all that is near it
    if name.startswith("triton_") and not name.startswith("triton_tem"):
        return "memory"
    for kind, parts in KERNEL_KINDS.items():
        if any(part in name for part in parts):
            return kind
    return "memory"


def kernel_times(events: list[dict]) -> Counter[str]:
    """Return microseconds by kind of what ran on the device."""
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
    """Return True for a matrix product with less than THIN FLOPs per byte, by its shapes, in bf16."""
    if operator["name"] not in PRODUCTS or "args" not in operator:
        return False
    shapes = operator["args"]["Input Dims"]
    (rows, inner), (_, columns) = shapes[1:3] if operator["name"] == "aten::addmm" else shapes[:2]
    size = 2 * (rows * inner + inner * columns + rows * columns)
    return 2 * rows * inner * columns < THIN * size


def covered(spans: Iterable[MeasuredSpan]) -> Counter[str]:
    """Return microseconds by kind, where each moment counts for the span that began first."""
    parts = Counter()
    until = 0.0
    for begin, end, kind in sorted(spans):
        parts[kind] += max(0.0, end - max(begin, until))
        until = max(until, end)
    return parts


def operator_times(events: list[dict]) -> Counter[str]:
    """Return microseconds by kind of operators on the host, each without those that it calls."""
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    parts = Counter()
    # (thread, end, kind) of those that are running
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
    """Return the most bytes on `device` that `function()` holds, beyond those held before it."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    events = record_events(function, device, profile_memory=True)
    memory = [event for event in events if event["name"] == "[memory]"]
    memory.sort(key=lambda event: event["ts"])
    # releases are below 0
    return max(accumulate((event["args"]["Bytes"] for event in memory), initial=0))
