"""Write the report (report.py) as one HTML page that needs no script and no network.

Bars are styled boxes, timelines are inline SVG, and all figures are also text. The colors are Okabe
and Ito's, which color-blind readers can distinguish, and nothing is distinguished by color alone. In
a window that is too narrow for a table, each of its lines becomes a card with named figures; only
timelines scroll sideways, each in its own box.
"""

import os
import re
from datetime import date
from html import escape
from pathlib import Path
from string import Template
from urllib.parse import quote

from minitrain.bench.report import (
    MODES,
    Report,
    Row,
    accuracy_cells,
    as_markdown,
    cells,
    merge_results,
    notes,
    outliers,
    provenance,
    read_results,
    summary,
)
from minitrain.bench.rows import CONFIGS, FIGURES, SOURCES
from minitrain.bench.tables import calibration_line, result_columns, short
from minitrain.errors import as_input_error
from minitrain.run.config.recipes import own_folder

PICTURE = own_folder("results") / "pictures/accuracy.svg"
MEMORY = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "reference",
    "sampler",
)
# keys of `breakdown_s`, and their names on the page
TIME = {
    "gemm": "matrix products",
    "grouped": "expert products",
    "attention": "attention",
    "memory": "memory-bound kernels",
    "exposed communication": "exposed communication",
    "bubble": "bubble",
    "tail": "not overlapped at the end",
    "gaps": "device waits for the host",
}
# letters of a timeline's lanes, and their names on the page
ACTIONS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
    "U": "gradient reduction and update",
}
# height of a timeline's lane, in units of the drawing
LANE = 14

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>minitrain beside the published tables</title>
<style>
:root { color-scheme: light dark; --back: #fff; --text: #1a1a1a; --soft: #595959; --line: #d5d5d5; --box: #f4f4f4;
  --published: #8a8a8a; --simulated: #0072b2; --measured: #d55e00; --c0: #0072b2; --c1: #e69f00; --c2: #009e73;
  --c3: #cc79a7; --c4: #56b4e9; --c5: #d55e00; --c6: #999; --c7: #f0e442; }
@media (prefers-color-scheme: dark) { :root { --back: #14161a; --text: #e8e8e8; --soft: #a8a8a8; --line: #3a3d44;
  --box: #1e2127; --published: #9a9a9a; --simulated: #56b4e9; --measured: #e69f00; --c0: #3d9bd9; --c5: #f0803c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 90rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .25rem; } p, li, figcaption { color: var(--soft); }
p, ul, .chart { max-width: 60rem; } a { color: var(--simulated); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: .7rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .25rem; text-align: right; border-bottom: 1px solid var(--line); overflow-wrap: normal; }
td { white-space: nowrap; } td:first-child, td:last-child { white-space: normal; min-width: 7rem; }
td:first-child { overflow-wrap: anywhere; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--back); }
th, th:first-child { background: var(--box); vertical-align: bottom; } tr:last-child td { border-bottom: 0; }
figure > svg { max-width: 100%; height: auto; }
.chart { display: grid; gap: .8rem; margin: 1rem 0; }
.bar { display: grid; grid-template-columns: 1fr 14rem; gap: .5rem; align-items: center; font-size: .8rem; }
.track { display: flex; height: .75rem; background: var(--box); position: relative; }
.hundred::after { content: ""; position: absolute; left: 66.667%; top: -2px; bottom: -2px;
  border-left: 1px dashed var(--soft); }
.published { background: var(--published); } .simulated { background: var(--simulated); }
.measured { background: var(--measured); } .recipe { background: var(--c3); } .fastest { background: var(--c2); }
.extrapolated { background: repeating-linear-gradient(135deg, var(--measured) 0 4px, var(--back) 4px 7px); }
.name { font-weight: 600; font-size: .85rem; } .key { display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0;
  margin: .4rem 0; list-style: none; font-size: .8rem; } .key i { display: inline-block; width: .8rem; height: .8rem;
  margin-right: .35rem; vertical-align: -1px; }
.stack { display: flex; height: 1.1rem; background: var(--box); border-radius: 3px; overflow: hidden; }
.stack i { border-right: 1px solid var(--back); }
details { border: 1px solid var(--line); border-radius: 6px; padding: .5rem .8rem; margin: .5rem 0; }
summary { cursor: pointer; } figure { margin: .5rem 0; } figcaption { font-size: .8rem; }
.lanes { overflow-x: auto; } .lanes svg { display: block; width: 100%; min-width: 34rem; height: auto; }
.lanes text { fill: var(--text); font-size: 8px; }
.c0 { background: var(--c0); fill: var(--c0); } .c1 { background: var(--c1); fill: var(--c1); }
.c2 { background: var(--c2); fill: var(--c2); } .c3 { background: var(--c3); fill: var(--c3); }
.c4 { background: var(--c4); fill: var(--c4); } .c5 { background: var(--c5); fill: var(--c5); }
.c6 { background: var(--c6); fill: var(--c6); } .c7 { background: var(--c7); }
.idle { fill: var(--box); background: var(--box); }
@media (max-width: 80rem) { thead { display: none; } table, tbody, td { display: block; } .scroll { border: 0; }
  tr { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr)); gap: .3rem .6rem;
    padding: .6rem 0; border-bottom: 1px solid var(--line); } td:empty { display: none; }
  td, td:first-child { padding: 0; border: 0; text-align: left; white-space: normal; overflow-wrap: anywhere;
    position: static; } td:first-child, td:last-child { grid-column: 1 / -1; }
  td:first-child { font-weight: 600; font-size: .85rem; }
  td + td::before { content: attr(data-name); display: block; color: var(--soft); font-size: .7rem; } }
@media (max-width: 40rem) { body { padding: .75rem; } .bar { grid-template-columns: 1fr 9.5rem; font-size: .75rem; } }
</style>
</head>
<body>
<header><h1>minitrain beside the published tables</h1><p>$day. $summary.</p>
<p>A bar is a run's throughput as a share of the published figure, which the dashed line marks: beyond it, the run is
faster. Each table begins with the same shares as numbers; a * refers to a note below the table about the published run.
The accuracy of predictions is that on the rows that no constant was fitted to.</p>
$picture<ul class="key" aria-label="Colors of the bars">$key</ul>$provenance
<nav><h2>Contents</h2><ul>$contents</ul></nav></header>
<main>
$sections
</main>
</body>
</html>
""")


def write_report(files: list[str], folder: str) -> None:
    """Write report.md and report.html into `folder`. Raises InputError for unusable files."""
    lines = [result for file in files for result in read_results(file)]
    report = merge_results(lines, date.today().isoformat())
    target = Path(folder)
    with as_input_error(f"--out={folder} cannot be written"):
        target.mkdir(parents=True, exist_ok=True)
        (target / "report.md").write_text(as_markdown(report), encoding="utf-8")
        (target / "report.html").write_text(make_page(report, target), encoding="utf-8")
    print(f"{summary(report)}\nwrote {target / 'report.md'}; open {target / 'report.html'}")


def make_page(report: Report, folder: Path) -> str:
    """Return the page. folder: where it will be, because its links to configs are relative."""
    sections = {}
    if accuracy := accuracy_cells(report):
        sections["Accuracy of the simulation"] = html_table(accuracy) + bullets(outliers(report))
    for title, rows in report.tables.items():
        sections[title] = published_table(title, rows, folder)
    if report.calibrations:
        sections["Calibration"] = bullets(map(calibration_line, report.calibrations))
    if report.others:
        sections["Not to be compared with a row"] = html_table(result_columns(report.others))
    names = {title: re.sub(r"\W+", "-", title.lower()) for title in sections}
    picture = ""
    if PICTURE.is_file():
        caption = "The rows of results/simulated; what was simulated since is in the tables."
        drawing = PICTURE.read_text(encoding="utf-8")
        picture = f"<figure>{drawing}<figcaption>{caption}</figcaption></figure>"
    return PAGE.substitute(
        day=report.day,
        summary=escape(summary(report)),
        picture=picture,
        provenance=bullets(provenance(report)),
        key=color_key({mode: mode for mode in ("published", *MODES)}),
        contents="".join(f"<li>{link('#' + names[title], title)}</li>" for title in sections),
        sections="\n".join(
            f'<section id="{names[title]}"><h2>{escape(title)}</h2>{body}</section>'
            for title, body in sections.items()
        ),
    )


def published_table(title: str, rows: list[Row], folder: Path) -> str:
    """Return the rows of a published table: bars, figures, notes, and folds of details."""
    source = next((url for name, url in SOURCES.items() if title.startswith(name)), None)
    body = f"<p>{link(source, 'the published page')}</p>" if source else ""
    shown = [row for row in rows if row.results]
    bars = "".join(map(row_bars, shown)) or "<p>No results yet.</p>"
    links = [
        quote(os.path.relpath(CONFIGS.resolve() / f"{row.name}.yaml", folder)) for row in rows
    ]
    body += f'<div class="chart">{bars}</div>' + html_table(cells(rows), links)
    return body + bullets(notes(rows)) + "".join(map(row_details, shown))


def link(url: str, text: str) -> str:
    return f'<a href="{url}">{escape(text)}</a>'


def bullets(lines) -> str:
    # text between backticks is code
    texts = (re.sub("`([^`]+)`", r"<code>\1</code>", escape(line)) for line in lines)
    items = "".join(f"<li>{text}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def color_key(names: dict[str, str]) -> str:
    """Return list items of a legend: a colored box, then a name. names: CSS class -> name."""
    return "".join(
        f'<li><i class="{kind}"></i>{escape(name)}</li>' for kind, name in names.items()
    )


def html_table(columns: dict[str, list[str]], links: list[str] | None = None) -> str:
    """Return a table; each cell also names its column, for cards. links: for the first column."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = ""
    for number, line in enumerate(zip(*columns.values(), strict=True)):
        texts = list(map(escape, line))
        if links:
            texts[0] = link(links[number], line[0])
        pairs = zip(columns, texts, strict=True)
        body += "<tr>"
        body += "".join(f'<td data-name="{escape(name)}">{text}</td>' for name, text in pairs)
        body += "</tr>"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="table"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


# --- bars


def row_bars(row: Row) -> str:
    """Return a row's figures as bars; the published bar has the same length in all rows."""
    lines = bar("published", row.published, 1.0)
    for mode in MODES:
        if result := row.results.get(mode):
            lines += bar(mode, result[row.figure], result["ratio"])
    return f'<div><div class="name">{escape(row.short_name)}, {FIGURES[row.figure]}</div>{lines}</div>'


def bar(mode: str, figure: float, ratio: float) -> str:
    """Return one bar; the published figure fills two thirds of its track."""
    share = "" if mode == "published" else f" ({ratio:.0%})"
    beyond = " →" if ratio > 1.5 else ""
    width = min(100.0, ratio / 1.5 * 100)
    return (
        f'<div class="bar"><div class="track hundred" aria-hidden="true"><div class="{mode}" '
        f'style="width:{width:.1f}%"></div></div><span>{mode} {short(figure)}{share}{beyond}</span></div>'
    )


def stacked_bar(parts: dict[str, float], whole: float, unit: str, label: str) -> str:
    """Return a bar of colored parts with their figures below. whole: the amount of its full length."""
    shown = {f"c{n}": part for n, part in enumerate(parts.items()) if part[1] > 0}
    boxes = "".join(
        f'<i class="{color}" style="width:{100 * size / whole:.2f}%"></i>'
        for color, (_, size) in shown.items()
    )
    key = color_key({color: f"{name} {size:.3g} {unit}" for color, (name, size) in shown.items()})
    return (
        f'<figure><div class="stack" aria-hidden="true">{boxes}</div>'
        f'<figcaption>{escape(label)}<ul class="key">{key}</ul></figcaption></figure>'
    )


# --- details of one simulation


def row_details(row: Row) -> str:
    """Return a row's foldable details: simulated memory, time and pipeline, and measured time."""
    folds = ""
    if result := row.results.get("simulated"):
        title = f"{row.short_name}: simulated memory, time"
        parts = memory_stack(result) + time_stack(result)
        if lanes := result.get("timeline"):
            title += " and pipeline"
            parts += pipeline(lanes, result["step_time_s"])
        folds = fold(title, parts)
    if parts := time_stack(row.results.get("measured", {})):
        folds += fold(f"{row.short_name}: measured time", parts)
    return folds


def fold(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def memory_stack(result: dict) -> str:
    """Return a bar of peak memory by kind, on the scale of the GPU's capacity."""
    held = result.get("memory_gib")
    if not held:
        return ""
    memory = {kind: held.get(kind, 0.0) for kind in MEMORY}
    total = sum(memory.values())
    room = result.get("capacity_gib") or 0.0
    fits = "fits into" if result.get("fits") else "does not fit into"
    label = f"Peak memory {total:.1f} GiB, which {fits} {room:.0f} GiB of {result['device']}"
    return stacked_bar(memory, max(total, room), "GiB", label)


def time_stack(result: dict) -> str:
    """Return a bar of a step's seconds by kind."""
    spent = result.get("breakdown_s")
    if not spent:
        return ""
    seconds = {name: spent.get(kind, 0.0) for kind, name in TIME.items()}
    label = f"Step of {result['step_time_s']:.4g} s, first rank"
    return stacked_bar(seconds, max(sum(seconds.values()), result["step_time_s"]), "s", label)


def pipeline(lanes: list[str], step: float) -> str:
    """Return a drawing of a pipeline's ranks over a step. lanes, step: see `Replay.lanes`."""
    columns = len(lanes[0])
    height = len(lanes) * (LANE + 3)
    busy = ", ".join(f"{1 - lane.count('.') / columns:.0%}" for lane in lanes)
    text = f"Pipeline of {len(lanes)} ranks over a step of {step:.4g} s; busy {busy}"
    colors = {color: name for name, color in timeline_actions(lanes).items()}
    key = color_key(colors | {"idle": "idle: the bubble"})
    return (
        f'<figure><div class="lanes" tabindex="0" role="region" aria-label="timeline"><svg role="img" '
        f'aria-label="{escape(text)}" viewBox="0 0 {columns + 40} {height}">{draw_lanes(lanes)}</svg></div>'
        f'<figcaption>{escape(text)}<ul class="key">{key}</ul></figcaption></figure>'
    )


def timeline_actions(lanes: list[str]) -> dict[str, str]:
    """Return the actions that occur in the lanes: name -> CSS class of its color."""
    drawn = "".join(lanes)
    return {name: f"c{n}" for n, (letter, name) in enumerate(ACTIONS.items()) if letter in drawn}


def draw_lanes(lanes: list[str]) -> str:
    """Draw each rank's actions as one row of SVG boxes, its name to the left."""
    drawn = ""
    for rank, lane in enumerate(lanes):
        top = rank * (LANE + 3)
        drawn += f'<text x="0" y="{top + 10}">rank {rank}</text>'
        drawn += f'<rect class="idle" x="40" y="{top}" width="{len(lane)}" height="{LANE}"/>'
        for number, kind in enumerate(ACTIONS):
            if kind in lane:
                drawn += path(lane, kind, top, f"c{number}")
    return drawn


def path(lane: str, kind: str, top: int, color: str) -> str:
    """Draw all boxes of one kind in a lane."""
    boxes = ""
    for run in re.finditer(f"{kind}+", lane):
        length = len(run[0])
        boxes += f"M{40 + run.start()} {top}h{length}v{LANE}h-{length}z"
    return f'<path class="{color}" d="{boxes}"/>'
