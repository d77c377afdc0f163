"""All of training on one screen: the same losses on four ranks as on one, and a model that transformers loads."""

import re

import pytest
import torch
import transformers

from tests.helpers.commands import ROOT, command, torchrun

MODULE = "minitrain.examples.train_loop"


def losses(run) -> list[float]:
    assert run.returncode == 0, run.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", run.stdout)]


def test_it_fits_one_screen():
    file = ROOT / "minitrain/examples/train_loop.py"
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 80


def test_a_misspelled_word_is_refused():
    run = command("-m", MODULE, "step=4")
    assert run.returncode and "AssertionError: {'step': '4'}" in run.stderr and not run.stdout


def test_a_notebook_runs_it_before_and_after_other_runs_and_has_its_model(tmp_path):
    """As %run -m of IPython does: a script whose names stay."""
    code = f"""
import runpy, sys, minitrain
def loop():
    sys.argv = ["", "steps=2", "out={tmp_path}/loop"]
    return runpy.run_module("{MODULE}", run_name="__main__")
model = loop()["model"]
minitrain.train("{tmp_path}/x.yaml", steps=1, batch={{"seq_len": 16}}, out_dir="{tmp_path}/run", device="cpu")
assert next(model.parameters()).equal(next(loop()["model"].parameters()))
"""
    (tmp_path / "x.yaml").write_text("model: llama3-8b-tiny")
    (tmp_path / "cells.py").write_text(code)
    run = command(str(tmp_path / "cells.py"))
    first, second = losses(run)[:2], losses(run)[-2:]
    assert first == second and first[1] < first[0]


def test_four_ranks_with_tensor_parallelism_have_the_losses_of_one(tmp_path):
    alone = losses(command("-m", MODULE, "steps=4", f"out={tmp_path / 'alone'}"))
    ranks = torchrun(4, "-m", MODULE, "steps=4", "tp=2", f"out={tmp_path / 'ranks'}")
    assert len(alone) == 4 and alone[-1] < alone[0]
    assert losses(ranks) == pytest.approx(alone, abs=1e-5)
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        for name in ("alone", "ranks")
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ranks")
    tokens = tokenizer("import os\n", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = [model(tokens).logits for model in models]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)
