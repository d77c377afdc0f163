"""Draw plots as SVG text: axes with ticks, lines, dots and a legend. Needs nothing but Python."""

import math
from dataclasses import dataclass
from html import escape

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")  # Okabe and Ito: for color-blind readers
SOFT, LINE = "#595959", "#d5d5d5"


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
        """Return round values: powers of ten on a log scale, else at most eight multiples of 1, 2 or 5."""
        if self.log:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**power for power in powers]
        span = self.high - self.low
        smallest = 10.0 ** (math.floor(math.log10(span)) - 1)
        step = next(smallest * factor for factor in (1, 2, 5, 10, 20) if span <= 8 * smallest * factor)
        return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def axis(values: list[float], start: float, end: float, log: bool = False) -> Axis:
    """Return an axis that holds all values, with a little room on both sides."""
    low, high = min(values), max(values)
    if log:
        return Axis(low / 1.3, high * 1.3, start, end, log)
    room = 0.05 * (high - low) or max(abs(high), 1.0) * 0.05
    return Axis(low - room, high + room, start, end)


def grid(x: Axis, y: Axis, x_label: str, y_label: str) -> str:
    """Draw the ticks of both axes as thin lines with their values, and the axes' labels."""
    parts = []
    for value in x.ticks():
        parts.append(line([(x(value), y.start), (x(value), y.end)], LINE))
        parts.append(text(x(value), y.start + 14, f"{value:,.6g}", "middle"))
    for value in y.ticks():
        parts.append(line([(x.start, y(value)), (x.end, y(value))], LINE))
        parts.append(text(x.start - 6, y(value) + 4, f"{value:,.6g}", "end"))
    parts.append(text((x.start + x.end) / 2, y.start + 32, x_label, "middle"))
    parts.append(text(x.start - 6, y.end - 10, y_label))
    return "".join(parts)


def line(points: list[tuple[float, float]], color: str, width: float = 1, dashes: str = "") -> str:
    places = " ".join(f"{x:g},{y:g}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{width:g}"{dashed}/>'


def text(x: float, y: float, words: str, anchor: str = "start", color: str = SOFT) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'


def legend(names: dict[str, str], x: float, y: float) -> str:
    """List names, each behind a box of its color, downwards from (x, y)."""
    parts = []
    for number, (name, color) in enumerate(names.items()):
        top = y + 16 * number
        parts.append(f'<rect x="{x:g}" y="{top:g}" width="10" height="10" fill="{color}"/>')
        parts.append(text(x + 15, top + 9, name))
    return "".join(parts)


def picture(width: int, height: int, title: str, body: str) -> str:
    """Return a whole SVG file, on white so that it can be read on dark pages too."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="11" role="img"><title>{escape(title)}</title>'
        f'<rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'
    )
