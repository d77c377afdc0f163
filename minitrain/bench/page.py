"""The report as one HTML page: no script, no network; bars are boxes, timelines inline SVG, all
figures also text.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart, and never the only
difference. On a phone there is one column; only tables and timelines scroll sideways, each in its
own box. results.py says what it shows.
"""

from datetime import date
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template

from minitrain.bench import results
from minitrain.bench.report import calibration_line, short
from minitrain.errors import refused

MODES = {
    "published": "published",
    "simulated": "simulated: our code in the published layout, predicted by running it on fake tensors",
    "fastest": "fastest: our code in a faster layout of as many GPUs and as much memory",
    "recipe": "recipe: the published run, predicted with its own kernels and costs: what the accuracy is of",
    "measured": "measured: the whole row, run",
    "extrapolated": "extrapolated from proxies with fewer layers on one rank, without communication",
}
MEMORY = ("parameters", "gradients", "optimizer", "gathered", "activations", "reference", "sampler")
TIME = ("gemm", "grouped", "attention", "memory", "exposed communication", "bubble", "tail", "gaps")
TIME_NAMES = {
    "gemm": "matrix products",
    "grouped": "expert products",
    "memory": "memory-bound kernels",
    "tail": "not overlapped at the end",
    "gaps": "device waits for the host",
}
ACTIONS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
    "U": "gradient reduction and update",
}
LANE = 14  # height of a timeline's lane, in units of the drawing

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
body { margin: 0 auto; padding: 1rem; max-width: 68rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .25rem; } p, li, figcaption { color: var(--soft); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--back); }
th, th:first-child { background: var(--box); } tr:last-child td { border-bottom: 0; }
.chart { display: grid; gap: .8rem; margin: 1rem 0; }
.bar { display: grid; grid-template-columns: 1fr 12rem; gap: .5rem; align-items: center; font-size: .8rem; }
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
@media (max-width: 40rem) { body { padding: .75rem; } .bar { grid-template-columns: 1fr 9.5rem; font-size: .75rem; }
  th:first-child, td:first-child { position: static; } }
</style>
</head>
<body>
<header><h1>minitrain beside the published tables</h1><p>$day. $summary.</p>$provenance
<ul class="key" aria-label="Colours of the bars">$key</ul>
<p>Bars are shares of the published figure, which the dashed line marks.</p></header>
<main>
$sections
</main>
</body>
</html>
""")


def write_report(files: list[str], folder: str) -> None:
    """Write report.md and report.html into `folder`. Raises InputError for what cannot be read or
    written.
    """
    report = results.merge(
        [result for file in files for result in results.read_results(file)],
        date.today().isoformat(),
    )
    target = Path(folder)
    with refused(f"--out={folder} cannot be written"):
        target.mkdir(parents=True, exist_ok=True)
        (target / "report.md").write_text(results.as_markdown(report), encoding="utf-8")
        (target / "report.html").write_text(make_page(report), encoding="utf-8")
    print(f"{target / 'report.md'} and {target / 'report.html'}: {results.summary(report)}")


def make_page(report: results.Report) -> str:
    sections = [table_section(title, rows) for title, rows in report.tables.items()]
    if cells := results.accuracy_cells(report):
        body = html_table(cells) + bullets(results.outliers(report))
        sections.insert(0, section("Accuracy of the simulation", body))
    if report.calibrations:
        sections.append(
            section(
                "Calibration", "".join(paragraph(calibration_line(c)) for c in report.calibrations)
            )
        )
    if report.others:
        sections.append(
            section("Not to be compared with a row", html_table(results.other_cells(report.others)))
        )
    return PAGE.substitute(
        day=report.day,
        summary=escape(results.summary(report)),
        provenance=bullets(results.provenance(report)),
        key="".join(f'<li><i class="{mode}"></i>{text}</li>' for mode, text in MODES.items()),
        sections="\n".join(sections),
    )


def table_section(title: str, rows: list[results.Row]) -> str:
    shown = [row for row in rows if row.results]
    chart = (
        f'<div class="chart">{"".join(map(bars, shown))}</div>'
        if shown
        else paragraph("No results yet.")
    )
    details = "".join(simulation_details(row) for row in rows if "simulated" in row.results)
    details += "".join(
        profile_details(row) for row in rows if "breakdown_s" in row.results.get("measured", {})
    )
    return section(
        title, chart + html_table(results.cells(rows)) + bullets(results.notes(rows)) + details
    )


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def bullets(lines: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def html_table(columns: dict[str, list[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    lines = zip(*columns.values(), strict=True)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="table"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


# ---------------------------------------------------------------------------------------------------------------- bars


def bars(row: results.Row) -> str:
    """A row's figures as bars, the published one of a length that is the same everywhere: two
    thirds of the track.
    """
    unit = results.FIGURES[row.figure]
    figures = {"published": (row.published, 1.0)}
    figures |= {mode: (result[row.figure], result["ratio"]) for mode, result in row.results.items()}
    lines = "".join(bar(mode, figure, ratio) for mode, (figure, ratio) in figures.items())
    return f'<div><div class="name">{escape(results.short_name(row))}, {unit}</div>{lines}</div>'


def bar(mode: str, figure: float, ratio: float) -> str:
    share = "" if mode == "published" else f" ({ratio:.0%})"
    text = f"{mode} {short(figure)}{share}"
    beyond = " →" if ratio > 1.5 else ""
    return (
        f'<div class="bar"><div class="track hundred" aria-hidden="true"><div class="{mode}" '
        f'style="width:{min(100.0, ratio / 1.5 * 100):.1f}%"></div></div><span>{escape(text)}{beyond}</span></div>'
    )


def stack(parts: dict[str, float], whole: float, unit: str, label: str) -> str:
    """A bar of coloured parts with their figures below. whole: what the bar's full length stands
    for.
    """
    shown = [(number, name, size) for number, (name, size) in enumerate(parts.items()) if size > 0]
    boxes = "".join(
        f'<i class="c{number}" style="width:{100 * size / whole:.2f}%"></i>'
        for number, _, size in shown
    )
    keys = "".join(
        f'<li><i class="c{number}"></i>{escape(name)} {size:.3g} {unit}</li>'
        for number, name, size in shown
    )
    return (
        f'<figure><div class="stack" aria-hidden="true">{boxes}</div>'
        f'<figcaption>{escape(label)}<ul class="key">{keys}</ul></figcaption></figure>'
    )


# ---------------------------------------------------------------------------------------------- what a simulation knows


def simulation_details(row: results.Row) -> str:
    """A fold with memory by kind, the step's time by kind, and the pipeline."""
    result = row.results["simulated"]
    held = result.get("memory_gib") or {}
    memory = {kind: held.get(kind, 0.0) for kind in MEMORY}
    parts = []
    if held:
        total = sum(memory.values())
        room = result.get("capacity_gib") or 0.0
        fits = "fits into" if result.get("fits") else "does not fit into"
        label = f"Peak memory {total:.1f} GiB, which {fits} {room:.0f} GiB of {result['device']}"
        parts.append(stack(memory, max(total, room), "GiB", label))
    if result.get("breakdown_s"):
        parts.append(time_stack(result))
    if result.get("timeline"):
        parts.append(pipeline(result["timeline"], result["step_time_s"]))
    title = f"{results.short_name(row)}: simulated memory, time{' and pipeline' if result.get('timeline') else ''}"
    return f"<details><summary>{escape(title)}</summary>{''.join(parts)}</details>"


def profile_details(row: results.Row) -> str:
    """A fold with the measured step's time by kind."""
    title = f"{results.short_name(row)}: measured time"
    return f"<details><summary>{escape(title)}</summary>{time_stack(row.results['measured'])}</details>"


def time_stack(result: dict) -> str:
    seconds = {TIME_NAMES.get(kind, kind): result["breakdown_s"].get(kind, 0.0) for kind in TIME}
    label = f"Step of {result['step_time_s']:.4g} s, first rank"
    return stack(seconds, max(sum(seconds.values()), result["step_time_s"]), "s", label)


def pipeline(lanes: list[str], step: float) -> str:
    """The ranks of a pipeline over a step, as Replay.lanes has them."""
    columns = len(lanes[0])
    drawn = draw_lanes(lanes)
    height = len(lanes) * (LANE + 3)
    keys = "".join(
        f'<li><i class="{colour}"></i>{name}</li>' for name, colour in actions(lanes).items()
    )
    busy = [1 - lane.count(".") / columns for lane in lanes]
    text = f"Pipeline of {len(lanes)} ranks over a step of {step:.4g} s; busy " + ", ".join(
        f"{b:.0%}" for b in busy
    )
    return (
        f'<figure><div class="lanes" tabindex="0" role="region" aria-label="timeline"><svg role="img" '
        f'aria-label="{escape(text)}" viewBox="0 0 {columns + 40} {height}">{drawn}</svg></div>'
        f'<figcaption>{escape(text)}<ul class="key">{keys}<li><i class="idle"></i>idle: the bubble</li></ul>'
        "</figcaption></figure>"
    )


def actions(lanes: list[str]) -> dict[str, str]:
    """Return the names of the actions that occur, with the class of each one's colour."""
    colours = {letter: f"c{number}" for number, letter in enumerate(ACTIONS)}
    return {
        ACTIONS[letter]: colours[letter]
        for letter in ACTIONS
        if any(letter in lane for lane in lanes)
    }


def draw_lanes(lanes: list[str]) -> str:
    """Draw each rank's actions as one row of SVG boxes, its name to the left."""
    drawn = ""
    for rank, lane in enumerate(lanes):
        top = rank * (LANE + 3)
        drawn += f'<text x="0" y="{top + 10}">rank {rank}</text>'
        drawn += f'<rect class="idle" x="40" y="{top}" width="{len(lane)}" height="{LANE}"/>'
        drawn += "".join(
            path(lane, kind, top, f"c{n}") for n, kind in enumerate(ACTIONS) if kind in lane
        )
    return drawn


def path(lane: str, kind: str, top: int, colour: str) -> str:
    """All boxes of one kind in a lane."""
    boxes = ""
    place = 0
    for letter, run in groupby(lane):
        length = len(list(run))
        if letter == kind:
            boxes += f"M{40 + place} {top}h{length}v{LANE}h-{length}z"
        place += length
    return f'<path class="{colour}" d="{boxes}"/>'
