"""`bench.py --report`: results beside what was published, in the tables of the published pages, and
as Markdown.

Of several results for a row, the last one of each kind counts: simulated (and, where the published
run differed, by its recipe), measured as a whole, or extrapolated from proxies. What cannot stand
beside a published figure (proxies themselves, changed models, other systems, shrunk and other
configs) has a table of its own. page.py makes a page of it.
"""

from dataclasses import dataclass, field
from statistics import median, median_high

from minitrain.bench.report import (
    label,
    markdown,
    need,
    need_rates,
    number,
    on_own_system,
    read_lines,
    short,
)
from minitrain.bench.rows import FIGURES, constants, read_reference, row_trees, typed
from minitrain.errors import InputError

LIMIT = 0.35  # of a simulated figure's error, beyond which it is named
OPTIONAL = {  # kinds of what a result may have, or have as null
    **dict.fromkeys(
        ("ratio", "peak_memory_gib", "capacity_gib", "decode_tokens_per_sec_per_gpu", "decode_mbu"),
        float,
    ),
    **dict.fromkeys(("memory_gib", "breakdown_s"), dict[str, float]),
    "system": str,
    "timeline": list[str],
    "as_published": dict,
}
KINDS = ("simulated", "fastest", "recipe", "measured", "extrapolated")

COMPARED = {  # which prediction a ratio to the published figure is of
    "simulated": "simulated ratio: our code in the published layout, with our kernels",
    "fastest": "fastest ratio: our code in a faster layout of as many GPUs and as much memory (`--ours`)",
    "recipe": "recipe ratio: the published run, predicted with its own kernels and costs (`reference.recipe`)",
}


@dataclass
class Row:
    """A published row. tree: its config as written. results: by kind. figure: what is compared, as
    a key of FIGURES.
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
        """As printed; or, where that is known to be wrong, what it should have been."""
        return self.reference.get(f"corrected_{self.figure}", self.reference[self.figure])


@dataclass
class Report:
    """tables: rows by the title of their table. others: results that are none of a row. machines:
    by kind of result.
    """

    tables: dict[str, list[Row]]
    others: list[dict]
    calibrations: list[dict]
    machines: dict[str, list[str]]
    day: str


def read_results(file: str) -> list[dict]:
    """The lines of a file that --json wrote. Raises InputError."""
    lines = read_lines("--report", file)
    for where, result in lines:
        need(where, result, str, "row", "mode", "device", "torch")
        if result["mode"] == "calibration":
            need_rates(where, result)
            continue
        check_figures(where, result)
        check_figures(
            where, result | (result.get("as_published") or {})
        )  # whose figures are shown, too
    return [result for _, result in lines]


def check_figures(where: str, result: dict) -> None:
    """Raises InputError for what the tables cannot show."""
    need(where, result, dict, "reference")
    need(where, result, float, "world_size", *FIGURES, "step_time_s", "clean_tflops_per_gpu", "mfu")
    typed(
        {key: value for key, value in result.items() if value is not None}, OPTIONAL, f"{where}: "
    )
    if "" in (result.get("timeline") or ()):
        raise InputError(f"{where}: timeline has a lane without a letter")
    read_reference(result["reference"], f"{where}: reference")
    if result.get("proxy"):
        need(where, result, float, "full_layers")
    if result["mode"] == "extrapolated":
        need(where, result, list, "layers")
        need(where, result, str, "left_out")


def merge(results: list[dict], day: str) -> Report:
    """All published rows, with what there is of each."""
    rows = {name: Row(name, tree) for name, tree in row_trees().items()}
    others = []
    calibrations = []
    for result in results:
        if result["mode"] == "calibration":
            calibrations.append(result)
        elif (
            result["mode"] in KINDS
            and result["row"] in rows
            and result.get("ratio")
            and on_own_system(result)
        ):
            found = rows[result["row"]].results
            ours = result["mode"] == "simulated" and result["reference"].get("layout") == "ours"
            found["fastest" if ours else result["mode"]] = result
            if result.get("as_published"):
                found["recipe"] = result | result["as_published"]
        else:
            others.append(result)
    tables: dict[str, list[Row]] = {}
    for row in rows.values():
        source = row.reference["source"]
        system = row.reference["system"]
        title = (
            f"{source}, {system}" if source.startswith("NeMo Framework") else source
        )  # which has one for each
        tables.setdefault(title, []).append(row)
    machines: dict[str, set[str]] = {}
    for result in results:
        machines.setdefault(result["mode"], set()).add(
            f"{result['device']}, torch {result['torch']}"
        )
    return Report(
        tables, others, calibrations, {mode: sorted(names) for mode, names in machines.items()}, day
    )


def summary(report: Report) -> str:
    """Say how many published rows have which results, and how far off those are: simulated ones by
    the published run's recipe, where no constant was fitted to them. A row of one's own counts
    nowhere."""
    known = {*constants("fitted_on"), *constants("held_back")}
    rows = [row for table in report.tables.values() for row in table if row.name in known]
    parts = [f"{len(rows)} published rows"]
    for kind in KINDS:
        ratios = [row.results[kind]["ratio"] for row in rows if kind in row.results]
        if ratios:
            parts.append(
                f"{len(ratios)} {kind}, median {median_high(ratios):.2f} of the published figure"
            )
    if tested := held_back(rows):
        middle = median(map(error, tested))
        worst = max(tested, key=error)
        off = f"off by {middle:.1%} in the median, {error(worst):.0%} at worst ({worst.name})"
        parts.append(f"of {len(tested)} rows not fitted to, {off}")
    return "; ".join(parts)


def held_back(rows: list[Row]) -> list[Row]:
    """Return the simulated ones of the published rows that no constant of the simulator was fitted
    to.
    """
    return known_as("held_back", rows)


def known_as(kind: str, rows: list[Row]) -> list[Row]:
    """Return the simulated ones of the rows that systems.yaml lists under `fitted_on` or
    `held_back`.
    """
    names = set(constants(kind))
    return [row for row in rows if "simulated" in row.results and row.name in names]


def predicted(row: Row) -> float:
    """The published run's simulated figure, as a share of the published one; our form's, where they
    do the same.
    """
    return row.results.get("recipe", row.results["simulated"])["ratio"]


def error(row: Row) -> float:
    return abs(predicted(row) - 1)


def accuracy_cells(report: Report) -> dict[str, list[str]]:
    """How far simulated figures are off, over held-back rows: by table, and in the end of all and
    of some.
    """
    groups = {title: held_back(rows) for title, rows in report.tables.items()}
    everything = [row for rows in groups.values() for row in rows]
    groups["all"] = everything
    groups["all but GRPO"] = training = [
        row for row in everything if row.tree.get("task") != "grpo"
    ]
    alike = [row for row in training if "differs" not in row.reference]
    groups["all but GRPO and those whose published runs differ"] = alike
    groups = {title: rows for title, rows in groups.items() if rows}
    if not groups:
        return {}
    worst = [max(rows, key=error) for rows in groups.values()]
    fitted = known_as("fitted_on", [row for rows in report.tables.values() for row in rows])
    shown = {title: known_as("fitted_on", report.tables.get(title, [])) for title in groups} | {
        "all": fitted
    }
    return {
        "rows not fitted to": list(groups),
        "number": [str(len(rows)) for rows in groups.values()],
        "median error": [f"{median(map(error, rows)):.1%}" for rows in groups.values()],
        "worst": [f"{error(row):.0%}" for row in worst],
        "which": [row.name for row in worst],
        "of fitted rows": [
            f"{median(map(error, shown[title])):.1%}" if shown[title] else "" for title in groups
        ],
        "of rows never seen": ["judged by others"] * len(groups),
    }


def outliers(report: Report) -> list[str]:
    """Each held-back row that is off by more than `LIMIT`, and each simulated row that would not
    fit its memory.
    """
    rows = [row for rows in report.tables.values() for row in rows if "simulated" in row.results]
    far = sorted((row for row in held_back(rows) if error(row) > LIMIT), key=error, reverse=True)
    lines = [
        f"{row.name}: {predicted(row):.2f} of the published figure; "
        + ("its " + differs(row) if "differs" in row.reference else "unexplained")
        for row in far
    ]
    tight = [row for row in rows if row.results["simulated"].get("fits") is False]
    return lines + [f"{row.name}: its simulated memory does not fit" for row in tight]


def differs(row: Row) -> str:
    return f"published run {row.reference['differs']}"


def cells(rows: list[Row]) -> dict[str, list[str]]:
    """A published table's columns, with ours behind; those that are empty in all rows are left
    out.
    """
    trees = [row.tree for row in rows]
    unit = FIGURES[rows[0].figure]
    batches = [tree["batch"] for tree in trees]
    layouts = [tree["parallel"] for tree in trees]
    references = [row.reference for row in rows]
    columns = {
        "row": [short_name(row) for row in rows],
        "system": [reference["system"] for reference in references],
        "GPUs": [str(reference["gpus"]) for reference in references],
        "GBS": [str(batch["global"]) for batch in batches],
        "MBS": [str(batch["micro"]) for batch in batches],
        "sequence": [str(batch["seq_len"]) for batch in batches],
        **{
            name: [str(layout.get(name.lower(), 1)) for layout in layouts]
            for name in ("TP", "PP", "CP", "VP", "EP")
        },
        "published step s": [
            number(reference.get("step_time_s"), ".4g") for reference in references
        ],
        "published TFLOP/s": [
            number(reference.get("tflops_per_gpu"), ".4g") for reference in references
        ],
        f"published {unit}": [short(row.reference[row.figure]) for row in rows],
    }
    for kind in KINDS:
        found = [row.results.get(kind, {}) for row in rows]
        columns[f"{kind} {unit}"] = [
            short(r.get(row.figure)) for row, r in zip(rows, found, strict=True)
        ]
        columns[f"{kind} ratio"] = [number(r.get("ratio"), ".3f") for r in found]
        columns[f"{kind} GiB"] = [number(r.get("peak_memory_gib"), ".1f") for r in found]
    columns["note"] = [
        "*" if {"known_error", "differs"} & reference.keys() else "" for reference in references
    ]
    return {name: column for name, column in columns.items() if any(column)}


def other_cells(results: list[dict]) -> dict[str, list[str]]:
    """Columns that no result fills are left out."""
    columns = {
        "result": [label(r) for r in results],
        "device": [r["device"] for r in results],
        "ranks": [str(r["world_size"]) for r in results],
        "step s": [short(r["step_time_s"]) for r in results],
        "tokens/s/GPU": [short(r["tokens_per_sec_per_gpu"]) for r in results],
        "decoded tokens/s/GPU": [short(r.get("decode_tokens_per_sec_per_gpu")) for r in results],
        "decode MBU": [number(r.get("decode_mbu"), ".1%") for r in results],
        "clean TFLOP/s": [number(r["clean_tflops_per_gpu"], ".4g") for r in results],
        "MFU": [number(r["mfu"], ".1%") for r in results],
        "peak GiB": [number(r.get("peak_memory_gib"), ".2f") for r in results],
    }
    return {name: cells for name, cells in columns.items() if any(cells)}


def short_name(row: Row) -> str:
    return row.name.rsplit("/", 1)[-1]


def notes(rows: list[Row]) -> list[str]:
    """What is known to be wrong with a published figure, what was run otherwise, and of what an
    extrapolation knows nothing."""
    lines = [
        f"{short_name(row)}: {row.reference['known_error']}"
        for row in rows
        if "known_error" in row.reference
    ]
    lines += [
        f"{short_name(row)}: the {differs(row)}" for row in rows if "differs" in row.reference
    ]
    for row in rows:
        if "extrapolated" in row.results:
            result = row.results["extrapolated"]
            layers = " and ".join(map(str, result["layers"]))
            lines.append(
                f"{short_name(row)}: extrapolated by proxy on one {result['device']} from {layers} of "
                f"{result['full_layers']} layers, without {result['left_out']}"
            )
    return lines


def provenance(report: Report) -> list[str]:
    """On or for which machines the results are, by which versions, and what a recipe's are."""
    lines = [f"{mode}: {'; '.join(names)}" for mode, names in report.machines.items()]
    shown = {kind for rows in report.tables.values() for row in rows for kind in row.results}
    return lines + [line for kind, line in COMPARED.items() if kind in shown]


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
        parts.append(f"## Not to be compared with a row\n\n{markdown(other_cells(report.others))}")
    return "\n\n".join(parts) + "\n"
