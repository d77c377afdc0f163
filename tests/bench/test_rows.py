"""Every published row has one config, which says what the table says and can be laid out on the table's GPUs."""

import pytest

from minitrain.bench import rows
from minitrain.bench.report import held_back, merge_results, read_results, summary
from minitrain.bench.rows import (
    CONFIGS,
    list_one_gpu,
    list_rows,
    one_gpu_rows,
    published_rows,
    read_row,
)
from minitrain.commands import bench
from minitrain.errors import InputError
from minitrain.models.zoo import model_config
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.config.load import load
from minitrain.run.launch import cli
from minitrain.simulator import simulate
from minitrain.simulator.fake_world import trace_step
from minitrain.training.build import make_model
from tests.helpers.published import ROWS, SINGLE

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
        assert (config.lora.rank, config.lora.alpha) == tuple(
            row["settings"]["lora"][key] for key in ("rank", "alpha")
        )
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


def test_the_list_has_them_all_in_a_terminals_width():
    table, notes = list_rows().split("\n\n")
    assert max(map(len, table.splitlines())) <= 100
    for name, reference in REFERENCES.items():
        marked = "known_error" in reference
        row = next(line for line in table.splitlines() if line.startswith(f"| {name} "))
        _, cell, system, gpus, *_ = (cell.strip() for cell in row.split("|"))
        assert cell == (f"{name} *" if marked else name) and (f"\n* {name}: " in notes) == marked
        assert reference["system"] == f"DGX-{system}" and gpus == str(reference["gpus"])


@pytest.mark.parametrize("model", SINGLE)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_rows_of_one_gpu_are_as_published(model, precision):
    row, name = SINGLE[model], f"one-gpu/{model}-lora-{precision}"
    config, reference = load(CONFIGS / f"{name}.yaml"), one_gpu_rows()[name]
    shape = config.model.config
    sizes = shape.hidden_size, shape.intermediate_size, shape.num_layers
    assert [*sizes, shape.num_attention_heads] == row["model"]
    assert shape.tie_word_embeddings == (shape.num_layers == 28 or shape.hidden_size == 2560)
    assert (shape.family, shape.num_key_value_heads, shape.head_dim) == ("qwen3", 8, 128)
    assert (config.task, config.lora.rank, config.lora.alpha) == ("lora", 16, 32)
    assert (config.batch.global_, config.batch.seq_len) == (8, 2048)
    # 80 GB hold one row of the largest in FP8
    assert config.batch.micro == (1 if name == "one-gpu/qwen3-14b-lora-fp8" else 2)
    assert (config.precision == "fp8") == (precision == "fp8")
    assert reference["tokens_per_sec_per_gpu"] == row[precision]
    other = f"Unsloth {row['unsloth_bf16']:,}" if precision == "bf16" else None
    assert reference.get("others") == other
    check_layout(config, reference["gpus"])


def test_rows_of_one_gpu_are_listed_apart():
    rows = one_gpu_rows()
    assert len(rows) == len(list((CONFIGS / "one-gpu").glob("*.yaml"))) + 2
    text = list_one_gpu()
    assert max(map(len, text.splitlines())) <= 100
    for name, reference in rows.items():
        line = next(line for line in text.splitlines() if line.startswith(f"| {name} "))
        assert f" {reference['tokens_per_sec_per_gpu']:,.6g} " in line


def test_report_of_one_gpu_has_every_row():
    text = (CONFIGS.parents[0] / "results/one-gpu.md").read_text(encoding="utf-8")
    for name, reference in one_gpu_rows().items():
        line = next(line for line in text.splitlines() if f"[{name}]" in line)
        assert f"| {reference['tokens_per_sec_per_gpu']:,.0f} |" in line
        assert f"| {reference.get('others', '').removeprefix('Unsloth ')} |" in line


ROW = "{batch: {global: 8, micro: 1, seq_len: 64}, parallel: {tp: 2}, reference: {source: x, system: y, gpus: 2, %s}}"


@pytest.mark.parametrize(
    "text, line",
    [
        ("", "row.yaml needs reference, a mapping"),
        ("batch: [", "row.yaml:1:9: "),
        ("- x", "row.yaml: a config must be a mapping"),
        ("reference: {}", "row.yaml needs batch, a mapping"),
        (
            ROW.replace("global: 8, ", "") % "tflops_per_gpu: 5",
            "row.yaml: batch needs global, a number above 0",
        ),
        (
            ROW.replace("source: x, ", "") % "tflops_per_gpu: 5",
            "row.yaml: reference needs source, text",
        ),
        (
            ROW.replace("gpus: 2", "gpus: two") % "tflops_per_gpu: 5",
            "needs gpus, a number above 0, not str 'two'",
        ),
        (ROW % "id: z", "row.yaml: reference needs tokens_per_sec_per_gpu or tflops_per_gpu"),
        (
            ROW % "tflops_per_gpu: 5, step_time_s: fast",
            "row.yaml: reference.step_time_s must be a finite number, not str",
        ),
    ],
)
def test_rows_that_no_table_can_show(tmp_path, text, line):
    file = tmp_path / "row.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=line):
        read_row(file)


def test_figures_of_rows_are_numbers_as_configs_have_them(tmp_path):
    file = tmp_path / "row.yaml"
    file.write_text(ROW % "tokens_per_sec_per_gpu: 1.2e4")
    assert read_row(file)["reference"]["tokens_per_sec_per_gpu"] == 12000


MINE = """
model: llama3-8b-tiny
batch: {global: 2, micro: 1, seq_len: 64}
parallel: {dp_shard: 1}
reference: {source: my cluster, system: DGX-H100, gpus: 1, tokens_per_sec_per_gpu: 1000}
"""


@pytest.fixture
def mine(tmp_path, monkeypatch) -> str:
    """A row of one's own beside the published ones; returns its name."""
    (tmp_path / "configs/own").mkdir(parents=True)
    for file in CONFIGS.iterdir():
        if file.name != "own":
            (tmp_path / "configs" / file.name).symlink_to(file)
    (tmp_path / "configs/own/mine.yaml").write_text(MINE)
    for module in (rows, cli):
        monkeypatch.setattr(module, "CONFIGS", tmp_path / "configs")
    return "own/mine"


def test_a_row_of_ones_own_is_listed_simulated_and_compared_but_not_counted(
    mine, tmp_path, monkeypatch, capsys
):
    assert sorted(published_rows()) == sorted(REFERENCES)
    bench.main(["--list"])
    listed = capsys.readouterr().out
    assert f"| {mine} " in listed and "\n69 rows" in listed

    # in this process
    monkeypatch.setattr(
        simulate, "trace_all", lambda jobs: {at: trace_step(*job) for at, job in jobs.items()}
    )
    monkeypatch.setattr(bench.tracers, "start_server", lambda: None)
    file = tmp_path / "mine.jsonl"
    bench.main(["--simulate", "--config", mine, "--json", str(file)])
    (result,) = read_results(str(file))
    assert (result["row"], result["system"]) == (mine, "dgx-h100")
    assert result["ratio"] == pytest.approx(result["tokens_per_sec_per_gpu"] / 1000)

    report = merge_results([result], "")
    assert [row.name for row in report.tables["my cluster"]] == [mine]
    assert "69 published rows" in summary(report) and not held_back(report.rows)
    assert "my cluster" not in merge_results([], "").tables
