"""Reads mutated training configs: each is read, or refused in one line.

python scripts/campaign_configs.py --files 1000 -o scripts/campaign_configs.json

An error of another kind, or a strategy whose text is not that strategy, ends it with the file that
was found, as small as Hypothesis makes it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hypothesis import HealthCheck, given, seed, settings

from benchmarks import record
from shardwright.frameworks.registry import FRAMEWORKS
from tests.harness.mutated_configs import check, mutated


def main() -> None:
    """Mutate configs, print how many were read, and write that."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path)
    asked = parser.parse_args()
    found: Counter[str] = Counter()
    frameworks = (*FRAMEWORKS, None)

    @seed(asked.seed)
    @settings(
        max_examples=asked.files,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(text=mutated())
    def every(text: str) -> None:
        number = found["read"] + found["refused"]
        framework = frameworks[number % len(frameworks)] if number % 2 else None
        read = check(text, (None, 8, 64)[number % 3], framework)
        found["read" if read else "refused"] += 1

    every()
    files = found["read"] + found["refused"]
    print(f"{files} mutated files: {found['read']} read, {found['refused']} refused in one line")
    if asked.out is not None:
        record.write({"files": files, **found}, asked.out, asked.seed)


if __name__ == "__main__":
    main()
