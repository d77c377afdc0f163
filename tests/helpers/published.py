"""Load the published rows by their ids, and the published figures of single GPUs by model."""

from pathlib import Path

import yaml

PUBLISHED = Path(__file__).parents[1] / "published"
ROWS = {row["id"]: row for row in yaml.safe_load((PUBLISHED / "tables.yaml").read_text())}
BRIDGE = yaml.safe_load((PUBLISHED / "megatron_bridge.yaml").read_text())
OFFLOADED = yaml.safe_load((PUBLISHED / "prime_rl.yaml").read_text())
SINGLE = yaml.safe_load((PUBLISHED / "one_gpu.yaml").read_text())
