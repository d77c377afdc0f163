"""The tables and notes of the report, and the whole of it as Markdown."""

from minitrain.bench.report import MODES, Report, Row
from minitrain.bench.report_accuracy import accuracy_cells, outliers, summary
from minitrain.bench.rows import FIGURES
from minitrain.bench.tables import by_column, format_number, markdown, result_columns, short

# keys of `reference` that are printed as notes, each with how the note begins
REMARKS = {"known_error": "", "differs": "the published run ", "others": "others' tokens/s: "}


def cells(rows: list[Row]) -> dict[str, list[str]]:
    """Return the columns of a published table: ratios, figures, memory, and the layout last."""
    unit = FIGURES[rows[0].figure]
    return by_column([table_line(row, unit) for row in rows])


def table_line(row: Row, unit: str) -> dict[str, str]:
    """Return a row's cells by column. unit: of the published figure."""
    reference = row.reference
    batch = row.tree["batch"]
    layout = [f"{reference['gpus']} {reference['system']}"]
    layout.append(f"batch {batch['global']} x {batch['seq_len']}, micro {batch['micro']}")
    for name in ("tp", "pp", "cp", "vp", "ep"):
        size = row.tree["parallel"].get(name, 1)
        if size > 1:
            layout.append(f"{name}={size}")
    found = {kind: row.results.get(kind, {}) for kind in MODES}
    memory = {kind: format_number(r.get("peak_memory_gib"), ".1f") for kind, r in found.items()}
    return {
        "row": row.short_name,
        **{f"{kind} ratio": format_number(r.get("ratio"), ".3f") for kind, r in found.items()},
        f"published {unit}": short(reference[row.figure]),
        **{kind: short(r.get(row.figure)) for kind, r in found.items()},
        **{f"{kind} GiB": gib for kind, gib in memory.items() if kind != "recipe"},
        "published step s": format_number(reference.get("step_time_s"), ".4g"),
        "published TFLOP/s": format_number(reference.get("tflops_per_gpu"), ".4g"),
        "note": "*" if {"known_error", "differs"} & reference.keys() else "",
        "layout": ", ".join(layout),
    }


def notes(rows: list[Row]) -> list[str]:
    """Return lines on known errors of published figures, differing runs, and extrapolations."""
    lines = []
    for row in rows:
        for key, start in REMARKS.items():
            if key in row.reference:
                lines.append(f"{row.short_name}: {start}{row.reference[key]}")
        if result := row.results.get("extrapolated"):
            layers = " and ".join(map(str, result["layers"]))
            lines.append(
                f"{row.short_name}: extrapolated by proxy on one {result['device']} from {layers} of "
                f"{result['full_layers']} layers, without {result['left_out']}"
            )
    return lines


def provenance(report: Report) -> list[str]:
    """Return lines on what each kind of result is, and on which machines results were obtained."""
    shown = {kind for row in report.rows for kind in row.results}
    lines = [f"{kind}: {text}" for kind, text in MODES.items() if kind in shown]
    return lines + [
        f"{mode} on {'; '.join(sorted(names))}" for mode, names in report.machines.items()
    ]


def as_markdown(report: Report) -> str:
    """Return the whole report as Markdown."""
    parts = [f"# minitrain beside the published tables\n\n{report.day}. {summary(report)}."]
    parts += [f"- {line}" for line in provenance(report)]
    if table := accuracy_cells(report):
        parts.append(f"## Accuracy of the simulation\n\n{markdown(table)}")
        parts += [f"- {line}" for line in outliers(report)]
    for title, rows in report.tables.items():
        parts.append(f"## {title}\n\n{markdown(cells(rows))}")
        parts += [f"- {line}" for line in notes(rows)]
    if report.others:
        parts.append(
            f"## Not to be compared with a row\n\n{markdown(result_columns(report.others))}"
        )
    return "\n\n".join(parts) + "\n"
