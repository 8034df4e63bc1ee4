"""Price all rows, score them, and write the page.

    python -m benchmarks.published
    python -m benchmarks.published --minutes 5 --sources vtrain torchtitan
    python -m benchmarks.published --rows 150
    python -m benchmarks.published --sources torchtitan megatron-bridge --older
    python -m benchmarks.published --page

A run that is stopped, or ends after `--minutes`, goes on where it was; rows without a prediction
are counted on the page as not yet priced. With `--older` the score has predictions by earlier code
for rows that this one has not priced, and the page names the commits.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from benchmarks.published import comparisons, page
from benchmarks.published.fit import RESULT as FITTED
from benchmarks.published.overlap import RESULT as OVERLAP
from benchmarks.published.own import RESULT as OWN
from benchmarks.published.row import read, sources
from benchmarks.published.run import kept_predictions, predictions, with_progress
from benchmarks.published.sample import sample
from benchmarks.published.score import result_of
from benchmarks.record import write

RESULT = Path(__file__).with_name("result.json")


def main() -> None:
    """Parse, price, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="processes that price")
    parser.add_argument("--minutes", type=float, help="stop pricing after so long")
    parser.add_argument("--sources", nargs="+", choices=sorted(sources()), help="price only these")
    parser.add_argument("--rows", type=int, help="price a sample of so many rows")
    parser.add_argument(
        "--older", action="store_true", help="score also what earlier code has priced"
    )  # fmt: skip
    parser.add_argument("--page", action="store_true", help="write the page of the kept result")
    asked = parser.parse_args()
    if not asked.page:
        rows = read()
        _price(asked)
        write(result_of(rows, kept_predictions(rows, older=asked.older)), RESULT, seed=0)
    page.write(RESULT, FITTED, OWN, OVERLAP)
    points = json.loads(RESULT.read_text())["points"]
    used = comparisons.held_out(json.loads(FITTED.read_text()), read())
    comparisons.write(comparisons.content(used, points))


def _price(asked: argparse.Namespace) -> None:
    used = [row for row in read() if not row.excluded]
    wanted = [row for row in used if asked.sources is None or row.source in asked.sources]
    wanted = sample(wanted, asked.rows) if asked.rows else wanted
    ends = time.monotonic() + 60 * asked.minutes if asked.minutes else float("inf")
    for _ in with_progress(predictions(wanted, asked.workers), len(wanted)):
        if time.monotonic() > ends:
            return


if __name__ == "__main__":
    main()
