"""The published rows, by their ids."""

from pathlib import Path

import yaml

ROWS = {
    row["id"]: row
    for row in yaml.safe_load((Path(__file__).parents[1] / "published/tables.yaml").read_text())
}
