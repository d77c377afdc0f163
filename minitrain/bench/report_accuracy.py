"""How far the simulated figures are from the published ones."""

from statistics import median, median_high

from minitrain.bench.report import MODES, Report, Row
from minitrain.bench.rows import constants, is_published
from minitrain.bench.tables import by_column

# simulated rows with a larger error are listed by name
LIMIT = 0.35
# kinds that the summary describes in words
IN_WORDS = {"fastest": "in our fastest layout", "recipe": "predicted as they were run"}


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
