"""Set results beside the published figures: `bench.py --report`.

The report has the tables of the published pages. Each row has at most one result of each kind (see
MODES), the last one given. Results that cannot be compared with a published figure are in a table of
their own: proxies, shrunk configs, changed models, other systems, configs that are no row.
`as_markdown` writes the report as Markdown, report_html.py as a page.
"""

from dataclasses import dataclass, field
from statistics import median, median_high

from minitrain.bench.rows import (
    FIGURES,
    constants,
    is_published,
    read_reference,
    row_trees,
    typed,
)
from minitrain.bench.tables import (
    by_column,
    format_number,
    markdown,
    need,
    need_rates,
    on_own_system,
    result_columns,
    result_lines,
    short,
)
from minitrain.errors import InputError

# simulated rows with a larger error are listed by name
LIMIT = 0.35
# key -> type, of what a result may lack or have as null
OPTIONAL = {
    "ratio": float,
    "peak_memory_gib": float,
    "capacity_gib": float,
    "decode_tokens_per_sec_per_gpu": float,
    "decode_mbu": float,
    "memory_gib": dict[str, float],
    "breakdown_s": dict[str, float],
    "system": str,
    "timeline": list[str],
    "as_published": dict,
}
# kinds of results, in the order of the columns, with a description of each
MODES = {
    "simulated": "our code in the published layout, with our kernels, predicted on fake tensors",
    "fastest": "our code in a faster layout of as many GPUs and as much memory (`--ours`)",
    "recipe": "the published run, predicted with its own kernels and costs (`reference.recipe`): "
    "this prediction's errors are the accuracy",
    "measured": "the whole row, run",
    "extrapolated": "from proxies with fewer layers on one rank, without communication",
}
# kinds that the summary describes in words
IN_WORDS = {"fastest": "in our fastest layout", "recipe": "predicted as they were run"}
# keys of `reference` that are printed as notes, each with how the note begins
REMARKS = {"known_error": "", "differs": "the published run ", "others": "others' tokens/s: "}


@dataclass
class Row:
    """A published row and its results."""

    name: str
    # its config file as written
    tree: dict
    # kind of measurement (a key of MODES) -> the measurement
    results: dict[str, dict] = field(default_factory=dict)

    @property
    def reference(self) -> dict:
        return self.tree["reference"]

    @property
    def figure(self) -> str:
        """Return the key of FIGURES that is compared."""
        return next(figure for figure in FIGURES if figure in self.reference)

    @property
    def published(self) -> float:
        """Return the published figure, corrected if it is known to be wrong."""
        return self.reference.get(f"corrected_{self.figure}", self.reference[self.figure])

    @property
    def short_name(self) -> str:
        return self.name.rsplit("/", 1)[-1]


@dataclass
class Report:
    """All rows with their results, and all other results."""

    # title of a published table -> its rows
    tables: dict[str, list[Row]]
    # results that cannot be compared with a row
    others: list[dict]
    calibrations: list[dict]
    # kind of result -> the machines and torch versions that gave such results
    machines: dict[str, set[str]]
    # ISO date
    day: str

    @property
    def rows(self) -> list[Row]:
        return [row for table in self.tables.values() for row in table]


def read_results(file: str) -> list[dict]:
    """Return the lines of a file that --json wrote. Raises InputError."""
    lines = result_lines("--report", file)
    for where, result in lines:
        need(where, result, str, "row", "mode", "device", "torch")
        if result["mode"] == "calibration":
            need_rates(where, result)
            continue
        check_figures(where, result)
        # the report also shows the figures by the published run's recipe
        check_figures(where, result | (result.get("as_published") or {}))
    return [result for _, result in lines]


def check_figures(where: str, result: dict) -> None:
    """Raise InputError if a result lacks what the tables show, or has it as another type."""
    need(where, result, dict, "reference")
    need(
        where, result, float, "world_size", *FIGURES, "step_time_s", "clean_tflops_per_gpu", "mfu"
    )
    known = {key: value for key, value in result.items() if value is not None}
    typed(known, OPTIONAL, f"{where}: ")
    if "" in known.get("timeline", ()):
        raise InputError(f"{where}: timeline has a lane without a letter")
    read_reference(result["reference"], f"{where}: reference")
    if result.get("proxy"):
        need(where, result, float, "full_layers")
    if result["mode"] == "extrapolated":
        need(where, result, list, "layers")
        need(where, result, str, "left_out")


def merge_results(results: list[dict], day: str) -> Report:
    """Return a report of all published rows and these results. day: an ISO date."""
    report = Report({}, [], [], {}, day)
    rows = {name: Row(name, tree) for name, tree in row_trees().items()}
    for result in results:
        mode = result["mode"]
        machine = f"{result['device']}, torch {result['torch']}"
        report.machines.setdefault(mode, set()).add(machine)
        row = rows.get(result["row"])
        if mode == "calibration":
            report.calibrations.append(result)
        elif mode in MODES and row and is_comparable(result, row):
            is_ours = mode == "simulated" and result["reference"].get("layout") == "ours"
            row.results["fastest" if is_ours else mode] = result
            if result.get("as_published"):
                row.results["recipe"] = result | result["as_published"]
        else:
            # the file may hold a ratio that does not apply to today's row
            report.others.append(result | {"ratio": None, "as_published": None})
    for row in rows.values():
        title = row.reference["source"]
        # this page has one table per system
        if title.startswith("NeMo Framework"):
            title += f", {row.reference['system']}"
        if row.results or is_published(row.name):
            report.tables.setdefault(title, []).append(row)
    return report


def is_comparable(result: dict, row: Row) -> bool:
    """Return True if a result's ratio applies to the row as its config is today.

    The result may be older than the config: the published figure, the number of GPUs and the system
    must still be the same.
    """
    kept = result["reference"]
    reference = row.reference
    figures = (row.figure, f"corrected_{row.figure}")
    return (
        bool(result.get("ratio"))
        and not kept.get("changed")
        and all(kept.get(key) == reference.get(key) for key in figures)
        and result["world_size"] == reference["gpus"]
        and on_own_system(result | {"reference": reference})
    )


# --- accuracy


def held_back(rows: list[Row]) -> list[Row]:
    """Return the simulated rows that no constant of the simulator was fitted to."""
    return simulated_of("held_back", rows)


def simulated_of(section: str, rows: list[Row]) -> list[Row]:
    """Return the simulated rows that systems.yaml lists under `fitted_on` or `held_back`."""
    names = constants(section)
    return [row for row in rows if "simulated" in row.results and row.name in names]


def predicted(row: Row) -> float:
    """Return the ratio of the simulated published run to the published figure.

    Without a recipe of its own, the published run is simulated as ours.
    """
    return row.results.get("recipe", row.results["simulated"])["ratio"]


def error(row: Row) -> float:
    """Return the relative error of a row's simulated figure."""
    return abs(predicted(row) - 1)


def summary(report: Report) -> str:
    """Return one line: how many published rows have which results, and the simulation's errors.

    Errors are those of `held_back` rows. Rows that a user added do not count.
    """
    rows = [row for row in report.rows if is_published(row.name)]
    parts = [f"{len(rows)} published rows"]
    for kind in MODES:
        ratios = [row.results[kind]["ratio"] for row in rows if kind in row.results]
        if ratios:
            middle = median_high(ratios)
            what = IN_WORDS.get(kind, kind)
            parts.append(f"{len(ratios)} {what}, median {middle:.2f} of the published figure")
    if tested := held_back(rows):
        middle = median(map(error, tested))
        worst = max(tested, key=error)
        errors = f"off by {middle:.1%} in the median, {error(worst):.0%} at worst ({worst.name})"
        parts.append(f"of {len(tested)} rows not fitted to, {errors}")
    return "; ".join(parts)


def accuracy_cells(report: Report) -> dict[str, list[str]]:
    """Return the columns of the simulation's errors: a line per published table, then totals."""
    training = [row for row in report.rows if row.tree.get("task") != "grpo"]
    groups = report.tables | {
        "all": report.rows,
        "all but GRPO": training,
        "all but GRPO and those whose published runs differ": [
            row for row in training if "differs" not in row.reference
        ],
    }
    lines = []
    for title, rows in groups.items():
        if tested := held_back(rows):
            worst = max(tested, key=error)
            fitted = simulated_of("fitted_on", rows)
            line = {
                "rows not fitted to": title,
                "number": str(len(tested)),
                "median error": f"{median(map(error, tested)):.1%}",
                "worst": f"{error(worst):.0%}",
                "which": worst.name,
                "of fitted rows": f"{median(map(error, fitted)):.1%}" if fitted else "",
            }
            lines.append(line)
    return by_column(lines)


def outliers(report: Report) -> list[str]:
    """Return lines that name held-back rows with errors above LIMIT, and rows that do not fit."""
    lines = []
    for row in sorted(held_back(report.rows), key=error, reverse=True):
        if error(row) > LIMIT:
            why = row.reference.get("differs")
            why = f"its published run {why}" if why else "unexplained"
            lines.append(f"{row.name}: {predicted(row):.2f} of the published figure; {why}")
    for row in report.rows:
        if row.results.get("simulated", {}).get("fits") is False:
            lines.append(f"{row.name}: its simulated memory does not fit")
    return lines


# --- tables


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
