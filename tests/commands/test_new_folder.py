"""A folder that a command writes is whole or not there, whatever ends the command."""

import os
from pathlib import Path

import pytest
import torch

from minitrain.__main__ import dispatch
from minitrain.data.byte_tokenizer import ByteTokenizer
from minitrain.errors import InputError
from minitrain.formats.hf import save_pretrained
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.run.launch import cli


@pytest.mark.parametrize("error", [InputError("x"), KeyboardInterrupt(), OSError(28, "full")])
def test_half_a_result_is_removed(tmp_path, error):
    out = tmp_path / "new" / "out"
    with pytest.raises(type(error)), cli.new_folder(out) as folder:
        (folder / "half").write_text("half")
        assert not out.exists()
        raise error
    assert not any(out.parent.iterdir())
    # as a kill leaves it
    (out.parent / ".out.minitrain").mkdir()
    (out.parent / ".out.minitrain" / "half").write_text("half")
    with cli.new_folder(str(out)) as folder:
        (folder / "whole").write_text("whole")
    assert os.listdir(out.parent) == ["out"] and os.listdir(out) == ["whole"]


@pytest.mark.parametrize("is_file", [False, True])
def test_what_is_there_stays(tmp_path, is_file):
    out = tmp_path / "out"
    out.write_text("own") if is_file else out.mkdir()
    with pytest.raises(InputError, match=rf"^--out {out} exists already"), cli.new_folder(out):
        raise AssertionError("is not reached")
    assert os.listdir(tmp_path) == ["out"]


@pytest.fixture
def trained(tmp_path, monkeypatch) -> Path:
    """A folder, in which one is, with a model and a run that trained adapters of it."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    save_pretrained(
        Decoder(model_config("llama3-8b-tiny", num_layers=1, vocab_size=258)), "model"
    )
    ByteTokenizer().save("model")
    Path("a.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    Path("empty.yaml").write_text("")
    words = (
        "model=model task=lora data.kind=jsonl data.path=a.jsonl out_dir=lora steps=1 device=cpu"
    )
    words += " batch.global=1 batch.micro=1 batch.seq_len=64 optim.warmup=0 checkpoint.every=1"
    dispatch(["train", "empty.yaml", *words.split()])
    return tmp_path


def test_commands_that_end_early_leave_nothing(trained, monkeypatch):
    """At the tokenizer, which comes after the weights in one of them, before them in the others."""
    before = set(os.listdir())

    def end(self, folder):
        Path(folder, "tokenizer.json").write_text("half")
        raise KeyboardInterrupt

    commands = {
        "merge": "--model model --adapter lora",
        "export": "--run lora",
        "tokenize": "--tokenizer bytes --processes 1 a.jsonl --field prompt",
    }
    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "save", end)
        for name, words in commands.items():
            with pytest.raises(KeyboardInterrupt):
                dispatch([name, *words.split(), "--out", "out"])
            # what is tokenized is kept for the next call
            kept = {"out.unfinished"} if name == "tokenize" else set()
            assert set(os.listdir()) - before == kept
    for name, words in commands.items():
        dispatch([name, *words.split(), "--out", name])
        assert Path(name, "tokenizer.json").exists() and not Path(f".{name}.minitrain").exists()
