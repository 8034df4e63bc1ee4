"""`shardwright/report/accuracy.json`: what users see beside predictions.

Times are those of rows whose source was left out of the fit, by the conditions that decide their
residuals, widened so that nine of ten rows of a source that is not among them are within; peaks are
those of priced rows, as no figure of memory is fitted.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any

import shardwright as sw
from benchmarks.published.fit import NOT_FITTED
from benchmarks.published.row import Row
from benchmarks.published.setups import PRESETS
from shardwright.machine.gpus import GPUS
from shardwright.report.accuracy import MeasuredRatios, MeasuredUnder

FILE = Path(sw.__file__).parent / "report" / "accuracy.json"
_POINTS = 21  # quantiles that are kept
_FEWEST = 20  # rows of a comparison
_LOW = 0.05  # share of rows below an interval, and above it


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A row that was predicted without its source: measured over predicted, and under what."""

    source: str
    under: MeasuredUnder
    ratio: float


def held_out(fitted: Mapping[str, Any], rows: Iterable[Row]) -> list[HeldOut]:
    """The rows of `fit.py`'s result whose sources users' comparisons rest on."""
    known = {row.key: row for row in rows}
    used = (one for one in fitted["rows"] if one["source"] not in NOT_FITTED)
    return [
        HeldOut(
            one["source"], conditions_of(known[one["key"]], one["held_out"]), 1 / one["held_out"]
        )
        for one in used
    ]


def conditions_of(row: Row, over: float) -> MeasuredUnder:
    """The conditions of a row with a time whose prediction is `over` times what was published."""
    assert row.step_seconds is not None
    return MeasuredUnder.of(
        PRESETS.get(row.gpu, row.gpu),
        experts=bool(row.experts),
        bits=8 if row.precision.startswith("fp8") else 16,
        compiled=row.compiled,
        pipeline=row.pp > 1,
        seconds=over * row.step_seconds / row.micro_batches,
    )


def content(used: Sequence[HeldOut], points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The file's content, of rows that were held out and the priced rows of the score."""
    factor = widening(used)
    found = {under: _among(used, under) for under in sorted({one.under for one in used})}
    peaks = comparison(
        (point["source"], point["published_gib"] / point["predicted_gib"])
        for point in points
        if point["published_gib"] and point["predicted_gib"] and point["source"] not in NOT_FITTED
    )
    return {
        "kinds": [gpu.kind for gpu in GPUS],
        "times": [
            {**under._asdict(), **asdict(widened(one, factor))}
            for under, one in found.items()
            if one is not None
        ],
        "peaks": None if peaks is None else asdict(peaks),
    }


def coverage(used: Sequence[HeldOut]) -> dict[str, dict[str, float]]:
    """By source: rows, those with a comparison, how many its interval holds, and its widening.

    A comparison is with rows of other sources under the same conditions, each predicted without its
    own source; the interval is that of nine of ten, widened by what these sources say.
    """
    found = dict[str, dict[str, float]]()
    for source in sorted({row.source for row in used}):
        factor = widening([row for row in used if row.source != source])
        needed = _needed(used, source)
        found[source] = {
            "rows": sum(row.source == source for row in used),
            "compared": len(needed),
            "inside": sum(one <= factor for one in needed),
            "widened": factor,
        }
    return found


def widening(rows: Sequence[HeldOut]) -> float:
    """The factor of intervals with which they hold nine of ten rows of a source that is new.

    Sources differ by more than rows of one do. So each source in turn is compared with the others,
    and the mean of the sources' shares decides; with a single source nothing is widened.
    """
    needed = [one for s in {row.source for row in rows} if (one := _needed(rows, s))]
    for factor in sorted({1.0, *(x for one in needed for x in one if x > 1)}):
        if not needed or fmean(_share(one, factor) for one in needed) >= 1 - 2 * _LOW:
            return float(factor)
    return 1.0


def widened(found: MeasuredRatios, factor: float) -> MeasuredRatios:
    """The comparison with ratios farther from the median, by a factor of their logarithms."""
    middle = found.quantile(0.5)
    ratios = tuple(round(middle * (one / middle) ** factor, 4) for one in found.ratios)
    return replace(found, ratios=ratios)


def _share(needed: Sequence[float], factor: float) -> float:
    return sum(one <= factor for one in needed) / len(needed)


def _needed(rows: Sequence[HeldOut], source: str) -> list[float]:
    """For each row of a source that can be compared, the factor whose interval just holds it."""
    found = []
    others: dict[MeasuredUnder, MeasuredRatios | None] = {}
    for row in rows:
        if row.source != source:
            continue
        if row.under not in others:
            others[row.under] = _among(rows, row.under, without=source)
        if (known := others[row.under]) is not None:
            low, middle, high = (log(known.quantile(q)) for q in (_LOW, 0.5, 1 - _LOW))
            apart = log(row.ratio) - middle
            found.append(apart / (high - middle) if apart > 0 else apart / (low - middle))
    return found


def _among(
    rows: Iterable[HeldOut], under: MeasuredUnder, *, without: str = ""
) -> MeasuredRatios | None:
    """The comparison of rows under these conditions; None of too few."""
    return comparison(
        (row.source, row.ratio) for row in rows if row.under == under and row.source != without
    )


def write(data: Mapping[str, Any]) -> None:
    """Write the file."""
    FILE.write_text(json.dumps(data, indent=1) + "\n")


def comparison(given: Iterable[tuple[str, float]]) -> MeasuredRatios | None:
    """Measured over predicted, of pairs (source, ratio); None of fewer rows than users see."""
    found = list(given)
    if len(found) < _FEWEST:
        return None
    ratios = tuple(_quantile(found, i / (_POINTS - 1)) for i in range(_POINTS))
    return MeasuredRatios(len(found), len({source for source, _ in found}), ratios)


def _quantile(found: Iterable[tuple[str, float]], share: float) -> float:
    """The ratio that this share of sources, each weighted alike, does not exceed."""
    ordered = sorted(found, key=lambda pair: pair[1])
    counts: dict[str, int] = defaultdict(int)
    for source, _ in ordered:
        counts[source] += 1
    reached = 0.0
    for source, ratio in ordered:
        reached += 1 / (counts[source] * len(counts))
        if reached >= share - 1e-9:
            return round(ratio, 4)
    return round(ordered[-1][1], 4)
