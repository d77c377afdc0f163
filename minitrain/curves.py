"""Draw training curves: python -m minitrain.curves RUN... [--out FILE.svg].

Reads the metrics.jsonl of each run's out_dir and draws loss, validation, reward and learning rate over steps, one color
a run. Without --out, curves.svg goes into the first run's folder.
"""

from collections.abc import Sequence
from pathlib import Path

from minitrain import svg
from minitrain.errors import InputError, refused
from minitrain.run import cli
from minitrain.run.metrics import read_lines

KEYS = {  # panels: their names and the keys of metrics.jsonl that they show; the second as dots
    "loss; dots: validation (nats per token)": ("loss", "val_loss"),
    "validation (bits per byte)": ("val_bits_per_byte",),
    "reward; dots: validation": ("reward", "val_reward"),
    "validation (exact match)": ("val_exact_match",),
    "learning rate": ("lr",),
}
WIDTH, HEIGHT = 460, 220  # of a panel


def main(arguments: list[str]) -> None:
    parser = cli.Parser(prog="python -m minitrain.curves", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=cli.home_path, help="a run's out_dir")
    parser.add_argument("--out", metavar="FILE", type=cli.home_path)
    options = parser.parse_args(arguments)
    file = Path(options.out or Path(options.runs[0]) / "curves.svg")
    drawing = draw({run: read_run(Path(run)) for run in options.runs})
    with refused(f"{file} cannot be written"):
        file.write_text(drawing, encoding="utf-8")
    print(f"{file}: open it in a browser")


def read_run(folder: Path) -> list[dict]:
    """Return the steps' numbers of a run. Raises InputError if it has none."""
    lines, _ = read_lines(folder / "metrics.jsonl")
    if not lines:
        raise InputError(f"{folder} has no metrics.jsonl with steps (give a run's out_dir)")
    return lines


def draw(runs: dict[str, list[dict]]) -> str:
    """Return an SVG file with one panel for each of KEYS that any run has."""
    panels = []
    for label, keys in KEYS.items():
        curves = {(run, key): points(lines, key) for run, lines in runs.items() for key in keys}
        curves = {name: curve for name, curve in curves.items() if curve}
        if curves:
            panels.append((label, curves))
    colors = {run: svg.COLORS[number % len(svg.COLORS)] for number, run in enumerate(runs)}
    top = 16 * len(runs) + 14
    body = svg.legend(colors, 60, 10)
    for number, (label, curves) in enumerate(panels):
        left, above = WIDTH * (number % 2), top + HEIGHT * (number // 2)
        body += panel(label, curves, colors, left, above)
    height = top + HEIGHT * ((len(panels) + 1) // 2) + 10
    return svg.picture(WIDTH * min(2, len(panels)) + 10, height, "training curves of " + ", ".join(runs), body)


def panel(label: str, curves: dict, colors: dict[str, str], left: float, above: float) -> str:
    places = [place for curve in curves.values() for place in curve]
    x = svg.axis([step for step, _ in places], left + 60, left + WIDTH - 10)
    y = svg.axis([value for _, value in places], above + HEIGHT - 40, above + 25)
    body = svg.grid(x, y, "step", label)
    for (run, key), curve in curves.items():
        drawn = [(x(step), y(value)) for step, value in curve]
        if key.startswith("val_"):
            body += "".join(f'<circle cx="{px:g}" cy="{py:g}" r="3" fill="{colors[run]}"/>' for px, py in drawn)
        body += svg.line(drawn, colors[run])
    return body


def points(lines: Sequence[dict], key: str) -> list[tuple[int, float]]:
    """Return (step, value) of the lines that have a finite number under `key`."""
    return [(line["step"], line[key]) for line in lines if isinstance(line.get(key), int | float)]


if __name__ == "__main__":
    cli.run(main)
