"""How people begin: FILE, --key=value, flags of other trainers, recipes whose files are not there yet."""

import json
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml

import bench
import minitrain
from minitrain.__main__ import dispatch
from minitrain.commands import train
from minitrain.data.byte_tokenizer import ByteTokenizer
from minitrain.errors import InputError
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.run.config.aliases import ALIASES
from minitrain.run.config.flags import setting_kinds, take_flags
from minitrain.run.config.load import from_dict, load, to_dict
from minitrain.run.tasks import train_model
from minitrain.settings import Lora
from tests.helpers.commands import ROOT

ARITHMETIC = ROOT / "configs/train/arithmetic.yaml"


@pytest.fixture
def trained(monkeypatch) -> list:
    """The configs that would have been trained."""
    found = []
    monkeypatch.setattr(train_model, "train", found.append)
    return found


@pytest.mark.parametrize(
    "words",
    [
        "{file} steps=7",
        "steps=7 {file}",
        "config={file} steps=7",
        "--config {file} --steps=7",
        "--config={file} --steps=7",
        "--steps=7 {file}",
        "train/arithmetic steps=7",
        "--config configs/train/arithmetic.yaml steps=7",
        "config=train/arithmetic --steps=7",
    ],
)
def test_a_config_and_its_settings_in_any_spelling(trained, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    dispatch(["train", *words.format(file=ARITHMETIC).split()])
    assert trained == [load(ARITHMETIC, ["steps=7"])]


def test_a_key_may_have_dashes_and_its_value_what_it_likes(trained):
    words = ["--optim.weight-decay=0.5", "--out-dir=a=b", "--optim.betas=0.8,0.9", "--device=cpu"]
    dispatch(["train", str(ARITHMETIC), *words])
    wanted = ["optim.weight_decay=0.5", "out_dir=a=b", "optim.betas=[0.8, 0.9]", "device=cpu"]
    assert trained == [load(ARITHMETIC, wanted)]


@pytest.mark.parametrize(
    "words, line",
    [
        ("--learning_rate 1e-4", "--learning_rate 1e-4 is optim.lr=1e-4$"),
        (
            "--learning-rate 1e-4 --num_train_epochs 3 --output_dir x",
            "optim.lr=1e-4, --num_train_epochs 3 is epochs=3, --output_dir x is out_dir=x$",
        ),
        ("--optim.lr 1e-4", "--optim.lr 1e-4 is optim.lr=1e-4$"),
        ("--model.hidden_size 64", "is model.hidden_size=64$"),
        ("--bf16 True", "--bf16 True is precision=bf16$"),
        ("--fp16 True", "--fp16 True is precision$"),  # no value of ours
        ("--gradient_checkpointing --tp 2", "is recompute=full, --tp 2 is tp=2$"),
        ("--gradient_accumulation_steps 8", "8 is batch.global, which is batch.micro x "),
        ("--keep 3", "--keep 3 is checkpoint.keep=3$"),
        ("--steps", "--steps is steps$"),
        ("--optim adamw_torch", "--optim adamw_torch is optim.name$"),
        ("--learning_rate=1e-4", r"unknown key learning_rate \(use optim.lr\)$"),
        ("--confg x", r"unknown option --confg \(nearest: --config\)$"),
        (
            "--do_train",
            r"unknown option --do_train \(minitrain train --help lists all settings\)",
        ),
        ("--config train/shapes", "arithmetic.yaml is a second config, beside .*shapes.yaml"),
        ("config=train/shapes", "shapes.yaml is a second config, beside .*arithmetic.yaml"),
        ("--config quickstart --config quickstart", "--config is given twice"),
        ("steps 10", "argument 'steps' is not of the form key=value$"),
    ],
)
def test_words_of_other_trainers_are_answered_by_ours(trained, words, line):
    with pytest.raises(InputError, match=line):
        dispatch(["train", str(ARITHMETIC), *words.split()])
    assert not trained


def test_every_alias_is_answered_as_a_flag(tmp_path):
    """And what is said to be a setting with a value is taken as that."""
    file = tmp_path / "empty.yaml"
    file.write_text("")
    for alias in ALIASES:
        with pytest.raises(InputError, match="^settings are key=value: ") as told:
            take_flags([f"--{alias}", "2"], ["--config"])
        said = str(told.value).partition(" is ")[2]
        if said in setting_kinds() or "," in said or said.startswith(("out_dir/", "model=")):
            continue
        try:
            load(file, [said])
        except InputError as error:  # a value of the right type, beside the wrong others
            assert not re.search("unknown|must be (a |text|true)|not one of", str(error)), said


def test_settings_by_name_are_those_of_the_config():
    config = from_dict({})
    config.lora = Lora()
    tree = to_dict(config)
    found = {
        f"{name}.{key}" if isinstance(value, dict) and name != "reference" else name
        for name, value in tree.items()
        if name != "model"
        for key in (value if isinstance(value, dict) and name != "reference" else [""])
    }
    short = {name for name in setting_kinds() if f"parallel.{name}" in setting_kinds()}
    assert setting_kinds().keys() - short == found | {"model"}


def test_any_option_that_would_be_lost_is_refused():
    for words in (
        ["generate", "--model", "a", "--model=b"],
        ["bench", "--steps", "1", "--steps=2"],
    ):
        with pytest.raises(InputError, match=f"{words[1]} is given twice"):
            dispatch(words)
    words = ["--config", "a", "--config", "b", "--report", "x", "--debug", "--debug"]
    assert bench.parser().parse_args(words).config == ["a", "b"]


@pytest.mark.parametrize("words", ["{name}", "--config {name}", "config={name}"])
def test_the_benchmark_knows_recipes_by_name(capsys, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train/arithmetic", str(ARITHMETIC)):
        dispatch(["bench", *words.format(name=name).split(), "--dry-run", "--batch.micro=4"])
        assert capsys.readouterr().out.startswith("train/arithmetic: 164,416 parameters")
    with pytest.raises(
        InputError, match=r"^config file arithmetic does not exist .nearest: train/"
    ):
        dispatch(["bench", *words.format(name="arithmetic").split(), "--dry-run"])


def test_version_names_torch_and_cuda(capsys):
    dispatch(["--version"])
    told = f"minitrain {minitrain.__version__}, Python {platform.python_version()}, torch "
    line = capsys.readouterr().out
    assert line.startswith(f"{told}{torch.__version__}, CUDA ")
    assert line.endswith(f"{torch.version.cuda or 'none: this torch is for the CPU'}\n")
    with pytest.raises(InputError, match=r"evaluate, generate, .*bench \(nearest: train\)$"):
        dispatch(["trian"])


@pytest.mark.parametrize(
    "name, line",
    [
        ("optimizer", r"there is no section optimizer \(--help optim has optim.name\)"),
        ("lr", r"there is no section lr \(--help optim has optim.lr\)"),
        ("steps", r"\(--help has steps, --help rollout has rollout.steps, --help profile has"),
        ("learning_rate", r"\(--help optim has optim.lr\)"),
        ("parralel", r"there is no section parralel \(nearest: parallel\)"),
        ("zzz", r"there is no section zzz \(but model, data, batch, parallel"),
    ],
)
def test_help_names_the_section(name, line):
    with pytest.raises(InputError, match=line):
        train.main(["--help", name])


def test_help_says_types_in_words(capsys):
    """None of Python's, neither of settings nor of options."""
    for words in (["--help", "optim"], ["--help", "data"], ["--help", "model"], ["--help"]):
        with suppress(SystemExit):
            train.main(words)
        shown = " ".join(capsys.readouterr().out.replace("#", "").split())
        kinds = re.findall(r"\(([^()]*); default: ", shown)
        assert len(kinds) > 5
        assert not re.search(
            r"Literal|\b(int|float|bool|str|None|dict)\b|list\[", " ".join(kinds)
        )
    assert 'type of AdamW\'s moments (fp32, bf16; default: "fp32")' in " ".join(
        describe("optim").split()
    )
    assert '(text or list of text; default: "")' in describe("data")
    assert "(true or false or null; default: null)" in describe("data")
    for command in ("tokenize", "generate", "evaluate", "export", "merge", "bench"):
        with pytest.raises(SystemExit):
            dispatch([command, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        assert "default: None" not in shown and "default: False" not in shown
    assert "timed steps (default: 10)" in shown


def describe(section: str) -> str:
    from minitrain.run.config.describe import describe_section

    return " ".join(describe_section(section).replace("#", "").split())


# --- files that are not there yet


@pytest.mark.parametrize(
    "recipe, missing, told",
    [
        ("arithmetic", "out/arithmetic.jsonl", "python -m minitrain.examples.arithmetic out/"),
        ("sft-chats", "models/qwen2.5-7b-instruct", "hf download Qwen/Qwen2.5-7B-Instruct --loc"),
        (
            "wan-lora",
            "models/wan2.1-1.3b",
            "hf download Wan-AI/Wan2.1-T2V-1.3B-Diffusers --local",
        ),
        ("pretrain-tokens", "models/llama3.1-8b", "hf download meta-llama/Llama-3.1-8B --local"),
        (
            "grpo-own-reward",
            "models/llama3.1-8b-instruct",
            "hf download meta-llama/Llama-3.1-8B-",
        ),
    ],
)
@pytest.mark.parametrize("with_folder", [False, True])
def test_a_recipe_says_what_makes_what_it_lacks(
    tmp_path, monkeypatch, recipe, missing, told, with_folder
):
    monkeypatch.chdir(tmp_path)
    if with_folder:  # else the name is like one of the hub's
        (tmp_path / missing).parent.mkdir(parents=True)
    line = rf"{missing}\b.* \({recipe}.yaml says: {told}"
    with pytest.raises(InputError, match=line) as error:
        dispatch(["train", f"train/{recipe}", "device=cpu"])
    assert "of the hub" not in str(error.value)


def test_every_recipe_that_downloads_says_so_when_it_is_not_there(tmp_path, monkeypatch):
    """Each model and tokenizer that a recipe of the package names."""
    monkeypatch.chdir(tmp_path)
    count = 0
    for file in sorted((ROOT / "configs/train").glob("*.yaml")):
        tree = yaml.safe_load(file.read_text())
        names = [tree["model"].get("path"), tree["data"].get("tokenizer")]
        if any(name and name.startswith("models/") for name in names):
            count += 1
            with pytest.raises(
                InputError, match=r"says: hf download \S+/\S+ --local-dir models/"
            ):
                dispatch(["train", str(file), "device=cpu"])
    assert count >= 10


def test_a_recipe_shows_a_line_of_the_data_that_it_lacks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = r"no file matches 'chats.jsonl' \(sft-chats.yaml says: A line of chats.jsonl: \{\"mess"
    with pytest.raises(InputError, match=line):
        dispatch(["train", "train/sft-chats", "model=qwen2.5-7b-tiny", "device=cpu"])


def test_other_mistakes_stay_as_they_are(tmp_path, monkeypatch):
    """Of files that are there, and of files that the recipe does not make."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text("{\n")
    words = ["train", "train/sft-chats", "model=qwen2.5-7b-tiny", "device=cpu"]
    for more in ([], ["data.path=others.jsonl"]):
        with pytest.raises(InputError) as told:
            dispatch([*words, *more])
        assert "says:" not in str(told.value)
    (tmp_path / "run").mkdir()
    with pytest.raises(InputError, match=r"run is a folder .*run/config.yaml"):
        dispatch(["train", str(tmp_path / "run")])


@pytest.fixture
def base(tmp_path) -> Path:
    """A model of bytes, with its tokenizer."""
    torch.manual_seed(0)
    minitrain.save_pretrained(
        Decoder(model_config("llama3-8b-tiny", vocab_size=258)), tmp_path / "base"
    )
    ByteTokenizer().save(tmp_path / "base")
    return tmp_path / "base"


def test_the_tokenizer_is_by_default_that_of_the_folder_that_training_starts_from(base, tmp_path):
    def tokenizer(**tree):
        return from_dict({"data": {"kind": "text", "path": "x"}} | tree).data.tokenizer

    assert tokenizer(model=str(base)) == str(base)
    assert tokenizer(model="llama3-8b-tiny") == "bytes"
    given = {"kind": "text", "path": "x", "tokenizer": "bytes"}
    assert tokenizer(model=str(base), data=given) == "bytes"
    os.remove(base / "tokenizer.json")
    assert tokenizer(model=str(base)) == "bytes"
    config = from_dict({"model": str(base), "data": {"kind": "text", "path": "x"}})
    assert from_dict(to_dict(config)) == config


def test_adapters_go_on_with_their_own_tokenizer(base, tmp_path):
    """Theirs has the chat template of their training, as merge and generate take it."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"prompt": "1+1", "response": "2"}) + "\n")
    words = f"task=lora model={base} data.kind=jsonl data.path={chats} lora.rank=2 device=cpu"
    words += " batch.global=1 batch.micro=1 batch.seq_len=32 steps=1 optim.warmup=0"
    (tmp_path / "empty.yaml").write_text("")
    run = ["train", str(tmp_path / "empty.yaml"), *words.split()]
    dispatch([*run, f"out_dir={tmp_path / 'adapters'}"])
    assert (tmp_path / "adapters/tokenizer.json").exists()
    config = load(tmp_path / "empty.yaml", [*words.split(), f"lora.path={tmp_path / 'adapters'}"])
    assert config.data.tokenizer == str(tmp_path / "adapters")


@pytest.mark.parametrize(
    "words",
    [
        "",
        "task=sft",
        "task=sft data.packed=false",
        "task=diffusion model=wan2.1-1.3b-tiny batch.seq_len=24 data.size=[1,8,12]",
    ],
)
def test_epochs_of_data_without_an_end_are_refused(tmp_path, words):
    """With what is right instead, and before anything is made."""
    (tmp_path / "a.yaml").write_text("model: llama3-8b-tiny\n")
    line = r"^epochs=2 needs data that ends, and data.kind=mock has no end here \(use steps\)$"
    with pytest.raises(InputError, match=line):
        dispatch(["train", str(tmp_path / "a.yaml"), "epochs=2", "device=cpu", *words.split()])


def test_on_windows_one_line_names_the_way(tmp_path):
    code = "import getpass, os, importlib, typing, sys; sys.platform = 'win32'; import minitrain"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: minitrain runs on Linux and macOS: on Windows inside WSL (wsl --install)"
    )
