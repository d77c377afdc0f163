"""Stand-ins for configs that are too large: what they keep, the line through two of them, and what may be compared."""

import dataclasses
import json
from collections import Counter

import pytest

import bench
from minitrain.bench.figures import compare, placed, published_step_time, rates
from minitrain.bench.proxy import (
    LEFT_OUT,
    cut_layers,
    extrapolate,
    make_proxy,
    mixture,
    note,
    parse_counts,
)
from minitrain.bench.rows import CONFIGS, load_row
from minitrain.bench.tables import is_of_system, label
from minitrain.commands import bench_runs
from minitrain.commands.bench_results import write_result
from minitrain.errors import InputError
from minitrain.run.config.load import load
from minitrain.run.config.ranks import micro_batches
from minitrain.settings import Lora
from minitrain.simulator import predict
from tests.helpers.commands import command

DENSE = CONFIGS / "nemo/h100/llama3-70b-pretrain-64gpu.yaml"
EXPERTS = CONFIGS / "automodel/deepseek-v3-pretrain-256gpu.yaml"
HYBRID = CONFIGS / "automodel/nemotron3-nano-30b-a3b-pretrain-8gpu.yaml"


def test_a_proxy_keeps_the_width_and_the_micro_batch_and_is_alone():
    config = load(DENSE)
    proxy = make_proxy(config, 4)
    assert dataclasses.replace(proxy.model.config, num_layers=80) == config.model.config
    p = proxy.parallel
    assert p.dp_replicate * p.dp_shard * p.tp * p.cp * p.pp * p.ep * p.vp == 1
    assert proxy.batch.micro == config.batch.micro and proxy.batch.seq_len == config.batch.seq_len
    assert proxy.batch.global_ == 8 * proxy.batch.micro
    assert compare(1.0, 1.0, proxy.reference) is None and published_step_time(proxy) is None
    few = dataclasses.replace(
        config.batch, global_=2 * config.batch.global_ // micro_batches(config)
    )
    assert (
        make_proxy(dataclasses.replace(config, batch=few), 4).batch.global_
        == 2 * config.batch.micro
    )


def test_a_proxy_has_the_weights_of_no_file():
    config = load(DENSE)
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, path="a"), lora=Lora(path="b")
    )
    found = cut_layers(config, 4)
    assert found.model.path == "" and found.lora == Lora()


@pytest.mark.parametrize("file, ranks, experts", [(EXPERTS, 64, 8), (HYBRID, 8, 16)])
def test_experts_are_those_of_one_rank_but_enough_for_a_token(file, ranks, experts):
    config = load(file)
    whole, shape = config.model.config, make_proxy(config, 8).model.config
    assert config.parallel.ep == ranks
    assert (
        shape.num_experts == experts == max(whole.num_experts // ranks, whole.num_experts_per_tok)
    )
    assert shape.num_experts_per_tok == whole.num_experts_per_tok
    assert note(config, 8)["experts"] == experts


@pytest.mark.parametrize("layers", [8, 13, 26, 52])
def test_hybrids_keep_their_mixture(layers):
    pattern = load(HYBRID).model.config.layer_pattern
    found, real = Counter(mixture(pattern, layers)), Counter(pattern)
    for kind in real:
        assert abs(found[kind] - real[kind] * layers / 52) < 1
    if layers == 52:
        assert found == real


def fake(config, layers: int, seconds: float) -> dict:
    """The result row of a proxy whose step takes so long."""
    batch = make_proxy(config, layers).batch
    return {
        "row": "row",
        "mode": "measured",
        "device": "NVIDIA H100 80GB HBM3",
        "torch": "2",
        "matmul_tflops": 100.0,
        "step_time_s": seconds,
        "tokens_per_sec_per_gpu": batch.global_ * batch.seq_len / seconds,
    } | note(config, layers)


def test_extrapolation_is_exact_for_a_machine_whose_layers_take_equally_long():
    """0.5 s for embedding and head, 0.25 s per layer: 4 layers take 1.5 s, 8 take 2.5 s, so 80 take 20.5 s."""
    config = load(DENSE)
    found = extrapolate(config, fake(config, 4, 1.5), fake(config, 8, 2.5))
    tokens = 8 * config.batch.micro * 8192 / 20.5
    assert found["tokens_per_sec_per_gpu"] == pytest.approx(tokens)
    assert found["ratio"] == pytest.approx(tokens / config.reference["tokens_per_sec_per_gpu"])
    assert found["step_time_s"] == pytest.approx(config.batch.global_ * 8192 / 64 / tokens)
    assert found["seconds_per_layer"] == pytest.approx(0.25)
    assert found["mode"] == "extrapolated" and found["proxy"] is True
    assert (
        found["layers"] == [4, 8]
        and found["full_layers"] == 80
        and "communication" in found["left_out"]
    )


def test_what_an_extrapolation_knows_nothing_of_is_told(capsys):
    config = load(DENSE)
    write_result(extrapolate(config, fake(config, 4, 1.5), fake(config, 8, 2.5)), None)
    assert capsys.readouterr().out.endswith(f"\nwithout {LEFT_OUT}\n")


def test_extrapolation_needs_time_that_grows():
    config = load(DENSE)
    with pytest.raises(InputError, match="8 layers took no longer than 4"):
        extrapolate(config, fake(config, 4, 2.0), fake(config, 8, 2.0))


@pytest.mark.parametrize("word", ["", "0", "8,4", "4,4", "a", "4,8,12", "4,", "-4", "²"])
def test_wrong_counts(word):
    with pytest.raises(InputError, match="must be a number of layers, or two that rise"):
        parse_counts(word)


@pytest.mark.parametrize(
    "row, layers, line",
    [
        ("nemo/h100/llama3-70b-pretrain-64gpu", 81, "must be above 0 and at most num_layers=80"),
        ("automodel/deepseek-v3-pretrain-256gpu", 3, "must be above 3 and at most num_layers=61"),
        ("dfm/wan2.1-14b-pretrain-h100-128gpu", 4, "is not a multiple of recompute=5"),
        ("rl/llama3.1-8b-grpo-16gpu-onpolicy", 4, "not task=grpo"),
        (
            "nemo/h100/mixtral-8x7b-pretrain-64gpu",
            4,
            "one expert per rank, in FP8, has no stand-in",
        ),
    ],
)
def test_rows_without_such_a_proxy(row, layers, line):
    with pytest.raises(InputError, match=line):
        make_proxy(load(CONFIGS / f"{row}.yaml"), layers)


def test_one_expert_per_rank_has_a_stand_in_where_groups_multiply_in_fp8():
    config = load(
        CONFIGS / "nemo/h100/mixtral-8x7b-pretrain-64gpu.yaml",
        ["fp8.form=row", "fp8.keep_transposed=false"],
    )
    proxy = make_proxy(config, 4)
    assert proxy.model.config.num_experts == 2 and proxy.fp8 == config.fp8


GRPO_ROW, WAN_ROW = "rl/qwen3-32b-grpo-32gpu-onpolicy", "dfm/wan2.1-14b-pretrain-h100-8gpu"
DENSE_ROW, LORA_ROW = "nemo/h100/llama3-70b-pretrain-64gpu", "automodel/llama3-8b-lora-1gpu"


@pytest.mark.parametrize(
    "row, overrides, changed",
    [
        (DENSE_ROW, "model.num_layers=40", ["model"]),
        (DENSE_ROW, "batch.seq_len=2048", ["batch.seq_len"]),
        (DENSE_ROW, "batch.global=256", ["batch.global"]),
        (DENSE_ROW, "precision=bf16", ["precision"]),
        (DENSE_ROW, "optim.name=sgd", ["optim.name"]),
        (DENSE_ROW, "data.kind=jsonl data.path=x", ["data.kind"]),
        (DENSE_ROW, "data.kind=tokens data.path=x", ["data.kind"]),
        (DENSE_ROW, "task=sft", ["task"]),
        (
            DENSE_ROW,
            "batch.micro=2 parallel.tp=2 recompute=full optim.lr=1 steps=3 compile=false",
            None,
        ),
        (LORA_ROW, "lora.rank=8", ["lora"]),
        (LORA_ROW, "data.packed=true", ["data"]),
        (WAN_ROW, "data.size=[24,52,60] batch.seq_len=18720", ["batch.seq_len", "data"]),
        (GRPO_ROW, "grpo.kl=0 batch.global=2048", ["batch.global", "grpo.kl"]),
        (GRPO_ROW, "grpo.group=8 grpo.prompts=256", ["grpo.prompts", "grpo.group"]),
        (GRPO_ROW, "grpo.generations=2 grpo.lag=1", ["grpo.generations", "grpo.lag"]),
        (GRPO_ROW, "rollout.max_tokens=512", ["rollout.max_tokens"]),
        (
            GRPO_ROW,
            "rollout.slots=64 grpo.kl=0.1 rollout.temperature=0.5 grpo.offload=true",
            None,
        ),
    ],
)
def test_what_is_compared_with_the_published_figure(row, overrides, changed):
    """Runs that do the row's work, in whatever layout and by whatever kernels."""
    name, config = load_row(CONFIGS / f"{row}.yaml", overrides.split())
    assert name == row
    assert config.reference.get("changed") == changed
    assert (compare(1621.0, 1e14, config.reference) is None) == (changed is not None)


@pytest.mark.parametrize(
    "ranks, machine, changed",
    [
        (64, "NVIDIA H100 80GB HBM3", None),
        (64, "dgx-h100", None),
        (64, "dgx-h100 (calibrated)", None),
        (1, "NVIDIA H100 80GB HBM3", ["gpus"]),
        (128, "dgx-h100", ["gpus"]),
        (64, "NVIDIA H100 PCIe", ["system"]),
        (64, "NVIDIA H100 NVL", ["system"]),
        (64, "NVIDIA H100 80GB HBM3 MIG 1g.10gb", ["system"]),
        (64, "NVIDIA H200", ["system"]),
        (64, "NVIDIA GH200 480GB", ["system"]),
        (64, "dgx-gb200", ["system"]),
        (8, "Intel(R) Xeon(R) Processor", ["gpus", "system"]),
    ],
)
def test_figures_of_other_machines_or_numbers_of_gpus_are_compared_with_nothing(
    ranks, machine, changed
):
    config = placed(load_row(DENSE, [])[1], ranks, machine)
    assert config.reference.get("changed") == changed
    assert (compare(1621.0, 0.0, config.reference) is None) == (changed is not None)
    faster = placed(load_row(DENSE, ["precision=bf16"])[1], ranks, machine)
    assert faster.reference["changed"] == ["precision", *(changed or ())]


@pytest.mark.parametrize(
    "system, device, same",
    [
        ("DGX-B200", "NVIDIA B200", True),
        ("DGX-B200", "NVIDIA GB200", False),
        ("DGX-GB200", "NVIDIA GB200", True),
        ("DGX-GB300", "NVIDIA GB300", True),
        ("DGX-GB300", "NVIDIA B300 SXM6 AC", False),
    ],
)
def test_devices_of_systems(system, device, same):
    assert is_of_system(device, system) == same


def test_a_copy_of_a_row_elsewhere_is_the_row_where_it_does_its_work(tmp_path):
    copy = tmp_path / f"configs/{DENSE_ROW}.yaml"
    copy.parent.mkdir(parents=True)
    for text, changed in (("precision: fp8", None), ("precision: bf16", ["precision"])):
        copy.write_text(DENSE.read_text().replace("precision: fp8", text))
        row, config = load_row(copy, [])
        assert row == DENSE_ROW and config.reference.get("changed") == changed


def test_extrapolations_are_compared_on_the_rows_machines_alone():
    config = load(DENSE)
    small, large = fake(config, 4, 1.5), fake(config, 8, 2.5)
    for device, compared in (("NVIDIA H100 80GB HBM3", True), ("NVIDIA A100-SXM4-80GB", False)):
        found = extrapolate(config, small | {"device": device}, large | {"device": device})
        assert (found["ratio"] is not None) == compared
        assert ("changed: system" in label(found)) == (not compared)


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize(
    "ranks, system, changed",
    [(None, None, None), (2, None, ["gpus"]), (1, "DGX-B200", ["system"])],
)
def test_a_run_here_is_not_compared_with_a_run_there(
    monkeypatch, tmp_path, simulated, ranks, system, changed
):
    """Measured on one CPU, and simulated on one H100: by bench.py itself, its figures made up."""
    row, said = (
        tmp_path / "row.yaml",
        {"tflops_per_gpu": 0.5, "step_time_s": 9.0, "gpus": ranks, "system": system},
    )
    reference = {key: value for key, value in said.items() if value}
    row.write_text(json.dumps(ONE_RANK | {"reference": reference}))
    config, options = (
        load_row(row, [])[1],
        bench.parser().parse_args(["--simulate"] if simulated else []),
    )
    options.system = "dgx-h100"
    monkeypatch.setattr("minitrain.bench.measure.measure", made_up)
    monkeypatch.setattr(predict, "simulated_figures", made_up)
    for name in ("record", "time_traces"):
        monkeypatch.setattr(predict, name, lambda *_: None)
    found = bench_runs.run("row", config, options)
    assert found["changed"] == changed
    assert (found["ratio"], found["published"]) == (
        (2.0, 9.0) if changed is None else (None, None)
    )


ONE_RANK = {"model": "llama3-8b-tiny", "device": "cpu", "parallel": {"dp_shard": 1}}


def made_up(config, *_) -> dict:
    """Of a run at 1 TFLOP/s."""
    told = {"changed": config.reference.get("changed"), "published": published_step_time(config)}
    return rates(config, 1.0, 1.0, 1e12, 1e12) | told


def test_proxies_run_one_bad_config_does_not_stop_the_others_and_results_are_marked(tmp_path):
    text = "model: {{name: llama3-8b-tiny, num_layers: {}}}\nbatch: {{global: 8, micro: 1, seq_len: 64}}\n"
    reference = "parallel: {dp_shard: 4}\nreference: {tokens_per_sec_per_gpu: 100, gpus: 4}\n"
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(text.format(64) + reference)
    bad.write_text(text.format(64) + "parallel: {dp_shard: 4}\n")
    file = tmp_path / "results.jsonl"
    files = ["bench.py", "--json", file, "--steps", 3, "--warmup", 1, "device=cpu", "--config"]
    done = command(*files, good, "--proxy", "2,12")
    assert done.returncode == 0, done.stderr
    small, large, whole = map(json.loads, file.read_text().splitlines())
    assert [r["layers"] for r in (small, large, whole)] == [2, 12, [2, 12]]
    assert small["proxy"] and large["proxy"] and whole["proxy"] and small["ratio"] is None
    assert whole["mode"] == "extrapolated" and whole["world_size"] == 4
    assert (
        whole["tokens_per_sec_per_gpu"]
        < large["tokens_per_sec_per_gpu"]
        < small["tokens_per_sec_per_gpu"]
    )
    assert whole["ratio"] == pytest.approx(whole["tokens_per_sec_per_gpu"] / 100)
    assert "good (proxy, 2 of 64 layers)" in done.stdout
    assert "good (extrapolated; proxy, 2 and 12 of 64 layers)" in done.stdout

    file.unlink()
    bad_layout = tmp_path / "quick.yaml"
    bad_layout.write_text(text.format(1))
    done = command(*files, bad, bad_layout)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: 1 of 2 configs failed: bad"
    assert "error: bad: parallel.dp_replicate=1 x dp_shard=4" in done.stderr
    assert [json.loads(line)["row"] for line in file.read_text().splitlines()] == [
        "calibration",
        "quick",
    ]
