"""Compare the order of published alternatives with the predicted one: python results/order.py [WORD ...]

Prints README.md's table of the pairs in order.yaml, or of those whose names contain every WORD, a
line at a time. Predicted is the run as published, by `reference.recipe`.
"""

import sys
from functools import cache
from pathlib import Path

import yaml

from minitrain.bench.report import Row, merge_results, read_results
from minitrain.bench.report_accuracy import predicted
from minitrain.bench.rows import load_row
from minitrain.run.config.recipes import CONFIGS
from minitrain.simulator.predict import as_published, predicted_row
from minitrain.simulator.timeline import load_system

FOLDER = Path(__file__).parent
KNOWN = yaml.safe_load(Path(FOLDER, "order.yaml").read_text(encoding="utf-8"))
# a smaller predicted difference tells no order
TOLD = 0.01


def main(words: list[str]) -> None:
    print("| pair | published ratio | predicted ratio | right |")
    print("| --- | ---: | ---: | --- |", flush=True)
    for title, pair in KNOWN["pairs"].items():
        if all(word in title for word in words):
            (published, found), (other, other_found) = map(figures, pair)
            ratio = found / other_found
            right = abs(ratio - 1) >= TOLD and (ratio > 1) == (published > other)
            cells = title, f"{published / other:.2f}", f"{ratio:.2f}", "yes" if right else "no"
            print(f"| {' | '.join(cells)} |", flush=True)


@cache
def figures(name: str) -> tuple[float, float]:
    """Return the published figure and the predicted one, of a run of order.yaml or of a row."""
    if name in rows():
        row = rows()[name]
        return row.published, row.published * predicted(row)
    run = KNOWN["runs"][name]
    group = KNOWN["groups"][run["group"]]
    row, config = load_row(CONFIGS / f"{group['config']}.yaml", [*group["words"], *run["words"]])
    system = load_system(config.reference["system"])
    simulation, _ = predicted_row(config, row, system)
    found = as_published(config, row, system, simulation)
    return run["published"], found["tokens_per_sec_per_gpu"]


@cache
def rows() -> dict[str, Row]:
    files = sorted(FOLDER.glob("simulated/*.jsonl"))
    results = [result for file in files for result in read_results(str(file))]
    return {row.name: row for row in merge_results(results, "").rows}


if __name__ == "__main__":
    main(sys.argv[1:])
