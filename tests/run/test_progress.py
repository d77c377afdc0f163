"""What a run says in the terminal, and what it measures of itself."""

import json
import math
import re
import shlex
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from minitrain.data.datasets import open_dataset
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import start
from minitrain.run.monitor import meter
from minitrain.run.monitor.flops import clean, count_work, step_flops
from minitrain.run.monitor.meter import Meter
from minitrain.run.monitor.progress import (
    LAYOUT,
    bar_width,
    closing_lines,
    fitting,
    goodness,
    next_command,
    opening,
    step_figures,
    validation,
)
from minitrain.run.tasks import train_model
from minitrain.run.tasks.initial_weights import make_trainer
from tests.helpers.oracle import count_flops

CPU = torch.device("cpu")
MODEL = {"name": "llama3-8b-tiny", "num_layers": 2, "vocab_size": 258}
TINY = {
    "model": MODEL,
    "batch": {"global": 4, "micro": 2, "seq_len": 32},
    "steps": 4,
    "device": "cpu",
}


@pytest.mark.parametrize(
    "steps, numbers, told",
    [
        (900, {"loss": 1.3}, "loss 1.3000 = 1.876 bits/byte, tokens/s 12,345"),
        (100_000, {"loss": 12.3456}, "loss 12.3456 = 17.811 bits/byte, tokens/s 12,345"),
        (20, {"loss": 1e-5, "reward": 0.9371}, "reward 0.937"),
        (
            20,
            {"loss": 0.5, "reward_accuracy": 0.875, "reward_margin": 0.25, "reward_chosen": 1.0},
            "loss 0.5000, accuracy 87.5%, margin 0.250, tokens/s 12,345",
        ),
    ],
)
def test_the_bar_fits_eighty_columns(monkeypatch, steps, numbers, told):
    for columns in (200, 80, 50):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = step_figures(
            numbers | {"tokens_per_sec": 12345.4}, 1.0 if numbers["loss"] > 1 else None
        )
        assert text.startswith(told)
        bar = tqdm.format_meter(
            steps, steps, 98765.0, ncols=bar_width(), bar_format=LAYOUT, postfix=text, initial=0
        )
        assert len(bar) <= min(80, columns)
        if columns >= 80:
            assert bar.endswith(text) and "|" in bar


def test_no_figure_of_the_bar_is_cut(monkeypatch):
    """With losses of many sources, also where hours are left: whole figures, as many as fit."""
    numbers = {"loss": 1.3, "tokens_per_sec": 12345.4} | {
        f"loss/source-{n}": n / 7 for n in range(9)
    }
    whole = step_figures(numbers).split(", ")
    for columns, figures in ((80, 3), (60, 2), (50, 1)):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = fitting(step_figures(numbers), 900)
        assert text.split(", ") == whole[:figures]
        bar = tqdm.format_meter(1, 900, 300.0, ncols=bar_width(), bar_format=LAYOUT, postfix=text)
        assert bar.endswith(f"74:55:00 left, {text}") and len(bar) == columns


@pytest.mark.parametrize(
    "numbers, told",
    [
        (
            {"val_loss": 1.3, "val_bits_per_byte": 1.3 / math.log(2)},
            "1.300 nats = 1.876 bits/byte",
        ),
        ({"val_loss": 1.3, "val_exact_match": 0.946}, "1.300 nats, exact match 94.6%"),
        (
            {
                "val_loss": 1.3,
                "val_mtp_loss": 2.4,
                "val_mtp_acceptance": 0.38,
                "val_bits_per_byte": 1.876,
            },
            "1.300 nats = 1.876 bits/byte, mtp loss 2.400 nats, mtp acceptance 38.0%",
        ),
        ({"val_loss": 0.5, "video_tokens": 8.0}, "0.500"),
        ({"val_loss": 25.0, "reward_accuracy": 0.5}, "25.000"),  # IPO's is a square
        (
            {
                "val_loss": 0.7,
                "reward_accuracy": 0.5,
                "val_reward_accuracy": 0.625,
                "val_reward_chosen": 0.5,
                "val_reward_rejected": 0.75,
                "val_reward_margin": -0.25,
            },
            "0.700, accuracy 62.5%, margin -0.250",
        ),
        ({"val_greedy": 0.5, "val_pass@8": 0.75, "reward": 0.1}, "greedy 50.0%, pass@8 75.0%"),
        ({f"val_pass@{n}": 1.0 for n in (1, 2, 4, 8, 16)}, "pass@1 100.0%, pass@16 100.0%"),
        ({"loss": 1.0}, ""),
    ],
)
def test_the_line_of_a_validation(numbers, told):
    assert validation(numbers) == told


@pytest.mark.parametrize(
    "lines, best",
    [
        # GRPO raises what samples get; greedy responses, one each, may fall meanwhile
        (
            [
                {"val_greedy": 0.976, "val_pass@1": 0.888},
                {"val_greedy": 0.97, "val_pass@1": 0.944},
            ],
            1,
        ),
        ([{"val_loss": 1.3}, {"val_loss": 1.2}, {"val_loss": 1.25}], 1),
        ([{"loss": 0.1}, {"val_loss": 1.2, "val_exact_match": 0.0}], 1),
        ([{"reward": 1.0}, {"val_greedy": 0.0, "val_pass@1": 0.0}], 1),
    ],
)
def test_the_best_validation_is_the_one_whose_figure_training_raises(lines, best):
    assert max(lines, key=goodness) is lines[best]


def test_the_end_of_a_run_in_six_lines(tmp_path, capsys):
    """And lines of validations that stay, the best marked, also beside those of a run before it was resumed."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n % 7} of a text\n" for n in range(400)))
    tree = TINY | {
        "data": {"kind": "text", "path": str(text), "validation": 0.3},
        "optim": {"lr": 0.01, "warmup": 0, "schedule": "constant"},
        "validation": {"every": 2, "batches": 1},
        "out_dir": str(tmp_path / "out"),
    }
    train_model.train(from_dict(tree))
    # which makes it worse
    train_model.train(from_dict(tree | {"steps": 6, "optim": tree["optim"] | {"lr": 1.0}}))
    shown = capsys.readouterr().out
    lines = [
        json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    ]
    found = re.findall(
        r"^step (\d)  val ([\d.]+) nats = ([\d.]+) bits/byte(, best)?$", shown, re.MULTILINE
    )
    tested = [line for line in lines if "val_loss" in line]
    expected = [[f"{x['val_loss']:.3f}", f"{x['val_bits_per_byte']:.3f}"] for x in tested]
    assert [[*each[1:3]] for each in found] == expected and [each[0] for each in found] == [
        "2",
        "4",
        "6",
    ]
    # the first has none to be better than
    assert [each[3] for each in found] == ["", ", best", ""]
    end = shown[shown.rindex("\ntime  ") :].replace(" \\\n            ", " ")
    end = end.replace("\n            ", " ")
    time, validation, speed, memory, files, following = end.strip().splitlines()
    assert re.fullmatch(r"time        2 steps in 0:0\d:\d\d", time)
    best, last = (f"{loss} nats = {bits} bits/byte" for loss, bits in (expected[1], expected[2]))
    assert validation == f"validation  best {best} at step 4; last {last}"
    rate = sum(line["tokens_per_sec"] for line in lines[1:]) / 5
    assert speed.startswith(f"speed       {rate:,.0f} tokens/s, MFU ") and speed.endswith(
        "of a large matmul here"
    )
    peak = max(line["peak_memory_gib"] for line in lines)
    assert memory == f"memory      {peak:.2f} GiB at the peak, on the first rank"
    assert (
        files
        == f"files       {tmp_path}/out holds the model, metrics.jsonl, curves.svg, checkpoints/"
    )
    assert following == f'next        minitrain generate --model {tmp_path}/out --prompt "..."'
    assert "<svg" in (tmp_path / "out/curves.svg").read_text()


@pytest.mark.parametrize(
    "tree, command",
    [
        ({"data": {"kind": "mock"}}, "minitrain curves out/a\\ b"),
        ({"task": "sft"}, "minitrain generate --model out/a\\ b --chat --prompt"),
        ({"lora": {}}, "minitrain curves out"),  # over random weights, which no file holds
        (
            {
                "task": "diffusion",
                "data": {"kind": "shapes"},
                "model": {"name": "wan2.1-14b-tiny"},
            },
            "minitrain generate --model out/a\\ b --task diffusion --prompts shapes --out",
        ),
    ],
    ids=str,
)
def test_the_next_command_is_one_for_what_was_made(tree, command):
    config = SimpleNamespace(
        task="pretrain",
        lora=None,
        out_dir="out/a b",
        model=SimpleNamespace(path=""),
        data=SimpleNamespace(kind="jsonl", tokenizer="bytes", sources=[]),
    )
    for key, value in tree.items():
        if isinstance(value, dict):
            value = SimpleNamespace(**value, path="", tokenizer="bytes", sources=[])
        setattr(config, key, value)
    assert (
        next_command(config, config.out_dir).replace("'out/a b'", "out/a\\ b").startswith(command)
    )


def test_each_steps_cost_is_that_of_its_tokens(monkeypatch):
    """With a device whose rate is known: FLOPs by bench's count."""
    config = from_dict(TINY)
    monkeypatch.setattr(meter, "matmul_rate", lambda *_, **__: 2e12)
    monkeypatch.setattr(meter.dist, "get_world_size", lambda: 4)
    measured = Meter(config, step_flops(config, SimpleNamespace(row=lambda n: {})), CPU)
    line = measured.measure({"tokens_per_sec": 64.0, "step_tokens": 128})
    flops = clean(count_work(config.model.config), 32) * 128
    assert line["tflops_per_gpu"] == pytest.approx(flops / 2 / 4 / 1e12)
    assert line["mfu"] == pytest.approx(flops / 2 / 4 / 2e12)
    assert line["tokens_per_sec_per_gpu"] == 16.0 and line["peak_memory_gib"] > 0.01
    assert measured.about == "the 2 TFLOP/s of a large matmul here"
    monkeypatch.setattr(meter, "matmul_rate", lambda *_, **__: 45.1e9)
    assert Meter(config, float, CPU).about == "the 45.1 GFLOP/s of a large matmul here"
    monkeypatch.setattr(meter, "describe", lambda device: {"device": "NVIDIA H100 80GB HBM3"})
    bf16 = from_dict(TINY | {"precision": "bf16"})
    assert Meter(bf16, float, CPU).about == "the 989 TFLOP/s published of NVIDIA H100 80GB HBM3"


def test_documents_that_do_not_see_each_other_cost_less():
    config = from_dict(TINY)
    work = count_work(config.model.config)
    row = {"document_ids": torch.tensor([0] * 8 + [1] * 24)}
    count = step_flops(config, SimpleNamespace(row=lambda n: row))
    assert count(128) == pytest.approx(clean(work, (8 * 8 + 24 * 24) / 32))


WORDS = {"task": "sft", "lora": {"rank": 2}, "data": {"kind": "jsonl", "path": "x"}}
LINE = {"tokens_per_sec": 1234567.8, "mfu": 0.5, "peak_memory_gib": 12.34}


def lines_at_the_end(out: str, mfu: float = 0.5, tests: tuple = (1.25, 1.125)) -> str:
    tree = TINY | WORDS | {"out_dir": out, "model": MODEL | {"name": "llama3-8b-tiny"}}
    config = from_dict(tree)
    config.model.path = "models/a model of mine with a long name"
    lines = [
        LINE | {"step": n, "mfu": mfu, "val_loss": loss, "val_bits_per_byte": loss}
        for n, loss in enumerate(tests, 1)
    ]
    return "\n".join(
        closing_lines(config, lines, 0, 98765.4, "the 989 TFLOP/s published of NVIDIA H100")
    )


@pytest.mark.parametrize("out", ["out/x", "out/" + "a-long-name/" * 5, "out/a b", "o" * 200])
def test_closing_lines_fit_a_terminal_and_their_command_stays_one(out):
    """No line is longer than 78 columns, but for a name that is; a shell reads the command as it was."""
    told = lines_at_the_end(out)
    for line in told.splitlines():
        assert len(line) <= 78 or max(map(len, line.split())) > 60, line
    titles = [line.split()[0] for line in told.splitlines() if not line.startswith(" ")]
    assert titles == ["time", "validation", "speed", "memory", "files", "next"]
    command = told[told.index("\nnext") + 5 :].strip().replace("\\\n", "")
    base = "models/a model of mine with a long name"
    assert shlex.split(command) == [
        *["minitrain", "generate", "--model", base, "--adapter", out, "--chat", "--prompt", "..."]
    ]


def test_the_opening_fits_a_terminal(tmp_path):
    for out in ("out/x", "out/" + "a-long-name/" * 4):
        told = opening(from_dict(TINY | {"out_dir": out}), 1, CPU)
        assert all(len(line) <= 78 for line in told.splitlines())
        assert " ".join(told.split()).endswith(f"on 1 x CPU, 4 steps, into {out}")
    assert "llama3-8b-tiny with random weights, 0." in told and "M parameters" in told
    small = {"num_layers": 1, "vocab_size": 9, "hidden_size": 16, "intermediate_size": 16}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    told = opening(from_dict(TINY | {"model": MODEL | small, "steps": 1}), 1, CPU)
    assert re.search(r"weights, 2,\d{3} parameters: ", told) and ", 1 step, into" in told


def test_best_is_said_where_something_can_be_better():
    told = lines_at_the_end("x", tests=(1.25,))
    assert "best" not in told and "1.250 nats = 1.250 bits/byte at step 1" in told
    told = " ".join(lines_at_the_end("x", tests=(1.25, 1.125, 1.5)).split())
    assert "validation best 1.125 nats = 1.125 bits/byte at step 2; last 1.500" in told


def test_more_than_the_machine_can_do_is_named_a_fault_of_the_measurement():
    assert "(above 100 %" not in lines_at_the_end("x", mfu=0.999)
    told = " ".join(lines_at_the_end("x", mfu=1.915).split())
    assert "MFU 191.5% of the 989 TFLOP/s published of NVIDIA H100 (above 100 %: it was" in told


@pytest.mark.parametrize(
    "words",
    [
        {"data": {"kind": "shapes"}, "batch": {"global": 4, "micro": 2, "seq_len": 16}},
        {
            "data": {"kind": "mock", "size": [2, 4, 6], "text_tokens": 9},
            "batch": {"global": 4, "micro": 4, "seq_len": 12},
        },
        {
            "data": {"kind": "mock", "size": [2, 4, 6], "text_tokens": 9},
            "batch": {"global": 2, "micro": 1, "seq_len": 12},
            "lora": {"rank": 3, "targets": ["to_q", "to_v", "ffn.net.2"]},
        },
    ],
    ids=["shapes", "mock", "lora"],
)
def test_the_cost_of_a_step_of_videos_is_what_torch_counts(pool, words):
    """All of a step's micro-batches, forward and backward, by torch's own counter."""
    counted, ours, timesteps, videos = pool.run(1, count_video_step, words)[0]
    # the timestep's embedding, a row a video, is left out; and gradients of inputs are of no use
    assert ours <= counted <= ours + 3 * videos * timesteps
    assert counted == pytest.approx(ours, rel=0.05)


def count_video_step(words: dict) -> tuple[int, float, int, int]:
    shape = {"num_attention_heads": 4, "attention_head_dim": 32, "ffn_dim": 512, "num_layers": 3}
    shape |= {"in_channels": 8, "out_channels": 8, "text_dim": 64, "freq_dim": 8}
    tree = {"task": "diffusion", "model": shape, "device": "cpu", "steps": 1} | words
    config = from_dict(tree)
    data, _ = open_dataset(config)
    trainer = make_trainer(config, start(config))
    counts = count_flops(lambda: trainer.step(data, 0))
    sums = trainer.total(trainer.objective.sums()).tolist()
    tokens = trainer.objective.metrics(sums)["video_tokens"]
    ours = step_flops(config, data)(round(tokens)) * tokens
    dim = config.model.config.dim
    timesteps = 2 * (config.model.config.freq_dim * dim + 7 * dim**2)
    return sum(counts.values()), ours, timesteps, config.batch.global_
