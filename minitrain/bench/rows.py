"""The published rows: which config stands for which, and what was published."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from minitrain.bench.report import column, markdown, need
from minitrain.errors import InputError
from minitrain.run.config.config_yaml import check_known, convert, read_tree
from minitrain.run.launch.cli import CONFIGS

SYSTEMS = Path(__file__).with_name("systems.yaml")
# folders of configs, in the order of the tables
TABLES = ("automodel", "nemo/h100", "nemo/b200", "nemo/gb200", "rl", "dfm")
ONE_GPU = "one-gpu"  # a folder of configs, of what was published for single GPUs elsewhere
SOURCES = {  # of published tables, by how their titles begin
    "NeMo AutoModel": "https://docs.nvidia.com/nemo/automodel/performance/performance-summary.md",
    "NeMo Framework 25.04": "https://docs.nvidia.com/nemo-framework/user-guide/latest/performance/archive/"
    "25.04-performance-summary.html",
    "NeMo RL": "https://docs.nvidia.com/nemo/rl/latest/about/performance-summary.html",
    "NeMo DFM": "https://github.com/NVIDIA-NeMo/DFM",
    "Surogate": "https://github.com/invergent-ai/surogate/blob/main/docs/reference/benchmarks.md",
}

# figures, one of which is compared
FIGURES = {"tokens_per_sec_per_gpu": "tokens/s/GPU", "tflops_per_gpu": "TFLOP/s/GPU"}
REFERENCE = {  # kinds of what a config's `reference` may say
    **dict.fromkeys(("source", "system", "convention", "known_error", "differs", "layout"), str),
    "others": str,  # tokens/s of slower published runs of the same work
    **dict.fromkeys(
        (*FIGURES, *(f"corrected_{name}" for name in FIGURES), "step_time_s", "mean_response"),
        float,
    ),
    **dict.fromkeys(("gpus", "generation_tp", "responses"), int),
    **dict.fromkeys(("changed", "ours"), list[str]),
    "recipe": dict,
}
RECIPE = {"compile": bool, "attention": str, "micro_batches": int, "stack": str}  # see recipe.py
# sections of systems.yaml with what a recipe may name
NAMES = {"attention": "kernels", "stack": "stacks"}


@cache
def constants(section: str) -> Any:
    """Return a section of systems.yaml."""
    return yaml.safe_load(SYSTEMS.read_text(encoding="utf-8"))[section]


def row_trees(folders: tuple[str, ...] = TABLES) -> dict[str, dict]:
    """Return what every row's config says, by the row's name: its file under configs/, without the
    ending.
    """
    files = [file for folder in folders for file in sorted((CONFIGS / folder).glob("*.yaml"))]
    return {str(file.relative_to(CONFIGS).with_suffix("")): read_row(file) for file in files}


def read_row(file: Path) -> dict:
    """Return what a row's config says. Raises InputError if it lacks what all tables show."""
    tree = read_tree(file)
    need(str(file), tree, dict, "reference", "batch", "parallel")
    need(f"{file}: batch", tree["batch"], float, "global", "micro", "seq_len")
    need(f"{file}: reference", tree["reference"], str, "source", "system")
    need(f"{file}: reference", tree["reference"], float, "gpus")
    if not FIGURES.keys() & tree["reference"].keys():
        raise InputError(f"{file}: reference needs {' or '.join(FIGURES)}")
    return tree | {"reference": read_reference(tree["reference"], f"{file}: reference")}


def read_reference(reference: dict, where: str = "reference") -> dict:
    """Return `reference` of a config, its values as their kinds.

    Raises InputError for what nothing could be compared with.
    """
    found = typed(reference, REFERENCE, f"{where}.")
    # from these follows how long prompts are
    missing = {"tokens_per_sec_per_gpu", "gpus", "step_time_s"} - found.keys()
    if "mean_response" in found and missing:
        raise InputError(f"{where}.mean_response needs {where}.{min(missing)} too")
    if "recipe" in found:
        for key in found["recipe"]:
            check_known(key, RECIPE, f"{where}.recipe")
        found["recipe"] = typed(found["recipe"], RECIPE, f"{where}.recipe.")
        for key in NAMES.keys() & found["recipe"].keys():
            name = found["recipe"][key]
            known = constants(NAMES[key])
            if name not in known:
                raise InputError(f"{where}.recipe.{key}={name} is not one of {', '.join(known)}")
    return found


def typed(values: dict, kinds: dict[str, Any], prefix: str) -> dict:
    """Return `values`, those of `kinds` as their kind. Raises InputError for numbers not above 0."""
    found = dict(values)
    for key in filter(kinds.get, values):
        found[key] = convert(kinds[key], values[key], f"{prefix}{key}")
        if kinds[key] in (int, float) and found[key] <= 0:
            raise InputError(f"{prefix}{key}={values[key]} must be a number above 0")
    return found


def published_rows() -> dict[str, dict]:
    """Return `reference` of every row's config, by the row's name."""
    return {name: tree["reference"] for name, tree in row_trees().items()}


def one_gpu_rows() -> dict[str, dict]:
    """Return `reference` of every row that a single GPU repeats, those of the tables first."""
    rows = published_rows() | {n: tree["reference"] for n, tree in row_trees((ONE_GPU,)).items()}
    return {name: reference for name, reference in rows.items() if reference["gpus"] == 1}


def list_one_gpu() -> str:
    """Return the rows of single GPUs as a Markdown table."""
    rows = one_gpu_rows()
    figures = list(rows.values())
    columns = {
        "row on one GPU": list(rows),
        "tokens/s": column(figures, "tokens_per_sec_per_gpu", ",.6g"),
        "of": [next(filter(row["source"].startswith, SOURCES)) for row in figures],
        "others": [row.get("others", "") for row in figures],
    }
    return f"{markdown(columns)}\n\n{len(rows)} rows of one GPU"


def list_rows() -> str:
    """Return all rows as a Markdown table, and below it what is wrong with published figures."""
    rows = published_rows()
    figures = list(rows.values())
    errors = {name: row["known_error"] for name, row in rows.items() if "known_error" in row}
    columns = {
        "row": [f"{name} *" if name in errors else name for name in rows],
        "system": [row["system"].removeprefix("DGX-") for row in figures],
        "GPUs": column(figures, "gpus", ""),
        "tokens/s": column(figures, "tokens_per_sec_per_gpu", ",.6g"),  # and GPU
        "TFLOP/s": column(figures, "tflops_per_gpu", ".6g"),
        "step s": column(figures, "step_time_s", ".4g"),
    }
    notes = "\n".join(f"* {name}: {text}" for name, text in errors.items())
    return f"{markdown(columns)}\n\n{len(rows)} rows, rates per GPU; as published, but:\n{notes}"
