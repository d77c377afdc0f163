"""Pictures against the numbers that they draw: places are read back from the SVG by its ticks."""

import importlib
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import numpy as np
import pytest
import torch

from minitrain.bench.report import merge_results, read_results
from minitrain.bench.report_accuracy import held_back, predicted
from minitrain.commands import curves
from minitrain.errors import InputError
from minitrain.run.monitor import svg
from minitrain.run.monitor.draw_curves import curves as curves_of
from minitrain.run.monitor.draw_curves import smooth
from tests.helpers.commands import ROOT
from tests.helpers.house import ROOMS, TREES, imported

PICTURES = ROOT / "results" / "pictures"
RESULTS = sorted((ROOT / "results" / "simulated").glob("*.jsonl"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def scripts_find_each_other(monkeypatch):
    monkeypatch.syspath_prepend(PICTURES)


def script(name: str):
    return importlib.import_module(name)


def elements(text: str, name: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(text).iter(SVG + name))


def value_at(place: float, ticks: dict[float, float], log: bool) -> float:
    """Return the value at a pixel, by a straight line through the outermost of `ticks` (value: pixel)."""
    (low, start), *_, (high, end) = sorted(ticks.items())
    share = (place - start) / (end - start)
    return low * (high / low) ** share if log else low + share * (high - low)


def ticks(text: str, anchor: str, coordinate: str, limit: float = 575) -> dict[float, float]:
    """Return the values of an axis with their pixels; of the first panel, where there are several."""
    found = {}
    for element in elements(text, "text"):
        if float(element.get("x")) > limit:
            continue
        if element.get("text-anchor") == anchor and re.fullmatch(r"-?[\d,.]+", element.text):
            found[float(element.text.replace(",", ""))] = float(element.get(coordinate))
    return found


def test_committed_pictures_are_what_the_command_draws(tmp_path):
    """After new results: python results/pictures/draw.py results/simulated/*.jsonl"""
    script("draw").main([*map(str, RESULTS), "--out", str(tmp_path)])
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    # rooms.svg says how many lines each room has: they change with every commit
    kept = {file.name: (PICTURES / file.name).read_text() for file in PICTURES.glob("*.svg")}
    drawn["rooms.svg"], kept["rooms.svg"] = map(
        without_sizes, (drawn["rooms.svg"], kept["rooms.svg"])
    )
    # those of runs are drawn by the runs
    assert drawn == {name: text for name, text in kept.items() if not name.startswith("curves")}


def without_sizes(text: str) -> str:
    return re.sub(r"[\d,]+ lines", "lines", text)


def test_rooms_are_those_of_the_house_in_its_order():
    text = (PICTURES / "rooms.svg").read_text()
    inside_run = {"config", "launch", "checkpoint", "monitor", "tasks"}
    bold = [group[0].text for group in elements(text, "g") if group.get("font-weight") == "bold"]
    found = [f"run/{name}" if name in inside_run else name for name in bold]
    folders = {script("draw").drawn_room(file) for file in TREES if len(file.parts) > 2} - {"run"}
    assert found == [name for name in ROOMS if name in folders]


def test_arrows_between_rooms_are_the_imports_of_their_files():
    """Those that are drawn, and those that follow from them, are all that there are, and none points down."""
    text = (PICTURES / "rooms.svg").read_text()
    titles = [group[0].text for group in elements(text, "g") if group[0].tag == SVG + "title"]
    drawn = [tuple(title.split(" imports ")) for title in titles]
    there = {
        (script("draw").drawn_room(file), script("draw").drawn_room(to))
        for file, tree in TREES.items()
        for to in imported(tree)
    }
    folders = {script("draw").drawn_room(file) for file in TREES if len(file.parts) > 2}
    there = {(one, other) for one, other in there if one != other and {one, other} <= folders}
    assert set(drawn) <= there
    follows = set(drawn)
    while new := {(a, d) for a, b in follows for c, d in drawn if b == c} - follows:
        follows |= new
    assert there <= follows
    assert all(ROOMS.index(other) < ROOMS.index(one) for one, other in drawn)


def test_layout_has_an_arrow_for_each_parallelism():
    text = (PICTURES / "layout.svg").read_text()
    titles = [group[0].text for group in elements(text, "g")]
    assert sorted(title[:2] for title in titles) == ["cp", "dp", "ep", "pp", "tp"]
    heights = {e.text: float(e.get("y")) for e in elements(text, "text")}
    assert heights["rank 0"] < heights["rank 8"]  # the first stage is on top


def test_accuracy_has_a_dot_at_each_rows_figures():
    text = (PICTURES / "accuracy.svg").read_text()
    across = ticks(text, "middle", "x")
    upward = {value: place - 4 for value, place in ticks(text, "end", "y").items()}
    report = merge_results([result for file in RESULTS for result in read_results(str(file))], "")
    rows = [row for rows in report.tables.values() for row in rows]
    dots = {dot.find(SVG + "title").text.split(":")[0]: dot for dot in elements(text, "circle")}
    assert len(rows) == len(dots) == 69
    for row in rows:
        dot = dots[row.name]
        assert value_at(float(dot.get("cx")), across, log=True) == pytest.approx(
            row.published, rel=0.01
        )
        figure = row.published * predicted(row)
        assert value_at(float(dot.get("cy")), upward, log=True) == pytest.approx(figure, rel=0.01)
    filled = {name for name, dot in dots.items() if dot.get("fill") != "#fff"}
    assert filled == {row.name for row in held_back(rows)}


def test_layout_numbers_ranks_as_a_device_mesh():
    words = [element.text for element in elements((PICTURES / "layout.svg").read_text(), "text")]
    found = dict(pairwise(words))
    # pp, dp, cp, tp: DeviceMesh counts the last dimension fastest
    ranks = torch.arange(16).view(2, 2, 2, 2)
    for index in range(16):
        _, data, context, tensor = (ranks == index).nonzero()[0].tolist()
        assert found[f"rank {index}"] == f"dp{data} cp{context} tp{tensor}"


def test_pipeline_boxes_cover_what_its_lanes_say():
    text = (PICTURES / "pipeline.svg").read_text()
    results = [json.loads(line) for file in RESULTS for line in file.read_text().splitlines()]
    lanes = next(
        r["timeline"] for r in results if r["row"] == "automodel/deepseek-v3-pretrain-256gpu"
    )
    lengths = [
        sum(map(int, re.findall(r"h(\d+)", path.get("d")))) for path in elements(text, "path")
    ]
    assert sum(lengths) == sum(len(lane) - lane.count(".") for lane in lanes)


def test_curves_draw_each_finite_number_of_every_run(tmp_path):
    for run, scale in (("a", 1.0), ("b", 2.0)):
        (tmp_path / run).mkdir()
        lines = [{"step": n, "loss": scale * n, "lr": 0.1} for n in range(1, 21)]
        lines[4]["loss"] = None  # a skipped step's
        lines[9]["val_loss"] = 7.0
        (tmp_path / run / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    curves.main([str(tmp_path / "a"), str(tmp_path / "b")])
    text = (tmp_path / "a" / "curves.svg").read_text()
    across = ticks(text, "middle", "x", 455)
    upward = {value: place - 4 for value, place in ticks(text, "end", "y", 455).items()}
    drawn = [
        line.get("points").split()
        for line in elements(text, "polyline")
        if len(line.get("points").split()) == 19
    ]
    for curve, scale in zip(drawn, (1.0, 2.0), strict=True):
        steps = [n for n in range(1, 21) if n != 5]
        for step, point in zip(steps, curve, strict=True):
            x, y = map(float, point.split(","))
            assert value_at(x, across, log=False) == pytest.approx(step, abs=0.05)
            assert value_at(y, upward, log=False) == pytest.approx(scale * step, abs=0.2)
    assert len(elements(text, "circle")) == 2


def test_noisy_curves_are_pale_below_their_mean(tmp_path):
    """The oracle: each mean by itself, over as many points before as after it."""
    random = np.random.default_rng(0)
    losses = (2 + np.exp(-np.arange(400) / 50) + random.normal(0, 0.3, 400)).tolist()
    lines = [{"step": n + 1, "loss": loss, "lr": n / 400} for n, loss in enumerate(losses)]
    text = curves_of({"a": lines})
    drawn = elements(text, "polyline")
    raw, mean, rate = (line for line in drawn if line.get("points").count(",") == 400)
    assert (raw.get("opacity"), mean.get("opacity"), rate.get("opacity")) == ("0.25", None, None)
    places = [
        [[*map(float, p.split(","))] for p in each.get("points").split()] for each in (raw, mean)
    ]
    assert [x for x, _ in places[0]] == [x for x, _ in places[1]]
    ys = np.array([y for _, y in places[0]])
    for i, (_, y) in enumerate(places[1]):
        half = min(10, i, 399 - i)
        assert y == pytest.approx(ys[i - half : i + half + 1].mean(), abs=0.1)
    assert np.abs(np.diff([y for _, y in places[1]])).mean() < np.abs(np.diff(ys)).mean() / 5


def test_few_points_are_drawn_as_they_are():
    points = [(n, float(n * n)) for n in range(1, 15)]
    assert smooth(points) == points


def test_a_panel_has_two_points_or_is_left_out():
    lines = [{"step": n, "loss": 1.0 / n, "lr": 0.1} for n in (1, 2)]
    lines[-1]["val_exact_match"] = 0.5
    text = curves_of({"a": lines, "b": lines[:1]})
    assert "learning rate" in text and "exact match" not in text
    assert "exact match" in curves_of({"a": [line | {"val_exact_match": 0.5} for line in lines]})
    assert "no curve yet" in curves_of({"a": lines[:1]})


def test_curves_of_no_run_is_one_line(tmp_path):
    with pytest.raises(InputError, match="has no metrics.jsonl with steps"):
        curves.main([str(tmp_path)])


@pytest.mark.parametrize(
    "values", [[3.0], [0.0, 0.0], [1e-9, 2e-9], [5.4e3, 5.5e3], [-2.0, 1e6], [1e20, 3e20]]
)
def test_ticks_are_few_and_round(values):
    axis = svg.make_axis(values, 0, 100)
    found = axis.ticks()
    assert 2 <= len(found) <= 9
    assert all(axis.low <= tick <= axis.high for tick in found)
    step = found[1] - found[0]
    assert (
        min(
            abs(step / 10 ** math.floor(math.log10(step) + 1e-9) - digit)
            for digit in (1, 2, 5, 10)
        )
        < 1e-6
    )
