"""Lines that tell: data of another task, checkpoints for models, another command's words, small data."""

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch

from minitrain import save_pretrained
from minitrain.__main__ import dispatch
from minitrain.commands import evaluate, generate, tokenize
from minitrain.commands.export import best_step
from minitrain.data.byte_tokenizer import ByteTokenizer
from minitrain.data.chat.read_chats import read_messages
from minitrain.data.chat.read_pairs import read_pair
from minitrain.data.chat.read_problems import read_problem
from minitrain.data.faults.wording import counted
from minitrain.errors import InputError
from minitrain.examples import arithmetic
from minitrain.grpo.rewards import load_reward
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.run.launch import lock
from minitrain.run.tasks import train_model

PAIR = {"prompt": "1+1", "chosen": "2", "rejected": "3"}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
TEXT = {"text": "a document", "id": 3}
COMMANDS = {"evaluate": evaluate, "generate": generate, "tokenize": tokenize}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder, in which one is, with a model of bytes."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    shape = model_config("llama3-8b-tiny", num_layers=1, vocab_size=258)
    save_pretrained(Decoder(shape), "model")
    ByteTokenizer().save("model")
    Path("empty.yaml").write_text("")
    return tmp_path


def run(*words: str) -> None:
    small = "device=cpu batch.global=2 batch.micro=2 batch.seq_len=64 steps=2 optim.warmup=0"
    dispatch(["train", "empty.yaml", "model=model", *small.split(), *words])


def write(name: str, *lines: dict) -> str:
    Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return name


# --- data of another task


@pytest.mark.parametrize(
    "task, line, told",
    [
        ("sft", PAIR, "'chosen' and 'rejected' are a pair of replies, for task=dpo"),
        ("lora", {**CHAT, **PAIR}, "are a pair of replies, for task=dpo"),
        ("sft", {"chosen": CHAT["messages"], "rejected": CHAT["messages"]}, "for task=dpo"),
        ("sft", TEXT, "'text' is a document, for task=pretrain"),
        ("dpo", CHAT, r"'messages' is a chat, for task=sft \(a pair has 'chosen' and 'rejected'"),
        ("dpo", SHAREGPT, "'conversations' is a chat, for task=sft"),
        ("dpo", TEXT, "'text' is a document, for task=pretrain"),
        ("dpo", {"prompt": "a", "chosen": "b"}, "no key 'rejected'"),
        ("dpo", {**PAIR, "rejected": "2"}, "'chosen' and 'rejected' are the same"),
        ("dpo", {"chosen": CHAT["messages"], "rejected": CHAT["messages"]}, "are the same"),
        ("pretrain", CHAT, "no key 'text' .*chats need task=sft or lora, pairs task=dpo"),
        ("pretrain", PAIR, "no key 'text' .*pairs task=dpo"),
        (
            "grpo",
            PAIR,
            r"are a pair of replies, for task=dpo \(a problem has a prompt and an ans",
        ),
        ("grpo", TEXT, "'text' is a document, for task=pretrain"),
    ],
)
def test_data_of_another_task_names_it(folder, task, line, told):
    words = [f"task={task}", "data.kind=jsonl", f"data.path={write('a.jsonl', line)}"]
    words += ["grpo.prompts=2", "grpo.group=2", "rollout.max_tokens=4"] if task == "grpo" else []
    with pytest.raises(InputError, match=f"^a.jsonl:1: .*{told}") as error:
        run(*words)
    assert len(str(error.value)) < 260 and not os.path.exists("out")


def test_lines_of_the_right_task_are_read_as_before():
    """Also with keys of another task beside them that are empty, or of other meaning."""
    assert len(read_messages(CHAT | {"chosen": None, "rejected": None, "text": "x"})) == 2
    assert len(read_messages({"prompt": "a", "response": "b", "text": "c"})) == 2
    assert len(read_pair(PAIR | {"text": "x"})) == 2
    asked, answer = read_problem({"prompt": "a", "answer": "b", "text": "c"}, "", "")
    assert (asked[0].content, answer) == ("a", "b")


# --- folders that are no models


@pytest.fixture
def trained(folder) -> Path:
    Path("a.txt").write_text("some text of a few words. " * 40)
    run("data.kind=text", "data.path=a.txt", "checkpoint.every=1", "out_dir=run")
    return folder


@pytest.mark.parametrize("command", ["generate", "evaluate", "merge", "train"])
def test_a_checkpoint_in_a_models_place_names_the_command_that_makes_a_model(trained, command):
    words = {
        "generate": ["generate", "--prompt", "a", "--model"],
        "evaluate": ["evaluate", "a.txt", "--model"],
        "merge": ["merge", "--adapter", "model", "--out", "merged", "--model"],
        "train": ["train", "empty.yaml", "device=cpu"],
    }[command]

    def told(path: str) -> str:
        path = f"model={path}" if command == "train" else path
        with pytest.raises(InputError) as error:
            dispatch([*words, path])
        return str(error.value)

    step = "run/checkpoints/step-00000001"
    line = told(step)
    assert re.match(rf"{step} holds no \w+.json; it is a checkpoint of a run \(minitrain", line)
    found = re.search(r"\(minitrain (export --run run --step 1 --out FOLDER)", line)
    assert "(minitrain export --run run --out FOLDER " in told("run/checkpoints")
    if command == "generate":  # the command works as it stands
        dispatch(found[1].replace("FOLDER", "half").split())
        assert Path("half/model.safetensors").exists()
    for name in ("config.json", "model.safetensors"):
        os.remove(f"run/{name}")
    assert "minitrain export --run run --out FOLDER writes its newest checkpoint" in told("run")


def test_an_unfinished_download_of_weights_is_named(folder):
    os.rename("model/model.safetensors", "model/model.safetensors.incomplete")
    line = r"holds no model.safetensors .* index of shards; it is model.safetensors.incomplete, an unfin"
    with pytest.raises(InputError, match=line):
        dispatch(["generate", "--model", "model", "--prompt", "a", "--device", "cpu"])


# --- words of the command at hand


@pytest.mark.parametrize(
    "words, told",
    [
        ("evaluate --model model a.jsonl", "--field names the key .*; chats need --chat"),
        ("evaluate --model model nothing.txt", "^no file matches 'nothing.txt'"),
        ("evaluate --model model a.csv --kind jsonl", "a.csv is a table in text"),
        ("evaluate --model model --chat texts.jsonl", r"is a document \(leave --chat out\)"),
        ("evaluate --model model --chat pairs.jsonl", "and evaluate has no use for pairs"),
        ("evaluate --model model --kind jsonl a.txt", r"text: --kind text reads texts\)"),
        ("evaluate --model model latin.txt", r"not UTF-8 at byte 3 \(it is ISO-8859-1: iconv"),
        ("evaluate --model model --kind jsonl folder", "as --kind jsonl a folder's"),
        ("generate --model model --prompts a.txt.jsonl", "text: lines of text stand in a file"),
        ("generate --model model --prompts latin.txt", r"it is ISO-8859-1: iconv .* NEW\)$"),
        (
            "evaluate --model model --kind text a.parquet",
            r"parquet file \(--kind jsonl reads it\)",
        ),
        ("evaluate --model model splits", "^splits holds several splits"),
        ("evaluate --model model a,b", "^no file matches 'a,b'$"),
        ("generate --chat --model model --prompts none.jsonl", r"no prompt \(one of [^;]*\)$"),
        ("tokenize --tokenizer bytes --out t a.jsonl", "--field names the key .* task=sft"),
        ("tokenize --tokenizer bytes --out t nothing", "^no file matches 'nothing'"),
        ("tokenize --tokenizer bytes --out t org/name", "hf download .* then give DIR"),
    ],
)
def test_commands_give_hints_in_their_own_options(folder, words, told):
    """Whether `minitrain NAME` starts them or `python -m minitrain.NAME`."""
    write("a.jsonl", CHAT)
    write("texts.jsonl", TEXT)
    write("pairs.jsonl", PAIR)
    Path("a.csv").write_text("a,b\n1,2\n")
    Path("a.txt").write_text("Once upon a time.\n")
    Path("a.txt.jsonl").write_text("Once upon a time.\n")
    Path("latin.txt").write_bytes("caf\u00e9 au lait".encode("latin-1"))
    Path("folder").mkdir()
    Path("folder/a.csv").write_text("a")
    Path("a.parquet").write_bytes(b"PAR1" + bytes(100))
    write("none.jsonl", {"a": 1})
    Path("splits").mkdir()
    Path("splits/dataset_dict.json").write_text("{}")
    name, *rest = words.split()
    rest += ["--processes=1"] if name == "tokenize" else []
    for start in (lambda: dispatch([name, *rest]), lambda: COMMANDS[name].main(rest)):
        with pytest.raises(InputError, match=told) as error:
            start()
        assert "data." not in str(error.value).replace("datasets'", "")


# --- small data


@pytest.mark.parametrize(
    "words, told",
    [
        ("task=sft epochs=1", "5 rows: 1 epoch = 3 steps of 2; few steps learn little"),
        ("task=sft epochs=9", "5 rows: 9 epochs = 23 steps of 2"),
        ("task=sft", "5 rows: 2 steps of 2 = 0.8 epochs"),
        ("task=sft steps=1", "5 rows: 1 step of 2 = 0.4 epochs"),
        ("task=dpo epochs=1 data.path=pairs.jsonl", "1 row: 1 epoch = 1 step of 2; few steps"),
        (
            "task=grpo data.path=problems.jsonl grpo.prompts=3 grpo.group=2 epochs=2 "
            "rollout.max_tokens=2",
            "4 problems: 2 epochs = 3 steps of 3; few steps",
        ),
    ],
)
def test_small_data_is_told_in_rows_and_steps(folder, capsys, words, told):
    """The oracle is the arithmetic of the numbers that the line has."""
    long = {"prompt": "x" * 40, "response": "y" * 20}
    write("a.jsonl", *[long] * 5)
    write("pairs.jsonl", PAIR, {**PAIR, "chosen": "4"})
    write("problems.jsonl", *({"prompt": f"1+{n}", "answer": "2"} for n in range(4)))
    run("data.kind=jsonl", "data.path=a.jsonl", "out_dir=run", *words.split())
    (line,) = re.findall(
        r"^.* rows?: .*$|^.* problems: .*$", capsys.readouterr().out, re.MULTILINE
    )
    assert line.startswith(told) and (";" in line) == (";" in told)
    steps = len(Path("run/metrics.jsonl").read_text().splitlines())
    assert counted(steps, "step") in line
    if found := re.match(r"(\d+) \w+: (\d+) epochs? = (\d+) steps? of (\d+)", line):
        rows, epochs, made, each = map(int, found.groups())
        assert made == steps == math.ceil(rows * epochs / each)


def test_one_thing_is_no_plural(folder, capsys):
    write("a.jsonl", {"prompt": "a", "response": "b"})
    run("task=sft", "data.kind=jsonl", "data.path=a.jsonl", "epochs=1", "out_dir=run")
    shown = capsys.readouterr().out
    assert "1 chat in 1 row of 64 tokens" in shown and "1 epoch, into run" in shown
    assert not re.search(r"\b1 (chats|rows|steps|epochs|pairs)\b", shown)


# --- and others


def test_merging_asks_before_it_replaces_a_model(folder):
    write("a.jsonl", {"prompt": "a", "response": "b"})
    run("task=lora", "data.kind=jsonl", "data.path=a.jsonl", "out_dir=lora", "steps=1")
    words = ["merge", "--model", "model", "--adapter", "lora", "--out"]
    dispatch([*words, "merged"])
    before = {file: file.read_bytes() for file in Path("merged").iterdir()}
    with pytest.raises(InputError, match=r"^--out merged exists already \(name a new fold"):
        dispatch([*words, "merged"])
    assert before == {file: file.read_bytes() for file in Path("merged").iterdir()}


@pytest.mark.parametrize(
    "name", ["own.py:score", "./own.py:score", "sub/own2.py:score", "{folder}/own.py:score"]
)
def test_rewards_are_named_by_their_file_too(folder, name):
    Path("sub").mkdir()
    code = "def score(response, answer, row):\n    return float(len(response))\n"
    for file in ("own.py", "sub/own2.py"):
        Path(file).write_text(code)
    assert load_reward(name.format(folder=folder))("abc", "", {}) == 3.0
    with pytest.raises(InputError, match=r"cannot be imported: .*nothing"):
        load_reward("nothing.py:score")


def test_a_mistake_in_the_data_makes_and_waits_for_nothing(folder, monkeypatch):
    """Neither a folder nor a lock, which another run may have."""
    monkeypatch.setattr(lock, "wait_for", lambda file: pytest.fail("waits"))
    for words in (
        ["data.path=none.txt", "data.kind=text"],
        ["epochs=1"],
        ["data.path=a", "data.kind=tokens"],
    ):
        with pytest.raises(InputError):
            run(*words, "out_dir=run")
    with pytest.raises(InputError, match="is not a reward|package.module:function"):
        run("task=grpo", "grpo.reward=exakt", "grpo.prompts=2", "grpo.group=2", "out_dir=run")
    assert not os.path.exists("run")


def test_the_lock_is_held_while_a_run_trains(folder, monkeypatch):
    held = []
    monkeypatch.setattr(
        train_model, "run_task", lambda *_: held.append(Path("run/.lock").read_bytes())
    )
    run("out_dir=run")
    assert held and held[0].startswith(f"process {os.getpid()} on ".encode())


def test_curves_take_the_file_for_its_run(folder, capsys):
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, "loss": 1.0 / n}) + "\n" for n in (1, 2))
    )
    dispatch(["curves", "run/metrics.jsonl"])
    assert capsys.readouterr().out == "run/curves.svg: open it in a browser\n"
    assert "<svg" in Path("run/curves.svg").read_text()


def test_lines_of_metrics_that_are_no_steps_are_told(tmp_path, capsys):
    """Where a run goes on, they are told too: see `MetricsLog`."""
    numbers = [{"step": n, "loss": 1.0, "val_loss": abs(n - 2.5)} for n in (1, 2, 4)]
    first, best, last = (json.dumps(each) + "\n" for each in numbers)
    file = tmp_path / "metrics.jsonl"
    file.write_text(f"{first}{best}half a line\n[1]\n{last}")
    told = f"note: {file}: lines that are not the numbers of a step, and are left out: 2\n"
    assert best_step(file) == 2 and capsys.readouterr().err == told
    dispatch(["curves", str(tmp_path)])
    assert capsys.readouterr().err == told
    file.write_text(first + best)
    assert best_step(file) == 2 and not capsys.readouterr().err


def test_the_toy_data_say_what_is_next(folder, capsys):
    arithmetic.main(["out/sums.jsonl", "--count", "3"])
    assert capsys.readouterr().out.splitlines() == [
        "out/sums.jsonl holds 3 dialogues",
        "next: minitrain train train/arithmetic data.path=out/sums.jsonl",
    ]
    assert len(Path("out/sums.jsonl").read_text().splitlines()) == 3
