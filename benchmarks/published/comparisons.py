"""`shardwright/report/accuracy.json`: what users see beside predictions.

Times are those of rows whose source was left out of the fit, widened so that nine of ten rows of a
source that is not among them are within; peaks are those of priced rows, as no figure of memory is
fitted.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any

import shardwright as sw
from benchmarks.published.fit import NOT_FITTED
from benchmarks.published.setups import PRESETS
from shardwright.machine.gpus import GPUS
from shardwright.report.accuracy import MeasuredRatios

FILE = Path(sw.__file__).parent / "report" / "accuracy.json"
EVERY_GPU = "every GPU"  # the allocator is the same on all
_POINTS = 21  # quantiles that are kept
_FEWEST = 20  # rows of a comparison
_LOW = 0.05  # share of rows below an interval, and above it


def content(fitted: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The file's content, of the result of `fit.py` and the priced rows of the score."""
    used = _used(fitted)
    factor = widening(used)
    found = {kind: comparison(_ratios(used, kind=kind)) for kind in sorted(_kinds(used))}
    peaks = comparison(
        (point["source"], point["published_gib"] / point["predicted_gib"])
        for point in points
        if point["published_gib"] and point["predicted_gib"] and point["source"] not in NOT_FITTED
    )
    return {
        "kinds": [gpu.kind for gpu in GPUS],
        "times": {
            kind: asdict(widened(one, factor)) for kind, one in found.items() if one is not None
        },
        "peaks": {} if peaks is None else {EVERY_GPU: asdict(peaks)},
    }


def coverage(fitted: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """By source: rows, those with a comparison, how many its interval holds, and its widening.

    A comparison is with rows of other sources on the same kind of GPU, each predicted without its
    own source; the interval is that of nine of ten, widened by what these sources say.
    """
    used, found = _used(fitted), dict[str, dict[str, float]]()
    for source in sorted({row["source"] for row in used}):
        factor = widening([row for row in used if row["source"] != source])
        needed = _needed(used, source)
        found[source] = {
            "rows": sum(row["source"] == source for row in used),
            "compared": len(needed),
            "inside": sum(one <= factor for one in needed),
            "widened": factor,
        }
    return found


def widening(rows: Sequence[Mapping[str, Any]]) -> float:
    """The factor of intervals with which they hold nine of ten rows of a source that is new.

    Sources differ by more than rows of one do. So each source in turn is compared with the others,
    and the mean of the sources' shares decides; with a single source nothing is widened.
    """
    needed = [one for s in {row["source"] for row in rows} if (one := _needed(rows, s))]
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


def _needed(rows: Sequence[Mapping[str, Any]], source: str) -> list[float]:
    """For each row of a source that can be compared, the factor whose interval just holds it."""
    found = []
    others: dict[str, MeasuredRatios | None] = {}
    for row in rows:
        if row["source"] != source:
            continue
        kind = _kind(row)
        if kind not in others:
            others[kind] = comparison(_ratios(rows, kind=kind, without=source))
        if (known := others[kind]) is not None:
            low, middle, high = (log(known.quantile(q)) for q in (_LOW, 0.5, 1 - _LOW))
            apart = -log(row["held_out"]) - middle
            found.append(apart / (high - middle) if apart > 0 else apart / (low - middle))
    return found


def _used(fitted: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in fitted["rows"] if row["source"] not in NOT_FITTED]


def _kind(row: Mapping[str, Any]) -> str:
    gpu: str = row["gpu"]
    return PRESETS.get(gpu, gpu)


def _kinds(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    return {_kind(row) for row in rows}


def _ratios(
    rows: Iterable[Mapping[str, Any]], *, kind: str, without: str = ""
) -> Iterator[tuple[str, float]]:
    """The source of each row on a kind of GPU, and measured over predicted."""
    for row in rows:
        if _kind(row) == kind and row["source"] != without:
            yield row["source"], 1 / row["held_out"]


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
