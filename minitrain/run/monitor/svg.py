"""Draw plots as SVG text: axes, lines, dots, legends. Needs only Python's standard library."""

import math
from dataclasses import dataclass
from html import escape

# Okabe and Ito's, which color-blind readers can distinguish
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


@dataclass(frozen=True)
class Axis:
    """A linear scale that maps the values `low` to `high` to the pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Return at most nine multiples of 1, 2 or 5 times a power of ten."""
        span = self.high - self.low
        power = 10.0 ** (math.floor(math.log10(span)) - 1)
        step = next(power * n for n in (1, 2, 5, 10, 20) if span <= 8 * power * n)
        numbers = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        return [n * step for n in numbers]


def make_axis(values: list[float], start: float, end: float) -> Axis:
    """Return an axis for all values, with some room at both ends."""
    low = min(values)
    high = max(values)
    room = 0.05 * (high - low) or 0.05 * max(abs(high), 1.0)
    return Axis(low - room, high + room, start, end)


def grid(x: Axis, y: Axis, x_label: str, y_label: str) -> str:
    """Draw thin lines at the ticks of both axes, with their values and the axes' labels."""
    drawn = text((x.start + x.end) / 2, y.start + 32, x_label, "middle")
    drawn += text(x.start - 6, y.end - 10, y_label)
    for value in x.ticks():
        drawn += line([(x(value), y.start), (x(value), y.end)], "#d5d5d5")
        drawn += text(x(value), y.start + 14, f"{value:,.6g}", "middle")
    for value in y.ticks():
        drawn += line([(x.start, y(value)), (x.end, y(value))], "#d5d5d5")
        drawn += text(x.start - 6, y(value) + 4, f"{value:,.6g}", "end")
    return drawn


def line(points: list, color: str, dashes: str = "none", opacity: float = 1) -> str:
    """Draw a line through points (x, y)."""
    places = " ".join(f"{x:g},{y:g}" for x, y in points)
    pale = f' opacity="{opacity:g}"' if opacity < 1 else ""
    return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-dasharray="{dashes}"{pale}/>'


def dots(points: list, color: str) -> str:
    return "".join(f'<circle cx="{x:g}" cy="{y:g}" r="3" fill="{color}"/>' for x, y in points)


def text(x: float, y: float, words: str, anchor: str = "start", color: str = "#595959") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'
    )


def legend(names: dict[str, str], x: float, y: float) -> str:
    """List names below each other, each after a box of its color. names: name -> color."""
    drawn = ""
    for name, color in names.items():
        drawn += f'<rect x="{x:g}" y="{y:g}" width="10" height="10" fill="{color}"/>{text(x + 15, y + 9, name)}'
        y += 16
    return drawn


def picture(width: int, height: int, title: str, body: str) -> str:
    """Return a whole SVG file with a white background, which is readable on dark pages too."""
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" \
height="{height}" \
font-family="system-ui, sans-serif" font-size="11" role="img"><title>{escape(title)}</title>\
<rect width="100%" height="100%" fill="#fff"/>{body}</svg>
"""
