"""bench.py --shrink: what a config becomes, and that its processes run, complain and die cleanly."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from minitrain.bench.proxy import make_proxy
from minitrain.bench.shrink import shrink, shrink_parallel, shrunk_micro_batches
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.config.load import from_dict, load
from minitrain.run.config.ranks import stated_ranks
from minitrain.settings import Config, Parallel
from tests.helpers.commands import ROOT, command
from tests.helpers.processes import popen
from tests.helpers.recipes import SHORT_ANSWER, STAND_INS

CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
ROW_405B = ROOT / "configs/nemo/h100/llama3.1-405b-pretrain-1024gpu.yaml"


@pytest.mark.parametrize(
    "file", CONFIGS, ids=lambda file: str(file.relative_to(ROOT / "configs"))
)
def test_every_config_shrinks_to_a_layout_that_fits(file, tmp_path, monkeypatch):
    (tmp_path / "short_answer.py").write_text(SHORT_ANSWER)
    monkeypatch.syspath_prepend(str(tmp_path))
    small = shrink(load(file, STAND_INS.get(file.stem, [])))
    assert stated_ranks(small) <= 16
    check_layout(small, stated_ranks(small))
    shape = small.model.config
    assert (
        shape.dim if small.task == "diffusion" else shape.hidden_size
    ) <= 64 and small.batch.seq_len <= 128


def test_dimensions_batch_and_settings():
    real = load(ROW_405B)
    small = shrink(real)
    p, b = small.parallel, small.batch
    assert (p.dp_replicate, p.dp_shard, p.tp, p.cp, p.pp, p.vp) == (1, 2, 2, 2, 2, 2)
    assert stated_ranks(small) == 16
    assert (p.schedule, p.reshard_after_forward) == ("Interleaved1F1B", False)
    # the real one has 64 for 8 pipeline ranks; at most 4 for each of 2
    assert b.global_ // (b.micro * 2) == 8
    assert small.model.config.num_layers == 8  # two for each of four stages
    assert (small.precision, small.optim, small.reference) == (
        real.precision,
        real.optim,
        real.reference,
    )


def test_quirks_of_the_model_stay():
    small = shrink(
        from_dict({"model": {"name": "qwen3-32b", "tie_word_embeddings": True}})
    ).model.config
    assert small.family == "qwen3" and small.qk_norm and small.tie_word_embeddings


def test_sizes_that_are_small_already_stay_and_odd_ones_go():
    tree = {"model": {"name": "llama3-8b", "num_layers": 12}, "compile": True}
    batch, split = (
        {"global": 4, "micro": 4, "seq_len": 20},
        {"dp_shard": 1, "pp": 2, "layers_per_stage": [6, 8]},
    )
    small = shrink(from_dict(tree | {"batch": batch | {"global": 8}, "parallel": split}))
    assert (small.batch.micro, small.batch.seq_len, small.compile) == (2, 16, False)
    assert small.parallel.layers_per_stage is None
    assert (
        shrink(from_dict({"batch": {"global": 1, "micro": 1, "seq_len": 5}})).batch.seq_len == 8
    )
    packed = load(ROOT / "configs/nemo/h100/llama3-8b-sft-8gpu.yaml")
    assert (
        packed.reference["convention"] == "nemo_squad"
        and "convention" not in shrink(packed).reference
    )


def test_weights_of_files_stay_with_the_real_model():
    config = from_dict({"model": "llama3-8b-tiny", "task": "lora", "lora": {"rank": 4}})
    config.lora.path = config.model.path = "somewhere"
    for small in (shrink(config), make_proxy(config, 2)):
        assert (small.model.path, small.lora.path, small.lora.rank) == ("", "", 4)


@pytest.mark.parametrize(
    "parallel, reference, shards",
    [
        ({"dp_shard": 1}, {}, 1),
        ({"dp_shard": 7}, {}, 2),
        ({}, {}, 2),
        ({}, {"gpus": 1}, 1),
        ({"tp": 8}, {"gpus": 8}, 1),
        ({"tp": 4}, {"gpus": 8}, 2),
        ({"dp_replicate": 3}, {"gpus": 3}, 1),
    ],
)
def test_an_open_number_of_shards(parallel, reference, shards):
    config = from_dict(
        {
            "parallel": parallel | {"dp_shard": parallel.get("dp_shard", -1)},
            "reference": reference,
        }
    )
    assert shrink_parallel(config).dp_shard == shards


@pytest.mark.parametrize(
    "parallel, gpus, sampling, ranks",
    [
        ({}, 64, 0, 64),
        ({"tp": 4, "cp": 2}, 64, 0, 64),
        ({"tp": 8, "pp": 3}, 64, 0, 48),  # two shards; a third does not fit
        ({"dp_replicate": 2, "tp": 2}, 16, 8, 16),  # of which 8 only sample
        ({"tp": 8}, 4, 0, 8),
        ({"tp": 2}, None, 0, 2),
    ],
)
def test_an_open_number_of_shards_fills_the_rows_gpus(
    monkeypatch, parallel, gpus, sampling, ranks
):
    """What --simulate, --dry-run and --proxy take a config for; but under torchrun, what this started."""
    config = Config(
        parallel=Parallel(dp_shard=-1, **parallel), reference={"gpus": gpus} if gpus else {}
    )
    config.grpo.generation_ranks = sampling
    assert stated_ranks(config) == ranks
    monkeypatch.setenv("WORLD_SIZE", "48")
    assert stated_ranks(dataclasses.replace(config, parallel=Parallel(dp_shard=-1))) == 48


@pytest.mark.parametrize(
    "parallel, shards",
    [
        ({"dp_shard": 8, "ep": 8}, 2),
        ({"dp_shard": 8, "ep": 4}, 4),
        ({"dp_shard": 8, "tp": 2, "ep": 4}, 2),
        ({"dp_shard": 4, "tp": 2, "ep": 8}, 2),
    ],
)
def test_ranks_that_have_the_same_experts(parallel, shards):
    """Two of them, as there are more, beside two that have others."""
    assert (
        shrink_parallel(from_dict({"model": "mixtral-8x7b", "parallel": parallel})).dp_shard
        == shards
    )


@pytest.mark.parametrize(
    "parallel, rows, expected",
    [
        ({"dp_shard": 4}, 4, 1),
        ({"dp_shard": 4}, 12, 3),
        ({"dp_shard": 4}, 400, 4),
        # three per pipeline rank
        ({"dp_shard": 1, "pp": 4, "vp": 3, "schedule": "Interleaved1F1B"}, 12, 6),
        ({"dp_shard": 1, "pp": 4, "vp": 1}, 4, 2),
        # one for each stage
        ({"dp_shard": 1, "pp": 4, "vp": 2, "schedule": "ZBVZeroBubble"}, 8, 4),
    ],
)
def test_accumulation(parallel, rows, expected):
    tree = {
        "model": {"num_layers": 24},
        "batch": {"global": rows, "micro": 1},
        "parallel": parallel,
    }
    config = from_dict(tree)
    assert shrunk_micro_batches(config, shrink_parallel(config)) == expected


# ------------------------------------------------------------------------------------------------------ whole commands


def bench(*words):
    return command("bench.py", "--shrink", "--steps", "1", "--warmup", "2", *words)


def test_run(tmp_path):
    result = tmp_path / "rows.jsonl"
    done = bench(
        "--config", ROOT / "configs/automodel/llama3-70b-pretrain-64gpu.yaml", "--json", result
    )
    assert done.returncode == 0, done.stderr
    (row,) = map(json.loads, result.read_text().splitlines())
    assert row["row"] == "automodel/llama3-70b-pretrain-64gpu"
    assert (row["mode"], row["world_size"], row["ratio"]) == ("shrunk", 4, None)
    assert row["activations_gib"] > 0 and row["step_time_s"] > 0 and row["recompiles"] == 0
    assert "(shrunk)" in done.stdout and "leaked" not in done.stderr


def test_a_row_of_grpo_samples_and_trains(tmp_path):
    result, row = (
        tmp_path / "rows.jsonl",
        ROOT / "configs/rl/llama3.1-8b-grpo-16gpu-onpolicy.yaml",
    )
    sizes = ["grpo.overlong_buffer=512", "grpo.mock_digits=1000", "rollout.pages=1"]
    done = bench("--config", row, "--json", result, *sizes)
    assert done.returncode == 0, done.stderr
    (outcome,) = map(json.loads, result.read_text().splitlines())
    assert (outcome["mode"], outcome["world_size"], outcome["ratio"]) == ("shrunk", 4, None)
    assert (
        outcome["response_tokens"] <= 8
        and min(outcome[f"{name}_s"] for name in ("generation", "training")) > 0
    )


@pytest.mark.parametrize(
    "words, line",
    [
        (["parallel.tp=3"], "error: .*tp=3"),
        (["--versus", "transformers"], "error: --shrink starts its own processes"),
        # found by the ranks
        (["reference.convention=guess"], "error: reference.convention='guess' is not one of"),
    ],
)
def test_mistakes_are_one_line(words, line):
    done = bench(*words)
    assert done.returncode == 2
    errors = [text for text in done.stderr.splitlines() if "error" in text]
    assert len(errors) == 1 and "Traceback" not in done.stderr
    assert re.search(line, errors[0])


def children(parent):
    """Processes that `parent` forked, and did not start with a command of their own."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            status, command = (folder / "status").read_text(), (folder / "cmdline").read_text()
            if f"PPid:\t{parent}\n" in status and "forkserver" in command:
                yield int(folder.name)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="finds the processes in Linux's /proc"
)
def test_a_dead_rank_ends_the_run():
    command = [sys.executable, "bench.py", "--shrink", "--steps", "100000"]
    with popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        watchdog = threading.Timer(300, process.kill)
        watchdog.start()
        errors = b""
        while b"step/s" not in errors and (text := os.read(process.stderr.fileno(), 4096)):
            errors += text
        (server,) = children(process.pid)
        _, rank = children(server)
        os.kill(rank, signal.SIGKILL)
        errors += process.stderr.read()
        watchdog.cancel()
    assert process.returncode == 1 and b"failed" in errors
