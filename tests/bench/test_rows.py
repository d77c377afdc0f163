"""Every published row has one config, which says what the table says and can be laid out on the table's GPUs."""

import math

import pytest

from minitrain.bench import rows
from minitrain.bench.figures import compare, placed
from minitrain.bench.report import merge_results, read_results
from minitrain.bench.report_accuracy import held_back, summary
from minitrain.bench.rows import CONFIGS, list_rows, published_rows, read_row, row_trees
from minitrain.commands import bench
from minitrain.errors import InputError
from minitrain.models.zoo import model_config
from minitrain.run.config import recipes
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.config.load import load, to_dict
from minitrain.simulator import simulate
from minitrain.training.build import make_model
from tests.helpers.published import BRIDGE, OFFLOADED, ROWS, SINGLE

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


@pytest.mark.parametrize("row_id", [key for key, row in ROWS.items() if row["task"] == "grpo"])
def test_settings_of_reinforcement_learning_are_the_recipes(row_id):
    config, settings = read(row_id), ROWS[row_id]["settings"]
    grpo, optim = config.grpo, config.optim
    assert (optim.lr, optim.weight_decay) == (settings["lr"], settings["weight_decay"])
    assert optim.clip == settings["grad_clip"] and optim.betas == [0.9, 0.999]
    assert (grpo.kl, grpo.kl_estimator) == (settings["kl"]["coef"], settings["kl"]["estimator"])
    assert [grpo.clip_low, grpo.clip_high] == settings["clip"]
    assert (grpo.prompts, grpo.group) == (
        settings["prompts_per_step"],
        settings["generations_per_prompt"],
    )
    corrected = "truncate" if settings["importance_correction"] else "none"
    assert (grpo.importance, grpo.lag) == (corrected, ROWS[row_id]["off_policy"])
    # the log of a weight is at most 20
    assert settings["importance_limit"] is None and (
        corrected == "none" or (grpo.importance_low == 0 and grpo.importance_high > math.exp(20))
    )
    differs = REFERENCES[CONFIG_OF[row_id]].get("differs", "")
    assert ("routers" in differs) == (getattr(config.model.config, "num_experts", 0) > 0)
    assert grpo.in_flight == ("in-flight" in settings["refit"]) and "weights" not in differs


@pytest.mark.parametrize("row_id", ROWS)
def test_rows_say_of_their_table_what_stands_there(row_id):
    """The column FSDP, the length that the text gives, and what the recipe has besides."""
    row, reference = ROWS[row_id], REFERENCES[CONFIG_OF[row_id]]
    text = (CONFIGS / f"{CONFIG_OF[row_id]}.yaml").read_text()
    head = " ".join(line.lstrip("# ") for line in text.partition("\n\n")[0].splitlines())
    replicas = row.get("fsdp") == 0 and row["table"] in ("pretrain", "diffusion")
    assert ("The table's FSDP 0 is replicated" in head) == replicas
    assert "as in the table" not in text
    packed = "SQuAD" in str(row.get("notes"))
    said = f"packed to 4096 tokens, the row's are {row['seq_len']}"
    assert (said in reference.get("known_error", "")) == (packed and row["seq_len"] != 4096)
    overlapped = row["settings"].get("async_tp", False)
    assert ("asynchronous TP" in reference.get("differs", "")) == overlapped


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


@pytest.mark.parametrize("model", sorted(SINGLE))
@pytest.mark.parametrize("base", ["fp8", "nf4"])
def test_rows_with_frozen_weights_in_fewer_bits_are_as_published(model, base):
    """Only what is stored differs from the row in BF16: Surogate's rates, or Unsloth's where it has none."""
    row, name = SINGLE[model], f"one-gpu/{model}-qlora-{base}"
    config, reference = load(CONFIGS / f"{name}.yaml"), one_gpu_rows()[name]
    rates = {"Surogate": row.get(f"base_{base}"), "Unsloth": row.get(f"unsloth_{base}")}
    published = [rate for rate in rates.values() if rate]
    assert reference["tokens_per_sec_per_gpu"] == published[0]
    other = f"Unsloth {published[1]:,}" if len(published) > 1 else None
    assert reference.get("others") == other
    shape = config.model.config
    sizes = [shape.hidden_size, shape.intermediate_size, shape.num_layers]
    assert [*sizes, shape.num_attention_heads] == row["model"]
    config.lora.base, config.recompute = "bf16", "none"
    alike = CONFIGS / f"one-gpu/{'qwen3-8b' if model == 'qwen3-32b' else model}-lora-bf16.yaml"
    plain = load(alike)
    config.model, config.reference = plain.model, plain.reference
    assert to_dict(config) == to_dict(plain)
    check_layout(config, reference["gpus"])


@pytest.mark.parametrize("model", [model for model, row in SINGLE.items() if "bf16" in row])
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


@pytest.mark.parametrize("row", BRIDGE, ids=lambda row: row["config"])
def test_rows_of_megatron_bridge_are_as_published(row):
    """They are in no table that is counted."""
    file = CONFIGS / f"megatron-bridge/{row['config']}.yaml"
    config, reference = load(file), read_row(file)["reference"]
    p = config.parallel
    check_layout(config, row["gpus"])
    assert (p.tp, p.pp, p.cp, p.vp) == (row["tp"], row["pp"], row["cp"], row.get("vp", 1))
    assert p.ep == row.get("ep", 1)
    assert (config.batch.global_, config.batch.micro) == (row["gbs"], row["mbs"])
    assert config.batch.seq_len == row["seq"]
    form = {"MXFP8": "mx", "FP8-CS": "tensor"}[row["precision"]]
    assert (config.precision, config.fp8.form) == ("fp8", form)
    # torch has grouped products in MXFP8 for compute capability 10.0 alone
    experts = bool(getattr(config.model.config, "num_experts", 0))
    assert config.fp8.experts == (experts and "300" not in row["system"])
    assert reference["tokens_per_sec_per_gpu"] == row["tokens_per_s_per_gpu"]
    for key in ("id", "system", "gpus", "tflops_per_gpu"):
        assert reference[key] == row[key]


@pytest.mark.parametrize("row", OFFLOADED, ids=lambda row: row["config"])
def test_rows_with_and_without_offload_are_as_published(row):
    """They are in no table that is counted."""
    file = CONFIGS / f"prime-rl/{row['config']}.yaml"
    config, reference = load(file), read_row(file)["reference"]
    check_layout(config, row["gpus"])
    assert (config.batch.seq_len, config.batch.micro) == (row["seq"], 1)
    assert config.batch.global_ == 2 * row["gpus"] == 2 * config.parallel.dp_shard
    assert config.recompute == {"Recompute": "full", "Offload": "full-offload"}[row["ac"]]
    assert (config.lora and config.lora.rank) == row["lora"]
    assert reference["tokens_per_sec_per_gpu"] * row["gpus"] == row["tokens_per_s"]
    for key in ("id", "system", "gpus"):
        assert reference[key] == row[key]


def one_gpu_rows() -> dict[str, dict]:
    rows = {name: tree["reference"] for name, tree in row_trees().items()}
    return {
        name: row
        for name, row in rows.items()
        if row["gpus"] == 1 and not name.startswith("prime-rl/")
    }


def test_rows_of_one_gpu_are_listed_but_not_counted():
    rows = one_gpu_rows()
    assert len(rows) == len(list((CONFIGS / "one-gpu").glob("*.yaml"))) + 2
    assert len(rows.keys() & published_rows()) == 2
    text, notes = list_rows().split("\n\n")
    assert max(map(len, text.splitlines())) <= 100
    assert notes.startswith("69 rows that count")
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


LORA = "automodel/llama3-8b-lora-1gpu"


def compared(file, words=()) -> list[str] | None:
    """What the ratio to the published figure is withheld for; None where there is one."""
    _, config = rows.load_row(file, list(words))
    config = placed(config, 1, config.reference["system"].lower())
    assert (compare(12472.87, 0, config.reference) is None) == ("changed" in config.reference)
    return config.reference.get("changed")


@pytest.mark.parametrize(
    "edit, changed",
    [
        (("", ""), None),
        (("micro: 2", "micro: 1"), None),
        (("seq_len: 4096", "seq_len: 512"), ["batch.seq_len"]),
        (("12472.87", "100"), ["reference.tokens_per_sec_per_gpu"]),
        (("DGX-H100", "DGX-GB200"), ["system"]),
        (("gpus: 1", "gpus: 2"), ["gpus"]),
        (("automodel\n", "clean\n"), ["reference.convention"]),
        (("  gpus: 1\n", ""), None),
        (("lora-llama3-8b", "lora-qwen2.5-7b"), ["model"]),
    ],
    ids=str,
)
def test_an_edited_copy_is_compared_for_the_same_work_alone(tmp_path, edit, changed):
    text = (CONFIGS / f"{LORA}.yaml").read_text().replace(*edit)
    for name in ("mine.yaml", "configs/own/fast.yaml", f"configs/{LORA}.yaml"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        found = compared(file)
        assert changed is None if found is None else set(changed) <= set(found)


@pytest.mark.parametrize(
    "words, changed",
    [
        (["batch.seq_len=512"], ["batch.seq_len"]),
        (["reference.system=DGX-GB200"], ["system"]),
        (["reference.gpus=128"], ["gpus"]),
        (["reference.tokens_per_sec_per_gpu=100"], ["reference.tokens_per_sec_per_gpu"]),
        (
            ["reference.corrected_tokens_per_sec_per_gpu=100"],
            ["reference.corrected_tokens_per_sec_per_gpu"],
        ),
        (["reference.tflops_per_gpu=1"], ["reference.tflops_per_gpu"]),
        (["reference.step_time_s=1"], ["reference.step_time_s"]),
        (["reference.convention=clean"], ["reference.convention"]),
        (["reference.recipe={stack: megatron}"], ["reference.recipe"]),
        (["reference.changed=[]", "batch.seq_len=512"], ["batch.seq_len", "reference.changed"]),
        (["reference.layout=ours"], None),
    ],
    ids=str,
)
def test_what_is_written_of_the_published_run_is_not_compared_with(words, changed):
    assert compared(CONFIGS / f"{LORA}.yaml", words) == changed


def test_a_reference_that_cites_a_table_names_its_row(tmp_path):
    text = (CONFIGS / f"{LORA}.yaml").read_text()
    for edit in (("  id: am-lora-llama3-8b-1gpu\n", ""), ("id: am", "id: xx")):
        (tmp_path / "mine.yaml").write_text(text.replace(*edit))
        with pytest.raises(
            InputError, match="is a published table: reference.id must name a row"
        ):
            rows.load_row(tmp_path / "mine.yaml", [])


def test_kept_results_of_another_gpu_stand_beside_no_row():
    """What was measured on an H200 is compared with no figure of an H100, nor in a file that says so."""
    lines = read_results(str(CONFIGS.parents[0] / "results/h200/rows.jsonl"))
    assert not [line for line in lines if line.get("ratio")]
    line = next(line for line in lines if line["row"] == LORA)
    told = line | {"ratio": 1.23, "reference": {**REFERENCES[LORA]}}
    for reference in ({}, {"system": "H200"}, {"tokens_per_sec_per_gpu": 100.0}):
        report = merge_results([told | {"reference": told["reference"] | reference}], "")
        assert not [row for row in report.rows if row.results]
        assert [other["ratio"] for other in report.others] == [None]
    there = told | {"device": "NVIDIA H100 80GB HBM3"}
    (row,) = [row for row in merge_results([there], "").rows if row.results]
    assert row.results["measured"]["ratio"] == 1.23


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
    for module in (rows, recipes):
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
        simulate, "trace_all", lambda jobs: {at: job() for at, job in jobs.items()}
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


def test_a_published_row_in_flow_style_is_found_by_its_id(tmp_path, monkeypatch):
    text = MINE.replace("{source: my cluster", '{id: "mine-1", source: "NeMo AutoModel, a table"')
    (tmp_path / "configs/own").mkdir(parents=True)
    (tmp_path / "configs/own/mine.yaml").write_text(text)
    (tmp_path / "edited.yaml").write_text(text.replace("seq_len: 64", "seq_len: 32"))
    monkeypatch.setattr(rows, "CONFIGS", tmp_path / "configs")
    _, config = rows.load_row(tmp_path / "edited.yaml", [])
    assert config.reference["changed"] == ["batch.seq_len"]
