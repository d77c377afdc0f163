"""Load configs as rows: a config with what was published of a run of it, under `reference`."""

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
# folders of configs, in the order of the tables. Rows of the last four (runs in MXFP8, with and without
# offload, one-GPU runs by others, and a user's own) are compared, but left out of all statistics: see
# `is_published`
TABLES = (
    "automodel",
    "nemo/h100",
    "nemo/b200",
    "nemo/gb200",
    "rl",
    "dfm",
    "megatron-bridge",
    "prime-rl",
    "one-gpu",
    "own",
)
# beginning of a published table's title -> its page
SOURCES = {
    "NeMo AutoModel": "https://docs.nvidia.com/nemo/automodel/performance/performance-summary.md",
    "NeMo Framework 25.04": "https://docs.nvidia.com/nemo-framework/user-guide/latest/performance/archive/"
    "25.04-performance-summary.html",
    "NeMo RL": "https://docs.nvidia.com/nemo/rl/latest/about/performance-summary.html",
    "NeMo DFM": "https://github.com/NVIDIA-NeMo/DFM",
    "Megatron-Bridge": "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/docs/performance-summary.md",
    "prime-rl": "https://github.com/PrimeIntellect-ai/prime-rl/blob/main/benchmarks/results/BENCHMARKS.md",
    "Surogate": "https://github.com/invergent-ai/surogate/blob/main/docs/reference/benchmarks.md",
}

# figures that can be compared, with their units; a row is compared by the first one that it has
FIGURES = {"tokens_per_sec_per_gpu": "tokens/s/GPU", "tflops_per_gpu": "TFLOP/s/GPU"}
# key of a config's `reference` -> type
REFERENCE = {
    # the row's own name, by which an edited config finds it, see `published_file`
    "id": str,
    # title of the published table, and the machine
    "source": str,
    "system": str,
    "gpus": int,
    # the published figures
    "tokens_per_sec_per_gpu": float,
    "tflops_per_gpu": float,
    "step_time_s": float,
    # how the table counts FLOPs, see CONVENTIONS
    "convention": str,
    # what is wrong with a published figure, and what it should have been
    "known_error": str,
    "corrected_tokens_per_sec_per_gpu": float,
    "corrected_tflops_per_gpu": float,
    # how the published run differs from the config
    "differs": str,
    # tokens/s of slower published runs of the same work
    "others": str,
    # for GRPO: mean length of the responses, their number per step, tensor-parallel size of the
    # samplers
    "mean_response": float,
    "responses": int,
    "generation_tp": int,
    # for GRPO with drafts by multi-token prediction: how many tokens are drafted at once, and the
    # probability that a draft is accepted if those before it are
    "drafts": int,
    "acceptance": float,
    # for GRPO with an environment: mean number of turns, tokens of a reply between two of them, and the
    # seconds that it takes
    "turns": float,
    "reply_tokens": float,
    "environment_s": float,
    # how to predict the published run, see RECIPE
    "recipe": dict,
    # overrides that give our fastest layout; "ours" in a config to which they are applied
    "ours": list[str],
    "layout": str,
    # what differs from the row in an edited config, see `load_row`
    "changed": list[str],
}
# key of `reference.recipe` -> type; see simulator/predict.py
RECIPE = {"compile": bool, "attention": str, "micro_batches": int, "stack": str}
# ways in which tables count FLOPs: names of functions in run/monitor/flops.py
CONVENTIONS = ("clean", "automodel", "nemo_pretrain", "nemo_squad")
# key of a recipe -> the section of systems.yaml that lists its possible values
NAMES = {"attention": "kernels", "stack": "stacks"}

# keys of `reference` that say where the run was
PLACE = ("gpus", "system")
# settings that determine the work of a step
WORK = ("task", "lora", "optim.name", "batch.global_", "batch.seq_len", "data.kind")
# and those that also do so for GRPO
POLICY_WORK = ("rollout.max_tokens", "grpo.prompts", "grpo.group", "grpo.generations", "grpo.lag")


@cache
def constants(section: str) -> Any:
    """Return a section of systems.yaml."""
    return yaml.safe_load(SYSTEMS.read_text(encoding="utf-8"))[section]


def row_trees() -> dict[str, dict]:
    """Return every row's config as written, by the row's name: its path in configs/, no suffix."""
    files = [file for folder in TABLES for file in sorted((CONFIGS / folder).glob("*.yaml"))]
    return {str(file.relative_to(CONFIGS).with_suffix("")): read_row(file) for file in files}


def read_row(file: Path) -> dict:
    """Return a row's config as written. Raises InputError if it lacks what all tables show."""
    tree = read_tree(file)
    need(str(file), tree, dict, "reference", "batch", "parallel")
    need(f"{file}: batch", tree["batch"], float, "global", "micro", "seq_len")
    need(f"{file}: reference", tree["reference"], str, "source", "system")
    need(f"{file}: reference", tree["reference"], float, "gpus")
    if not FIGURES.keys() & tree["reference"].keys():
        raise InputError(f"{file}: reference needs {' or '.join(FIGURES)}")
    return tree | {"reference": read_reference(tree["reference"], f"{file}: reference")}


def read_reference(reference: dict, where: str = "reference") -> dict:
    """Return a config's `reference` with its values converted to their types. Raises InputError."""
    for key in reference:
        check_known(key, REFERENCE, where)
    found = typed(reference, REFERENCE, f"{where}.")
    convention = found.get("convention", "clean")
    if convention not in CONVENTIONS:
        raise InputError(
            f"{where}.convention={convention!r} is not one of {', '.join(CONVENTIONS)}"
        )
    # the mean length of prompts follows from these
    missing = {"tokens_per_sec_per_gpu", "gpus", "step_time_s"} - found.keys()
    if "mean_response" in found and missing:
        raise InputError(f"{where}.mean_response needs {where}.{min(missing)} too")
    if ("drafts" in found) != ("acceptance" in found) or found.get("acceptance", 0) > 1:
        raise InputError(
            f"{where} needs both drafts and acceptance, a share of at most 1, or none"
        )
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
    """Return `values`, converted to the types in `kinds`. Raises InputError for numbers <= 0."""
    found = dict(values)
    for key in filter(kinds.get, values):
        found[key] = convert(kinds[key], values[key], f"{prefix}{key}")
        if kinds[key] in (int, float) and found[key] <= 0:
            raise InputError(f"{prefix}{key}={values[key]} must be a number above 0")
    return found


def published_rows() -> dict[str, dict]:
    """Return `reference` of every row for which `is_published` holds, by the row's name."""
    trees = row_trees().items()
    return {name: tree["reference"] for name, tree in trees if is_published(name)}


def is_published(name: str) -> bool:
    """Return whether statistics include a row: it is listed in systems.yaml."""
    return name in constants("fitted_on") + constants("held_back")


def list_rows() -> str:
    """Return all rows as a Markdown table, and below it the known errors of published figures."""
    rows = {name: tree["reference"] for name, tree in row_trees().items()}
    figures = list(rows.values())
    errors = {name: row["known_error"] for name, row in rows.items() if "known_error" in row}
    columns = {
        "row": [f"{name} *" if name in errors else name for name in rows],
        "system": [row["system"].removeprefix("DGX-") for row in figures],
        "GPUs": column(figures, "gpus", ""),
        # both per GPU
        "tokens/s": column(figures, "tokens_per_sec_per_gpu", ",.6g"),
        "TFLOP/s": column(figures, "tflops_per_gpu", ".6g"),
        "step s": column(figures, "step_time_s", ".4g"),
    }
    notes = "\n".join(f"* {name}: {text}" for name, text in errors.items())
    head = f"{len(published_rows())} rows that count, rates per GPU; as published, but:"
    return f"{markdown(columns)}\n\n{head}\n{notes}"


# --- a config as a row


def load_row(file: str | Path, overrides: list[str]) -> tuple[str, Config]:
    """Return the row's name and its config.

    `reference["changed"]` lists the settings that change the row's work, and the keys of `reference`
    that differ from the published row's. If there are any, nothing is compared with the published
    figure. Layout and micro-batches may differ.
    """
    config = load(file, overrides)
    row = row_name(file)
    written = read_reference(config.reference)
    if written:
        # `file` may be an edited copy of the published row's config
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
        # the published tokens per step are those of this many responses
        if "mean_response" in table:
            config.reference["responses"] = published.grpo.prompts * published.grpo.group
    return row, config


def published_file(reference: dict) -> Path | None:
    """Return the config file whose reference has the same id, or None for a user's own row.

    Raises InputError if the reference cites a published table without the id of one of its rows.
    """
    if file := files_by_id(CONFIGS).get(reference.get("id")):
        return file
    if reference.get("source", "").startswith(tuple(SOURCES)):
        raise InputError(
            f"reference.source={reference['source']!r} is a published table: reference.id must name a row of it "
            f"(or give a source of one's own)"
        )
    return None


@cache
def files_by_id(configs: Path) -> dict[str, Path]:
    """Return the config file of each row that has a `reference.id`, by it. configs: their folder."""
    files = [file for folder in TABLES for file in sorted((configs / folder).glob("*.yaml"))]
    references = {file: read_tree(file).get("reference") or {} for file in files}
    return {found["id"]: file for file, found in references.items() if "id" in found}


def work(config: Config) -> dict:
    """Return the settings that determine the work of a step, by name."""
    is_policy = config.task == "grpo"
    names = WORK + POLICY_WORK if is_policy else WORK
    settings = {name.rstrip("_"): attrgetter(name)(config) for name in names}
    settings["model"] = config.model.config
    settings["precision"] = config.precision.removesuffix("-pure")
    settings["data"] = config.data.packed, config.data.size, config.data.text_tokens
    # with a KL penalty, a step also has a forward pass of the reference model
    settings["grpo.kl"] = is_policy and config.grpo.kl > 0
    return settings


def row_name(path: str) -> str:
    """Return a config file's path within configs/, without its suffix."""
    path = Path(path).with_suffix("")
    parts = path.parts
    return "/".join(parts[parts.index("configs") + 1 :]) if "configs" in parts else path.name
