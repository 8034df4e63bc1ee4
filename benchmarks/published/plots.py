"""Pictures of the score in SVG: predicted against published times, and the error by model size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_WIDTH, _HEIGHT = 720, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 170, 16, 46
# Colours that are distinguishable in print and for most colour-blind readers (Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic axis: its title and its ends, which are powers of ten."""

    title: str
    low: float
    high: float

    @classmethod
    def over(cls, title: str, values: Sequence[float]) -> Axis:
        """The axis that holds all values."""
        low, high = (math.log10(end) for end in (min(values), max(values)))
        return cls(title, math.floor(low), max(math.ceil(high), math.floor(low) + 1))

    def share(self, value: float) -> float:
        """Where a value is, 0 to 1."""
        return (math.log10(value) - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Powers of ten with their text."""
        return [(10.0**n, f"{10.0**n:g}") for n in range(int(self.low), int(self.high) + 1)]


def times(points: Sequence[dict[str, Any]]) -> str:
    """Predicted against published seconds of a step; the line is where they are equal."""
    shown = [point for point in points if point["published"]]
    every = [point[name] for point in shown for name in ("published", "predicted")]
    across, up = Axis.over("published, seconds", every), Axis.over("predicted, seconds", every)
    dots = [(point["source"], point["published"], point["predicted"]) for point in shown]
    return _picture(dots, across, up, equal=True)


def errors(points: Sequence[dict[str, Any]]) -> str:
    """Predicted over published seconds against the number of parameters; the line is at 1."""
    shown = [point for point in points if point["published"]]
    dots = [
        (point["source"], point["parameters"] / 1e9, point["predicted"] / point["published"])
        for point in shown
    ]
    across = Axis.over("parameters, in 1e9", [dot[1] for dot in dots])
    up = Axis.over("predicted / published", [0.11, 9.9, *(dot[2] for dot in dots)])
    return _picture(dots, across, up, equal=False)


def _picture(
    dots: Sequence[tuple[str, float, float]], across: Axis, up: Axis, *, equal: bool
) -> str:
    sources = sorted({source for source, _, _ in dots})
    colour = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(sources)}

    def x(value: float) -> float:
        return round(_LEFT + across.share(value) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - up.share(value) * (_HEIGHT - _TOP - _BOTTOM), 1)

    low, high = 10.0**across.low, 10.0**across.high
    ends = (10.0**up.low, 10.0**up.high) if equal else (1.0, 1.0)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
    ]
    for value, text in across.ticks():
        lines.append(_line((x(value), y(10.0**up.low)), (x(value), y(10.0**up.high)), "#ddd"))
        lines.append(_text(x(value), _HEIGHT - _BOTTOM + 16, "middle", text))
    for value, text in up.ticks():
        lines.append(_line((x(low), y(value)), (x(high), y(value)), "#ddd"))
        lines.append(_text(_LEFT - 6, y(value) + 4, "end", text))
    lines.append(_line((x(low), y(ends[0])), (x(high), y(ends[1])), "#444"))
    lines += [
        f'<circle cx="{x(one)}" cy="{y(other)}" r="2.2" fill="{colour[source]}" opacity=".55"/>'
        for source, one, other in dots
    ]
    lines.append(_text((x(low) + x(high)) / 2, _HEIGHT - 10, "middle", across.title))
    lines.append(_text(_LEFT, _TOP - 4, "start", up.title))
    for i, name in enumerate(sources):
        height = _TOP + 14 + 18 * i
        lines.append(f'<circle cx="{_WIDTH - 156}" cy="{height}" r="4" fill="{colour[name]}"/>')
        lines.append(_text(_WIDTH - 146, height + 4, "start", name))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _line(start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"/>'


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'
