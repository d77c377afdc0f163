"""Draw plots as SVG text: axes, lines, dots, legends; and training curves. Needs nothing but Python."""

import math
from dataclasses import dataclass
from html import escape

COLORS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
)  # Okabe and Ito: for color-blind readers
PANELS = {  # of curves: their titles and the keys of metrics.jsonl that they show
    "loss; dots: validation (nats per token)": ("loss", "val_loss"),
    "validation (bits per byte)": ("val_bits_per_byte",),
    "reward; dots: validation": ("reward", "val_reward"),
    "validation (exact match)": ("val_exact_match",),
    "learning rate": ("lr",),
}
WIDTH, HEIGHT = 460, 220  # of a panel, in pixels


@dataclass(frozen=True)
class Axis:
    """A scale from values `low` to `high` to pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        scale = math.log if self.log else float
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Return round values: powers of ten on a log scale, else at most nine multiples of 1, 2 or 5."""
        if self.log:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**power for power in powers]
        span = self.high - self.low
        smallest = 10.0 ** (math.floor(math.log10(span)) - 1)
        step = next(
            smallest * factor for factor in (1, 2, 5, 10, 20) if span <= 8 * smallest * factor
        )
        return [
            n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        ]


def make_axis(values: list[float], start: float, end: float, log: bool = False) -> Axis:
    """Return an axis that holds all values, with a little room on both sides."""
    low, high = min(values), max(values)
    if log:
        return Axis(low / 1.3, high * 1.3, start, end, log)
    room = 0.05 * (high - low) or 0.05 * max(abs(high), 1.0)
    return Axis(low - room, high + room, start, end)


def grid(x: Axis, y: Axis, x_label: str, y_label: str) -> str:
    """Draw thin lines at the ticks of both axes, with their values and the axes' labels."""
    drawn = text((x.start + x.end) / 2, y.start + 32, x_label, "middle") + text(
        x.start - 6, y.end - 10, y_label
    )
    for value in x.ticks():
        drawn += line([(x(value), y.start), (x(value), y.end)], "#d5d5d5")
        drawn += text(x(value), y.start + 14, f"{value:,.6g}", "middle")
    for value in y.ticks():
        drawn += line([(x.start, y(value)), (x.end, y(value))], "#d5d5d5")
        drawn += text(x.start - 6, y(value) + 4, f"{value:,.6g}", "end")
    return drawn


def line(points: list[tuple[float, float]], color: str, dashes: str = "none") -> str:
    places = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-dasharray="{dashes}"/>'


def text(x: float, y: float, words: str, anchor: str = "start", color: str = "#595959") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'


def legend(names: dict[str, str], x: float, y: float) -> str:
    """List names, each behind a box of its color, downwards from (x, y)."""
    drawn = ""
    for number, (name, color) in enumerate(names.items()):
        top = y + 16 * number
        drawn += f'<rect x="{x:g}" y="{top:g}" width="10" height="10" fill="{color}"/>{text(x + 15, top + 9, name)}'
    return drawn


def picture(width: int, height: int, title: str, body: str) -> str:
    """Return a whole SVG file, on white so that it can be read on dark pages too."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="11" role="img"><title>{escape(title)}</title>'
        f'<rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'
    )


def curves(runs: dict[str, list[dict]]) -> str:
    """Return an SVG file of the PANELS that any run has numbers for, over steps, one color a run.

    runs: the lines of each run's metrics.jsonl.
    """
    colors = {run: COLORS[number % len(COLORS)] for number, run in enumerate(runs)}
    body, panels, top = legend(colors, 60, 10), 0, 16 * len(runs) + 14
    for title, keys in PANELS.items():
        found = {}
        for run, lines in runs.items():
            for key in keys:
                points = [
                    (each["step"], each[key])
                    for each in lines
                    if isinstance(each.get(key), int | float)
                ]
                if points:
                    found[run, key] = points
        if found:
            left, above = WIDTH * (panels % 2), top + HEIGHT * (panels // 2)
            body += panel(title, found, colors, left, above)
            panels += 1
    height = top + HEIGHT * ((panels + 1) // 2) + 10
    return picture(2 * WIDTH + 10, height, f"training curves of {', '.join(runs)}", body)


def panel(title: str, found: dict, colors: dict[str, str], left: float, above: float) -> str:
    """Draw the points of each (run, key) as a line, with dots for validation."""
    steps, values = zip(*(point for points in found.values() for point in points), strict=True)
    x = make_axis(steps, left + 60, left + WIDTH - 10)
    y = make_axis(values, above + HEIGHT - 40, above + 25)
    drawn = grid(x, y, "step", title)
    for (run, key), points in found.items():
        places = [(x(step), y(value)) for step, value in points]
        drawn += line(places, colors[run])
        if key.startswith("val_"):
            drawn += "".join(
                f'<circle cx="{px:g}" cy="{py:g}" r="3" fill="{colors[run]}"/>' for px, py in places
            )
    return drawn
