"""`shardwright/report/accuracy.json`: what users see beside predictions.

Times are those of rows whose source was left out of the fit; peaks are those of priced rows, as no
figure of memory is fitted.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import shardwright as sw
from benchmarks.published.fit import NOT_FITTED
from benchmarks.published.setups import PRESETS
from shardwright.machine.gpus import GPUS

FILE = Path(sw.__file__).parent / "report" / "accuracy.json"
EVERY_GPU = "every GPU"  # the allocator is the same on all
_POINTS = 21  # quantiles that are kept
_FEWEST = 20  # rows of a comparison


def content(fitted: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The file's content, of the result of `fit.py` and the priced rows of the score."""
    times: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for row in fitted["rows"]:
        if row["source"] not in NOT_FITTED:
            kind = PRESETS.get(row["gpu"], row["gpu"])
            times[kind].append((row["source"], 1 / row["held_out"]))
    peaks = [
        (point["source"], point["published_gib"] / point["predicted_gib"])
        for point in points
        if point["published_gib"]
    ]
    return {
        "kinds": [gpu.kind for gpu in GPUS],
        "times": {
            kind: _comparison(found)
            for kind, found in sorted(times.items())
            if len(found) >= _FEWEST
        },
        "peaks": {EVERY_GPU: _comparison(peaks)} if len(peaks) >= _FEWEST else {},
    }


def write(data: Mapping[str, Any]) -> None:
    """Write the file."""
    FILE.write_text(json.dumps(data, indent=1) + "\n")


def _comparison(found: Sequence[tuple[str, float]]) -> dict[str, Any]:
    sources = {source for source, _ in found}
    ratios = [_quantile(found, i / (_POINTS - 1)) for i in range(_POINTS)]
    return {"rows": len(found), "sources": len(sources), "ratios": ratios}


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
