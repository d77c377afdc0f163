"""The published rows: which config stands for which, and what was published."""

import re
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from minitrain.bench.tables import column, markdown, need
from minitrain.errors import InputError
from minitrain.run.config.config_yaml import check_known, convert, read_tree
from minitrain.run.config.load import load
from minitrain.run.config.recipes import CONFIGS
from minitrain.settings import Config

SYSTEMS = Path(__file__).with_name("systems.yaml")
# folders of configs, in the order of the tables; the last two hold rows that are compared, but not
# counted, see `is_published`: of others' runs on one GPU, and of one's own
TABLES = ("automodel", "nemo/h100", "nemo/b200", "nemo/gb200", "rl", "dfm", "one-gpu", "own")
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

# of a reference, where the run was
PLACE = ("gpus", "system")
# settings that fix what a step computes; of GRPO also those below
WORK = ("task", "lora", "optim.name", "batch.global_", "batch.seq_len", "data.kind")
POLICY_WORK = ("rollout.max_tokens", "grpo.prompts", "grpo.group", "grpo.generations", "grpo.lag")


@cache
def constants(section: str) -> Any:
    """Return a section of systems.yaml."""
    return yaml.safe_load(SYSTEMS.read_text(encoding="utf-8"))[section]


def row_trees() -> dict[str, dict]:
    """Return what every row's config says, by the row's name.

    That is its file under configs/, without the ending.
    """
    files = [file for folder in TABLES for file in sorted((CONFIGS / folder).glob("*.yaml"))]
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


def published_rows() -> dict[str, dict]:
    """Return `reference` of every row that counts, by the row's name."""
    trees = row_trees().items()
    return {name: tree["reference"] for name, tree in trees if is_published(name)}


def is_published(name: str) -> bool:
    """Return whether a row counts: whether systems.yaml names it, as it names none of one's own."""
    return name in constants("fitted_on") + constants("held_back")


def list_rows() -> str:
    """Return all rows as a Markdown table, and below it what is wrong with published figures."""
    rows = {name: tree["reference"] for name, tree in row_trees().items()}
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
    told = f"{len(published_rows())} rows that count, rates per GPU; as published, but:"
    return f"{markdown(columns)}\n\n{told}\n{notes}"


# --- a config as a row


def load_row(file: str | Path, overrides: list[str]) -> tuple[str, Config]:
    """Return the row's name and its config.

    `reference["changed"]` names the settings whose work is not the row's, and what is written of
    the published run other than its table has it: nothing is compared with its figures then.
    Layout and micro-batches are free.
    """
    config = load(file, overrides)
    row = row_name(file)
    written = read_reference(config.reference)
    if written:
        # what is loaded may be a copy of it that was edited
        published = load(published_file(written) or file)
        table = read_reference(published.reference)
        theirs = work(published)
        changed = [name for name, ours in work(config).items() if ours != theirs[name]]
        for key, value in written.items():
            if key != "layout" and value != table.get(key):
                changed.append(key if key in PLACE else f"reference.{key}")
        config.reference = table | written
        config.reference.pop("changed", None)
        if changed := [*table.get("changed", ()), *changed]:
            config.reference["changed"] = changed
        # the published tokens are of so many responses
        if "mean_response" in table:
            config.reference["responses"] = published.grpo.prompts * published.grpo.group
    return row, config


def published_file(reference: dict) -> Path | None:
    """Return the config of the row with the reference's id; None for one's own.

    Raises InputError for a reference that cites a table, but none of its rows.
    """
    line = re.compile(rf"^ +id: {re.escape(str(reference.get('id')))}$", re.MULTILINE)
    for folder in TABLES:
        for file in (CONFIGS / folder).glob("*.yaml"):
            if line.search(file.read_text(encoding="utf-8")):
                return file
    if reference.get("source", "").startswith(tuple(SOURCES)):
        raise InputError(
            f"reference.source={reference['source']!r} is a published table: reference.id must name a row of it "
            f"(or give a source of one's own)"
        )
    return None


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
