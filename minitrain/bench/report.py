"""Results as lines of JSON, as --json writes them, and as a table for the terminal, in Markdown."""

import json
import sys
from pathlib import Path

from minitrain.errors import InputError, refused
from minitrain.run.config_yaml import describe


def read_lines(option: str, file: str) -> list[tuple[str, dict]]:
    """Each line's object in a file that --json wrote, behind its place for messages. Raises
    InputError.
    """
    with refused(f"{option} {file} cannot be read"):
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{option} {file}, line {number}"
        try:
            found.append((where, json.loads(line)))
        except (ValueError, RecursionError):
            raise InputError(f"{where} is not JSON, as --json writes (was it cut short?)") from None
        need(where, {"result": found[-1][1]}, dict, "result")
    return found


def need(where: str, values: dict, kind: type, *names: str) -> None:
    """Raises InputError if one of these is missing, not of the kind, or for float no number above
    0.
    """
    for name in names:
        value = values.get(name)
        number = isinstance(value, int | float) and 0 < value <= sys.float_info.max
        if not (number if kind is float else isinstance(value, kind)):
            wanted = {float: "a number above 0", str: "text", dict: "a mapping", list: "a list"}[
                kind
            ]
            raise InputError(
                f"{where} needs {name}, {wanted}" + f", not {describe(value)}" * (name in values)
            )


def need_rates(where: str, outcome: dict) -> None:
    """Raises InputError if this is not what --calibrate writes."""
    need(where, outcome, float, "attention_forward", "attention_backward", "memory")
    need(where, outcome, dict, "matmul")
    need(where, outcome["matmul"], float, *outcome["matmul"])


WIDTH = 100  # columns of a terminal
UNITS = {  # by the size of what is told in them
    "s": (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)),
    "GiB": (("MiB", 2**-10), ("GiB", 1.0)),
    "TFLOP/s": (("GFLOP/s", 1e-3), ("TFLOP/s", 1.0)),
}
PHASES = ("generation", "logprobs", "training", "refit")  # of a GRPO step


def table(results: list[dict], wide: bool = False) -> str:
    """Return one line per result, below one for each machine, and what each says of another
    library.

    wide: with all columns, in whatever width. Columns that no result fills are left out.
    """
    machines = list(dict.fromkeys(map(machine, results)))
    columns = {
        "row": [label(r) for r in results],
        "machine": [
            f"{r['device']} x {r['world_size']}" if len(machines) > 1 else "" for r in results
        ],
        "fits": [{True: "yes", False: "no"}.get(r.get("fits"), "") for r in results],
        **sized("step", "s", results, "step_time_s"),
        "spread": [spread(r) for r in results],
        "tokens/s/GPU": [short(r["tokens_per_sec_per_gpu"]) for r in results],
        **sized("prefill", "s", results, "first_tokens_s"),
        "decoded/s": [short(r.get("decode_tokens_per_sec_per_gpu")) for r in results],
        "MBU": [number(r.get("decode_mbu"), ".1%") for r in results],
        **sized("", "TFLOP/s", [{} if is_sampling(r) else r for r in results], "tflops_per_gpu"),
        "MFU": [f"{r['mfu']:.1%}" for r in results],
        **sized("peak", "GiB", results, "peak_memory_gib"),
        **(rare_columns(results) if wide else {}),
        "ratio": [number(r["ratio"], ".3f") for r in results],
        "recipe": [number(r.get("as_published", {}).get("ratio"), ".3f") for r in results],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    body = markdown(columns) if wide else in_width(columns)
    return "\n".join([*machines, body, *(beside(r) for r in results if "versus" in r)])


def rare_columns(results: list[dict]) -> dict[str, list[str]]:
    """Return what --wide shows besides."""
    columns = {
        **sized("clean", "TFLOP/s", results, "clean_tflops_per_gpu"),
        **sized("matmul", "TFLOP/s", results, "matmul_tflops"),
        **sized("estimated", "GiB", results, "estimated_memory_gib"),
        **sized("activations", "GiB", results, "activations_gib"),
        **sized("activations estimated", "GiB", results, "estimated_activations_gib"),
        **sized("compile", "s", results, "compile_s"),
    }
    for phase in PHASES:
        columns |= sized(phase, "s", results, f"{phase}_s")
    columns["published tokens/s"] = [number(published(r), ",.0f") for r in results]
    return columns | sized("published step", "s", results, "published_step_time_s")


def sized(name: str, unit: str, results: list[dict], key: str) -> dict[str, list[str]]:
    """Return a column of figures in the unit that suits the largest of them."""
    values = [result.get(key) for result in results]
    largest = max((value for value in values if value), default=1.0)
    unit, size = next(
        (pair for pair in reversed(UNITS[unit]) if largest >= pair[1]), UNITS[unit][0]
    )
    return {
        f"{name} {unit}".strip(): [number(value / size, ".4g") if value else "" for value in values]
    }


def spread(result: dict) -> str:
    """Return how far apart a run's fastest and slowest steps are, as a share of the median."""
    if "step_time_max_s" not in result:
        return ""
    return f"{(result['step_time_max_s'] - result['step_time_min_s']) / result['step_time_s']:.0%}"


def short(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def beside(result: dict) -> str:
    """Say how fast a result is beside another library."""
    library = "training the whole model" if result["versus"] == "full" else result["versus"]
    low, high = result["versus_ratio_range"]
    line = f"{result['row']}: {result['versus_ratio']:.2f} times as fast as {library} ({low:.2f} to {high:.2f})"
    if "versus_memory_gib" not in result:
        return line
    ours, theirs = result["versus_memory_gib"]
    return f"{line}, in {ours:.3f} GiB where that takes {theirs:.3f}"


def in_width(columns: dict[str, list[str]]) -> str:
    """Return `markdown` of the columns in WIDTH: where names make it wider, they stand above it, by
    number.
    """
    text = markdown(columns)
    if max(map(len, text.splitlines())) <= WIDTH:
        return text
    names = [name for name in ("row", "settings", "machine") if name in columns]
    texts = [", ".join(parts) for parts in zip(*(columns[name] for name in names), strict=True)]
    others = {name: cells for name, cells in columns.items() if name not in names}
    if len(texts) == 1:
        return f"{texts[0]}\n{markdown(others)}"
    numbers = [str(n) for n in range(1, len(texts) + 1)]
    legend = [f"{n}: {each}" for n, each in zip(numbers, texts, strict=True)]
    return "\n".join([*legend, markdown({"": numbers, **others})])


def machine(result: dict) -> str:
    """What a result is of, and what its MFU is a share of."""
    simulated = "simulated" in (result["mode"], result.get("extrapolated_from"))
    return (
        f"{result['device']}, {result['world_size']} process(es), torch {result['torch']}; "
        f"MFU is of the matmul rate {'of large products there' if simulated else 'measured here'}"
    )


def details(result: dict) -> str:
    """What a profile or a simulation knows beyond its line in the table: per GPU and step, of the
    first rank; its fullest one's memory."""
    if result["mode"] == "measured":
        return f"seconds: {amounts(result['breakdown_s'])}"
    model = result["clean_tflops_per_gpu"] * result["step_time_s"]
    messages = [
        f"{name} {calls:,} x, {size / 2**30:,.4g} GiB"
        for name, (calls, size) in sorted(result["collectives"].items())
    ]
    return "\n".join(
        [
            f"FLOPs: executed {result['executed_flops_per_gpu'] / 1e12:,.5g} TFLOP, of the model {model:,.5g}",
            f"messages: {'; '.join(messages) or 'none'}",
            f"seconds: {amounts(result['breakdown_s'])}",
            f"GiB: {amounts(result['memory_gib'])}, of {result['capacity_gib']:.4g}",
        ]
    )


def amounts(parts: dict[str, float]) -> str:
    return ", ".join(
        f"{name} {amount:.3g}" for name, amount in parts.items() if amount > 1e-9
    )  # less is rounding


def label(result: dict) -> str:
    """The row's name, and what makes the result another thing than a measured step of that row."""
    notes = [] if result["mode"] == "measured" else [result["mode"]]
    notes += ["sampling"] * is_sampling(result)
    layers = result.get("layers")
    changed = result["reference"].get("changed", [])
    if result["mode"] == "simulated" and not on_own_system(result):
        notes[0] += f" on {result['system']}"
        changed = [name for name in changed if name != "system"]
    if result.get("proxy"):
        counts = " and ".join(map(str, layers)) if isinstance(layers, list) else layers
        notes.append(f"proxy, {counts} of {result['full_layers']} layers")
    if changed and (result["mode"] == "extrapolated" or not result.get("proxy")):
        notes.append(f"changed: {', '.join(changed)}")
    return f"{result['row']} ({'; '.join(notes)})" if notes else result["row"]


def is_sampling(result: dict) -> bool:
    return "first_tokens_s" in result


def on_own_system(result: dict) -> bool:
    """Not on another than its config's published row ran on, if it says any."""
    system = result.get("system")
    published = result["reference"].get("system")
    return not (system and published) or system.lower() == published.lower()


def calibration_line(outcome: dict) -> str:
    products = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in outcome["matmul"].items())
    return (
        f"{outcome['device']}, torch {outcome['torch']}: matrix products {products} TFLOP/s; attention forward "
        f"{outcome['attention_forward'] / 1e12:.4g}, backward {outcome['attention_backward'] / 1e12:.4g} TFLOP/s; "
        f"memory {outcome['memory'] / 1e9:.4g} GB/s"
    )


def published(result: dict) -> float | None:
    """The table's tokens/s per GPU, where this result can be compared with it."""
    return None if result["ratio"] is None else result["reference"].get("tokens_per_sec_per_gpu")


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def markdown(columns: dict[str, list[str]]) -> str:
    """Aligned Markdown from equally long columns; the first is text, the others are numbers."""
    widths = {name: max(2, len(name), *map(len, cells)) for name, cells in columns.items()}
    lines = [list(columns), *map(list, zip(*columns.values(), strict=True))]
    first, *others = widths.values()
    lines.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    rows = [[cells[0].ljust(first), *map(str.rjust, cells[1:], others)] for cells in lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
