"""The published rows: which config stands for which, and what was published."""

from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from minitrain.bench.tables import column, markdown, need
from minitrain.errors import InputError
from minitrain.run.config.config_yaml import check_known, convert, read_tree
from minitrain.run.config.load import load
from minitrain.run.launch.cli import CONFIGS
from minitrain.settings import Config

SYSTEMS = Path(__file__).with_name("systems.yaml")
# folders of configs, in the order of the tables; the last is for rows of one's own, see `is_published`
TABLES = ("automodel", "nemo/h100", "nemo/b200", "nemo/gb200", "rl", "dfm", "own")
# a folder of configs, of what was published for single GPUs elsewhere
ONE_GPU = "one-gpu"
# of published tables, by how their titles begin
SOURCES = {
    "NeMo AutoModel": "https://docs.nvidia.com/nemo/automodel/performance/performance-summary.md",
    "NeMo Framework 25.04": "https://docs.nvidia.com/nemo-framework/user-guide/latest/performance/archive/"
    "25.04-performance-summary.html",
    "NeMo RL": "https://docs.nvidia.com/nemo/rl/latest/about/performance-summary.html",
    "NeMo DFM": "https://github.com/NVIDIA-NeMo/DFM",
    "Surogate": "https://github.com/invergent-ai/surogate/blob/main/docs/reference/benchmarks.md",
}

# figures, one of which is compared
FIGURES = {"tokens_per_sec_per_gpu": "tokens/s/GPU", "tflops_per_gpu": "TFLOP/s/GPU"}
# kinds of what a config's `reference` may say
REFERENCE = {
    **dict.fromkeys(("source", "system", "convention", "known_error", "differs", "layout"), str),
    # tokens/s of slower published runs of the same work
    "others": str,
    **dict.fromkeys(
        (*FIGURES, *(f"corrected_{name}" for name in FIGURES), "step_time_s", "mean_response"),
        float,
    ),
    **dict.fromkeys(("gpus", "generation_tp", "responses"), int),
    **dict.fromkeys(("changed", "ours"), list[str]),
    "recipe": dict,
}
# see simulator/predict.py
RECIPE = {"compile": bool, "attention": str, "micro_batches": int, "stack": str}
# how a table counts FLOPs: functions of run/monitor/flops.py
CONVENTIONS = ("clean", "automodel", "nemo_pretrain", "nemo_squad")
# sections of systems.yaml with what a recipe may name
NAMES = {"attention": "kernels", "stack": "stacks"}

# settings that fix what a step computes; of GRPO also those below
WORK = ("task", "lora", "optim.name", "batch.global_", "batch.seq_len", "data.kind")
POLICY_WORK = ("rollout.max_tokens", "grpo.prompts", "grpo.group", "grpo.generations", "grpo.lag")


@cache
def constants(section: str) -> Any:
    """Return a section of systems.yaml."""
    return yaml.safe_load(SYSTEMS.read_text(encoding="utf-8"))[section]


def row_trees(folders: tuple[str, ...] = TABLES) -> dict[str, dict]:
    """Return what every row's config says, by the row's name.

    That is its file under configs/, without the ending.
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
    convention = found.get("convention", "clean")
    if convention not in CONVENTIONS:
        raise InputError(
            f"{where}.convention={convention!r} is not one of {', '.join(CONVENTIONS)}"
        )
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


def published_rows(own: bool = False) -> dict[str, dict]:
    """Return `reference` of every published row's config, by the row's name; with `own`, of all."""
    trees = row_trees().items()
    return {name: tree["reference"] for name, tree in trees if own or is_published(name)}


def is_published(name: str) -> bool:
    """Return False for a row of one's own, in whatever folder: it is compared, but never counted."""
    return name in constants("fitted_on") or name in constants("held_back")


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
    rows = published_rows(own=True)
    figures = list(rows.values())
    errors = {name: row["known_error"] for name, row in rows.items() if "known_error" in row}
    columns = {
        "row": [f"{name} *" if name in errors else name for name in rows],
        "system": [row["system"].removeprefix("DGX-") for row in figures],
        "GPUs": column(figures, "gpus", ""),
        # per GPU, as are TFLOP/s
        "tokens/s": column(figures, "tokens_per_sec_per_gpu", ",.6g"),
        "TFLOP/s": column(figures, "tflops_per_gpu", ".6g"),
        "step s": column(figures, "step_time_s", ".4g"),
    }
    notes = "\n".join(f"* {name}: {text}" for name, text in errors.items())
    count = len([name for name in rows if is_published(name)])
    return f"{markdown(columns)}\n\n{count} rows, rates per GPU; as published, but:\n{notes}"


# --- a config as a row


def load_row(file: str | Path, overrides: list[str]) -> tuple[str, Config]:
    """Return the row's name and its config.

    `reference["changed"]` names the settings whose work is not the row's: nothing is compared with
    its published figures then. Layout and micro-batches are free.
    """
    config = load(file, overrides)
    row = row_name(file)
    config.reference = read_reference(config.reference)
    if config.reference:
        # a copy in another configs/ may have been edited
        own = CONFIGS / f"{row}.yaml"
        published = load(own if "/" in row and own.is_file() else file)
        theirs = work(published)
        if changed := [name for name, ours in work(config).items() if ours != theirs[name]]:
            config.reference["changed"] = changed
        # the published tokens are of so many responses
        if "mean_response" in config.reference:
            config.reference["responses"] = published.grpo.prompts * published.grpo.group
    return row, config


def work(config: Config) -> dict:
    """Return the settings that fix what a step computes, by name."""
    is_policy = config.task == "grpo"
    names = WORK + POLICY_WORK if is_policy else WORK
    settings = {name.rstrip("_"): attrgetter(name)(config) for name in names}
    settings["model"] = config.model.config
    settings["precision"] = config.precision.removesuffix("-pure")
    settings["data"] = config.data.packed, config.data.size, config.data.text_tokens
    # a forward pass of the reference
    settings["grpo.kl"] = is_policy and config.grpo.kl > 0
    return settings


def row_name(path: str) -> str:
    """Return a config file's name within configs/, without the ending."""
    path = Path(path).with_suffix("")
    parts = path.parts
    return "/".join(parts[parts.index("configs") + 1 :]) if "configs" in parts else path.name
