"""Read results from lines of JSON, as --json writes them, and print them as Markdown tables."""

import json
import sys
from pathlib import Path

from minitrain.errors import InputError, as_input_error
from minitrain.run.config.config_yaml import type_and_value

# words in the names of GPUs that are slower forms, or parts, of a system's GPU
OTHER_FORMS = {"pcie", "nvl", "mig"}
KINDS = {float: "a number above 0", str: "text", dict: "a mapping", list: "a list"}


def result_lines(option: str, file: str) -> list[tuple[str, dict]]:
    """Return (place for messages, object) of each line of a file that --json wrote.

    Raises InputError.
    """
    with as_input_error(f"{option} {file} cannot be read"):
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{option} {file}, line {number}"
        try:
            result = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(
                f"{where} is not JSON, as --json writes (was it cut short?)"
            ) from None
        need(where, {"result": result}, dict, "result")
        found.append((where, result))
    return found


def need(where: str, values: dict, kind: type, *names: str) -> None:
    """Raise InputError unless `values` has all `names` with values of type `kind`; floats: > 0."""
    for name in names:
        value = values.get(name)
        is_number = isinstance(value, int | float) and 0 < value <= sys.float_info.max
        if not (is_number if kind is float else isinstance(value, kind)):
            found = f", not {type_and_value(value)}" if name in values else ""
            raise InputError(f"{where} needs {name}, {KINDS[kind]}{found}")


def need_rates(where: str, outcome: dict) -> None:
    """Raise InputError if a calibration lacks rates."""
    need(where, outcome, float, "attention_forward", "attention_backward", "memory")
    need(where, outcome, dict, "matmul")
    need(where, outcome["matmul"], float, *outcome["matmul"])


# --- cells and columns

# the greatest width of a table, in characters
WIDTH = 100
# columns that hold text
NAMES = ("row", "settings", "machine")
# base unit -> units from large to small, each in base units
UNITS = {
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6},
    "GiB": {"GiB": 1.0, "MiB": 2**-10},
    "TFLOP/s": {"TFLOP/s": 1.0, "GFLOP/s": 1e-3},
}

# columns that only --wide shows: name, unit, key of the result
RARE = (
    ("clean", "TFLOP/s", "clean_tflops_per_gpu"),
    ("matmul", "TFLOP/s", "matmul_tflops"),
    ("estimated", "GiB", "estimated_memory_gib"),
    ("activations", "GiB", "activations_gib"),
    ("activations estimated", "GiB", "estimated_activations_gib"),
    ("compile", "s", "compile_s"),
    # the phases of a GRPO step
    ("generation", "s", "generation_s"),
    ("logprobs", "s", "logprobs_s"),
    ("training", "s", "training_s"),
    ("refit", "s", "refit_s"),
)


def format_number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def short(value: float | None) -> str:
    return format_number(value, ",.0f" if value and value >= 1000 else ".4g")


def column(results: list[dict], key: str, form: str) -> list[str]:
    """Return a figure of each result as text, empty where a result has none."""
    return [format_number(result.get(key), form) for result in results]


def sized(name: str, unit: str, results: list[dict], key: str) -> dict[str, list[str]]:
    """Return a column of figures in the unit that suits the largest of them."""
    values = [result.get(key) or 0.0 for result in results]
    largest = max(values, default=0.0)
    sizes = UNITS[unit]
    # the largest unit that does not exceed it; otherwise the smallest
    unit = next((each for each in sizes if largest >= sizes[each]), [*sizes][-1])
    size = sizes[unit]
    return {f"{name} {unit}".strip(): [f"{x / size:.4g}" if x else "" for x in values]}


def filled(columns: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the columns that are not empty in all lines."""
    return {name: cells for name, cells in columns.items() if any(cells)}


def by_column(lines: list[dict[str, str]]) -> dict[str, list[str]]:
    """Turn lines that all have the same keys into columns, without empty columns."""
    return filled({name: [line[name] for line in lines] for name in (lines or [{}])[0]})


def markdown(columns: dict[str, list[str]]) -> str:
    """Return columns as an aligned Markdown table: the first to the left, others to the right."""
    widths = [max(2, *map(len, (name, *cells))) for name, cells in columns.items()]
    rules = ["-" * (width - 1) + ":" for width in widths]
    rules[0] = "-" * widths[0]
    forms = [f">{width}" for width in widths]
    forms[0] = f"<{widths[0]}"
    lines = [columns, rules, *zip(*columns.values(), strict=True)]
    return "\n".join(f"| {' | '.join(map(format, line, forms))} |" for line in lines)


def in_width(columns: dict[str, list[str]]) -> str:
    """Return a Markdown table; if it exceeds WIDTH, texts stand above it, numbered, in its place."""
    text = markdown(columns)
    if max(map(len, text.splitlines())) <= WIDTH:
        return text
    names = [cells for name, cells in columns.items() if name in NAMES]
    figures = {name: cells for name, cells in columns.items() if name not in NAMES}
    texts = list(map(", ".join, zip(*names, strict=True)))
    if len(texts) > 1:
        figures = {"": [str(n + 1) for n in range(len(texts))]} | figures
        texts = [f"{n}: {each}" for n, each in enumerate(texts, 1)]
    return "\n".join([*texts, markdown(figures)])


# --- the terminal's table


def table(results: list[dict], wide: bool = False) -> str:
    """Return the machines, a table with a line per result, and comparisons with other libraries.

    wide: all columns, in whatever width.
    """
    columns = result_columns(results)
    if wide:
        columns = filled(columns | rare_columns(results))
    body = markdown(columns) if wide else in_width(columns)
    machines = dict.fromkeys(map(machine, results))
    return "\n".join([*machines, body, *(comparison(r) for r in results if "versus" in r)])


def result_columns(results: list[dict]) -> dict[str, list[str]]:
    """Return the columns of results, without those that are empty for all of them."""
    several = len(set(map(machine, results))) > 1
    columns = {
        "row": [label(r) for r in results],
        "machine": [f"{r['device']} x {r['world_size']}" if several else "" for r in results],
        "fits": [{True: "yes", False: "no"}.get(r.get("fits"), "") for r in results],
        **sized("step", "s", results, "step_time_s"),
        "spread": [spread(r) for r in results],
        "tokens/s/GPU": [short(r["tokens_per_sec_per_gpu"]) for r in results],
        **sized("prefill", "s", results, "first_tokens_s"),
        "decoded/s": [short(r.get("decode_tokens_per_sec_per_gpu")) for r in results],
        "MBU": column(results, "decode_mbu", ".1%"),
        **sized("", "TFLOP/s", [{} if is_sampling(r) else r for r in results], "tflops_per_gpu"),
        "MFU": column(results, "mfu", ".1%"),
        **sized("peak", "GiB", results, "peak_memory_gib"),
        "ratio": column(results, "ratio", ".3f"),
        "recipe": column([r.get("as_published") or {} for r in results], "ratio", ".3f"),
    }
    return filled(columns)


def rare_columns(results: list[dict]) -> dict[str, list[str]]:
    """Return the columns that --wide adds."""
    columns = {}
    for name, unit, key in RARE:
        columns |= sized(name, unit, results, key)
    compared = [{} if r["ratio"] is None else r["reference"] for r in results]
    columns["published tokens/s"] = column(compared, "tokens_per_sec_per_gpu", ",.0f")
    return columns | sized("published step", "s", results, "published_step_time_s")


def spread(result: dict) -> str:
    """Return the difference between the slowest and the fastest step, as a share of the median."""
    if "step_time_max_s" not in result:
        return ""
    width = result["step_time_max_s"] - result["step_time_min_s"]
    return f"{width / result['step_time_s']:.0%}"


def comparison(result: dict) -> str:
    """Return a line on how fast a result is compared with another library."""
    library = "training the whole model" if result["versus"] == "full" else result["versus"]
    low, high = result["versus_ratio_range"]
    line = f"{result['row']}: {result['versus_ratio']:.2f} times as fast as {library} ({low:.2f} to {high:.2f})"
    if "versus_memory_gib" not in result:
        return line
    ours, theirs = result["versus_memory_gib"]
    return f"{line}, in {ours:.3f} GiB where that takes {theirs:.3f}"


def machine(result: dict) -> str:
    """Return a line on a result's machine, and on the rate that its MFU refers to."""
    simulated = "simulated" in (result["mode"], result.get("extrapolated_from"))
    return (
        f"{result['device']}, {result['world_size']} process(es), torch {result['torch']}; "
        f"MFU is of the matmul rate {'of large products there' if simulated else 'measured here'}"
    )


def details(result: dict) -> str:
    """Return further lines on a profiled or simulated step: a GPU's seconds, FLOPs and memory.

    They are the first rank's, except that memory is that of the rank with the most.
    """
    seconds = f"seconds: {amounts(result['breakdown_s'])}"
    if result["mode"] == "measured":
        return seconds
    model = result["clean_tflops_per_gpu"] * result["step_time_s"]
    messages = [
        f"{name} {calls:,} x, {size / 2**30:,.4g} GiB"
        for name, (calls, size) in sorted(result["collectives"].items())
    ]
    lines = [
        f"FLOPs: executed {result['executed_flops_per_gpu'] / 1e12:,.5g} TFLOP, of the model {model:,.5g}",
        f"messages: {'; '.join(messages) or 'none'}",
        seconds,
        f"GiB: {amounts(result['memory_gib'])}, of {result['capacity_gib']:.4g}",
    ]
    if on_host := result.get("host_activations_gib"):
        lines[-1] += f"; {on_host:.3g} of activations on the host"
    return "\n".join(lines)


def amounts(parts: dict[str, float]) -> str:
    # less than 1e-9 is rounding
    return ", ".join(f"{name} {amount:.3g}" for name, amount in parts.items() if amount > 1e-9)


def label(result: dict) -> str:
    """Return the row's name and, in parentheses, how the result differs from a measured step of it."""
    notes = [] if result["mode"] == "measured" else [result["mode"]]
    changed = result["reference"].get("changed", [])
    if result["mode"] == "simulated" and not on_own_system(result):
        notes[0] += f" on {result['system']}"
        changed = [name for name in changed if name != "system"]
    if is_sampling(result):
        notes.append("sampling")
    if result.get("proxy"):
        layers = result["layers"]
        counts = " and ".join(map(str, layers)) if isinstance(layers, list) else layers
        notes.append(f"proxy, {counts} of {result['full_layers']} layers")
    if changed and (result["mode"] == "extrapolated" or not result.get("proxy")):
        notes.append(f"changed: {', '.join(changed)}")
    return f"{result['row']} ({'; '.join(notes)})" if notes else result["row"]


def is_sampling(result: dict) -> bool:
    return "first_tokens_s" in result


def on_own_system(result: dict) -> bool:
    """Return False if a result is of another system than its published row."""
    published = result["reference"].get("system")
    if published and result["mode"] == "simulated":
        return (result.get("system") or published).lower() == published.lower()
    return not published or is_of_system(result["device"], published)


def is_of_system(machine: str, system: str) -> bool:
    """Return whether `machine`, the name of a system or of a device, is of a published system."""
    words = set(machine.lower().split())
    name = system.lower()
    return not words.isdisjoint({name, name.removeprefix("dgx-")}) and words.isdisjoint(
        OTHER_FORMS
    )


def calibration_line(outcome: dict) -> str:
    """Return a line of a machine's measured rates."""
    products = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in outcome["matmul"].items())
    return (
        f"{outcome['device']}, torch {outcome['torch']}: matrix products {products} TFLOP/s; attention forward "
        f"{outcome['attention_forward'] / 1e12:.4g}, backward {outcome['attention_backward'] / 1e12:.4g} TFLOP/s; "
        f"memory {outcome['memory'] / 1e9:.4g} GB/s"
    )
