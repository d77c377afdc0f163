"""Put results beside what was published: `bench.py --report`.

They stand in the tables of the published pages, as Markdown too.

Of several results for a row, the last one of each kind counts: simulated (and, where the published
run differed, by its recipe), measured as a whole, or extrapolated from proxies. What cannot stand
beside a published figure (proxies themselves, changed models, other systems, shrunk and other
configs) has a table of its own. report_html.py makes a page of it.
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

# of a simulated figure's error, beyond which it is named
LIMIT = 0.35
# kinds of what a result may have, or have as null
OPTIONAL = {
    **dict.fromkeys(
        (
            "ratio",
            "peak_memory_gib",
            "capacity_gib",
            "decode_tokens_per_sec_per_gpu",
            "decode_mbu",
        ),
        float,
    ),
    **dict.fromkeys(("memory_gib", "breakdown_s"), dict[str, float]),
    "system": str,
    "timeline": list[str],
    "as_published": dict,
}
# kinds of results, in the order of the columns, and what each is
MODES = {
    "simulated": "our code in the published layout, with our kernels, predicted on fake tensors",
    "fastest": "our code in a faster layout of as many GPUs and as much memory (`--ours`)",
    "recipe": "the published run, predicted with its own kernels and costs (`reference.recipe`): "
    "what the accuracy is of",
    "measured": "the whole row, run",
    "extrapolated": "from proxies with fewer layers on one rank, without communication",
}
# of a kind that its name alone does not explain
IN_WORDS = {"fastest": "in our fastest layout", "recipe": "predicted as they were run"}
# keys of `reference` that a note tells, and how it begins
REMARKS = {"known_error": "", "differs": "the published run ", "others": "others' tokens/s: "}


@dataclass
class Row:
    """A published row.

    tree: its config as written. results: by kind. figure: what is compared, as a key of FIGURES.
    """

    name: str
    tree: dict
    results: dict[str, dict] = field(default_factory=dict)

    @property
    def reference(self) -> dict:
        return self.tree["reference"]

    @property
    def figure(self) -> str:
        return next(figure for figure in FIGURES if figure in self.reference)

    @property
    def published(self) -> float:
        """Return the figure as printed; where that is known to be wrong, as it should have been."""
        return self.reference.get(f"corrected_{self.figure}", self.reference[self.figure])

    @property
    def short_name(self) -> str:
        return self.name.rsplit("/", 1)[-1]


@dataclass
class Report:
    """tables: rows by the title of their table. others: results that are none of a row. machines:
    by kind of result.
    """

    tables: dict[str, list[Row]]
    others: list[dict]
    calibrations: list[dict]
    machines: dict[str, set[str]]
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
        # the figures by the published run's recipe are shown too
        check_figures(where, result | (result.get("as_published") or {}))
    return [result for _, result in lines]


def check_figures(where: str, result: dict) -> None:
    """Raise InputError for what the tables cannot show."""
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
    """Return all published rows, with what there is of each."""
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
            # compared with nothing, though a file of results may say otherwise
            report.others.append(result | {"ratio": None, "as_published": None})
    for row in rows.values():
        title = row.reference["source"]
        # which has a table for each system
        if title.startswith("NeMo Framework"):
            title += f", {row.reference['system']}"
        if row.results or is_published(row.name):
            report.tables.setdefault(title, []).append(row)
    return report


def is_comparable(result: dict, row: Row) -> bool:
    """Return True for a result of the row's work, on its GPUs, that was compared with its figure.

    The file that a result was kept in may be of another version's configs.
    """
    kept = result["reference"]
    reference = row.reference
    same = (row.figure, f"corrected_{row.figure}")
    return (
        bool(result.get("ratio"))
        and not kept.get("changed")
        and all(kept.get(key) == reference.get(key) for key in same)
        and result["world_size"] == reference["gpus"]
        and on_own_system(result | {"reference": reference})
    )


# --- accuracy


def held_back(rows: list[Row]) -> list[Row]:
    """Return the simulated rows that no constant of the simulator was fitted to."""
    return known_as("held_back", rows)


def known_as(kind: str, rows: list[Row]) -> list[Row]:
    """Return the simulated rows that systems.yaml lists under `fitted_on` or `held_back`."""
    names = constants(kind)
    return [row for row in rows if "simulated" in row.results and row.name in names]


def predicted(row: Row) -> float:
    """Return the simulated figure of the published run, as a share of the published one.

    Where the published run did what ours does, that is the figure of ours.
    """
    return row.results.get("recipe", row.results["simulated"])["ratio"]


def error(row: Row) -> float:
    return abs(predicted(row) - 1)


def summary(report: Report) -> str:
    """Say how many published rows have which results, and how far off those are.

    Errors are of simulated rows that no constant was fitted to, by the published run's recipe. A
    row of one's own counts nowhere.
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
        off = f"off by {middle:.1%} in the median, {error(worst):.0%} at worst ({worst.name})"
        parts.append(f"of {len(tested)} rows not fitted to, {off}")
    return "; ".join(parts)


def accuracy_cells(report: Report) -> dict[str, list[str]]:
    """Return how far simulated figures are off: a line per table, and of all and some rows."""
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
            fitted = known_as("fitted_on", rows)
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
    """Name held-back rows that are off by more than LIMIT, and rows beyond their memory."""
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
    """Return a published table's columns: ratios, figures and memory first, the layout last."""
    unit = FIGURES[rows[0].figure]
    return by_column([table_line(row, unit) for row in rows])


def table_line(row: Row, unit: str) -> dict[str, str]:
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
    """Say what is wrong with published figures, what was run otherwise, and what is left out."""
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
    """Say what each kind of ratio compares, and which machines and versions results are of."""
    shown = {kind for row in report.rows for kind in row.results}
    lines = [f"{kind}: {text}" for kind, text in MODES.items() if kind in shown]
    return lines + [
        f"{mode} on {'; '.join(sorted(names))}" for mode, names in report.machines.items()
    ]


def as_markdown(report: Report) -> str:
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
