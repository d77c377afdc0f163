"""Results as lines of JSON, as --json writes them, and as a table for the terminal, in Markdown."""

import json
import sys
from pathlib import Path

from minitrain.errors import InputError, refused
from minitrain.run.config_yaml import describe


def read_lines(option: str, file: str) -> list[tuple[str, dict]]:
    """Each line's object in a file that --json wrote, behind its place for messages. Raises InputError."""
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
    """Raises InputError if one of these is missing, not of the kind, or for float no number above 0."""
    for name in names:
        value = values.get(name)
        number = isinstance(value, int | float) and 0 < value <= sys.float_info.max
        if not (number if kind is float else isinstance(value, kind)):
            wanted = {float: "a number above 0", str: "text", dict: "a mapping", list: "a list"}[kind]
            raise InputError(f"{where} needs {name}, {wanted}" + f", not {describe(value)}" * (name in values))


def need_rates(where: str, outcome: dict) -> None:
    """Raises InputError if this is not what --calibrate writes."""
    need(where, outcome, float, "attention_forward", "attention_backward", "memory")
    need(where, outcome, dict, "matmul")
    need(where, outcome["matmul"], float, *outcome["matmul"])


def table(results: list[dict]) -> str:
    """One line per result, below one for each machine; columns that no result fills are left out."""
    machines = list(dict.fromkeys(map(machine, results)))
    columns = {
        "row": [label(r) for r in results],
        "machine": [f"{r['device']} x {r['world_size']}" if len(machines) > 1 else "" for r in results],
        "fits": [{True: "yes", False: "no"}.get(r.get("fits"), "") for r in results],
        "step s": [f"{r['step_time_s']:.4g}" for r in results],
        "tokens/s/GPU": [f"{r['tokens_per_sec_per_gpu']:,.0f}" for r in results],
        "first tokens s": [number(r.get("first_tokens_s"), ".3g") for r in results],
        "decoded tokens/s/GPU": [number(r.get("decode_tokens_per_sec_per_gpu"), ",.0f") for r in results],
        "decode MBU": [number(r.get("decode_mbu"), ".1%") for r in results],
        "TFLOP/s": [f"{r['tflops_per_gpu']:.4g}" for r in results],
        "clean TFLOP/s": [f"{r['clean_tflops_per_gpu']:.4g}" for r in results],
        "MFU": [f"{r['mfu']:.1%}" for r in results],
        "matmul TFLOP/s": [f"{r['matmul_tflops']:.4g}" for r in results],
        "peak GiB": [number(r["peak_memory_gib"], ".2f") for r in results],
        "estimated": [number(r.get("estimated_memory_gib"), ".2f") for r in results],
        "activations GiB": [number(r.get("activations_gib"), ".3f") for r in results],
        "activations estimated": [number(r.get("estimated_activations_gib"), ".3f") for r in results],
        "compile s": [number(r.get("compile_s") or None, ".1f") for r in results],
        **{
            f"{phase} s": [number(r.get(f"{phase}_s"), ".3g") for r in results]
            for phase in ("generation", "logprobs", "training", "refit")
        },
        "published tokens/s": [number(published(r), ",.0f") for r in results],
        "published step s": [number(r["published_step_time_s"], ".4g") for r in results],
        "ratio": [number(r["ratio"], ".3f") for r in results],
        "ratio as published": [number(r.get("as_published", {}).get("ratio"), ".3f") for r in results],
    }
    for library in sorted({r["versus"] for r in results if "versus" in r}):
        columns[f"versus {library}"] = [number(r.get("versus_ratio"), ".3f") for r in results]
    columns["GiB of both"] = [" / ".join(number(x, ".3f") for x in r.get("versus_memory_gib", [])) for r in results]
    return "\n".join([*machines, markdown({name: cells for name, cells in columns.items() if any(cells)})])


def machine(result: dict) -> str:
    """What a result is of, and what its MFU is a share of."""
    simulated = "simulated" in (result["mode"], result.get("extrapolated_from"))
    return (
        f"{result['device']}, {result['world_size']} process(es), torch {result['torch']}; "
        f"MFU is of the matmul rate {'of large products there' if simulated else 'measured here'}"
    )


def details(result: dict) -> str:
    """What a profile or a simulation knows beyond its line in the table: per GPU and step, of the first rank; its
    fullest one's memory."""
    if result["mode"] == "measured":
        return f"seconds: {amounts(result['breakdown_s'])}"
    model = result["clean_tflops_per_gpu"] * result["step_time_s"]
    messages = [
        f"{name} {calls:,} x, {size / 2**30:,.4g} GiB" for name, (calls, size) in sorted(result["collectives"].items())
    ]
    return "\n".join([
        f"FLOPs: executed {result['executed_flops_per_gpu'] / 1e12:,.5g} TFLOP, of the model {model:,.5g}",
        f"messages: {'; '.join(messages) or 'none'}",
        f"seconds: {amounts(result['breakdown_s'])}",
        f"GiB: {amounts(result['memory_gib'])}, of {result['capacity_gib']:.4g}",
    ])  # fmt: skip


def amounts(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {amount:.3g}" for name, amount in parts.items() if amount > 1e-9)  # less is rounding


def label(result: dict) -> str:
    """The row's name, and what makes the result another thing than a measured step of that row."""
    notes = [] if result["mode"] == "measured" else [result["mode"]]
    notes += ["sampling"] * ("first_tokens_s" in result)
    layers, changed = result.get("layers"), result["reference"].get("changed", [])
    if result["mode"] == "simulated" and not on_own_system(result):
        notes[0] += f" on {result['system']}"
        changed = [name for name in changed if name != "system"]
    if result.get("proxy"):
        counts = " and ".join(map(str, layers)) if isinstance(layers, list) else layers
        notes.append(f"proxy, {counts} of {result['full_layers']} layers")
    if changed and (result["mode"] == "extrapolated" or not result.get("proxy")):
        notes.append(f"changed: {', '.join(changed)}")
    return f"{result['row']} ({'; '.join(notes)})" if notes else result["row"]


def on_own_system(result: dict) -> bool:
    """Not on another than its config's published row ran on, if it says any."""
    system, published = result.get("system"), result["reference"].get("system")
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
