"""Stand-ins for configs that are too large: what they keep, the line through two of them, and what may be compared."""

import dataclasses
import json
from collections import Counter

import pytest

from minitrain.bench.measure import compare, load_row, published_step_time
from minitrain.bench.proxy import LEFT_OUT, cut, extrapolate, make_proxy, mixture, note, parse_counts
from minitrain.bench.rows import CONFIGS
from minitrain.benchmark import write_result
from minitrain.errors import InputError
from minitrain.models.lora import Lora
from minitrain.settings import load
from minitrain.simulator.layout import micro_batches
from tests.commands import command

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
    few = dataclasses.replace(config.batch, global_=2 * config.batch.global_ // micro_batches(config))
    assert make_proxy(dataclasses.replace(config, batch=few), 4).batch.global_ == 2 * config.batch.micro


def test_a_proxy_has_the_weights_of_no_file():
    config = load(DENSE)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path="a"), lora=Lora(path="b"))
    found = cut(config, 4)
    assert found.model.path == "" and found.lora == Lora()


@pytest.mark.parametrize("file, ranks, experts", [(EXPERTS, 64, 8), (HYBRID, 8, 16)])
def test_experts_are_those_of_one_rank_but_enough_for_a_token(file, ranks, experts):
    config = load(file)
    whole, shape = config.model.config, make_proxy(config, 8).model.config
    assert config.parallel.ep == ranks
    assert shape.num_experts == experts == max(whole.num_experts // ranks, whole.num_experts_per_tok)
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
        "row": "row", "mode": "measured", "device": "clock", "torch": "2", "matmul_tflops": 100.0,
        "step_time_s": seconds,
        "tokens_per_sec_per_gpu": batch.global_ * batch.seq_len / seconds,
    } | note(config, layers)  # fmt: skip


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
    assert found["layers"] == [4, 8] and found["full_layers"] == 80 and "communication" in found["left_out"]


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
        ("nemo/h100/mixtral-8x7b-pretrain-64gpu", 4, "one expert per rank, in FP8, has no stand-in"),
    ],
)
def test_rows_without_such_a_proxy(row, layers, line):
    with pytest.raises(InputError, match=line):
        make_proxy(load(CONFIGS / f"{row}.yaml"), layers)


@pytest.mark.parametrize(
    "override, changed",
    [
        ("model.num_layers=40", ["model"]),
        ("batch.seq_len=2048", ["batch.seq_len"]),
        ("precision=bf16", ["precision"]),
        ("batch.micro=2", None),
        ("parallel.tp=2", None),
        ("recompute=full", None),
    ],
)
def test_what_is_compared_with_the_published_figure(override, changed):
    row, config = load_row(DENSE, [override])
    assert row == "nemo/h100/llama3-70b-pretrain-64gpu"
    assert config.reference.get("changed") == changed
    assert (compare(1621.0, 0.0, config.reference) is None) == (changed is not None)


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
    assert whole["tokens_per_sec_per_gpu"] < large["tokens_per_sec_per_gpu"] < small["tokens_per_sec_per_gpu"]
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
    assert [json.loads(line)["row"] for line in file.read_text().splitlines()] == ["calibration", "quick"]
