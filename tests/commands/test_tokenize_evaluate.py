"""minitrain tokenize and evaluate: the rows of the texts themselves; transformers' loss."""

import gzip
import json
import math
import re
import shlex

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import minitrain
from minitrain import train
from minitrain.__main__ import dispatch
from minitrain.commands import tokenize as tokenize_files
from minitrain.data.byte_tokenizer import ByteTokenizer
from minitrain.data.text.documents import find_documents, read_documents
from minitrain.data.text.text_rows import open_data
from minitrain.errors import InputError
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.settings import Data


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(3)
    minitrain.save_pretrained(
        Decoder(model_config("llama3-8b-tiny", num_layers=1, vocab_size=258)), tmp_path / "m"
    )
    ByteTokenizer().save(tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize(("suffix", "processes"), [("txt", "1"), ("jsonl", "2")])
def test_tokenized_files_give_the_rows_of_the_texts(
    tmp_path, monkeypatch, capsys, suffix, processes
):
    monkeypatch.setattr(tokenize_files, "MOST", 3)
    (tmp_path / "in").mkdir()
    for number in range(7):
        text = f"Document {number}, {'long ' * 9 * number}end"
        lines = [json.dumps({"text": f"{part}: {text}"}) for part in range(3)]
        (tmp_path / "in" / f"{number}.{suffix}").write_text(
            text if suffix == "txt" else "\n".join(lines)
        )
    out = tmp_path / "new" / "my tokens"
    dispatch(
        [
            "tokenize",
            "--tokenizer",
            "bytes",
            "--out",
            str(out),
            "--processes",
            processes,
            str(tmp_path / "in"),
        ]
    )
    _, advice = capsys.readouterr().out.split("next: minitrain ")
    shards = sorted(out.glob("*.npy"))
    assert len(shards) == 3 and all(np.load(shard).dtype == np.uint16 for shard in shards)
    kind = "text" if suffix == "txt" else "jsonl"
    texts, _ = open_data(Data(kind, str(tmp_path / "in")), 32, 258, seed=5)
    tokens, _ = open_data(Data("tokens", str(out), document_end=257), 32, 258, seed=5)
    assert len(texts) == len(tokens)
    for number in range(2 * len(texts)):
        for key, column in texts.row(number).items():
            assert torch.equal(column, tokens.row(number)[key])
    # what is printed works as it is typed, and makes a model with its tokenizer
    monkeypatch.chdir(tmp_path)
    small = [
        "device=cpu",
        "compile=false",
        "precision=fp32",
        "steps=1",
        "validation.every=0",
        "optim.warmup=0",
    ]
    small += ["batch.global=1", "batch.micro=1", "batch.seq_len=32", "data.validation=0"]
    model = "model={name: llama3.1-8b-tiny, num_layers: 1, vocab_size: 258}"
    dispatch([*shlex.split(advice), *small, "out_dir=my run", model])
    capsys.readouterr()
    dispatch(["evaluate", "--model", "my run", "--device", "cpu", str(tmp_path / "in")])
    *words, text = shlex.split(capsys.readouterr().out.split("next: minitrain ")[1])
    assert text == "TEXT"
    dispatch([*words, "a", "--device", "cpu", "--max-tokens", "2"])
    assert minitrain.load_tokenizer("my run").encode("a") == [97]


ROWS = [{"id": n, "text": f"Document {n} ä\n{{}}"} for n in range(4)]
LINED = "\n".join(map(json.dumps, ROWS))
WRITTEN = {
    "lines.jsonl": LINED.encode(),
    "lines.json": LINED.encode(),
    "lines.ndjson": LINED.encode(),
    "lines.txt": LINED.encode(),
    "lines": b"\xef\xbb\xbf" + LINED.encode(),
    "array.json": json.dumps(ROWS).encode(),
    "spread.json": json.dumps(ROWS, indent=1).encode(),
    "packed.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "packed.ndjson.gz": gzip.compress(LINED.encode()),
}


def tokenized(path, field: str = "text", kind: str = "auto") -> list[bytes]:
    """Return the documents that minitrain tokenize makes of a path."""
    files, _ = find_documents([str(path)], field, kind)
    return list(map(str.encode, read_documents(files, field, kind)))


@pytest.mark.parametrize("name", WRITTEN)
def test_objects_are_documents_whatever_the_file_is_called(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(WRITTEN[name])
    expected = [row["text"].encode() for row in ROWS]
    assert tokenized(tmp_path / name) == expected
    if not name.endswith("gz"):
        as_text = tokenized(tmp_path / name, kind="text")
        assert as_text == [WRITTEN[name].removeprefix(b"\xef\xbb\xbf")]


def test_files_that_only_resemble_json_lines_are_texts(tmp_path):
    """Settings of programs, code, and a template: nothing of them is lost."""
    texts = {
        "package.json": '{\n "name": "x",\n "version": "1"\n}\n',
        "tsconfig.json": '{\n // a comment\n "a": {}\n}\n',
        "one.json": '{"name": "x"}',
        "list.json": "[1, 2]\n",
        "lines.txt": '{"a": 1}\n{"b": 2}\n',
        "a.py": '{"text": 5}[x]\n',
        "b.jinja": "{% if x %}{{ y }}",
    }
    (tmp_path / "in").mkdir()
    for name, text in texts.items():
        (tmp_path / "in" / name).write_text(text)
    found = tokenized(tmp_path / "in")
    assert sorted(found) == sorted(text.encode() for text in texts.values())


def test_a_folder_from_the_hub_stands_for_its_data(tmp_path, capsys, folder):
    """Without README and infos, which are counted; for training, too, all of its JSON."""
    hub = tmp_path / "hub"
    (hub / "data").mkdir(parents=True)
    (hub / "README.md").write_text("# A set")
    (hub / "dataset_infos.json").write_text('{"default": {"features": {"text": {}}}}')
    (hub / "data" / "train.jsonl").write_text(LINED)
    (hub / "data" / "more.json").write_text('{"text": "five"}\n{"text": "six"}')
    expected = sorted([row["text"].encode() for row in ROWS] + [b"five", b"six"])
    assert sorted(tokenized(hub)) == expected
    out = tmp_path / "out"
    dispatch(
        ["tokenize", "--tokenizer", "bytes", "--processes", "1", "--out", str(out), str(hub)]
    )
    assert "in 2 files (without 2 other files beside them" in capsys.readouterr().out
    dispatch(["evaluate", "--model", str(folder), "--device", "cpu", str(hub)])
    assert numbers(capsys.readouterr().out)[0] == sum(map(len, expected))
    trained, _ = open_data(Data("jsonl", str(hub)), 8, 258, 0)
    found = bytes(n if n < 256 else 0 for n in trained.corpus.stores[0].tolist())
    assert sorted(found.split(b"\0")[:-1]) == expected


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.ndjson"])
def test_objects_without_a_text_are_not_taken_for_one(tmp_path, name):
    (tmp_path / name).write_text('{"body": "x"}\n{"body": "y"}\n')
    with pytest.raises(InputError, match=f"{name}:1: no key 'text'"):
        tokenized(tmp_path / name)
    assert tokenized(tmp_path / name, "body") == [b"x", b"y"]
    (tmp_path / name).write_text('{\n "text": "x"\n}\n{\n "text": "y"\n}\n')
    with pytest.raises(InputError, match=f"{name} is JSON over several lines"):
        tokenized(tmp_path / name)


def test_nothing_is_left_of_texts_that_cannot_be_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"txt": "bad"}\n')
    words = ["tokenize", "--tokenizer", "bytes", "--processes", "1", str(tmp_path / "a.jsonl")]
    with pytest.raises(InputError, match="a.jsonl:2: no key 'text'"):
        dispatch([*words, "--out", str(tmp_path / "out")])
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]
    with pytest.raises(InputError, match="exists already"):
        dispatch([*words, "--out", str(tmp_path)])


def losses(folder, documents: list[list[int]], length: int) -> list[float]:
    """Return transformers' losses of all tokens but each document's first, in pieces of `length`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for ids in documents:
        for start in range(0, len(ids) - 1, length):
            piece = torch.tensor(ids[start : start + length + 1])
            with torch.no_grad():
                scores = model(piece[None, :-1]).logits[0].log_softmax(-1)
            found += (-scores.gather(1, piece[1:, None])).flatten().tolist()
    return found


def numbers(text: str) -> list[float]:
    return [
        float(number) for number in re.findall(r"[\d.]+\d", text.replace(",", "").splitlines()[0])
    ]


def test_evaluate_says_the_loss_of_transformers(folder, tmp_path, capsys):
    texts = ["a first text", "né", "a longer text, in two pieces and a bit" * 2]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    dispatch(
        [
            "evaluate",
            "--model",
            str(folder),
            "--device",
            "cpu",
            "--seq-len",
            "32",
            str(tmp_path / "*.txt"),
        ]
    )
    bytes_of = [len(text.encode()) for text in texts]
    each = losses(folder, [[*text.encode(), 257] for text in texts], 32)
    loss = sum(each) / len(each)
    wanted = [sum(bytes_of), loss, math.exp(loss), sum(each) / math.log(2) / sum(bytes_of)]
    assert numbers(capsys.readouterr().out) == pytest.approx(wanted, rel=2e-4)


def test_evaluate_counts_chats_that_are_exactly_right(folder, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    prompt = list(b"hi\n")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = None
    best = model.generate(
        torch.tensor([prompt]), max_new_tokens=1, do_sample=False, pad_token_id=0
    )[0, 3].item()
    chats = [("hi", "no"), ("hi", "other")]
    lines = [json.dumps({"prompt": ask, "response": reply}) + "\n" for ask, reply in chats]
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    dispatch(
        [
            "evaluate",
            "--model",
            str(folder),
            "--device",
            "cpu",
            "--chat",
            str(tmp_path / "chats.jsonl"),
        ]
    )
    each = []
    for _, reply in chats:
        ids = [*prompt, *reply.encode(), 257]
        each += losses(folder, [ids], 100)[len(prompt) - 1 :]
    loss = sum(each) / len(each)
    assert best != ord("n") and best != ord("o")
    wanted = [loss, math.exp(loss)]
    assert numbers(capsys.readouterr().out)[0:2] == pytest.approx(wanted, rel=2e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_of_a_run_is_exported_as_that_run_would_end(tmp_path, capsys, precision):
    for name in ("text", "held"):
        (tmp_path / f"{name}.txt").write_text(f"a line of {name}\n" * 60)
    model = "model={name: llama3-8b-tiny, vocab_size: 258, num_layers: 1}"
    words = f"""data.kind=text data.path={tmp_path}/text.txt batch.global=2 batch.micro=2 batch.seq_len=32 device=cpu
    checkpoint.every=1 checkpoint.keep=2 optim.schedule=constant optim.warmup=0 precision={precision}
    validation.every=1 data.validation_path={tmp_path}/held.txt""".split()
    (tmp_path / "config.yaml").write_text("")
    for run, more in (("one", "steps=1"), ("two", "steps=2")):
        arguments = [
            "--config",
            str(tmp_path / "config.yaml"),
            model,
            *words,
            f"out_dir={tmp_path}/{run}",
            more,
        ]
        train.main(arguments)
    # of a save that goes on
    live = tmp_path / "two" / "checkpoints" / "step-00000003.tmp"
    live.mkdir()
    capsys.readouterr()
    for step, more in ((1, ["--step", "1"]), (2, [])):
        out = tmp_path / "out" / str(step)
        dispatch(["export", "--run", str(tmp_path / "two"), "--out", str(out), *more])
        assert capsys.readouterr().out.startswith(f"{out} holds step {step} of")
        whole = tmp_path / {1: "one", 2: "two"}[step]
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            assert (out / name).read_bytes() == (whole / name).read_bytes()
        assert {str(x.dtype) for x in load_file(out / "model.safetensors").values()} == {
            "torch.float32"
        }
    assert live.exists()
    for run, more, message in (
        ("two", ["--step", "7"], r"checkpoints holds steps \[1, 2\], not 7"),
        ("none", [], "none/checkpoints holds no checkpoint"),
    ):
        with pytest.raises(InputError, match=message):
            dispatch(
                ["export", "--run", str(tmp_path / run), "--out", str(tmp_path / "new"), *more]
            )
    assert not (tmp_path / "new").exists()
    train.main(["--config", str(tmp_path / "two" / "config.yaml"), "steps=3"])
    lines = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
