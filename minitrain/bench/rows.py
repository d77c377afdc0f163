"""The published rows: which config stands for which, and what was published; and what is known of their systems."""

from pathlib import Path
from typing import Any

import yaml

from minitrain.bench.report import markdown, number

SYSTEMS = Path(__file__).with_name("systems.yaml")
CONFIGS = Path(__file__).parents[2] / "configs"
TABLES = ("automodel", "nemo/h100", "nemo/b200", "nemo/gb200", "rl", "dfm")  # folders, in the order of the tables


def constants(section: str) -> Any:
    """A section of systems.yaml."""
    return yaml.safe_load(SYSTEMS.read_text(encoding="utf-8"))[section]


def row_trees() -> dict[str, dict]:
    """What every row's config says, by the row's name: its file under configs/, without the ending."""
    files = [file for folder in TABLES for file in sorted((CONFIGS / folder).glob("*.yaml"))]
    return {
        str(file.relative_to(CONFIGS).with_suffix("")): yaml.safe_load(file.read_text(encoding="utf-8"))
        for file in files
    }


def published_rows() -> dict[str, dict]:
    """`reference` of every row's config, by the row's name."""
    return {name: tree["reference"] for name, tree in row_trees().items()}


def list_rows() -> str:
    """All rows as a Markdown table; what is known to be wrong with a published figure stands below it."""
    rows = published_rows()
    columns = {
        "config": [f"configs/{name}.yaml" for name in rows],
        "system": [row["system"] for row in rows.values()],
        "GPUs": [str(row["gpus"]) for row in rows.values()],
        "tokens/s/GPU": [number(row.get("tokens_per_sec_per_gpu"), ",.6g") for row in rows.values()],
        "TFLOP/s/GPU": [number(row.get("tflops_per_gpu"), ".6g") for row in rows.values()],
        "step s": [number(row.get("step_time_s"), ".4g") for row in rows.values()],
        "": ["*" if "known_error" in row else "" for row in rows.values()],
    }
    errors = [f"* {name}: {row['known_error']}" for name, row in rows.items() if "known_error" in row]
    return f"{markdown(columns)}\n\n{len(rows)} rows; as published, but:\n" + "\n".join(errors)
