"""Results as a table for the terminal, in Markdown."""


def table(results: list[dict]) -> str:
    """One line per result; columns that no result fills are left out."""
    first = results[0]
    simulated = "simulated" in (first["mode"], first.get("extrapolated_from"))
    header = (
        f"{first['device']}, {first['world_size']} process(es), torch {first['torch']}; "
        f"MFU is of the matmul rate {'of large products there' if simulated else 'measured here'}, "
        f"{first['matmul_tflops']:.4g} TFLOP/s"
    )
    columns = {
        "row": [label(r) for r in results],
        "fits": [{True: "yes", False: "no"}.get(r.get("fits"), "") for r in results],
        "step s": [f"{r['step_time_s']:.4g}" for r in results],
        "tokens/s/GPU": [f"{r['tokens_per_sec_per_gpu']:,.0f}" for r in results],
        "TFLOP/s": [f"{r['tflops_per_gpu']:.4g}" for r in results],
        "clean TFLOP/s": [f"{r['clean_tflops_per_gpu']:.4g}" for r in results],
        "MFU": [f"{r['mfu']:.1%}" for r in results],
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
    return header + "\n" + markdown({name: cells for name, cells in columns.items() if any(cells)})


def label(result: dict) -> str:
    """The row's name, and what makes the result another thing than a measured step of that row."""
    notes = [] if result["mode"] == "measured" else [result["mode"]]
    layers, changed = result.get("layers"), result["reference"].get("changed")
    if result["proxy"]:
        counts = " and ".join(map(str, layers)) if isinstance(layers, list) else layers
        notes.append(f"proxy, {counts} of {result['full_layers']} layers")
    elif changed:
        notes.append(f"changed: {', '.join(changed)}")
    return f"{result['row']} ({'; '.join(notes)})" if notes else result["row"]


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
    widths = {name: max(len(name), *map(len, cells)) for name, cells in columns.items()}
    lines = [list(columns), *map(list, zip(*columns.values(), strict=True))]
    first, *others = widths.values()
    lines.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    rows = [[cells[0].ljust(first), *map(str.rjust, cells[1:], others)] for cells in lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
