"""Efficiency curves: the fraction of a device's peak that operators reach, by amount of work."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

_ROUNDED = 2e-3  # tolerance: machine files store few digits


class CurveError(ValueError):
    """An invalid curve."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Pairs (work, fraction of the peak), less work first, interpolated as a power of the work.

    Work is FLOP or bytes. Below the first and above the last point the part
    stays what it is there. Invariants, checked on construction: parts are more
    than 0 and at most 1, and none grows faster than the work does: more work never takes less time.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise CurveError("no points; give at least one, as in [['1MFLOP', 0.5]]")
        for work, part in self.points:
            if not 0 < part <= 1:
                raise CurveError(f"{part}; give a part, more than 0 and at most 1")
            if not 0 < work < math.inf:
                raise CurveError(f"at the work {work}; give more than zero")
        for (work, part), (more, better) in pairwise(self.points):
            if not work < more:
                raise CurveError(f"{more:g} after {work:g}; give the points in order of their work")
            if better / part > more / work * (1 + _ROUNDED):
                raise CurveError(
                    f"{better} at {more:g} after {part} at {work:g}: more work would take less"
                    " time; lower the second or raise the first"
                )

    def at(self, work: float) -> float:
        """The fraction of the peak that is reached at an amount of work.

        >>> round(Curve(((1e6, 0.1), (1e8, 0.4))).at(1e7), 12)
        0.2
        """
        place = bisect_right(self.points, work, key=lambda point: point[0])
        if place == 0:
            return self.points[0][1]
        if place == len(self.points):
            return self.points[-1][1]
        (less, low), (more, high) = self.points[place - 1 : place + 1]
        weight = math.log(work / less) / math.log(more / less)
        return low * math.exp(weight * math.log(high / low))

    @property
    def last(self) -> float:
        """The fraction of the peak at large amounts of work."""
        return self.points[-1][1]

    def lower(self, other: Curve) -> Curve:
        """The minimum of two curves, at the points of both."""
        works = sorted({work for curve in (self, other) for work, _ in curve.points})
        return Curve(tuple((work, min(self.at(work), other.at(work))) for work in works))


def monotone(points: dict[float, float]) -> Curve:
    """The curve through measured fractions, raised where they break its invariants.

    Times of small work are less reliable, so points of more work determine those of less.

    >>> monotone({1.0: 0.01, 2.0: 0.5, 4.0: 2.0}).points
    ((1.0, 0.25), (2.0, 0.5), (4.0, 1.0))
    """
    found: list[tuple[float, float]] = []
    for work in sorted(points, reverse=True):
        part = min(points[work], 1.0)
        if found:
            part = max(part, found[-1][1] * work / found[-1][0])
        found.append((work, part))
    return Curve(tuple(reversed(found)))
