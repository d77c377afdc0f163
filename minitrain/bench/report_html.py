"""Write the report (report.py) as one HTML page, report.html, that needs no script and no network.

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

from minitrain.bench.report import MODES, Report, Row, merge_results, read_results
from minitrain.bench.report_accuracy import accuracy_cells, outliers, summary
from minitrain.bench.report_tables import as_markdown, cells, notes, provenance
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
    "host update": "update on the host",
    "exposed copies": "exposed copies from and to the host",
    "exposed communication": "exposed communication",
    "bubble": "bubble",
    "tail": "not overlapped at the end",
    "slowest rank": "waiting for the slowest rank",
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

PAGE = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))


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
