"""The notebook: its cells run in order, in a folder of their own, and are kept without outputs."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

import minitrain
from tests.helpers.commands import ROOT

FILE = ROOT / "minitrain/examples/tour.ipynb"
STEPS = 12


@pytest.fixture(scope="module")
def cells() -> list[dict]:
    return json.loads(FILE.read_text(encoding="utf-8"))["cells"]


def test_the_notebook_is_kept_without_outputs(cells):
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) == 4 and not any(cell["outputs"] for cell in code)
    assert not any(cell["execution_count"] for cell in code)
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_the_notebook_trains_asks_and_draws(cells, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    drawn = []
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    display = SimpleNamespace(SVG=drawn.append)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    torch.manual_seed(0)
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("STEPS = 200", f"STEPS = {STEPS}")
            exec(compile(source, str(FILE), "exec"), names)
    assert names["STEPS"] == STEPS
    lines = (tmp_path / "out/tour/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
    losses = [line["loss"] for line in names["lines"]]
    assert len(losses) == STEPS and losses[-1] < losses[0]
    before = dict(minitrain.load_pretrained("out/tour").named_parameters())
    after = dict(names["model"].named_parameters())
    assert all(not torch.equal(after[name], before[name]) for name in before)
    (svg,) = drawn
    assert svg.count("<polyline") > 10 and "own loop" in svg
    assert capsys.readouterr().out.count("['") == 2  # both answers
