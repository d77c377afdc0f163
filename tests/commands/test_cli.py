"""The command lines as a user types them: what they print, write and exit with."""

import io
import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

import bench
import minitrain
from minitrain import generate, merge, train
from minitrain.data.tokenizer import ByteTokenizer
from minitrain.errors import InputError
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.run.config.load import load
from minitrain.run.launch import cli
from minitrain.run.launch.start import check_own_gpus, pick_device
from minitrain.run.tasks import rows_task, train_model
from tests.helpers.commands import ROOT, command, torchrun
from tests.helpers.processes import popen

TINY = {
    "model": {
        "name": "llama3-8b-tiny",
        "vocab_size": 258,
        "num_layers": 2,
        "tie_word_embeddings": True,
    },
    "steps": 6,
    "data": {"kind": "text", "validation": 0.3},
    "batch": {"global": 4, "micro": 2, "seq_len": 32},
    "optim": {"lr": 0.01, "warmup": 2, "schedule": "cosine"},
    "validation": {"every": 3, "batches": 2},
    "checkpoint": {"every": 2},
}


@pytest.fixture
def config_file(tmp_path):
    """A config that trains on a few small documents and writes below tmp_path."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(10):
        (texts / f"{i}.txt").write_text(
            "".join(f"line {i * k % 7} of text {i}\n" for k in range(20))
        )
    tree = TINY | {"out_dir": str(tmp_path / "out"), "data": TINY["data"] | {"path": str(texts)}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_train_writes_metrics_checkpoints_and_a_model_that_generates(
    config_file, tmp_path, capsys
):
    train.main(["--config", str(config_file)])
    out = tmp_path / "out"
    lines = metrics(out)
    # where there is no terminal: lines, also where the validation is due
    shown = capsys.readouterr()
    told = re.findall(
        r"^step (.*): loss [0-9.]+ = [0-9.]+ bits/byte, tokens/s [0-9,]+$",
        shown.out,
        re.MULTILINE,
    )
    assert told == ["1 of 6", "3 of 6", "6 of 6"]
    assert "\r" not in shown.out + shown.err
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "val_bits_per_byte" in line] == [3, 6]
    for line in lines:
        assert (
            line["tokens"] == line["step"] * 4 * 32
            and line["tokens_per_sec"] > 0
            and line["grad_norm"] > 0
        )
    val = lines[-1]
    # byte tokens: one byte each
    assert val["val_bits_per_byte"] == pytest.approx(val["val_loss"] / math.log(2))
    assert (
        lines[0]["loss"] == pytest.approx(math.log(258), rel=0.05)
        and lines[-1]["loss"] < lines[0]["loss"]
    )
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]

    model = minitrain.load_pretrained(out)
    tokens = torch.randint(258, (1, 8))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert theirs.generation_config.eos_token_id == ByteTokenizer.eos_id
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=1e-4, rtol=1e-4)
    assert AutoTokenizer.from_pretrained(out)("line")["input_ids"] == list(b"line")

    capsys.readouterr()
    generate.main(
        ["--model", str(out), "--prompt", "line ", "--max-tokens", "12", "--temperature", "0"]
    )
    text = capsys.readouterr().out
    expected = theirs.generate(
        torch.tensor([list(b"line ")]), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert text.encode() == bytes(t for t in expected[0].tolist() if t < 256) + b"\n"


def test_a_short_try_of_an_example_warms_up_less_and_says_so(config_file, tmp_path, capsys):
    train.main(["--config", str(config_file), "optim.warmup=50", "steps=2"])
    assert "optim.warmup=50 is longer than steps=2: 0 steps warm up\n" in capsys.readouterr().out
    assert metrics(tmp_path / "out")[0]["lr"] == 0.01


@pytest.mark.parametrize("epochs", [2, 0.5])
def test_epochs_in_place_of_steps(config_file, tmp_path, epochs):
    """As many steps as it takes to see each row so often: the oracle counts bytes, with one token to end each file."""
    sizes = [len(file.read_bytes()) + 1 for file in sorted((tmp_path / "texts").iterdir())]
    train.main(
        [
            "--config",
            str(config_file),
            f"epochs={epochs}",
            "data.validation=0",
            "validation.every=0",
        ]
    )
    out = tmp_path / "out"
    assert len(metrics(out)) == math.ceil(epochs * (sum(sizes) // 32) / 4)
    written = yaml.safe_load((out / "config.yaml").read_text())
    assert written["steps"] == len(metrics(out)) and written["epochs"] == 0
    assert metrics(out)[-1]["lr"] < metrics(out)[-2]["lr"]  # the schedule knows the end
    # done
    train.main(
        [
            "--config",
            str(config_file),
            f"epochs={epochs}",
            "data.validation=0",
            "validation.every=0",
        ]
    )


def test_steps_and_epochs_are_one_setting(config_file):
    for words, found in (("epochs=2", (6, 2)), ("epochs=2 steps=3", (3, 2)), ("steps=3", (3, 0))):
        config = load(config_file, words.split())
        assert (config.steps, config.epochs) == found


def test_the_same_command_resumes_where_it_was(config_file, tmp_path):
    """Interrupted after step 4 of 6, and run again: the losses of an unbroken run, to the bit."""
    train.main(["--config", str(config_file), f"out_dir={tmp_path / 'new/unbroken'}"])
    out = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        steps = rows_task.training_steps

        def stop_after_step_5(*args):
            for numbers in steps(*args):
                if numbers["step"] == 6:
                    raise KeyboardInterrupt
                yield numbers

        patch.setattr(rows_task, "training_steps", stop_after_step_5)
        train.main(["--config", str(config_file), f"out_dir={out}"])
    assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4, 5]
    train.main(["--config", str(config_file), f"out_dir={out}"])
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    assert [[line[k] for k in keys] for line in metrics(out)] == [
        [line[k] for k in keys] for line in metrics(tmp_path / "new/unbroken")
    ]


def test_training_starts_from_a_model_folder(config_file, tmp_path):
    train.main(["--config", str(config_file)])
    final = metrics(tmp_path / "out")[-1]["val_loss"]
    arguments = [
        "--config",
        str(config_file),
        f"model={tmp_path / 'out'}",
        f"out_dir={tmp_path / 'next'}",
    ]
    (tmp_path / "out" / "generation_config.json").write_text('{"eos_token_id": [257, 10]}')
    train.main([*arguments, "optim.lr=0", "validation.every=1", "steps=2"])
    assert json.loads((tmp_path / "next" / "generation_config.json").read_text()) == {
        "eos_token_id": [257, 10]
    }
    assert metrics(tmp_path / "next")[0]["val_loss"] == pytest.approx(final, rel=1e-6)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(
        InputError, match=r"^out_dir='\S+link' is model.path, which the result would overwrite"
    ):
        train.main([*arguments, f"out_dir={tmp_path / 'link'}"])


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", "fp8"])
def test_low_precision_learns(config_file, tmp_path, precision):
    train.main(
        ["--config", str(config_file), f"precision={precision}", "steps=10", "validation.every=0"]
    )
    lines = metrics(tmp_path / "out")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    stored = minitrain.load_pretrained(tmp_path / "out").head_weight.dtype
    assert stored == (torch.bfloat16 if precision == "bf16-pure" else torch.float32)


def test_two_processes_train_as_one(config_file, tmp_path):
    train.main(["--config", str(config_file)])
    done = torchrun(
        2, "-m", "minitrain.train", "--config", config_file, f"out_dir={tmp_path / 'two'}"
    )
    assert done.returncode == 0, done.stderr
    for one, two in zip(metrics(tmp_path / "out"), metrics(tmp_path / "two"), strict=True):
        for key in one.keys() & {"loss", "grad_norm", "val_loss"}:
            assert two[key] == pytest.approx(one[key], rel=1e-5), key
    ours, theirs = (
        dict(minitrain.load_pretrained(tmp_path / o).named_parameters()) for o in ("out", "two")
    )
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], atol=1e-4, rtol=1e-4)


def test_errors_are_one_line_with_exit_code_2(config_file):
    wrong = ("-m", "minitrain.train", "--config", config_file, "optim.learning_rate=1")
    done = command(*wrong)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith("error: unknown key optim.learning_rate")
        and done.stderr.count("\n") == 1
    )
    done = command(*wrong, "--debug")
    assert done.returncode == 2 and "Traceback" in done.stderr


def test_a_reader_that_has_seen_enough_is_no_error():
    words = ["bash", "-o", "pipefail", "-c", f"{sys.executable} bench.py --list | true"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


PRINTING = """
from minitrain.run.launch import cli
def main(arguments):
    for i in range(20_000):
        print("line", i)
cli.run(main)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "program, streams, told",
    [
        (PRINTING, ["stdout"], "error: [Errno 28] No space left on device\n"),
        (PRINTING, ["stdout", "stderr"], None),
        (PRINTING.replace("print(", "raise OSError("), ["stderr"], None),
    ],
)
def test_output_to_a_full_disk_is_one_line(unbuffered, program, streams, told):
    """And code 2, also where that line has no room."""
    with open("/dev/full", "w") as full:
        ends = {
            name: full if name in streams else subprocess.PIPE for name in ("stdout", "stderr")
        }
        words, environment = (
            [sys.executable, "-c", program],
            os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
        done = subprocess.run(words, cwd=ROOT, env=environment, text=True, **ends)
    assert done.returncode == 2 and done.stderr == told


def test_a_slow_reader_is_waited_for():
    """Also where whoever has made the pipe lets nobody wait for it, so that writing fails while it is full."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with (
        popen([sys.executable, "-c", PRINTING], cwd=ROOT, stdout=writer) as process,
        open(reader) as pipe,
    ):
        os.close(writer)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        assert pipe.read() == "".join(f"line {i}\n" for i in range(20_000))
    assert process.returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_is_one_write(unbuffered):
    """Also of an unbuffered interpreter, whose print writes the line's end by itself: another rank's line came between.

    A datagram is what one write has written.
    """
    program = "import sys" + PRINTING.replace("20_000", "3").replace(
        ", i)", ", i, file=sys.stderr)"
    )
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    reader.settimeout(60)
    with reader, writer:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environment, stderr=writer, check=True
        )
        assert [reader.recv(100) for _ in range(3)] == [b"line 0\n", b"line 1\n", b"line 2\n"]


def test_an_interrupted_program_says_so(monkeypatch, capsys):
    monkeypatch.setattr(cli, "group_is_up", lambda: False)
    with pytest.raises(SystemExit) as end:
        cli.run(mock.Mock(side_effect=KeyboardInterrupt))
    assert end.value.code == 130 and capsys.readouterr().err == "interrupted\n"


def test_letters_that_the_terminal_does_not_know_are_spelled_out(monkeypatch):
    """In what a model writes, or the names of files."""
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "ascii"))
    monkeypatch.setattr(cli, "group_is_up", lambda: False)  # with one, this process would end
    with pytest.raises(SystemExit) as end:
        cli.run(lambda arguments: print("d\u00e9f \udcff"))
    sys.stdout.flush()
    assert written.getvalue() == b"d\\xe9f \\udcff\n" and end.value.code == 0


def test_files_get_each_line_when_it_is_printed(monkeypatch):
    """And not all at a run's end, or none where another rank's death ended it."""
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written))
    monkeypatch.setattr(cli, "group_is_up", lambda: False)
    seen = []
    with pytest.raises(SystemExit):
        cli.run(lambda arguments: [print("resumed"), seen.append(written.getvalue())])
    assert seen == [b"resumed\n"]


def test_a_connection_that_breaks_is_an_error(monkeypatch, capsys):
    """And no reader of the output who has seen enough."""
    monkeypatch.setattr(cli, "group_is_up", lambda: False)
    with pytest.raises(SystemExit) as end:
        cli.run(mock.Mock(side_effect=BrokenPipeError(32, "Broken pipe")))
    assert end.value.code == 2 and capsys.readouterr().err == "error: [Errno 32] Broken pipe\n"


GRPO = [
    "task=grpo",
    "data.template=plain",
    "batch.seq_len=64",
    "batch.micro=1",
    "grpo.prompts=2",
    "grpo.group=2",
    "rollout.max_tokens=6",
    "grpo.eval_samples=1",
]


@pytest.mark.parametrize(
    "words",
    [
        ["data.tokenizer=bytes"],
        ["data.tokenizer={bytes}"],
        ["data.tokenizer=bytes", "task=sft", "data.kind=jsonl"],
        ["data.tokenizer=bytes", "data.kind=mock", *GRPO],
    ],
)
def test_a_model_with_another_tokenizer_does_not_learn_bytes(config_file, tmp_path, words):
    """104 is a byte, and any token of the model's, which is the default."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    base, chats = tmp_path / "base", tmp_path / "chats.jsonl"
    minitrain.save_pretrained(Decoder(model_config("llama3-8b-tiny")), base)
    vocabulary = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["?", "line", "of", "text"])}, "?")
    )
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=vocabulary).save_pretrained(base)
    ByteTokenizer().save(tmp_path / "bytes")
    chats.write_text('{"question": "line", "answer": "text"}\n')
    words = [*words, f"data.path={chats}"] if "data.kind=jsonl" in words else words
    arguments = ["--config", str(config_file), f"model={base}"]
    arguments += [word.format(bytes=tmp_path / "bytes") for word in words]
    with pytest.raises(
        InputError,
        match=rf"^data.tokenizer=\S*bytes: 4 of 258 ids .*in {base}/.*\(use \S*={base}\)$",
    ):
        train.main(arguments)
    assert not (tmp_path / "out").exists()
    if words == ["data.tokenizer=bytes"]:
        train.main([*arguments[:-1], "steps=2"])
        assert (
            AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == vocabulary.get_vocab()
        )


@pytest.mark.parametrize(
    "kind, words, saved",
    [
        ("tokens", [], False),
        ("tokens", ["data.tokenizer={bytes}"], True),
        ("mock", [], False),
        ("mock", GRPO, True),
    ],
)
def test_a_model_comes_with_the_tokenizer_of_its_data_if_that_is_known(
    config_file, tmp_path, kind, words, saved
):
    np.save(tmp_path / "a.npy", np.arange(300, dtype=np.uint16) % 258)
    ByteTokenizer().save(tmp_path / "bytes")
    words = [
        f"data.kind={kind}",
        f"data.path={tmp_path / 'a.npy'}",
        *words,
        "steps=1",
        "optim.warmup=0",
    ]
    words += ["validation.every=0", "data.validation=0"]
    train.main(
        ["--config", str(config_file), *(word.format(bytes=tmp_path / "bytes") for word in words)]
    )
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert (tmp_path / "out" / "tokenizer.json").exists() == saved


def test_settings_stand_before_and_behind_options(config_file, monkeypatch):
    words = [
        "seed=1",
        "--deterministic",
        "steps=3",
        "--config",
        str(config_file),
        "validation.every=0",
    ]
    found = []
    monkeypatch.setattr(train_model, "train", found.append)
    train.main(words)
    train.main([word for word in words if word != "--deterministic"])
    for config, deterministic in zip(found, (True, False), strict=True):
        assert (config.seed, config.steps, config.validation.every, config.deterministic) == (
            1,
            3,
            0,
            deterministic,
        )


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["--config", "none.yaml"], "none.yaml does not exist"),
        ([], "the following arguments are required: --config"),
        (["--config", "{file}", "data.path=/nowhere/*.txt"], "no file matches '/nowhere"),
        (
            ["--config", "{file}", "model.vocab_size=100"],
            "model.vocab_size=100 is smaller than the tokenizer's 258",
        ),
        (["--config", "{file}", "batch.seq_len=4096"], "less than one row of batch.seq_len=4096"),
        (["--config", "{file}", "parallel.dp_shard=2"], "is not the number of ranks, 1"),
        (
            ["--config", "{file}", "out_dir=/dev/null/x"],
            "out_dir='/dev/null/x' cannot be created",
        ),
    ],
)
def test_training_mistakes(config_file, tmp_path, arguments, line):
    with pytest.raises(InputError, match=line) as error:
        train.main([word.format(file=config_file) for word in arguments])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_checkpoint_that_does_not_fit_is_an_error_and_stays(config_file, tmp_path):
    train.main(["--config", str(config_file)])
    before = (tmp_path / "out" / "metrics.jsonl").read_text()
    with pytest.raises(
        InputError, match=r"gate_proj.weight is \[192, 64\], and \[64, 64\] in the model"
    ):
        train.main(["--config", str(config_file), "model.intermediate_size=64", "steps=8"])
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == before
    train.main(["--config", str(config_file), "steps=8"])
    assert [line["step"] for line in metrics(tmp_path / "out")] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_run_without_resuming_needs_a_fresh_folder(config_file, tmp_path):
    arguments = ["--config", str(config_file), "checkpoint.resume=false"]
    train.main(arguments)
    with pytest.raises(
        InputError, match=r"checkpoint.resume=false, but .*out/checkpoints holds checkpoints"
    ):
        train.main(arguments)


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["--model", "/nowhere", "--prompt", "x"], "/nowhere"),
        (
            ["--model", "/nowhere", "--prompt", "x", "--temperature", "-1"],
            "-1 must be at least 0",
        ),
        (
            ["--model", "/nowhere", "--prompt", "x", "--temperature", "inf"],
            "inf must be at least 0, and finite",
        ),
        (["--model", "/nowhere", "--prompt", "x", "--max-tokens", "0"], "0 must be above 0"),
        (
            ["--model", "/nowhere", "--prompt", "x", "--max-tokens", "ten"],
            "invalid int value: 'ten'",
        ),
        (
            ["--model", "/nowhere", "--prompt", "x", "--n", "100000000"],
            "100000000 must be above 0, and at most 65,536",
        ),
    ],
)
def test_generation_mistakes(arguments, line):
    with pytest.raises(InputError, match=line):
        generate.main(arguments)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_generation_ends_where_transformers_does(tmp_path, capsys, name):
    """At any of the tokens that are named beside the tokenizer's own end: chat models have several."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    minitrain.save_pretrained(
        Decoder(model_config("llama3-8b-tiny", num_layers=1, vocab_size=258)), tmp_path
    )
    ByteTokenizer().save(tmp_path)
    arguments = [
        "--model",
        str(tmp_path),
        "--prompt",
        "a",
        "--max-tokens",
        "6",
        "--temperature",
        "0",
    ]
    sampled = AutoModelForCausalLM.from_pretrained(tmp_path).generate(
        torch.tensor([[97]]), max_new_tokens=6
    )
    tokens = sampled[0].tolist()
    tree = json.loads((tmp_path / name).read_text()) if name == "config.json" else {}
    (tmp_path / name).write_text(json.dumps(tree | {"eos_token_id": [tokens[3], 257]}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).generate(
        torch.tensor([[97]]), max_new_tokens=6
    )
    assert theirs[0].tolist() == tokens[: tokens.index(tokens[3]) + 1]
    generate.main(arguments)
    assert capsys.readouterr().out == ByteTokenizer().decode(theirs[0].tolist()[:-1]) + "\n"


def test_generation_of_a_reply(tmp_path, capsys):
    """To a message, in the template that came with the tokenizer; it may end at a special token, which is not shown."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    minitrain.save_pretrained(
        Decoder(model_config("llama3-8b-tiny", num_layers=1, vocab_size=258)), tmp_path
    )
    ByteTokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' you: ' }}{% endif %}"
    )
    prompt = [256, *b"user: hi you: "]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    reply = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[
        0, len(prompt) :
    ].tolist()
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    end = next(token for token, number in tree["model"]["vocab"].items() if number == reply[2])
    tree["added_tokens"].append(tree["added_tokens"][0] | {"id": reply[2], "content": end})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    arguments = [
        "--model",
        str(tmp_path),
        "--prompt",
        "hi",
        "--chat",
        "--max-tokens",
        "6",
        "--temperature",
        "0",
    ]
    for more, shown in (
        ([], [t for t in reply if t != reply[2]]),
        (["--stop", end], reply[: reply.index(reply[2])]),
    ):
        generate.main([*arguments, *more])
        assert capsys.readouterr().out == ByteTokenizer().decode(shown) + "\n"


def test_without_a_terminal_lines_come_again_after_a_pause(config_file, monkeypatch, capsys):
    monkeypatch.setattr("minitrain.run.monitor.metrics.PAUSE", 0.0)
    train.main(["--config", str(config_file)])
    assert re.findall("^step (.*): loss", capsys.readouterr().out, re.MULTILINE) == [
        f"{n} of 6" for n in range(1, 7)
    ]


def test_the_home_folder_is_meant_behind_an_equals_sign_too(tmp_path, monkeypatch):
    """Where no shell expands it: else folders are made below one that is called `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        InputError, match=rf"^--out {tmp_path}/base is --model, which would be overwritten"
    ):
        merge.main(["--model=~/base", "--adapter=~/adapter", "--out=~/base"])
    words = ["--report", "--out=~/report", "--json=~/rows", "--trace=~/trace", "--system=~/gpu"]
    options = vars(bench.parser().parse_args(words))
    assert [options[name] for name in ("out", "json", "trace", "system")] == [
        f"{tmp_path}/{name}" for name in ("report", "rows", "trace", "gpu")
    ]
    for main, words in (
        (train.main, ["--config=~/none"]),
        (generate.main, ["--model=~/none", "--prompt=a"]),
        (
            generate.main,
            ["--task=diffusion", "--model=~/none", "--prompts=shapes", "--out=~/out"],
        ),
    ):
        with pytest.raises(InputError, match=f"{tmp_path}/none"):
            main(words)


def test_generation_asks_for_huge_pages_before_it_loads_a_model(monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")  # so that it is put back at the end
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    with pytest.raises(InputError, match="/none"):
        generate.main(["--model", "/none", "--prompt", "a"])
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"


def test_a_user_whom_the_container_does_not_know_has_a_name(monkeypatch):
    """torch before 2.13 asks for it as its compiler is imported, which every model does, and ended in a KeyError."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    unknown = "import getpass, pwd; pwd.getpwuid = {}.__getitem__; import minitrain; print(getpass.getuser())"
    done = subprocess.run(
        [sys.executable, "-c", unknown], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == f"uid{os.getuid()}\n", done.stderr


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_incomplete_variables_of_torchrun_are_one_line(config_file, monkeypatch, missing):
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    result = command("-m", "minitrain.train", "--config", str(config_file))
    assert result.returncode == 2
    assert (
        result.stderr
        == f"error: WORLD_SIZE is set without {missing} (start with torchrun, or unset WORLD_SIZE)\n"
    )


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("WORLD_SIZE", "", "WORLD_SIZE='' is not a number"),
        ("RANK", "node-1", "RANK='node-1' is not a number"),
        (
            "MASTER_PORT",
            "tcp://10.0.0.1:23456",
            "MASTER_PORT='tcp://10.0.0.1:23456' is not a number",
        ),
        ("RANK", "2", "RANK=2 is not one of WORLD_SIZE=2, which count from 0"),
        ("RANK", "-1", "RANK=-1 is not one of WORLD_SIZE=2, which count from 0"),
    ],
)
def test_wrong_variables_of_a_launcher_are_one_line(
    config_file, monkeypatch, tmp_path, name, value, problem
):
    environment = {
        "WORLD_SIZE": "2",
        "RANK": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    } | {name: value}
    for each, setting in environment.items():
        monkeypatch.setenv(each, setting)
    result = command(
        "-m",
        "minitrain.train",
        "--config",
        str(config_file),
        f"out_dir={tmp_path}/out",
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stderr == f"error: {problem} (start with torchrun, or unset WORLD_SIZE)\n"


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name, value in {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert pick_device("auto") == torch.device("cuda", 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(
        InputError, match=re.escape("8 processes on this node, but torch sees 4 GPUs here")
    ):
        pick_device("auto")
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # nobody but torchrun says it
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(InputError, match="5 processes on this node"):
        pick_device("auto")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each its own, whatever its rank
    assert pick_device("auto") == torch.device("cuda", 0)


def gpus_of(seen: list[list[str]], environment: dict[str, str]) -> str:
    """What ranks that see these GPUs, of which they took the first, are told, on this rank."""
    own = seen[dist.get_rank()]
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(torch.cuda, "device_count", lambda: len(own)),
        mock.patch.object(
            torch.cuda, "get_device_properties", lambda device: mock.Mock(uuid=own[0])
        ),
    ):
        try:
            check_own_gpus(torch.device("cuda", 0))
        except InputError as error:
            return str(error)
    return "right"


def test_processes_that_see_one_gpu_each_have_their_own(pool):
    told = {"LOCAL_RANK": "0"}
    assert pool.run(3, gpus_of, [["a"], ["b"], ["c"]], told) == ["right"] * 3
    # which take one by their rank
    assert pool.run(3, gpus_of, [["a", "b"], ["a", "b"], ["c"]], told) == ["right"] * 3
    same = "ranks {} and {} have the same GPU (start one process for each GPU)".format
    assert pool.run(3, gpus_of, [["a"], ["b"], ["b"]], told) == [same(1, 2)] * 3
    # nobody says which is whose
    assert pool.run(3, gpus_of, [["a", "b"], ["a", "b"], ["c"]], {}) == [same(0, 1)] * 3
