"""Set results beside the published figures: `bench.py --report`.

    read_results     lines of files that --json wrote; checked
    merge_results    those and the published rows -> a Report

Each row has at most one result of each kind (see MODES), the last one given. Results that cannot be
compared with a published figure are apart: proxies, shrunk configs, changed models, other systems,
configs that are no row. report_accuracy.py judges the simulated ones, report_tables.py makes tables
and writes Markdown, report_html.py writes a page.
"""

from dataclasses import dataclass, field

from minitrain.bench.rows import FIGURES, is_published, read_reference, row_trees, typed
from minitrain.bench.tables import need, need_rates, on_own_system, result_lines
from minitrain.errors import InputError

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
