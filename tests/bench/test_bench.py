"""bench.py: its figures against arithmetic, its flags, and its errors."""

import gc
import json
import os
import re
import runpy
import signal
import weakref
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from torch.distributed.fsdp import FSDPModule

from minitrain.bench.decoding import bytes_read, model_reads
from minitrain.bench.figures import table_convention, token_flops
from minitrain.bench.measure import announce_time, result
from minitrain.bench.measure_sampling import (
    decoding_figures,
    make_prompts,
    measure_sampling,
    sampling_figures,
)
from minitrain.bench.rows import CONVENTIONS, load_row, row_name
from minitrain.bench.tables import comparison, details, in_width, markdown, sized, table
from minitrain.commands import bench as commands
from minitrain.commands import bench_cases, bench_results, bench_runs
from minitrain.errors import InputError
from minitrain.rollout.engine import Sampler
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.config.load import from_dict, load
from minitrain.run.launch.interrupts import Stopped
from minitrain.run.monitor.flops import clean, count_work, flops_per_token, nemo_pretrain
from tests.helpers.commands import ROOT, command, torchrun

main = runpy.run_path(str(ROOT / "bench.py"), run_name="bench")["main"]


def bench_options(*words: str):
    return commands.parser().parse_args(list(words))


WAN = [
    "model=wan2.1-1.3b-tiny",
    "task=diffusion",
    "data.size=[2,8,16]",
    "batch.seq_len=64",
    "batch.micro=1",
]
SYSTEMS = yaml.safe_load((ROOT / "minitrain/bench/systems.yaml").read_text())
KNOWN = {section: ", ".join(SYSTEMS[section]) for section in ("kernels", "stacks")}
TINY = [
    "model.hidden_size=64",
    "model.num_layers=2",
    "model.vocab_size=256",
    "batch.seq_len=64",
    "device=cpu",
]


@pytest.fixture(autouse=True)
def four_ranks(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 4)


def outcome(tree: dict, seconds: list[float], matmul: float = 1e12) -> dict:
    config = from_dict(tree)
    figures = result(config, "row", torch.device("cpu"), seconds, matmul, token_flops(config))
    return figures | {"activations_gib": 0.5, "compile_s": 0.0}


@pytest.mark.parametrize(
    ("seconds", "matmul", "unsteady"),
    [([2.0, 2.1, 2.2], 1e12, False), ([1.0, 2.0, 2.0], 1e12, True), ([2.0, 2.0, 2.0], 1e9, True)],
)
def test_a_busy_machine_is_told_of(capsys, seconds, matmul, unsteady):
    tree = {"model": "llama3-8b", "batch": {"global": 1, "micro": 1, "seq_len": 4}}
    bench_results.write_result(outcome(tree, seconds, matmul), None)
    assert ("warning: row: steps were not of one speed" in capsys.readouterr().err) == unsteady


@pytest.mark.parametrize("mode", ["measured", "extrapolated"])
def test_more_than_all_of_a_machines_rate_is_told_of(capsys, mode):
    """A step of 2 s on a machine of 1 GFLOP/s."""
    tree = {"model": "llama3-8b", "batch": {"global": 1, "micro": 1, "seq_len": 4}}
    found = outcome(tree, [2.0] * 3, 1e9) | {"mode": mode, "left_out": "", "device": "slow"}
    bench_results.write_result(found, None)
    line = f"warning: row: MFU of {found['mfu']:.1%}: the matmul rate of slow, 0.001 TFLOP/s, is at fault"
    assert found["mfu"] > 1 and line in capsys.readouterr().err
    bench_results.write_result(found | {"mfu": 0.99}, None)
    assert "MFU of" not in capsys.readouterr().err


def test_figures_are_arithmetic():
    tree = {"model": "llama3-8b", "batch": {"global": 8, "micro": 2, "seq_len": 4096}}
    reference = {"tokens_per_sec_per_gpu": 1000, "convention": "nemo_pretrain"}
    found = outcome(tree | {"reference": reference}, [9.0, 2.0, 4.0])
    shape = from_dict(tree).model.config
    assert found["step_time_s"] == 4.0 and found["step_time_min_s"] == 2.0
    assert found["tokens_per_sec_per_gpu"] == 8 * 4096 / 4.0 / 4
    assert found["clean_tflops_per_gpu"] == pytest.approx(
        2048 * flops_per_token(shape, 4096, clean) / 1e12
    )
    assert found["tflops_per_gpu"] == pytest.approx(
        2048 * flops_per_token(shape, 4096, nemo_pretrain) / 1e12
    )
    assert found["mfu"] == pytest.approx(found["clean_tflops_per_gpu"])
    assert found["ratio"] == 2.048


def test_peak_is_that_of_the_type_that_is_computed_in(monkeypatch):
    """A multiple of fp32's on the device, of the work that is done, whatever the table counts."""
    peaks = {torch.float32: 1e12, torch.bfloat16: 2e12, torch.float8_e4m3fn: 4e12}
    monkeypatch.setattr("minitrain.bench.measure.peak_flops", lambda device, dtype: peaks[dtype])
    tree = {"model": "llama3-8b", "reference": {"convention": "nemo_pretrain"}}
    for precision, factor in {"fp32": 1, "bf16": 2, "bf16-pure": 2, "fp8": 4}.items():
        found = outcome(tree | {"precision": precision}, [1.0])
        assert found["mfu_of_peak"] == pytest.approx(found["clean_tflops_per_gpu"] / factor)
        assert found["tflops_per_gpu"] != found["clean_tflops_per_gpu"]


def test_no_reference_no_ratio():
    found = outcome({"model": "llama3-8b-tiny"}, [1.0])
    assert found["ratio"] is None and found["tflops_per_gpu"] == found["clean_tflops_per_gpu"]
    assert "ratio" not in table([found]) and "published" not in table([found])


@pytest.mark.parametrize(
    "reference, line",
    [
        ("convention: guess", r"reference\.convention='guess' is not one of clean, automodel"),
        ("convention: [clean]", r"reference\.convention must be text, not list \['clean'\]"),
        (
            "tokens_per_sec_per_gpu: 1k",
            r"reference\.tokens_per_sec_per_gpu must be a finite number, not str '1k'",
        ),
        ("tflops_per_gpu: 0", r"reference\.tflops_per_gpu=0 must be a number above 0"),
        ("gpus: null", r"reference\.gpus must be a whole number, not NoneType None"),
        ("mean_response: 8, gpus: 1", "reference.mean_response needs reference.step_time_s too"),
        ("drafts: 1", "reference needs both drafts and acceptance"),
        ("drafts: 1, acceptance: 1.5", "acceptance, a share of at most 1"),
        ("system: 200", r"reference\.system must be text, not int 200"),
        ("changed: 5", r"reference\.changed must be a list, not int 5"),
        ("recipe: nemo-rl", "reference.recipe must be a mapping, not str 'nemo-rl'"),
        (
            "recipe: {micro_batches: all}",
            "reference.recipe.micro_batches must be a whole number, not str 'all'",
        ),
        (
            "recipe: {compile: maybe}",
            "reference.recipe.compile must be true or false, not str 'maybe'",
        ),
        (
            "recipe: {attention: flash5}",
            f"^reference.recipe.attention=flash5 is not one of {KNOWN['kernels']}$",
        ),
        (
            "recipe: {stack: nemo}",
            f"^reference.recipe.stack=nemo is not one of {KNOWN['stacks']}$",
        ),
        (
            "tokens_per_sec: 5",
            r"^unknown key reference.tokens_per_sec \(nearest: tokens_per_sec_per_gpu\)",
        ),
        (
            "recipe: {compiled: true}",
            r"unknown key reference.recipe.compiled \(nearest: compile\)",
        ),
    ],
)
def test_wrong_published_figures_are_refused_before_a_run(reference, line, tmp_path):
    file = tmp_path / "row.yaml"
    file.write_text(f"model: llama3-8b-tiny\nreference: {{{reference}}}\n")
    with pytest.raises(InputError, match=line):
        load_row(file, [])


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_row_of_gpus_says_on_a_cpu_how_long_a_step_takes(ranks, capsys, monkeypatch):
    """72e15 FLOPs at 1 TFLOP/s of each rank; a row of one's own without a machine, and a GPU, say nothing."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    row = {"model": "llama3-8b-tiny", "reference": {"system": "DGX-H100", "gpus": 8}}
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    announce_time(from_dict(row), "row", gpu, 1e12, 72e15)
    announce_time(from_dict(row | {"reference": {}}), "row", cpu, 1e12, 72e15)
    assert not capsys.readouterr().out
    announce_time(from_dict(row), "row", cpu, 1e12, 72e15)
    assert f"row: a step will take {20 // ranks} hours or more" in capsys.readouterr().out


def test_fewer_gpus_than_a_row_has_are_told_what_runs_there():
    with pytest.raises(
        InputError, match="--proxy 2 needs one GPU, --dry-run, --simulate and --shr"
    ):
        check_layout(load_row(ROOT / "configs/nemo/h100/llama3-8b-pretrain-8gpu.yaml", [])[1], 1)


def test_every_convention_that_a_row_may_name_has_a_formula():
    for name in CONVENTIONS:
        config = from_dict({"model": "llama3-8b-tiny", "reference": {"convention": name}})
        assert table_convention(config).__name__ == name


def test_row_names():
    assert row_name("/x/configs/nemo/h100/a.yaml") == "nemo/h100/a"
    assert row_name(Path("elsewhere/b.yaml")) == "b"


def test_markdown_is_aligned():
    text = markdown({"row": ["a", "bbbbbb"], "x": ["1", "22"]})
    assert text == "| row    |  x |\n| ------ | -: |\n| a      |  1 |\n| bbbbbb | 22 |"


def test_markdown_of_a_narrow_column_is_a_table():
    """A cell of the second line has a hyphen at least: GitHub Flavored Markdown, section 4.10."""
    assert markdown({"row": ["a"], "": ["*"]}).splitlines()[1] == "| --- | -: |"


def test_results_of_several_machines_say_so():
    large, small = (
        outcome({"model": "llama3-8b-tiny"}, [1.0]) | {"device": name}
        for name in ("large", "small")
    )
    text = table([large, large | {"world_size": 8}, small])
    assert [line.split(",")[0] for line in text.splitlines()[:3]] == ["large", "large", "small"]
    assert (
        "| large x 8 |" in text
        and "| small x 4 |" in text
        and "large x" not in table([large, large])
    )


def test_a_table_says_what_is_known_and_no_more():
    measured = outcome({"model": "llama3-8b-tiny"}, [1.0]) | {"ratio": None}
    measured["reference"] = {"changed": ["precision"], "tokens_per_sec_per_gpu": 4321.0}
    text = table([measured])
    assert (
        "MFU is of the matmul rate measured here" in text and "row (changed: precision)" in text
    )
    assert not any(word in text for word in ("fits", "compile s", "published", "4,321"))
    simulated = measured | {"mode": "simulated", "system": "x", "fits": False}
    extrapolated = measured | {"mode": "extrapolated", "extrapolated_from": "simulated"}
    proxy = simulated | {"fits": True, "proxy": True, "layers": 4, "full_layers": 80}
    for other in (simulated, extrapolated, proxy):
        assert "MFU is of the matmul rate of large products there" in table([other])
    lines = [
        line
        for line in table([measured, simulated, proxy], wide=True).splitlines()
        if line.startswith("| ")
    ]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert [row[3] for row in rows if row[1].startswith("row")] == ["fits", "", "no", "yes"]
    assert rows[-1][1] == "row (simulated; proxy, 4 of 80 layers)"


def test_tables_fit_a_terminal_and_all_columns_are_for_wide_ones():
    """Where names make them wider they stand above: names as long as any row's, and all that a result can have."""
    name = "automodel/nemotron3-super-120b-a12b-pretrain-64gpu"
    measured = outcome({"model": "llama3-8b-tiny"}, [1.0, 1.5, 1.25]) | {
        "row": name,
        "ratio": 1.234,
        "peak_memory_gib": 1234.5,
        "tokens_per_sec_per_gpu": 1234567.0,
        "tflops_per_gpu": 1234.5,
        "activations_gib": 1.5,
        "compile_s": 20.0,
        "generation_s": 3.0,
    }
    simulated = {key: value for key, value in measured.items() if "step_time_m" not in key} | {
        "mode": "simulated",
        "system": None,
        "fits": True,
        "as_published": {"ratio": 1.1},
    }
    decoding = {"first_tokens_s": 0.25, "decode_mbu": 0.5, "decode_tokens_per_sec_per_gpu": 9e5}
    sampled = measured | decoding | {"ratio": None}
    for results in (
        [measured],
        [simulated],
        [sampled, sampled],
        [measured, simulated, measured | {"device": "other"}],
    ):
        text = table(results)
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert text.count(name) == len(results) == len(lines) - 2 and max(map(len, lines)) <= 100
        assert all(
            column in lines[0] for column in ("step s", "tokens/s/GPU", "MFU", "peak GiB")
        ), lines[0]
        assert not any(word in text for word in ("clean", "matmul TFLOP/s", "activations"))
        wide = next(
            line for line in table(results, wide=True).splitlines() if line.startswith("|")
        )
        assert all(
            word in wide
            for word in (
                "clean",
                "matmul TFLOP/s",
                "activations GiB",
                "compile s",
                "generation s",
            )
        )
    assert " 40% |" in table([measured])  # 1.0 to 1.5 s, of 1.25
    assert (
        in_width({"settings": ["tp=2 " * 20] * 2, "x": ["3", "4"]}).splitlines()[-1]
        == "| 2  |  4 |"
    )
    assert any(
        line.startswith("| row ") for line in table([measured | {"row": "row"}]).splitlines()
    )


@pytest.mark.parametrize(
    "values, name, cells",
    [
        ([0.0125, 0.3], "step ms", ["12.5", "300"]),
        ([0.5, 12.0, None], "step s", ["0.5", "12", ""]),
        ([2e-6], "step us", ["2"]),
    ],
)
def test_units_go_by_size(values, name, cells):
    assert sized("step", "s", [{"x": value} for value in values], "x") == {name: cells}
    assert sized("peak", "GiB", [{"x": 0.25}], "x") == {"peak MiB": ["256"]}
    assert sized("", "TFLOP/s", [{"x": 0.25}], "x") == {"GFLOP/s": ["250"]}


def test_another_library_is_told_in_words():
    found = {
        "row": "row",
        "versus": "transformers",
        "versus_ratio": 1.5678,
        "versus_ratio_range": [1.5, 1.625],
    }
    assert comparison(found) == "row: 1.57 times as fast as transformers (1.50 to 1.62)"
    whole = found | {"versus": "full", "versus_memory_gib": [0.5, 2.0]}
    assert comparison(whole).endswith(
        "training the whole model (1.50 to 1.62), in 0.500 GiB where that takes 2.000"
    )


def test_what_a_simulation_counted_is_told():
    found = {
        "mode": "simulated",
        "clean_tflops_per_gpu": 5.0,
        "step_time_s": 2.0,
        "executed_flops_per_gpu": 12e12,
        "capacity_gib": 80.0,
        "collectives": {"tp/reduce": [3, 2**30], "dp/gather": [1000, 2**29]},
        "memory_gib": {"gathered": 0.0, "x": 4},
        "breakdown_s": {"gemm": 1.25, "bubble": 0.75, "tail": 4e-18},
    }
    assert details(found).splitlines() == [
        "FLOPs: executed 12 TFLOP, of the model 10",
        "messages: dp/gather 1,000 x, 0.5 GiB; tp/reduce 3 x, 1 GiB",
        "seconds: gemm 1.25, bubble 0.75",
        "GiB: x 4, of 80",
    ]


def test_what_a_profile_knows_is_told():
    found = {"mode": "measured", "breakdown_s": {"attention": 0.0, "gemm": 1.25, "gaps": 0.5}}
    assert details(found) == "seconds: gemm 1.25, gaps 0.5"


def test_bench_prints_a_table_and_writes_json(tmp_path):
    file = tmp_path / "results.jsonl"
    config = ROOT / "configs" / "quickstart.yaml"
    done = command(
        "bench.py",
        "--config",
        config,
        config,
        "--steps",
        "2",
        "--warmup",
        "1",
        "--json",
        file,
        *TINY,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| quickstart ") == 4  # each as it is done, and both at the end
    assert "MFU is of the matmul rate measured here" in done.stdout
    machine, first, second = map(json.loads, file.read_text().splitlines())
    assert (
        machine["mode"] == "calibration"
        and min(machine["matmul"]["fp32"], machine["memory"]) > 1e8
    )
    assert (
        first.keys()
        == second.keys()
        >= {
            "row",
            "system",
            "device",
            "mode",
            "proxy",
            "world_size",
            "step_time_s",
            "tokens_per_sec_per_gpu",
            "tflops_per_gpu",
            "clean_tflops_per_gpu",
            "mfu",
            "peak_memory_gib",
            "reference",
            "ratio",
        }
    )
    assert first["world_size"] == 1 and first["mode"] == "measured" and first["steps"] == 2
    assert f"wrote {file}: python bench.py --report {file}" in done.stderr


@pytest.mark.parametrize(
    "words, told",
    [
        (
            [],
            ["--json FILE keeps results, and --report FILE shows them beside the published ones"],
        ),
        (
            ["--dry-run"],
            ["nothing was run: leave --dry-run out, or predict speed and memory with --simulate"],
        ),
        (
            ["--calibrate", "--json", "x"],
            ["wrote x: simulate this machine with --simulate --system x"],
        ),
        (
            ["--simulate", "--trace", "t", "--json", "x"],
            [
                "wrote t: see it at https://ui.perfetto.dev",
                "wrote x: python bench.py --report x makes a page of it",
            ],
        ),
    ],
)
def test_what_was_written_and_what_comes_next_is_told(capsys, words, told):
    commands.tell_next(bench_options(*words))
    assert capsys.readouterr().err.splitlines() == told


def test_bench_under_torchrun_and_against_transformers():
    done = torchrun(2, "bench.py", "--steps", "2", "--warmup", "1", *TINY)
    assert done.returncode == 0, done.stderr
    assert "2 process(es)" in done.stdout and done.stdout.count("| quickstart ") == 1
    done = command("bench.py", "--steps", "2", "--warmup", "1", "--versus", "transformers", *TINY)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^quickstart: \d+\.\d\d times as fast as transformers \(", done.stdout, re.MULTILINE
    )


def test_bench_of_the_sampler_against_transformers(tmp_path):
    file, config = tmp_path / "results.jsonl", ROOT / "configs" / "bench" / "generate-42m.yaml"
    arguments = [
        "--generate",
        "--versus",
        "transformers",
        "--profile",
        "--steps",
        "1",
        "--warmup",
        "0",
        "--json",
        file,
    ]
    settings = ["batch.global=2", "batch.seq_len=24", "grpo.group=3", *TINY[:3], "device=cpu"]
    settings += ["rollout.max_tokens=8", "rollout.steps=1", "rollout.compile=false"]
    done = command("bench.py", *arguments, "--config", config, *settings)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert (
        found["prompt_tokens"] == 2 * 16
        and found["new_tokens"] == 2 * 3 * 8
        and found["versus_ratio"] > 0
    )
    seconds, first = found["step_time_s"], found["first_tokens_s"]
    assert found["tokens_per_sec_per_gpu"] == pytest.approx(48 / seconds)
    assert (
        found["decode_tokens_per_sec_per_gpu"] == pytest.approx((48 - 6) / (seconds - first))
        and first > 0
    )
    config = load(config, settings)
    read = sum(
        bytes_read(
            model_reads(config.model.config, 4), config.model.config, samples=6, context=20
        )
    )
    steps = found["decode_tokens_per_sec_per_gpu"] / 6
    assert found["decode_mbu"] == pytest.approx(steps * read / found["memory_bytes_per_sec"])
    parts = found["breakdown_s"]
    assert (
        parts["gemm"] > 0
        and parts["attention"] > 0
        and sum(parts.values()) < 20 * (seconds - first)
    )
    assert re.search(r"\| prefill m?s \|", done.stdout) and "\nseconds: attention" in done.stdout


def test_figures_of_sampling_are_arithmetic():
    """A prompt of 768 tokens is computed once for 4 responses of 256; the other library took 3 s where ours took 2."""
    tree = {
        "model": "llama3-8b",
        "batch": {"global": 8, "micro": 1, "seq_len": 1024},
        "grpo": {"group": 4},
    }
    config = from_dict(tree | {"rollout": {"max_tokens": 256}, "parallel": {"tp": 2}})
    found = sampling_figures(
        config, "row", torch.device("cpu"), [[2.0, 3.0], [1.0, 5.0], [4.0, 6.0]], 1e12, 768
    )
    assert found["tokens_per_sec_per_gpu"] == 8 * 4 * 256 / 2.0 / 2 and found["ratio"] is None
    shape, work = config.model.config, count_work(config.model.config)
    # what follows a prompt sees all of it
    keys = 768 * 768 / 2 + 4 * (1024 * 1024 - 768 * 768) / 2
    # nobody asks what follows its tokens but the last
    of_prompt = work.weights - shape.hidden_size * shape.vocab_size
    forward = (
        2 * of_prompt * 768
        + 2 * work.weights * 4 * 256
        + 4 * shape.num_layers * shape.hidden_size * keys
    )
    assert found["clean_tflops_per_gpu"] == pytest.approx(8 * forward / 2.0 / 2 / 1e12)
    assert found["versus_ratio"] == 1.5 and found["versus_ratio_range"] == [1.5, 5.0]
    assert found["versus_step_time_s"] == [2.0, 5.0]


def test_figures_of_decoding_are_arithmetic():
    """Of 32 samples, which had 16 tokens each after 1 s. What all four ranks read they do so once."""
    tree = {
        "model": "llama3-8b",
        "batch": {"global": 8, "micro": 1, "seq_len": 1024},
        "grpo": {"group": 4},
    }
    tree |= {"rollout": {"max_tokens": 256}}
    for tp in (2, 4):
        config = from_dict(tree | {"parallel": {"tp": tp}})
        found = decoding_figures(config, [3.0, 4.0], [(1.0, 512), (1.0, 512)], 1e12, 2)
        assert (
            found["first_tokens_s"] == 1.0
            and found["decode_tokens_per_sec_per_gpu"] == 32 * 240 / 2 / tp
        )
        assert ("decode_mbu" in found) == (tp == 4)
    shape = config.model.config
    read = sum(bytes_read(model_reads(shape, 2), shape, samples=32, context=1024 - 128, tp=4))
    assert found["decode_mbu"] == pytest.approx(read * 240 / 2 / 1e12)


def test_prompts_of_another_step_are_others():
    config = from_dict(
        {"model": "llama3-8b-tiny", "batch": {"global": 2, "micro": 1, "seq_len": 8}}
    )
    first, again, second = (make_prompts(config, 8, step).tolist() for step in (0, 0, 1))
    assert first == again and not set(map(tuple, first)) & set(map(tuple, second))


@pytest.mark.parametrize("precision, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_both_samplers_compute_in_the_same_type(pool, precision, dtype):
    assert pool.run(1, sampled_types, precision)[0] == [dtype, dtype]


def sampled_types(precision):
    tree = {
        "model": "llama3-8b-tiny",
        "precision": precision,
        "device": "cpu",
        "grpo": {"group": 1},
    }
    config = from_dict(
        tree | {"batch": {"global": 1, "micro": 1, "seq_len": 8}, "rollout": {"max_tokens": 4}}
    )
    types, linear = [], torch.nn.functional.linear

    def noted(x, *rest):
        types.append(x.dtype)
        return linear(x, *rest)

    sampler = patch("minitrain.bench.measure_sampling.Sampler", wraps=Sampler)
    with patch("torch.nn.functional.linear", noted), sampler as made:
        measure_sampling(config, "row", steps=1, warmup=0, versus=True)
    assert not isinstance(made.call_args.args[0], FSDPModule)  # which would cast at each step
    return [types[0], types[-1]]


def test_decoding_has_no_figures_where_samples_wait_or_are_short(tmp_path):
    file, config = tmp_path / "results.jsonl", ROOT / "configs" / "bench" / "generate-42m.yaml"
    settings = [
        "batch.global=2",
        "batch.seq_len=24",
        "grpo.group=3",
        *TINY[:3],
        "device=cpu",
        "rollout.compile=false",
    ]
    words = [
        "--generate",
        "--profile",
        "--steps",
        "1",
        "--warmup",
        "0",
        "--json",
        file,
        "--config",
        config,
        *settings,
    ]
    waiting = command(
        "bench.py", *words, "rollout.max_tokens=8", "rollout.steps=1", "rollout.slots=4"
    )
    short = command("bench.py", *words, "rollout.max_tokens=4", "rollout.steps=2")
    assert waiting.returncode == short.returncode == 0, waiting.stderr + short.stderr
    first, second = map(json.loads, file.read_text().splitlines())
    assert "decode_tokens_per_sec_per_gpu" not in first and first["breakdown_s"]["gemm"] > 0
    assert "decode_mbu" in second and "breakdown_s" not in second
    assert (
        "warning: bench/generate-42m: no profile: 4 tokens are too few for three times 2"
        in short.stderr
    )


def test_sweep_measures_every_combination():
    settings = [word for word in TINY if "seq_len" not in word and "num_layers" not in word]
    choices = ["--sweep", "batch.seq_len=32,64", "model.num_layers=1,2"]
    done = command("bench.py", "--steps", "1", "--warmup", "0", *settings, *choices)
    assert done.returncode == 0, done.stderr
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[-4:]
    ]
    pairs = [(length, layers) for length in (32, 64) for layers in (1, 2)]
    assert [row[0] for row in rows] == [
        f"batch.seq_len={s} model.num_layers={n}" for s, n in pairs
    ]
    shapes = [
        load(ROOT / "configs/quickstart.yaml", [*settings, f"model.num_layers={n}"])
        for _, n in pairs
    ]
    work = [
        s * flops_per_token(config.model.config, s, clean)
        for (s, _), config in zip(pairs, shapes, strict=True)
    ]
    assert [float(row[3]) for row in rows] == [round(each / work[0], 2) for each in work]
    seconds = [float(row[1]) for row in rows]
    assert [float(row[2]) for row in rows] == pytest.approx(
        [each / seconds[0] for each in seconds], abs=0.02, rel=0.01
    )


def test_a_combination_that_cannot_run_does_not_stop_the_others(tmp_path):
    file = tmp_path / "results.jsonl"
    settings = ["--steps", "1", "--warmup", "0", "--json", file, *TINY]
    done = command("bench.py", *settings, "--sweep", "parallel.dp_shard=2,1")
    assert (
        done.returncode == 2
        and "error: dp_shard=2: parallel.dp_replicate=1 x dp_shard=2" in done.stderr
    )
    assert [json.loads(line)["row"] for line in file.read_text().splitlines()] == ["dp_shard=1"]


def test_dry_run_lays_out_any_number_of_ranks():
    settings = ["model=llama3-70b", "parallel.dp_shard=64", "batch.global=64", "batch.micro=1"]
    done = command("bench.py", "--dry-run", *settings)
    assert done.returncode == 0, done.stderr
    total, ranks, mine = (
        70553706496,
        64,
        int(done.stdout.split(" on rank 0")[0].split()[-1].replace(",", "")),
    )
    assert f"{total:,} parameters over {ranks} ranks" in done.stdout
    assert mine == pytest.approx(total / ranks, rel=1e-3)


def test_a_config_that_is_wrong_is_told_by_name(tmp_path):
    """One that says nonsense stops all, before any is run; one whose layout cannot be stops no other."""
    good, wrong, huge = tmp_path / "good.yaml", tmp_path / "wrong.yaml", tmp_path / "huge.yaml"
    good.write_text("model: llama3-8b-tiny\nbatch: {global: 4, micro: 2, seq_len: 64}\n")
    wrong.write_text("model: llama3-8b-tiny\nbatch: {global: 3, micro: 2, seq_len: 64}\n")
    huge.write_text(good.read_text() + "parallel: {dp_shard: 64}\n")
    with pytest.raises(
        InputError, match=f"^{wrong}: batch.micro=2 does not divide batch.global=3$"
    ):
        main(["--dry-run", "--config", str(good), str(wrong)])
    # named already
    with pytest.raises(InputError, match=f"^config file {tmp_path}/none.yaml does not exist$"):
        main(["--dry-run", "--config", str(good), f"{tmp_path}/none.yaml"])
    done = command("bench.py", "--dry-run", "--config", good, huge, good)
    assert (
        done.returncode == 2 and done.stdout.count("good: 311,872 parameters over 1 ranks") == 2
    )
    assert "error: huge: batch.global=4 is not a multiple of batch.micro=2 x 64" in done.stderr
    assert done.stderr.endswith("error: 1 of 3 configs failed: huge\n")


def test_dry_run_of_a_sweep_lays_out_every_combination():
    done = command(
        "bench.py", "--dry-run", "--sweep", "parallel.dp_shard=1,2", "model.num_layers=2"
    )
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"dp_shard={n} model.num_layers=2" for n in (1, 2)
    ]
    assert "over 1 ranks" in lines[0] and "over 2 ranks" in lines[1]


def test_a_config_that_is_swept_need_not_be_possible_by_itself():
    """Prompts have what batch.seq_len leaves, and the config's rollout.max_tokens=128 leaves nothing."""
    words = ["batch.seq_len=32", "--sweep", "rollout.max_tokens=2,8"]
    done = command("bench.py", "--generate", "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        f"rollout.max_tokens={n}" for n in (2, 8)
    ]
    assert (
        "must exceed rollout.max_tokens=128"
        in command("bench.py", "--generate", "--dry-run", words[0]).stderr
    )


@pytest.mark.parametrize(
    "arguments, line",
    [
        (
            [
                "--sweep",
                "tp=1,2",
                "--config",
                "configs/quickstart.yaml",
                "configs/quickstart.yaml",
            ],
            "--sweep takes one config at a time",
        ),
        (["--steps", "0"], "argument --steps: 0 must be above 0"),
        (["--steps", "two"], "argument --steps: invalid int value: 'two'"),
        (["--trace", "x.json"], "needs --simulate"),
        (["--system", "dgx-h100"], "needs --simulate"),
        (["--simulate", "--shrink"], "--shrink starts its own processes"),
        (["--simulate", "--generate"], "--simulate is for training"),
        (["--simulate", "--sweep", "foo=1,2"], "none of 2 combination"),
        (["--simulate", "--system", "nope"], "^--system=nope is not one of dgx-h100, "),
        (
            ["--simulate", "reference={system: nope}"],
            "^reference.system=nope is not one of dgx-h100, ",
        ),
        (
            ["--generate", "--versus", "transformers", "lora.rank=4"],
            "samples whole models, and the config has",
        ),
        (["--simulate", "--versus", "transformers"], "--simulate is for training"),
        (["--json", "/none/x.jsonl"], "--json=/none/x.jsonl cannot be written: No such file"),
        (["--calibrate", "--json", "/none/x.jsonl"], "--json=/none/x.jsonl cannot be written"),
        (["--json", ""], "--json= cannot be written"),
        (["--proxy", ""], "--proxy= must be a number of layers"),
        (["--simulate", "--system", ""], "--system= is not one of dgx-h100, "),
        (
            ["--simulate", "--sweep", "tp=1,2", "parallel.dp_shard=4"],
            "dp_shard=N stands before --sweep",
        ),
        (["--calibrate", "--simulate"], "without --generate, --versus or --calibrate"),
        (["--calibrate", "--trace", "x.json"], "needs --simulate"),
        (
            ["--calibrate", "--dry-run"],
            "--calibrate measures this machine: without --shrink or --dry-run",
        ),
        (
            ["--calibrate", "--shrink", "--config", "configs/quickstart.yaml"],
            "without --shrink or --dry-run",
        ),
        (["--calibrate", "--sweep", "tp=1,2"], "--calibrate alone measures rates"),
        (["--calibrate", "--generate"], "--calibrate alone measures rates"),
        (["--simulate", "--trace", "/none/x.json"], "--trace=/none/x.json cannot be written"),
        # before any is measured
        (["--sweep", "batch.micro=1,3"], "batch.micro=3 does not divide batch.global"),
        (["--versus", "magic"], "invalid choice: 'magic'"),
        (["--versus", "peft"], "--versus peft is about adapters, and the config has none"),
        (
            ["--versus", "diffusers"],
            r"--versus diffusers is not for task=pretrain \(use transformers\)",
        ),
        (["--versus", "transformers", "precision=fp8"], "it does not train in FP8"),
        (["--versus", "transformers", "lora.rank=4"], "the config has adapters"),
        (
            ["--versus", "diffusers", *WAN, "lora.rank=4", "lora.targets=[to_q]"],
            r"adapters \(use full\)",
        ),
        (["--generate", *WAN], "--generate samples tokens, not videos"),
        (["--generate", "parallel.pp=2"], "--generate: parallel.pp=2 is not for sampling"),
        (
            ["--generate", "rollout.max_tokens=512"],
            "batch.seq_len=512 must exceed rollout.max_tokens=512",
        ),
        (
            ["--dry-run", "--sweep", "batch.micro=2,3"],
            "batch.micro=3 does not divide batch.global",
        ),
        (["--simulate", "--dry-run", "--sweep", "tp=1,3"], "leave --dry-run out"),
        (["--config", str(ROOT / "configs/train/shapes.yaml")], "times mock videos"),
        (
            ["--versus", "transformers", "recompute=selective"],
            "transformers has no recompute=selective",
        ),
        (
            ["--versus", "transformers", "--config", str(ROOT / "configs/bench/grpo-8b.yaml")],
            "not for task=grpo",
        ),
        (["--config", "none.yaml"], "none.yaml does not exist"),
        (["--dry-run", "batch.global=5"], "batch.micro=2 does not divide batch.global=5"),
        (
            ["--dry-run", "parallel.dp_shard=64"],
            "is not a multiple of batch.micro=2 x 64 data-parallel ranks",
        ),
        (["parallel.dp_shard=64", "batch.global=128"], "is not the number of ranks, 1"),
    ],
)
def test_mistakes(arguments, line):
    with pytest.raises(InputError, match=line):
        main(arguments)


def test_a_full_disk_is_told_with_the_file():
    if not Path("/dev/full").exists():
        pytest.skip("needs Linux's /dev/full")
    with pytest.raises(
        InputError, match="^--json=/dev/full cannot be written: No space left on device$"
    ):
        bench_results.append({"row": "row"}, "/dev/full")


def test_a_result_begins_on_a_line_of_its_own(tmp_path):
    """Also behind one that a kill has cut short."""
    file = tmp_path / "results.jsonl"
    bench_results.append({"row": "first"}, str(file))
    file.write_text(file.read_text() + '{"row": "cut sh')
    for row in ("second", "third"):
        bench_results.append({"row": row}, str(file))
    first, cut, *others = file.read_text().splitlines()
    assert [json.loads(line)["row"] for line in (first, *others)] == ["first", "second", "third"]
    assert cut == '{"row": "cut sh'


def test_a_result_is_kept_though_nobody_reads_what_is_printed(tmp_path):
    file, result = tmp_path / "results.jsonl", outcome({"model": "llama3-8b-tiny"}, [1.0])
    with patch("builtins.print", side_effect=BrokenPipeError), pytest.raises(BrokenPipeError):
        bench_results.write_result(result, str(file))
    assert json.loads(file.read_text())["step_time_s"] == 1.0


def test_a_result_is_kept_though_the_other_library_fails(monkeypatch):
    written = []
    monkeypatch.setattr(bench_runs, "run", lambda *_: {"row": "row"})
    monkeypatch.setattr("minitrain.run.launch.start.start", lambda *_: None)
    monkeypatch.setattr(
        bench_runs, "write_result", lambda result, file, wide: written.append((result, file))
    )
    case = bench_cases.Case("row", None, [(None, {"proxy": True})])
    options = bench_options("--versus", "peft", "--json", "file")
    fails = patch("minitrain.bench.versus.versus", side_effect=MemoryError)
    with fails, pytest.raises(MemoryError):
        bench_runs.run_case(case, options)
    assert written == [({"row": "row", "proxy": True}, "file")]


def test_sampling_asks_for_huge_pages_before_torch_is_there(monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")  # so that it is put back at the end
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    with pytest.raises(InputError, match="none.yaml"):
        main(["--generate", "--config", "none.yaml"])
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"


def test_a_proxys_model_is_gone_before_the_next_is_made(monkeypatch):
    """Though it is full of cycles: the second's peak of memory is its own."""
    models = []

    def run(row, config, options):
        assert all(model() is None for model in models)
        model = torch.nn.Linear(2, 2)
        model.cycle = [model]
        models.append(weakref.ref(model))
        return {"row": row}

    monkeypatch.setattr(bench_runs, "run", run)
    monkeypatch.setattr(bench_runs, "write_result", lambda *_: None)
    case = bench_cases.Case("row", None, [(None, {}), (None, {}), (None, {})])
    gc.disable()
    try:
        bench_runs.run_case(case, bench_options())
    finally:
        gc.enable()
    assert len(models) == 3


def test_a_sweep_that_is_stopped_shows_what_it_has_found(monkeypatch, capsys):
    """Each point at once, and all in a table at the end."""
    figures = {
        "tokens_per_sec_per_gpu": 5.0,
        "step_time_s": 1.0,
        "mfu": 0.5,
        "peak_memory_gib": 1.0,
        "fits": True,
    }

    def stopped(*args):
        yield {"settings": "tp=1"} | figures
        assert capsys.readouterr().out == "tp=1: 5 tokens/s/GPU\n"
        yield {"settings": "tp=3", "error": "does not divide"}
        assert capsys.readouterr().out == "tp=3: does not divide\n"
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr("minitrain.simulator.sweep.sweep", stopped)
    monkeypatch.setattr("sys.argv", ["bench.py", "--simulate", "--sweep", "tp=1,3,4"])
    with pytest.raises(Stopped):
        runpy.run_path(ROOT / "bench.py")["main"](["--simulate", "--sweep", "tp=1,3,4"])
    shown = capsys.readouterr().out
    assert "tp=1" in shown and "tp=3: does not divide" in shown


def test_a_measured_sweep_that_is_stopped_shows_its_table(monkeypatch, capsys):
    runs = iter(["16", "32"])

    def run_case(case, options):
        if (length := next(runs, None)) is None:
            raise KeyboardInterrupt
        return [{"row": length, "step_time_s": 1.0, "clean_tflops_per_gpu": 1.0, "mfu": 0.5}]

    monkeypatch.setattr(bench_runs, "run_case", run_case)
    options = bench_options("--sweep", "x")
    with pytest.raises(KeyboardInterrupt):
        bench_runs.run_all([bench_cases.Case(name, None, []) for name in "abc"], options)
    shown = capsys.readouterr().out
    assert "16" in shown and "32" in shown
