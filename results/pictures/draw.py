"""Draw the READMEs' pictures: python results/pictures/draw.py FILE.jsonl... [--row NAME] [--out FOLDER].

From results as bench.py's --json writes them, into FOLDER:
    accuracy.svg   predicted beside published figures, one dot a row
    pipeline.svg   the pipeline of --row over one step, as simulated
    layout.svg     ranks by tensor, context, data, expert and pipeline parallelism
    rooms.svg      the package's folders, and which of them imports which
"""

import math
from itertools import product
from pathlib import Path
from statistics import median
from textwrap import wrap

from minitrain.bench.report import Row, merge_results, read_results
from minitrain.bench.report_accuracy import error, held_back, predicted
from minitrain.bench.report_html import LANE, draw_lanes, timeline_actions
from minitrain.errors import InputError, as_input_error
from minitrain.run.launch import cli
from minitrain.run.monitor import svg
from tests.helpers.house import ROOT, TREES, imported, reachable, room

TASKS = {  # colors by what a row trains
    "pretraining": svg.COLORS[0],
    "fine-tuning": svg.COLORS[1],
    "GRPO": svg.COLORS[2],
    "video": svg.COLORS[3],
}


def main(arguments: list[str]) -> None:
    parser = cli.Parser(prog="python results/pictures/draw.py", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE.jsonl", type=cli.home_path)
    parser.add_argument(
        "--row", default="automodel/deepseek-v3-pretrain-256gpu", help="whose pipeline is drawn"
    )
    parser.add_argument(
        "--out", metavar="FOLDER", default=str(Path(__file__).parent), type=cli.home_path
    )
    options = parser.parse_args(arguments)
    report = merge_results(
        [result for file in options.files for result in read_results(file)], ""
    )
    rows = [row for rows in report.tables.values() for row in rows if "simulated" in row.results]
    pictures = {
        "accuracy.svg": accuracy(rows),
        "pipeline.svg": pipeline(rows, options.row),
        "layout.svg": layout(pp=2, dp=2, cp=2, tp=2, ep=4),
        "rooms.svg": rooms(),
    }
    folder = Path(options.out)
    with as_input_error(f"--out={folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, drawing in pictures.items():
            (folder / name).write_text(drawing, encoding="utf-8")
    print(f"{', '.join(pictures)} in {folder}")


# ---------------------------------------------------------------------------------------------- predicted and published


class LogAxis(svg.Axis):
    """A logarithmic scale, with ticks at powers of ten."""

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
        return [10.0**power for power in powers]


def accuracy(rows: list[Row]) -> str:
    """Return predicted over published figures, both on log scales: filled dots for rows not fitted to."""
    if not rows:
        raise InputError(
            "no result here is a simulated published row (see bench.py --simulate --json FILE)"
        )
    not_fitted = held_back(rows)
    tested = {row.name for row in not_fitted}
    figures = [(row, row.published, row.published * predicted(row)) for row in rows]
    both = [value for _, *values in figures for value in values]
    low, high = min(both) / 1.3, max(both) * 1.3
    x, y = LogAxis(low, high, 60, 560), LogAxis(low, high, 480, 40)
    body = svg.grid(x, y, "published: tokens/s per GPU (video: TFLOP/s per GPU)", "predicted")
    for share, dashes in ((1.0, "none"), (0.8, "4 4"), (1.25, "4 4")):
        low, high = x.low * max(1.0, 1 / share), x.high * min(1.0, 1 / share)
        body += svg.line(
            [(x(low), y(low * share)), (x(high), y(high * share))], "#8a8a8a", dashes
        )
    for row, published, simulated in figures:
        color = TASKS[kind(row)]
        fill = color if row.name in tested else "#fff"
        body += (
            f'<circle cx="{x(published):g}" cy="{y(simulated):g}" r="4" fill="{fill}" stroke="{color}" '
            f'stroke-width="1.5" fill-opacity="0.8"><title>{row.name}: {simulated / published:.2f}</title></circle>'
        )
    body += svg.legend(TASKS, 80, 60)
    lines = [
        f"open: {len(rows) - len(tested)} rows that constants were fitted to",
        "dashed: 0.8 and 1.25 of published",
    ]
    if not_fitted:
        off = median(map(error, not_fitted))
        lines.insert(0, f"filled: {len(tested)} rows not fitted to, median error {off:.1%}")
    for number, words in enumerate(lines):
        body += svg.text(80, 138 + 16 * number, words)
    return svg.picture(580, 525, f"{len(rows)} published rows, predicted without a GPU", body)


def kind(row: Row) -> str:
    task = row.tree.get("task", "pretrain")
    if task == "diffusion":
        return "video"
    return {"pretrain": "pretraining", "grpo": "GRPO"}.get(task, "fine-tuning")


# ------------------------------------------------------------------------------------------------------------- pipeline


def pipeline(rows: list[Row], name: str) -> str:
    """Return each pipeline rank's actions over the step of row `name`. Raises InputError if it has no pipeline."""
    row = next((row for row in rows if row.name == name), None)
    if row is None or not row.results["simulated"].get("timeline"):
        raise InputError(
            f"--row={name} is no simulated row with a pipeline (see bench.py --list)"
        )
    step, lanes = row.results["simulated"]["step_time_s"], row.results["simulated"]["timeline"]
    colors = {f"c{number}": color for number, color in enumerate(svg.COLORS)} | {"idle": "#eee"}
    style = "".join(f".{name}{{fill:{color}}}" for name, color in colors.items())
    names = timeline_actions(lanes) | {"idle: the bubble": "idle"}
    busy = "".join(
        svg.text(
            len(lanes[0]) + 48,
            rank * (LANE + 3) + 11,
            f"{1 - lane.count('.') / len(lane):.0%} busy",
        )
        for rank, lane in enumerate(lanes)
    )
    body = f"<style>{style}</style>" + svg.text(
        50, 18, f"{name}: one step of {step:.3g} s, simulated"
    )
    body += f'<g transform="translate(10 28)">{draw_lanes(lanes)}{busy}</g>'
    below = 36 + len(lanes) * (LANE + 3)
    body += svg.legend({name: colors[used] for name, used in names.items()}, 50, below)
    return svg.picture(
        len(lanes[0]) + 120, below + 16 * len(names) + 8, f"pipeline of {name}", body
    )


# --------------------------------------------------------------------------------------------------------------- layout


DARK = "#1a1a1a"


def layout(pp: int, dp: int, cp: int, tp: int, ep: int) -> str:
    """Draw the ranks as floors of tiles, one floor a pipeline stage; color says which experts a rank holds.

    Ranks count tensor-parallel neighbors first, then context, data, and pipeline stages (parallel/mesh.py).
    """
    # half a tile's width and height, and a floor's height
    wide, high = 76, 34
    floor = high * (dp * cp + tp) + 40
    left = wide * dp * cp + 230

    def place(stage: float, row: float, tensor: float) -> tuple[float, float]:
        return left + wide * (tensor - row), 50 + floor * stage + high * (tensor + row)

    body = ""
    for stage, data, context, tensor in product(range(pp), range(dp), range(cp), range(tp)):
        row = data * cp + context
        # number of the rank in its stage
        inside = row * tp + tensor
        x, y = place(stage, row, tensor)
        corners = f"{x},{y + 3} {x + wide - 6},{y + high} {x},{y + 2 * high - 3} {x - wide + 6},{y + high}"
        body += f'<polygon points="{corners}" fill="{svg.COLORS[inside % ep]}" fill-opacity="0.35" stroke="#595959"/>'
        number = stage * dp * cp * tp + inside
        body += svg.text(x, y + high - 2, f"rank {number}", "middle", DARK)
        body += svg.text(x, y + high + 12, f"dp{data} cp{context} tp{tensor}", "middle")
    for stage in range(pp):
        below = place(stage, dp * cp, tp)[1]
        body += svg.text(12, below - 30, f"pipeline stage {stage} of {pp}", color=DARK)
    # each arrow lies beside the edge of the floor along which its ranks are numbered
    body += axis(
        (place(0, -0.15, 0.35), place(0, -0.15, tp - 0.35)),
        f"tp={tp}: parts of each matrix, for the same tokens",
        "all-gather, reduce-scatter of activations",
        raised=-15,
    )
    body += axis(
        (place(0, 0.35, -0.15), place(0, cp - 0.35, -0.15)),
        f"cp={cp}: parts of each sequence",
        "all-gather of keys and values",
        "end",
        raised=-15,
    )
    body += axis(
        (place(0, cp * 0.75, -0.5), place(0, cp * (dp - 0.25), -0.5)),
        f"dp={dp}: other sequences; weights sharded (FSDP2)",
        "all-gather of weights, reduce-scatter of gradients",
        "end",
        raised=-15,
    )
    body += axis(
        (place(0, 0.35, tp + 0.15), place(0, ep // tp - 0.35, tp + 0.15)),
        f"ep={ep}: one color holds the same 1 / {ep} of the experts",
        "all-to-all of tokens between the colors",
        raised=15,
    )
    side = left + wide * (tp + 0.5)
    body += axis(
        ((side, place(0, 0, tp + 2)[1]), (side, place(1, 0, tp)[1])),
        f"pp={pp}: layers, one floor a stage",
        "send activations, and gradients back",
    )
    title = f"{pp * dp * cp * tp} ranks = {pp} stages x {dp} data x {cp} context x {tp} tensor"
    width = left + wide * tp + 270
    return svg.picture(width, floor * pp + 36, title, svg.text(12, 24, title, color=DARK) + body)


def axis(ends: tuple, words: str, moved: str, anchor: str = "start", raised: float = 0) -> str:
    """Draw an arrow between two points (x, y): how ranks divide the work, and what is moved between them."""
    (x, y), (to_x, to_y) = ends
    beside = (x + to_x) / 2 + (8 if anchor == "start" else -8)
    middle = (y + to_y) / 2 + raised
    drawn = f"<g><title>{words}</title>{arrow([ends[1], ends[0]])}{arrow(list(ends))}</g>"
    drawn += svg.text(beside, middle - 3, words, anchor, DARK)
    return drawn + svg.text(beside, middle + 11, moved, anchor)


def arrow(points: list[tuple[float, float]]) -> str:
    """Draw a line through points (x, y), with a head at the last one."""
    (x, y), (tip_x, tip_y) = points[-2:]
    length = math.hypot(tip_x - x, tip_y - y)
    along_x, along_y = 7 * (tip_x - x) / length, 7 * (tip_y - y) / length
    corners = [
        (tip_x, tip_y),
        (tip_x - along_x - along_y / 2, tip_y - along_y + along_x / 2),
        (tip_x - along_x + along_y / 2, tip_y - along_y - along_x / 2),
    ]
    head = " ".join(f"{x:.4g},{y:.4g}" for x, y in corners)
    return svg.line(points, "#595959") + f'<polygon points="{head}" fill="#595959"/>'


# ---------------------------------------------------------------------------------------------------------------- rooms

PURPOSES = {
    "models": "plain networks and their zoo",
    "parallel": "one technique of parallelism a file",
    "training": "loss, optimizers, objectives, the step",
    "rollout": "a sampler with paged KV caches",
    "grpo": "rewards, advantages, weight sync",
    "formats": "Hugging Face and PEFT files",
    "data": "text, chats, videos as rows",
    "run/config": "read, check, explain settings",
    "run/launch": "start, watch, end processes",
    "run/checkpoint": "continue exactly, on any layout",
    "run/monitor": "metrics, health, FLOPs, curves",
    "run/tasks": "a whole run, step by step",
    "bench": "throughput beside published rows",
    "simulator": "steps predicted without GPUs",
    "examples": "all on one screen; toy worlds",
    "commands": "one file a command",
}
CORE = ("models", "parallel", "training", "rollout", "grpo")
ROWS = (CORE, ("formats", "data"), tuple(name for name in PURPOSES if name[:4] == "run/"))
ROWS += (("bench", "simulator", "examples", "commands"),)
BOX_WIDTH, BOX_HEIGHT, ACROSS, DOWN = 156, 62, 176, 116


def rooms() -> str:
    """Draw the folders of the package, and an arrow from each to those that it imports.

    An arrow that follows from others is left out. What stands in one file has no box.
    """
    places = {
        name: (12 + ACROSS * column, 44 + DOWN * row)
        for row, names in enumerate(ROWS)
        for column, name in enumerate(names)
    }
    width = 12 + ACROSS * max(map(len, ROWS))
    line, inside = 44 + DOWN - 38, 44 + 2 * DOWN - 16
    body = svg.text(
        12, 22, "An arrow: imports. Those that follow from others are left out; none points down."
    )
    body += svg.line([(12, line), (width - 20, line)], "#8a8a8a", "4 4")
    beside = 12 + ACROSS * len(ROWS[1]) + 20
    body += svg.text(beside, line + 60, "above the line: the core, which people read and fork")
    body += svg.text(beside, line + 76, "below it: tools, which the core never imports")
    body += (
        f'<rect x="4" y="{inside}" width="{width - 12}" height="{BOX_HEIGHT + 24}" rx="6" '
        f'fill="#f2f2f2"/>{svg.text(width - 20, inside - 5, "run: a run from start to end", "end")}'
    )
    for number, (start, target) in enumerate(arrows_of_rooms()):
        way = arrow(route(places[start], places[target], 4 * (number % 5)))
        body += f"<g><title>{start} imports {target}</title>{way}</g>"
    for name, (x, y) in places.items():
        body += box(name, x, y)
    return svg.picture(width, 44 + DOWN * len(ROWS) - 24, "the rooms of minitrain", body)


def box(name: str, x: float, y: float) -> str:
    """Draw a room with its purpose and its size."""
    color = svg.COLORS[0] if name in CORE else svg.COLORS[2]
    short = name.removeprefix("run/")
    files = [file for file in TREES if drawn_room(file) == name]
    lines = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files)
    drawn = (
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4" fill="#fff" stroke="{color}" '
        f'stroke-width="1.5"/><g font-weight="bold">{svg.text(x + 8, y + 18, short, color=DARK)}</g>'
    )
    drawn += svg.text(x + BOX_WIDTH - 8, y + 18, f"{lines:,} lines", "end")
    for number, words in enumerate(wrap(PURPOSES[name], 24)):
        drawn += svg.text(x + 8, y + 37 + 14 * number, words)
    return drawn


def drawn_room(file: Path) -> str:
    """Return the room of a file of the package; those inside of data/ are one."""
    name = room(file)
    return name if name.startswith("run/") else name.partition("/")[0]


def arrows_of_rooms() -> list[tuple[str, str]]:
    """Return (room, room it imports) of all folders, without those that follow from others."""
    imports = {Path(name): set() for name in PURPOSES}
    for file, tree in TREES.items():
        name = drawn_room(file)
        names = {drawn_room(target) for target in imported(tree)} & PURPOSES.keys()
        if name in PURPOSES:
            imports[Path(name)] |= {Path(other) for other in names - {name}}
    return [
        (start.as_posix(), target.as_posix())
        for start, targets in imports.items()
        for target in sorted(targets)
        if not any(target in reachable(other, imports) for other in targets)
    ]


def route(start: tuple[float, float], target: tuple[float, float], offset: float) -> list:
    """Return the corners of an arrow between two boxes, given their upper left corners (x, y)."""
    (x, y), (to_x, to_y) = start, target
    middle = BOX_HEIGHT / 2
    if y == to_y and x - to_x == ACROSS:
        return [(x, y + middle), (to_x + BOX_WIDTH, y + middle)]
    x, to_x = x + BOX_WIDTH / 2 - offset, to_x + BOX_WIDTH / 2 + offset
    if y == to_y:
        between = y + BOX_HEIGHT + 12
        return [(x, y + BOX_HEIGHT), (x, between), (to_x, between), (to_x, y + BOX_HEIGHT)]
    between = y - 18 + offset / 2
    return [(x, y), (x, between), (to_x, between), (to_x, to_y + BOX_HEIGHT)]


if __name__ == "__main__":
    cli.run(main)
