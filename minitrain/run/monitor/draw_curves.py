"""Draw the curves of runs from their metrics.jsonl as one SVG file."""

from itertools import accumulate, chain, cycle

from minitrain.run.monitor import svg

# title of a panel -> the keys of metrics.jsonl that it shows
PANELS = {
    "loss; dots: validation": ("loss", "val_loss"),
    "validation (bits per byte)": ("val_bits_per_byte",),
    "reward; dots: greedy responses right, held out": ("reward", "val_greedy"),
    "validation (exact match)": ("val_exact_match",),
    "pairs told apart; dots: validation": ("reward_accuracy", "val_reward_accuracy"),
    "learning rate": ("lr",),
    "tokens/s": ("tokens_per_sec",),
}
# noisy numbers, which are drawn pale, with a moving average over them
SMOOTHED = ("loss", "reward", "reward_accuracy", "tokens_per_sec")
# how many points on either side the moving average includes, as a share of all points
REACH = 1 / 40
# opacity of the pale line
PALE = 0.25
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
        # a single point makes no curve
        if any(len(numbers) > 1 for numbers in found.values()):
            panels.append((title, found))
    for number, (title, found) in enumerate(panels):
        row, column = divmod(number, 2)
        # two panels per row; the last of an odd number fills its row
        width = PICTURE_WIDTH * (2 if column == 0 and number == len(panels) - 1 else 1)
        left = PICTURE_WIDTH * column
        body += panel(title, found, colors, left, top + HEIGHT * row, width)
    if not panels:
        body += svg.text(60, top + 20, "no curve yet: there are fewer than two steps")
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


def smooth(curve: list) -> list:
    """Return the moving average of (step, value), over REACH of all points on either side.

    Near the ends it includes fewer points, as many on one side as on the other.
    """
    reach = int(len(curve) * REACH)
    sums = [0.0, *accumulate(value for _, value in curve)]
    means = []
    for i, (step, _) in enumerate(curve):
        half = min(reach, i, len(curve) - 1 - i)
        means.append((step, (sums[i + half + 1] - sums[i - half]) / (2 * half + 1)))
    return means


def panel(
    title: str, found: dict, colors: dict[str, str], left: float, above: float, width: float
) -> str:
    """Draw the points of each (run, key) as a line; those of a validation also as dots.

    Noisy lines are pale, with their moving average over them.
    """
    steps, values = zip(*chain(*found.values()), strict=True)
    x = svg.make_axis(steps, left + 60, left + width - 10)
    y = svg.make_axis(values, above + HEIGHT - 40, above + 25)
    drawn = svg.grid(x, y, "step", title)
    for (run, key), numbers in found.items():
        places = [(x(step), y(value)) for step, value in numbers]
        noisy = key in SMOOTHED and len(numbers) * REACH >= 1
        drawn += svg.line(places, colors[run], opacity=PALE if noisy else 1)
        if noisy:
            means = [(x(step), y(value)) for step, value in smooth(numbers)]
            drawn += svg.line(means, colors[run])
        if key.startswith("val_"):
            drawn += svg.dots(places, colors[run])
    return drawn
