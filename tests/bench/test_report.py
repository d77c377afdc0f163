"""The report against the lines it was given, and against a parser; calibration against a clock and the simulator."""

import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch

from minitrain.bench import rows
from minitrain.bench.report import merge_results
from minitrain.bench.report_accuracy import summary
from minitrain.bench.report_html import bar, path, write_report
from minitrain.bench.rows import published_rows
from minitrain.errors import InputError
from minitrain.run.monitor import hardware
from minitrain.run.monitor.hardware import measure_attention, measure_memory
from minitrain.simulator.calibrate import calibrate, find_system
from minitrain.simulator.replay import Replay
from minitrain.simulator.timeline import load_system
from minitrain.simulator.trace import Event
from tests.helpers.commands import ROOT

DENSE = "nemo/h100/llama3-70b-pretrain-64gpu"
PUBLISHED = published_rows()
FITTED = "nemo/h100/llama3-8b-pretrain-8gpu"
GRPO = "rl/qwen3-32b-grpo-32gpu-onpolicy"
KIMI = "automodel/kimi-k2-pretrain-256gpu"
WAN = "dfm/wan2.1-14b-pretrain-h100-128gpu"


class Page(HTMLParser):
    """All text, the labels of pictures, where links lead, and what would need a network."""

    def __init__(self, text: str):
        super().__init__()
        self.text, self.open, self.outside, self.labels, self.links, self.ids = (
            "",
            [],
            [],
            [],
            [],
            [],
        )
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.outside += [tag] * (tag in ("script", "link", "iframe", "img") or "src" in named)
        self.outside += [tag] * ("href" in named and tag != "a")
        self.links += [named["href"]] if tag == "a" else []
        self.ids += [named["id"]] if "id" in named else []
        self.labels += [named.get("aria-label", "")] * (named.get("role") == "img")
        if tag not in ("meta", "path", "rect", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("path", "rect", "polyline"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def line(row: str, mode: str, ratio: float | None, **more) -> dict:
    reference = PUBLISHED.get(row, {})
    return {
        "row": row,
        "mode": mode,
        "proxy": False,
        "device": "dgx-h100",
        "world_size": reference.get("gpus", 64),
        "step_time_s": 2.0,
        "tokens_per_sec_per_gpu": (ratio or 1) * reference.get("tokens_per_sec_per_gpu", 1000.0),
        "tflops_per_gpu": (ratio or 1) * reference.get("tflops_per_gpu", 100.0),
        "clean_tflops_per_gpu": 99.0,
        "mfu": 0.25,
        "peak_memory_gib": 40.0,
        "matmul_tflops": 660.0,
        "reference": reference,
        "ratio": ratio,
        "torch": "2.13.0",
    } | more


def written(tmp_path, lines: list[dict]) -> tuple[str, str]:
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report([str(file)], str(tmp_path / "out"))
    return (tmp_path / "out/report.md").read_text(), (tmp_path / "out/report.html").read_text()


def test_report_merges_results_with_the_published_tables(tmp_path):
    simulated = dict(
        memory_gib={
            "parameters": 10.0,
            "gradients": 5.0,
            "optimizer": 8.0,
            "gathered": 2.0,
            "activations": 15.0,
        },
        capacity_gib=74.5,
        fits=True,
        breakdown_s={"gemm": 1.25, "attention": 0.5, "bubble": 0.25},
        timeline=["FFBB..UU", ".FFBB.UU"],
    )
    proxies = dict(proxy=True, full_layers=80, left_out="communication", peak_memory_gib=None)
    lines = [
        line(DENSE, "simulated", 0.5),
        line(DENSE, "simulated", 1.25, **simulated),  # the last one counts
        line(DENSE, "extrapolated", 1.5, layers=[4, 8], **proxies),
        line(DENSE, "measured", None, layers=4, **proxies | {"peak_memory_gib": 9.0}),
        line(WAN, "measured", 0.75, breakdown_s={"gemm": 1.5, "gaps": 0.375}),
        line("<quick>", "measured", None, device="<cpu>"),
    ]
    text, html = written(tmp_path, lines)
    page = Page(html)
    assert not page.outside and "prefers-color-scheme: dark" in html
    assert list(filter(None, page.labels)) == [
        "Pipeline of 2 ranks over a step of 2 s; busy 75%, 75%"
    ]
    for name in PUBLISHED:
        stem = name.rsplit("/", 1)[-1]
        assert text.count(f"| {stem} ") >= 1 and stem in page.text
    row = next(
        x
        for x in text.splitlines()
        if x.startswith("| llama3-70b-pretrain-64gpu") and "1.250" in x
    )
    columns = [cell.strip() for cell in row.split("|")]
    assert columns[-2] == "64 DGX-H100, batch 128 x 8192, micro 1, tp=4, pp=8, vp=5"
    titles = {x for x in text.splitlines() if x.startswith("## ")}
    assert {
        f"## {name}"
        for name in (
            "NeMo Framework 25.04 performance summary, pretraining, DGX-H100",
            "NeMo AutoModel performance summary, pretraining",
        )
    } <= titles
    # 1.25 and 1.5 times 1621
    assert {"1,621", "2,026", "1.250", "2,432", "1.500", "780", "40.0"} <= set(columns)
    assert (
        next(
            x for x in text.splitlines() if x.startswith("| wan2.1-14b-pretrain-h100-128gpu")
        ).count("0.750")
        == 1
    )
    for part in (
        "published 1,621",
        "simulated 2,026 (125%)",
        "extrapolated 2,432 (150%)",
        "measured 244.3 (75%)",
        "parameters 10 GiB",
        "matrix products 1.25 s",
        "bubble 0.25 s",
        "matrix products 1.5 s",
        "device waits for the host 0.375 s",
        "<quick>",
        "<cpu>, torch ",
        "2.13.0",
        "extrapolated by proxy on one dgx-h100 from 4 and 8 of 80 layers, without communication",
        f"{DENSE} (proxy, 4 of 80 layers)",
        "the TFLOP/s cell is blank",
    ):
        assert part in page.text, part
    assert "simulated 810" not in page.text


def test_contents_and_links_lead_somewhere(tmp_path):
    """The contents to every section, each row to its config, each published table to the page that it is from."""
    page = Page(
        written(tmp_path, [line(DENSE, "simulated", 1.25), line("quickstart", "measured", None)])[
            1
        ]
    )
    places = [link[1:] for link in page.links if link.startswith("#")]
    assert places == page.ids and len(places) == len(set(places)) == 1 + 11 + 1
    configs = [link for link in page.links if link.endswith(".yaml")]
    found = {(tmp_path / "out" / link).resolve() for link in configs}
    assert found == {rows.CONFIGS.resolve() / f"{name}.yaml" for name in PUBLISHED}
    assert sum(link.startswith("https://") for link in page.links) == 11


def test_the_page_begins_with_the_picture_and_how_to_read_it(tmp_path):
    html = written(tmp_path, [line(DENSE, "simulated", 1.25)])[1]
    drawing = (ROOT / "results/pictures/accuracy.svg").read_text()
    places = [
        html.index(part) for part in ("A bar is a run's", drawing, "<h2>Contents", "<main>")
    ]
    assert places == sorted(places)


def test_tables_begin_with_ratios_and_end_with_the_layout(tmp_path):
    text, _ = written(tmp_path, [line(DENSE, "simulated", 1.25), line(DENSE, "measured", 0.5)])
    head = next(x for x in text.splitlines() if x.startswith("| row ") and "simulated" in x)
    names = [name.strip() for name in head.split("|")[1:-1]]
    assert names[:5] == [
        "row",
        "simulated ratio",
        "measured ratio",
        "published tokens/s/GPU",
        "simulated",
    ]
    assert names[-1] == "layout"


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
CUT = """<script>addEventListener("load", () => {
const parts = [...document.querySelectorAll("body, .scroll, td, th, .bar")];
const cut = parts.filter(x => x.scrollWidth > x.clientWidth + 1);
document.title = `[${innerWidth}, ${document.querySelectorAll("td").length}, ${cut.length}]`; })</script>"""
FRAMES = """<body><iframe src="frame.html" style="width: 1400px; height: 900px; border: 0"></iframe>
<iframe src="frame.html" style="width: 390px; height: 900px; border: 0"></iframe><script>addEventListener("load", () =>
document.body.innerHTML = [0, 1].map(number => frames[number].document.title).join())</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_no_column_is_cut_in_a_browser(tmp_path):
    """With all kinds of results, neither a desktop's window of 1,400 pixels nor a phone's of 390 scrolls sideways."""
    proxies = dict(layers=[4, 8], full_layers=80, left_out="communication", peak_memory_gib=None)
    lines = [
        line(
            "quickstart",
            "simulated",
            None,
            system="dgx-gb300",
            reference={"changed": ["model", "precision"]},
        )
    ]
    for row, reference in PUBLISHED.items():
        lines += [line(row, "measured", 1.25), line(row, "extrapolated", 1.25, **proxies)]
        lines.append(line(row, "simulated", 1.25, as_published={"ratio": 1.125}))
        lines.append(line(row, "simulated", 1.5, reference=reference | {"layout": "ours"}))
    _, html = written(tmp_path, lines)
    (tmp_path / "frame.html").write_text(html.replace("</body>", CUT + "</body>"))
    page = tmp_path / "frames.html"  # a headless window itself is at least 500 pixels wide
    page.write_text(FRAMES)
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1500,2000",
        "--allow-file-access-from-files",
    ]
    done = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=100,
    )
    (wide, cells, cut), phone = json.loads(
        "[" + re.search(r"<body>(.*?)</body>", done.stdout, re.DOTALL)[1] + "]"
    )
    assert wide == 1400 and cells > 69 * 15 and cut == 0 and phone == [390, cells, 0]


def test_bars_end_with_their_track(tmp_path):
    """Of figures up to 1.5 times the published one, which is two thirds of it; of parts that are more than there is
    room for, with the last of them."""
    for ratio, width, beyond in (
        (0.75, "50.0", False),
        (1.2, "80.0", False),
        (3.0, "100.0", True),
    ):
        drawn = bar("simulated", 5.0, ratio)
        assert f'class="simulated" style="width:{width}%"' in drawn and ("→" in drawn) == beyond
    parts = dict(
        memory_gib={
            "parameters": 10.0,
            "gradients": 5.0,
            "optimizer": 8.0,
            "gathered": 2.0,
            "activations": 15.0,
        },
        capacity_gib=20.0,
        fits=False,
        breakdown_s={"gemm": 3.0, "attention": 1.0},
        step_time_s=2.0,
    )
    _, html = written(tmp_path, [line(DENSE, "simulated", 1.0, **parts)])
    assert "which does not fit into 20 GiB" in html
    assert re.findall(r'<i class="c\d" style="width:(.*?)%', html) == [
        "25.00",
        "12.50",
        "20.00",
        "5.00",
        "37.50",
        "75.00",
        "25.00",
    ]


def test_lanes_are_drawn_where_things_happen():
    assert 'd="M40 7h2v14h-2zM45 7h1v14h-1z"' in path("FF.BBF", "F", 7, "c0")


def test_sampling_is_not_taken_for_training(tmp_path):
    """Both are of the same config, and of neither is there a published figure."""
    sampled = line(
        "quickstart",
        "measured",
        None,
        first_tokens_s=0.1,
        decode_tokens_per_sec_per_gpu=881.2,
        decode_mbu=0.25,
    )
    markdown, html = written(tmp_path, [line("quickstart", "measured", None), sampled])
    cells = [
        [cell.strip() for cell in text.split("|")[1:-1]]
        for text in markdown.splitlines()
        if "| " in text
    ]
    title = next(row for row in cells if row[0] == "row" and "MBU" in row)
    trained, sampled = (
        dict(zip(title, row, strict=True)) for row in cells if row[0].startswith("quickstart")
    )
    assert [trained["row"], sampled["row"]] == ["quickstart", "quickstart (sampling)"]
    assert [trained["MBU"], sampled["MBU"]] == ["", "25.0%"]
    assert sampled["decoded/s"] == "881.2" and "quickstart (sampling)" in Page(html).text
    markdown, _ = written(tmp_path, [line("quickstart", "measured", None)])
    assert "MBU" not in markdown


def test_corrected_figures_are_what_bars_compare_with(tmp_path):
    row = "nemo/gb200/llama3-70b-lora-8gpu"
    corrected = PUBLISHED[row]["corrected_tokens_per_sec_per_gpu"]
    page = Page(
        written(tmp_path, [line(row, "simulated", 1.0, tokens_per_sec_per_gpu=corrected)])[1]
    )
    assert (
        f"published {corrected:,.0f}" in page.text
        and f"simulated {corrected:,.0f} (100%)" in page.text
    )


def test_accuracy_is_told_of_rows_that_nothing_was_fitted_to(tmp_path):
    """Errors of 20, 50, 100 and 200 %; the fitted row's counts in no table, and the third's published run differs."""
    assert "differs" in PUBLISHED[KIMI] and "differs" not in PUBLISHED[WAN]
    lines = [
        line(DENSE, "simulated", 0.8),
        line(WAN, "simulated", 1.5),
        line(KIMI, "simulated", 2.0),
        line(FITTED, "simulated", 9.0, fits=False),
        line(DENSE, "measured", 7.0),
        line(GRPO, "simulated", 3.0),
    ]
    text, html = written(tmp_path, lines)
    rows = [
        [cell.strip() for cell in x.split("|")[1:-1]]
        for x in text.splitlines()
        if x.startswith("|")
    ]
    assert ["all", "4", "75.0%", "200%", GRPO, "800.0%"] in rows
    errors = [row[:5] for row in rows]
    assert ["all but GRPO", "3", "50.0%", "100%", KIMI] in errors
    assert [
        "all but GRPO and those whose published runs differ",
        "2",
        "35.0%",
        "50%",
        WAN,
    ] in errors
    assert sum(row[1:] == ["1", "20.0%", "20%", DENSE] for row in errors) == 1
    differs = PUBLISHED[KIMI]["differs"]
    assert "known_error" not in PUBLISHED[KIMI] and [
        row[-2] for row in rows if row[0] == KIMI[10:]
    ] == ["*"]
    assert text.index(f"{KIMI}: 2.00") < text.index(f"{WAN}: 1.50")
    for part in (
        f"{KIMI}: 2.00 of the published figure; its published run {differs}",
        f"{WAN}: 1.50 of the published figure; unexplained",
        f"{FITTED}: its simulated memory does not fit",
    ):
        assert f"- {part}\n" in text and part in Page(html).text


def test_a_row_of_ones_own_in_a_tables_folder_counts_in_no_accuracy(tmp_path, monkeypatch):
    """It stands in its table, beside its own figure."""
    configs = tmp_path / "configs"
    shutil.copytree(rows.CONFIGS, configs)
    shutil.copy(configs / f"{DENSE}.yaml", configs / "nemo/h100/mine.yaml")
    monkeypatch.setattr(rows, "CONFIGS", configs)
    own = line(
        "nemo/h100/mine",
        "simulated",
        9.0,
        reference=PUBLISHED[DENSE],
        tokens_per_sec_per_gpu=7654.0,
    )
    text, _ = written(tmp_path, [line(DENSE, "simulated", 0.8), own])
    table = [
        [cell.strip() for cell in x.split("|")[1:-1]]
        for x in text.splitlines()
        if x.startswith("|")
    ]
    assert ["all", "1", "20.0%", "20%", DENSE] in [row[:5] for row in table]
    assert any(row[0] == "mine" and "7,654" in row and "9.000" in row for row in table)
    assert "69 published rows; 1 simulated, median 0.80 of" in text and "mine: 9" not in text


def test_our_fastest_layout_stands_beside_the_published_one(tmp_path):
    reference = published_rows()[KIMI]
    faster = line(KIMI, "simulated", 3.0, reference=reference | {"layout": "ours"})
    text, html = written(tmp_path, [line(KIMI, "simulated", 2.0), faster])
    row = next(row for row in text.splitlines() if row.startswith(f"| {KIMI.rsplit('/')[-1]}"))
    assert [cell.strip() for cell in row.split("|") if cell.strip() in ("2.000", "3.000")] == [
        "2.000",
        "3.000",
    ]
    assert "(300%)" in Page(html).text and "(200%)" in Page(html).text


def test_a_published_run_is_compared_with_its_own_recipe(tmp_path):
    reference = PUBLISHED[KIMI]
    recipe = {"ratio": 1.25, "tokens_per_sec_per_gpu": 1.25 * reference["tokens_per_sec_per_gpu"]}
    text, html = written(tmp_path, [line(KIMI, "simulated", 2.0, as_published=recipe)])
    rows = [
        [cell.strip() for cell in x.split("|")[1:-1]]
        for x in text.splitlines()
        if x.startswith("|")
    ]
    assert ["all", "1", "25.0%", "25%", KIMI] in [row[:5] for row in rows]
    assert any("2.000" in row and "1.250" in row for row in rows)
    assert f"recipe {recipe['tokens_per_sec_per_gpu']:,.0f} (125%)" in Page(html).text


def test_another_system_is_not_the_row(tmp_path):
    lines = [
        line(DENSE, "simulated", 1.25, system="dgx-h100"),
        line(DENSE, "simulated", 2.5, system="dgx-b200"),
    ]
    text, _ = written(tmp_path, lines)
    assert f"| {DENSE} (simulated on dgx-b200) |" in text
    assert text.count(" 1.250 ") == 1 and " 2.500 " not in text


def test_files_that_are_no_results(tmp_path):
    file = tmp_path / "x"
    good = line(DENSE, "simulated", 1.0)
    bad = [
        {key: value for key, value in good.items() if key != lost}
        for lost in ("step_time_s", "device", "mfu")
    ]
    bad += [
        good | wrong
        for wrong in (
            {"ratio": "1"},
            {"reference": None},
            {"tflops_per_gpu": 0},
            {"mfu": math.nan},
        )
    ]
    for text in (
        "not json",
        "[1]",
        '{"row": 1}',
        '{"mode": "calibration", "row": "x"}',
        *map(json.dumps, bad),
        json.dumps(good)[:99],
        "[" * 100_000,
    ):
        file.write_text(json.dumps(good) + "\n\n" + text)
        with pytest.raises(InputError, match="--report .*x, line 3[: ]"):
            write_report([str(file)], str(tmp_path / "out"))
    with pytest.raises(InputError, match="--report .*none"):
        write_report([str(tmp_path / "none")], str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "wrong, part",
    [
        ({"system": 5}, "system must be text, not int 5"),
        ({"peak_memory_gib": "x"}, "peak_memory_gib must be a finite number, not str 'x'"),
        ({"capacity_gib": "x"}, "capacity_gib must be a finite number"),
        ({"memory_gib": [1]}, "memory_gib must be a mapping, not list"),
        ({"breakdown_s": [1]}, "breakdown_s must be a mapping, not list"),
        ({"breakdown_s": {"gemm": "x"}}, "breakdown_s.gemm must be a finite number, not str 'x'"),
        ({"timeline": [1]}, r"timeline\[0\] must be text, not int 1"),
        ({"timeline": [""]}, "timeline has a lane without a letter"),
        ({"as_published": 5}, "as_published must be a mapping"),
        ({"as_published": {"ratio": "x"}}, "ratio must be a finite number"),
        ({"step_time_s": 10**400}, " needs step_time_s, a number above 0, not int 1000"),
        ({"reference": {"system": 5}}, "reference.system must be text"),
        ({"reference": {"changed": 5}}, "reference.changed must be a list"),
        ({"proxy": True}, " needs full_layers, a number above 0"),
        ({"mode": "extrapolated", "layers": 4}, " needs layers, a list, not int 4"),
    ],
)
def test_damaged_values_of_results(tmp_path, wrong, part):
    file = tmp_path / "x"
    file.write_text(json.dumps(line(DENSE, "simulated", 1.0, breakdown_s={"gemm": 1.25}) | wrong))
    with pytest.raises(InputError, match=f"--report .*x, line 1(: )?{part}"):
        write_report([str(file)], str(tmp_path / "out"))


def test_lanes_show_what_each_rank_does():
    spans = {
        (0, "F", 0): (0.0, 1.0),
        (1, "F", 0): (1.0, 2.0),
        (1, "B", 0): (2.0, 4.0),
        (0, "B", 0): (4.0, 6.0),
    }
    assert Replay(spans, [6.0, 4.0], {0: 0, 1: 1}).lanes(8.0, columns=8) == [
        "F...BBUU",
        ".FBBUUUU",
    ]


def test_a_run_on_another_gpu_is_compared_with_no_row():
    """Though the line was kept with a ratio, and without what was changed: LoRA's on an H200, of a row of an H100."""
    row = "automodel/llama3-8b-lora-1gpu"
    measured = dict(world_size=1, system="DGX-H100", reference=PUBLISHED[row])
    for device, counts in (("NVIDIA H200", False), ("NVIDIA H100 80GB HBM3", True)):
        result = line(row, "measured", 1.25, device=device, **measured)
        report = merge_results([result], "")
        (found,) = (each for each in report.rows if each.name == row)
        assert ("measured" in found.results) == counts == ("1 measured" in summary(report))
        assert [each["ratio"] for each in report.others] == [None] * (not counts)


def test_the_list_needs_no_torch():
    code = "import sys, bench; bench.main(['--list']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "69 rows" in done.stdout, done.stderr


def test_what_needs_no_torch_is_answered_without_it(tmp_path):
    """--help, --report, and mistakes: of an option or its number, of a setting, of a row's name."""
    code = f"""
import sys, bench
for words in ("--help", "--report --out {tmp_path}", "--stepz 3", "model.num_layer=2",
              "--config no/such-row", "--steps 0"):
    try:
        bench.main(words.split())
    except (bench.cli.InputError, SystemExit):
        assert not words.startswith("--report"), words
    assert "torch" not in sys.modules, words
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rates_are_counted_work_over_seconds(monkeypatch):
    """On a machine where every call takes 0.1 s: causal attention 2 s^2 d per head, backward 2.5 times that."""
    monkeypatch.setattr(hardware, "_seconds_per_call", lambda *_: 0.1)
    forward, backward = measure_attention(torch.device("cpu"), torch.float32)
    assert forward == pytest.approx(2 * 8 * 512**2 * 128 / 0.1) and backward == pytest.approx(
        2.5 * forward
    )
    assert measure_memory(torch.device("cpu")) == pytest.approx(3 * 4 * 2**25 / 0.1)


def test_the_simulator_predicts_a_calibrated_product_as_measured(tmp_path):
    file = tmp_path / "calibration.jsonl"
    outcome = {
        "mode": "calibration",
        "system": "h200",
        "matmul": {"bf16": 6e14, "fp8": 1e15},
        "memory": 4e12,
        "attention_forward": 5e14,
        "attention_backward": 4e14,
    }
    file.write_text(json.dumps({"mode": "measured"}) + "\n" + json.dumps(outcome) + "\n")
    system, named = find_system(str(file)), load_system("h200")
    for element, rate in ((2, 6e14), (1, 1e15)):
        moved = [(1, 2 * 8192**2 * element)], [(2, 2 * 8192**2)]
        product = Event(
            "mm", "gemm", 2 * 8192**3, *moved, sizes=(1, 8192, 8192, 8192), element=element
        )
        assert system.kernel_seconds(product) - system.launch == pytest.approx(2 * 8192**3 / rate)
    for name, rate in (("attention", 5e14), ("attention_backward", 4e14)):
        event = Event(name, "attention", 10**15, [], [], (128, 4096), form="causal")
        assert system.kernel_seconds(event) - system.launch == pytest.approx(1e15 / rate)
    assert system.memory == pytest.approx(0.89 * 4e12)
    flex, causal = named.attention["flex"], named.attention["causal"]
    assert (
        system.attention["flex"].forward / system.attention["causal"].forward
        == flex.forward / causal.forward
    )
    assert (system.nvlink, system.capacity) == (named.nvlink, named.capacity)
    assert find_system("h200") == named


@pytest.mark.parametrize(
    "wrong",
    [
        {"matmul": None},
        {"matmul": {"bf16": 0}},
        {"memory": "fast"},
        {"attention_forward": -1},
        {"system": "mars"},
    ],
)
def test_damaged_calibrations(tmp_path, wrong):
    outcome = {
        "mode": "calibration",
        "system": "h200",
        "matmul": {"bf16": 6e14},
        "memory": 4e12,
        "attention_forward": 5e14,
        "attention_backward": 4e14,
    }
    file = tmp_path / "calibration.jsonl"
    file.write_text(json.dumps(outcome) + "\n" + json.dumps(outcome | wrong))
    with pytest.raises(InputError, match="--system"):
        find_system(str(file))


def test_a_calibrated_cpu_is_no_system(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "_seconds_per_call", lambda *_: 0.001)
    outcome = calibrate(torch.device("cpu"))
    assert (
        outcome["matmul"] == {"fp32": pytest.approx(2 * 1024**3 / 0.001)}
        and outcome["system"] is None
    )
    file = tmp_path / "cpu.jsonl"
    file.write_text(json.dumps(outcome))
    with pytest.raises(InputError, match="holds no calibration of a GPU"):
        find_system(str(file))


def test_the_report_says_what_it_means(tmp_path, capsys):
    """No kind of result by its key alone, no backticks in the page, no column of one word."""
    lines = [line(DENSE, "simulated", 0.8, as_published={"ratio": 0.75})]
    text, html = written(tmp_path, lines)
    assert (
        "1 simulated, median 0.80 of the published figure; 1 predicted as they were run" in text
    )
    assert "`" not in Page(html).text and "<code>reference.recipe</code>" in html
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
        for name, _, *cells in zip(*rows, strict=True):
            assert any(cells), name
