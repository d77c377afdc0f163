"""Draw the READMEs' pictures: python results/pictures/draw.py FILE.jsonl... [--row NAME] [--out FOLDER].

From results as bench.py's --json writes them, into FOLDER:
    accuracy.svg   predicted beside published figures, one dot a row
    pipeline.svg   the pipeline of --row over one step, as simulated
    layout.svg     ranks by tensor, context, data, expert and pipeline parallelism
"""

import math
from itertools import product
from pathlib import Path
from statistics import median

from minitrain.bench import results
from minitrain.bench.page import LANE, draw_lanes, timeline_actions
from minitrain.errors import InputError, refused
from minitrain.run.launch import cli
from minitrain.run.monitor import svg

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
    report = results.merge_results(
        [result for file in options.files for result in results.read_results(file)], ""
    )
    rows = [row for rows in report.tables.values() for row in rows if "simulated" in row.results]
    pictures = {
        "accuracy.svg": accuracy(rows),
        "pipeline.svg": pipeline(rows, options.row),
        "layout.svg": layout(pp=2, dp=2, cp=2, tp=2, ep=4),
    }
    folder = Path(options.out)
    with refused(f"--out={folder} cannot be written"):
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


def accuracy(rows: list[results.Row]) -> str:
    """Return predicted over published figures, both on log scales: filled dots for rows not fitted to."""
    if not rows:
        raise InputError(
            "no result here is a simulated published row (see bench.py --simulate --json FILE)"
        )
    held_back = results.held_back(rows)
    tested = {row.name for row in held_back}
    figures = [(row, row.published, row.published * results.predicted(row)) for row in rows]
    both = [value for _, *values in figures for value in values]
    low, high = min(both) / 1.3, max(both) * 1.3
    x, y = LogAxis(low, high, 60, 560), LogAxis(low, high, 480, 40)
    body = svg.grid(x, y, "published: tokens/s per GPU (video: TFLOP/s per GPU)", "predicted")
    for share, dashes in ((1.0, "none"), (0.8, "4 4"), (1.25, "4 4")):
        low, high = x.low * max(1.0, 1 / share), x.high * min(1.0, 1 / share)
        body += svg.line(
            [(x(low), y(low * share)), (x(high), y(high * share))], "#8a8a8a", dashes
        )
    for row, published, predicted in figures:
        color = TASKS[kind(row)]
        fill = color if row.name in tested else "#fff"
        body += (
            f'<circle cx="{x(published):g}" cy="{y(predicted):g}" r="4" fill="{fill}" stroke="{color}" '
            f'stroke-width="1.5" fill-opacity="0.8"><title>{row.name}: {predicted / published:.2f}</title></circle>'
        )
    body += svg.legend(TASKS, 80, 60)
    lines = [
        f"open: {len(rows) - len(tested)} rows that constants were fitted to",
        "dashed: 0.8 and 1.25 of published",
    ]
    if held_back:
        off = median(map(results.error, held_back))
        lines.insert(0, f"filled: {len(tested)} rows not fitted to, median error {off:.1%}")
    for number, words in enumerate(lines):
        body += svg.text(80, 138 + 16 * number, words)
    return svg.picture(580, 525, f"{len(rows)} published rows, predicted without a GPU", body)


def kind(row: results.Row) -> str:
    task = row.tree.get("task", "pretrain")
    if task == "diffusion":
        return "video"
    return {"pretrain": "pretraining", "grpo": "GRPO"}.get(task, "fine-tuning")


# ------------------------------------------------------------------------------------------------------------- pipeline


def pipeline(rows: list[results.Row], name: str) -> str:
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


def layout(pp: int, dp: int, cp: int, tp: int, ep: int) -> str:
    """Return the ranks as floors of tiles, one floor a pipeline stage; color says which experts a rank holds.

    Ranks count tensor-parallel neighbors first, then context, data, and pipeline stages (parallel/mesh.py).
    """
    wide, high, floor = (
        76,
        34,
        34 * (dp * cp + tp) + 12,
    )  # half a tile's width and height; a floor's height
    left, heights = wide * dp * cp + 10, [floor * (pp - 1 - stage) + 50 for stage in range(pp)]
    body = ""
    for stage, data, context, tensor in product(range(pp), range(dp), range(cp), range(tp)):
        row = data * cp + context
        inside = row * tp + tensor  # number of the rank in its stage
        x, y = left + wide * (tensor - row), heights[stage] + high * (tensor + row)
        corners = f"{x},{y + 3} {x + wide - 6},{y + high} {x},{y + 2 * high - 3} {x - wide + 6},{y + high}"
        body += f'<polygon points="{corners}" fill="{svg.COLORS[inside % ep]}" fill-opacity="0.35" stroke="#595959"/>'
        body += svg.text(
            x, y + high - 2, f"rank {stage * dp * cp * tp + inside}", "middle", "#1a1a1a"
        )
        body += svg.text(x, y + high + 12, f"dp{data} cp{context} tp{tensor}", "middle")
    for stage, y in enumerate(heights):
        body += svg.text(12, y + 20, f"pipeline stage {stage} of {pp}", color="#1a1a1a")
    lines = [
        f"tp={tp}: parts of each matrix, for the same tokens",
        f"cp={cp}: parts of each sequence",
        f"dp={dp}: other sequences; weights sharded (FSDP2)",
        f"pp={pp}: layers, one floor a stage",
        f"ep={ep}: experts; one color holds the same E / {ep}",
    ]
    right = left + wide * tp
    for number, words in enumerate(lines):
        body += svg.text(
            right, heights[0] + high * dp * cp - 12 + 18 * number, words, color="#1a1a1a"
        )
    title = f"{pp * dp * cp * tp} ranks = {pp} stages x {dp} data x {cp} context x {tp} tensor"
    return svg.picture(
        right + 280, floor * pp + 46, title, svg.text(12, 24, title, color="#1a1a1a") + body
    )


if __name__ == "__main__":
    cli.run(main)
