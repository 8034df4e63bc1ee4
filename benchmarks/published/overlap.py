"""Errors of published steps by the part of messages of parameters that operators hide.

    python -m benchmarks.published.overlap

Rows that shard parameters or gradients, of sources with several of them, are predicted with
different parts (`overlap` of machine files): with the figures of presets, and with figures that are
fitted to these rows for each part. Features of rows are kept, as by `benchmarks.published.fit`.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.published.evaluate import Steps
from benchmarks.published.fit import GUESSES, fitted_figures, kept_features, usable_rows
from benchmarks.published.sample import SEED, sample
from benchmarks.record import write
from shardwright.machine.fitted import FITTED

RESULT = Path(__file__).with_name("overlap.json")
PARTS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_ROWS = 300  # of the sample of `fit`
_LEAST_ROWS = 4  # of a source


def main() -> None:
    """Predict, print, write."""
    rows = [row for row in sample(usable_rows(), _ROWS) if row.zero >= 2]
    kept = list(dict(kept_features(rows)).values())
    steps = Steps.of([row for row, _ in kept], [features for _, features in kept])
    write({"parts": list(errors(steps))}, RESULT, seed=SEED)


def errors(steps: Steps) -> list[dict[str, Any]]:
    """Rows, mean error and bias of each source for each part, and means over sources."""
    figures = {name: preset_figure(name) for name in GUESSES}
    names = np.array([row.source for row in steps.rows])
    sources = [one for one in sorted(set(names.tolist())) if (names == one).sum() >= _LEAST_ROWS]
    found = []
    for part in PARTS:
        ratios = steps.seconds(figures, overlap=part) / steps.published - 1
        known = {"issue": figures["issue"]}
        own = fitted_figures(steps, np.ones(len(names), bool), known, part)
        fitted = np.abs(steps.seconds(own, overlap=part) / steps.published - 1)
        by_source = {
            source: {
                "rows": int((names == source).sum()),
                "mape": round(float(np.abs(ratios[names == source]).mean()), 4),
                "bias": round(float(ratios[names == source].mean()), 4),
            }
            for source in sources
        }
        mean = round(fmean(one["mape"] for one in by_source.values()), 4)
        refitted = round(fmean(float(fitted[names == one].mean()) for one in sources), 4)
        print(f"overlap {part:g}: {mean:.1%}, refitted {refitted:.1%}", flush=True)
        found.append({"overlap": part, "mape": mean, "refitted": refitted, "sources": by_source})
    return found


def preset_figure(name: str) -> float:
    """The figure of presets with a name of `GUESSES`, such as "efficiency.matmul/hopper"."""
    figure, _, architecture = name.partition("/")
    return FITTED[figure].of(architecture)


if __name__ == "__main__":
    main()
