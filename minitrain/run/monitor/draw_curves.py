"""Draw the curves of runs from their metrics.jsonl as one SVG file."""

from itertools import chain, cycle

from minitrain.run.monitor import svg

# title of a panel -> the keys of metrics.jsonl that it shows
PANELS = {
    "loss; dots: validation": ("loss", "val_loss"),
    "validation (bits per byte)": ("val_bits_per_byte",),
    "reward; dots: greedy responses right, held out": ("reward", "val_greedy"),
    "validation (exact match)": ("val_exact_match",),
    "learning rate": ("lr",),
    "tokens/s": ("tokens_per_sec",),
}
# size of a panel in pixels
PICTURE_WIDTH = 460
HEIGHT = 220
# of longer runs, only every n-th step is drawn
MOST_POINTS = 2000


def curves(runs: dict[str, list[dict]]) -> str:
    """Return an SVG file of those PANELS for which some run has numbers, with one color per run.

    runs: name -> lines of its metrics.jsonl.
    """
    colors = dict(zip(runs, cycle(svg.COLORS), strict=False))
    body = svg.legend(colors, 60, 10)
    top = 16 * len(runs) + 14
    panels = []
    for title, keys in PANELS.items():
        found = {(run, key): points(runs[run], key) for run in runs for key in keys}
        if any(found.values()):
            panels.append((title, found))
    for number, (title, found) in enumerate(panels):
        row, column = divmod(number, 2)
        # two panels per row; the last of an odd number fills its row
        width = PICTURE_WIDTH * (2 if column == 0 and number == len(panels) - 1 else 1)
        left = PICTURE_WIDTH * column
        body += panel(title, found, colors, left, top + HEIGHT * row, width)
    height = top + HEIGHT * ((len(panels) + 1) // 2) + 10
    title = f"training curves of {', '.join(runs)}"
    return svg.picture(2 * PICTURE_WIDTH + 10, height, title, body)


def points(lines: list[dict], key: str) -> list:
    """Return (step, value) of the lines that have a number for `key`; skipped steps have null."""
    found = [
        (line["step"], line[key]) for line in lines if isinstance(line.get(key), int | float)
    ]
    # counted from the end, so that the last point is always drawn
    return found[:: -(len(found) // MOST_POINTS + 1)][::-1]


def panel(
    title: str, found: dict, colors: dict[str, str], left: float, above: float, width: float
) -> str:
    """Draw the points of each (run, key) as a line; those of a validation also as dots."""
    steps, values = zip(*chain(*found.values()), strict=True)
    x = svg.make_axis(steps, left + 60, left + width - 10)
    y = svg.make_axis(values, above + HEIGHT - 40, above + 25)
    drawn = svg.grid(x, y, "step", title)
    for (run, key), numbers in found.items():
        places = [(x(step), y(value)) for step, value in numbers]
        drawn += svg.line(places, colors[run])
        if key.startswith("val_"):
            drawn += svg.dots(places, colors[run])
    return drawn
