"""The launches between two marks of a log, by kind: number, bytes, and the milliseconds of a roofline of the H100."""

import math
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import torch

# of an H100: bytes/s, and FLOP/s of products by bytes of an element, of attention, of grouped products
MEMORY, PRODUCTS, ATTENTION, GROUPED = (
    2.9e12,
    {1: 1300e12, 2: 660e12, 4: 40e12},
    (520e12, 420e12),
    0.8,
)
LAUNCH = 2.5e-6  # seconds that no kernel goes below


@cache
def generated_bytes(file: str) -> float:
    """Return the bytes that a kernel of the compiler reads and writes, by its own benchmark's arguments.

    A load or store touches as many elements as the kernel's loops have points, and no more than
    there are: of a gather, the rows that it takes.
    """
    source = Path(file).read_text()
    arguments = re.search(r"\ndef triton_\w+\(([^)]*)\):", source)[1].split(",")
    sizes = re.findall(r"\n +\w+numel = (\d+)", source)
    points = math.prod(map(int, sizes)) if sizes else math.inf
    moved = 0.0
    for number, argument in enumerate(arguments):
        name = argument.strip()
        tensor = rf"arg_{number} = rand_strided\(\(([0-9, ]*)\), \(([0-9, ]*)\), .*?dtype=torch\.(\w+)\)"
        if shape := re.search(tensor, source):
            dims = zip(shape[1].split(","), shape[2].split(","), strict=True)
            count = math.prod(
                int(size) for size, stride in dims if size.strip() and stride.strip() != "0"
            )
            uses = len(re.findall(rf"\({name} \+ ", source)) or math.inf
            touched = min(count, points * uses) * (1 + name.startswith("in_out"))
            moved += touched * getattr(torch, shape[3]).itemsize
    return moved


def operator_cost(text: str) -> tuple[str, float, float]:
    """Kind, FLOPs / rate in seconds, and bytes of a logged product or attention."""
    name, *tensors = text.split(" ")
    shapes = [[int(n) for n in re.findall(r"\d+", t[: t.index("]")])] for t in tensors]
    a, b = shapes[:2]
    size = getattr(torch, tensors[0].split("torch.")[1]).itemsize
    if name.startswith(("cudnn", "flash", "efficient")):
        batch, heads, length, width = a
        flops = (
            2
            * batch
            * heads
            * length
            * b[2]
            * (width + shapes[2][3])
            / (2 if "causal" in name else 1)
        )
        backward = "backward" in name
        return "attention", (2.5 if backward else 1) * flops / ATTENTION[backward], 0
    m, k, n = math.prod(a[:-1]), a[-1], b[-1]
    if name == "_grouped_mm":
        stack = shapes[2][0] * (k * n if len(b) == 3 else m * n)
        others = m * k + (m * n if len(b) == 3 else k * n)
        return "grouped", 2 * m * k * n / (PRODUCTS[size] * GROUPED), size * (stack + others)
    added = len(shapes) - 2
    moved = size * (m * k + math.prod(b) + m * n * (1 + added))
    seconds = 2 * m * k * n / PRODUCTS[size]
    return "product" if seconds > moved / MEMORY else "thin product", seconds, moved


def summarize(launches: list[str]) -> str:
    """Return the table of these lines of a log, and the 20 kernels that take longest."""
    kinds, kernels = defaultdict(lambda: [0, 0.0, 0.0]), Counter()
    source = ""  # of the compiled kernel that is launched next
    for line in launches:
        kind, name, _, y, *_ = line.split("\t")
        if kind == "SOURCE":
            source = name
            continue
        seconds = moved = 0.0
        if kind == "G":
            kind, seconds, moved = operator_cost(name)
        elif kind == "T":
            kind, moved = "generated", generated_bytes(source) if source else 0.0
        elif kind == "K":
            kind = "torch's own"
        elif kind in ("H2D", "D2H", "D2D", "memset"):
            moved = int(y)
        seconds = max(seconds, moved / MEMORY, LAUNCH)
        row = kinds[kind]
        kinds[kind] = [row[0] + 1, row[1] + moved, row[2] + seconds]
        kernels[name[:100]] += seconds
    rows = sorted(kinds.items(), key=lambda item: -item[1][2])
    rows.append(("all", [sum(row[i] for row in kinds.values()) for i in range(3)]))
    lines = [f"{'kind':14} {'launches':>9} {'GB':>9} {'ms':>9}"]
    lines += [
        f"{kind:14} {count:9} {moved / 1e9:9.2f} {seconds * 1e3:9.2f}"
        for kind, (count, moved, seconds) in rows
    ]
    return "\n".join(
        lines + [f"{seconds * 1e3:9.3f} ms  {name}" for name, seconds in kernels.most_common(20)]
    )
