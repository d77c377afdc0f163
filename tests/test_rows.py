"""Every published row has one config, which says what the table says and can be laid out on the table's GPUs."""

from pathlib import Path

import pytest
import yaml

from minitrain.bench.rows import CONFIGS, list_rows, published_rows
from minitrain.config import load
from minitrain.config_checks import check_layout
from minitrain.models.zoo import model_config
from minitrain.training.build import make_model

ROWS = {row["id"]: row for row in yaml.safe_load((Path(__file__).parent / "published/tables.yaml").read_text())}
REFERENCES = published_rows()
CONFIG_OF = {reference["id"]: name for name, reference in REFERENCES.items()}
FIGURES = ("tokens_per_sec_per_gpu", "tflops_per_gpu", "step_time_s", "gpus", "system")


def read(row_id: str):
    return load(CONFIGS / f"{CONFIG_OF[row_id]}.yaml")


def test_each_row_has_one_config():
    assert len(ROWS) == 69
    assert sorted(reference["id"] for reference in REFERENCES.values()) == sorted(ROWS)


@pytest.mark.parametrize("row_id", ROWS)
def test_figures_are_as_published(row_id):
    reference, row = REFERENCES[CONFIG_OF[row_id]], ROWS[row_id]
    for figure in FIGURES:
        assert reference.get(figure) == row.get(figure), figure
    assert reference["source"]


@pytest.mark.parametrize("row_id", ROWS)
def test_layout_and_batch_are_as_published(row_id):
    config, row = read(row_id), ROWS[row_id]
    p = config.parallel
    check_layout(config, row["gpus"])
    assert (p.tp, p.pp, p.cp) == (row["tp"], row["pp"], row["cp"])
    assert p.vp == max(1, row.get("vp") or 1)
    if row.get("ep"):  # empty for GPT-OSS, whose recipe has one
        assert p.ep == row["ep"]
    assert config.batch.seq_len == row["seq_len"]
    if row["task"] == "grpo":
        return
    assert (config.batch.global_, config.batch.micro) == (row["gbs"], row["mbs"])
    data_ranks = row["gpus"] // (p.tp * p.pp * p.cp)
    assert config.batch.global_ % (config.batch.micro * data_ranks) == 0


@pytest.mark.parametrize("row_id", ROWS)
def test_task_precision_and_model_are_as_published(row_id):
    config, row = read(row_id), ROWS[row_id]
    diffusion = row["table"] == "diffusion"
    assert config.task == ("diffusion" if diffusion else row["task"])
    assert (config.precision == "fp8") == row["precision"].startswith("fp8")
    assert config.model.name == row["arch"]
    if "lora" in row["settings"]:
        assert (config.lora.rank, config.lora.alpha) == tuple(row["settings"]["lora"][key] for key in ("rank", "alpha"))
    assert config.recompute == expected_recompute(row)


def expected_recompute(row: dict) -> str | int:
    said = row["settings"].get("activation_checkpointing", row["settings"].get("recompute"))
    if said in (None, False):
        return "none"
    return 5 if "8 of 40" in str(said) else "full"


@pytest.mark.parametrize("arch", sorted({row["arch"] for row in ROWS.values()}))
def test_models_can_be_built_on_the_meta_device(arch):
    row_id = next(row_id for row_id, row in ROWS.items() if row["arch"] == arch)
    model = make_model(read(row_id))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(p.numel() for p in model.parameters()) > 1e9
    assert model_config(arch)


def test_the_list_has_them_all():
    listing = list_rows()
    for name, reference in REFERENCES.items():
        line = next(line for line in listing.splitlines() if f"configs/{name}.yaml" in line)
        assert str(reference["gpus"]) in line
        assert line.rstrip(" |").endswith("*") == ("known_error" in reference)
