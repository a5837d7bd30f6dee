"""Line charts as SVG, by hand, without a library for pictures. Texts in them stay texts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from rllib_nlac.inputs.foreign import visible

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 44
COLOURS = ("#1f77b4", "#e6842a", "#2ca02c", "#9467bd", "#555555")
DASHES = ("", "6 4", "2 3", "8 3 2 3", "1 4")  # readable without colour
LARGEST = 1e100  # beyond it the axes overflow
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        name: In the legend.
        points: x and y; those that are not finite are left out.
        band: Low and high of each point, NaN where there is none; empty: none at all.
    """

    name: str
    points: Sequence[Point]
    band: Sequence[Point] = ()


@dataclass(frozen=True)
class Chart:
    """Curves over one pair of axes.

    Attributes:
        title: Above it.
        x, y: What the axes show.
        lines: The curves.
        y_range: Range of the vertical axis; None: the range of the points.
        width: Width of the picture, in pixels.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    y_range: Point | None = None
    width: int = WIDTH

    def svg(self) -> str:
        """The picture."""
        xs = _range([x for line in self.lines for x, y in line.points if _finite(x, y)])
        ys = self.y_range or _range(
            [y for line in self.lines for x, y in line.points if _finite(x, y)]
            + [y for line in self.lines for pair in line.band for y in pair if _finite(y)]
        )
        body = "\n".join(self._body(xs, ys))
        size = f'width="{self.width}" height="{HEIGHT}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {HEIGHT}" {size} '
            f'font-family="sans-serif" font-size="12" role="img">\n<title>{_text(self.title)}</title>\n'
            f'<rect {size} fill="white"/>\n{body}\n</svg>\n'
        )

    def _body(self, xs: Point, ys: Point) -> Iterator[str]:
        right, bottom = self.width - RIGHT, HEIGHT - BOTTOM

        def px(x: float) -> float:
            return round(LEFT + (x - xs[0]) / (xs[1] - xs[0]) * (right - LEFT), 1)

        def py(y: float) -> float:
            return round(bottom - (y - ys[0]) / (ys[1] - ys[0]) * (bottom - TOP), 1)

        yield f'<text x="{LEFT}" y="18" font-size="14">{_text(self.title)}</text>'
        for tick in ticks(*ys):
            yield f'<line x1="{LEFT}" x2="{right}" y1="{py(tick)}" y2="{py(tick)}" stroke="#ddd"/>'
            yield f'<text x="{LEFT - 6}" y="{py(tick) + 4}" text-anchor="end">{tick:g}</text>'
        for tick in ticks(*xs):
            yield f'<text x="{px(tick)}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
        yield f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#555"/>'
        yield f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{_text(self.x)}</text>'
        yield f'<text transform="translate(16 {(TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">{_text(self.y)}</text>'
        for number, line in enumerate(self.lines):
            colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
            band = [
                (x, *pair) for (x, y), pair in zip(line.points, line.band, strict=False) if _finite(x, y) and _finite(*pair)
            ]
            if band:
                there = [f"{px(x)} {py(high)}" for x, _, high in band]
                back = [f"{px(x)} {py(low)}" for x, low, _ in reversed(band)]
                outline = "L".join((*there, *back))
                yield f'<path d="M{outline}Z" fill="{colour}" fill-opacity="0.15" stroke="{colour}" stroke-opacity="0.3"/>'
            known = [(px(x), py(y)) for x, y in line.points if _finite(x, y)]
            if len(known) > 1:
                path = "L".join(f"{x} {y}" for x, y in known)
                yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
            for x, y in known:
                yield f'<circle cx="{x}" cy="{y}" r="3.0" fill="{colour}" fill-opacity="0.8"/>'
            place = LEFT + 10 + number * (right - LEFT) / max(len(self.lines), 1)
            yield f'<path d="M{place:.0f} {TOP - 6}h22" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
            yield f'<text x="{place + 28:.0f}" y="{TOP - 2}" font-size="11">{_text(line.name)}</text>'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers within a range, about so many."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= next((factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= count), 10)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _range(values: Sequence[float]) -> Point:
    """From the least to the largest, with some room where they are alike."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    return low - 0.5 - abs(low) / 2, high + 0.5 + abs(high) / 2


def _finite(*values: float) -> bool:
    return all(abs(value) < LARGEST for value in values)  # NaN is not


def _text(text: str) -> str:
    """XML holds no control characters, so they are written out."""
    return escape(visible(" ".join(text.split()))).replace("\u200c", "").replace("\u200d", "")
