"""Split a measured step's seconds by kind of kernel.

The kinds are matrix products, attention, other kernels, exposed communication, and gaps.

torch's profiler records one extra step. On CUDA it records kernels, and a kernel's kind follows from
its name. Where several run at once, the time counts for the one that began first; communication
counts only where nothing else runs. On CPU it records operators, and each operator counts without
the operators that it calls. Gaps are the rest of the step time that was measured without the
profiler: there the device waits for the host.

Matrix products with less than THIN FLOPs per byte, such as those of adapters, are `thin gemm`: they
are bound by memory, not by arithmetic. Kernels in a CUDA graph have no operator that would show
their shapes, so there all products are `gemm`.
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
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

EXPOSED = "exposed communication"
# kind -> substrings of kernel names; the first kind that matches counts
KERNEL_KINDS = {
    EXPOSED: ("nccl", "c10d", "gloo:"),
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


class MeasuredSpan(NamedTuple):
    """A kernel's time on the device, in microseconds."""

    begin: float
    end: float
    kind: str


def profiled(
    row: str,
    step: Callable[[], object],
    seconds: float,
    device: torch.device,
    folder: str | None = None,
) -> dict[str, dict]:
    """Return {"breakdown_s": ...} for a row's result, or {} with a warning if profiling fails.

    folder: if given, the recorded trace is written there, to a file named after the row. Other
    arguments: see `step_breakdown`.
    """
    file = new_file(folder, row) if folder else None
    try:
        return {"breakdown_s": step_breakdown(step, seconds, device, file)}
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        print(f"warning: {row}: no profile: {why}", file=sys.stderr, flush=True)
        return {}


def new_file(folder: str, row: str) -> Path:
    """Return an unused path for the row's trace, numbered if earlier runs left theirs."""
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
    """Return seconds by kind; the last kind is `gaps`.

    step: runs one step. seconds: how long a step takes without the profiler. file: where to write
    the compressed Chrome trace.

    Raises RuntimeError if the profiler records nothing, for example because the driver forbids it.
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
    # otherwise the profiler announces its start on the terminal
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with warnings.catch_warnings():
        # torch 2.11 gives this warning although it clears nothing
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
    # the name of a fused Triton kernel also contains names of operators that it does not compute
    if name.startswith("triton_") and not name.startswith("triton_tem"):
        return "memory"
    for kind, parts in KERNEL_KINDS.items():
        if any(part in name for part in parts):
            return kind
    return "memory"


def kernel_times(events: list[dict]) -> Counter[str]:
    """Return microseconds by kind of the kernels and copies that ran on the device."""
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
            spans.append(MeasuredSpan(event["ts"], event["ts"] + event["dur"], kind))
    parts = covered(span for span in spans if span.kind != EXPOSED)
    parts[EXPOSED] = covered(spans).total() - parts.total()
    return parts


def is_thin(operator: dict) -> bool:
    """Return True for a matrix product whose shapes give less than THIN FLOPs per byte in bf16."""
    if operator["name"] not in PRODUCTS or "args" not in operator:
        return False
    shapes = operator["args"]["Input Dims"]
    (rows, inner), (_, columns) = shapes[1:3] if operator["name"] == "aten::addmm" else shapes[:2]
    size = 2 * (rows * inner + inner * columns + rows * columns)
    return 2 * rows * inner * columns < THIN * size


def covered(spans: Iterable[MeasuredSpan]) -> Counter[str]:
    """Return microseconds by kind; where spans overlap, the one that began first counts."""
    parts = Counter()
    until = 0.0
    for begin, end, kind in sorted(spans):
        parts[kind] += max(0.0, end - max(begin, until))
        until = max(until, end)
    return parts


def operator_times(events: list[dict]) -> Counter[str]:
    """Return microseconds by kind of operators on the host, each without the operators it calls."""
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    parts = Counter()
    # stack of the operators that are running: (thread, end, kind)
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
    """Return the peak bytes that `function()` allocates on `device`, beyond those held before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    events = record_events(function, device, profile_memory=True)
    memory = [event for event in events if event["name"] == "[memory]"]
    memory.sort(key=lambda event: event["ts"])
    # freed bytes are negative
    return max(accumulate((event["args"]["Bytes"] for event in memory), initial=0))
