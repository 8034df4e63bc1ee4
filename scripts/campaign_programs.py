"""Deletes or swaps instructions of step programs, and sees who notices.

python scripts/campaign_programs.py --mutations 300 -o scripts/campaign_programs.json
python scripts/campaign_programs.py --matrix -o scripts/campaign_matrix.json

A change of one rank's program should be refused by `verify` or by `check_order`, or else give other
numbers when all ranks run it. What changes no number is classified: a `free` decides how long
values live, and the order of two instructions of which neither reads or writes what the other
writes, nor sends anything, does not matter. What remains is unexplained, and the exit status is 1.

With `--matrix` it runs sixty strategies, unchanged, and compares each with one device in float64.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from tests.harness import strategy_matrix
from tests.harness.mutations import SUBJECTS, UNEXPLAINED, campaign


def main() -> int:
    """Change programs, print who noticed, and write what was seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mutations", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--matrix", action="store_true", help="run the matrix of strategies")
    given = parser.parse_args()
    if given.matrix:
        errors = strategy_matrix.errors_of(strategy_matrix.CASES)
        print(f"{len(errors)} strategies, the largest error is {max(errors.values()):.1e}")
        if given.out is not None:
            record.write({"errors": errors}, given.out, given.seed)
        return int(max(errors.values()) > strategy_matrix.TOLERANCE)
    found = campaign(given.mutations, given.seed, SUBJECTS)
    for name, counts in found["noticed"].items():
        print(f"{name:40} " + ", ".join(f"{who} {n}" for who, n in counts.items()))
    for text in found[UNEXPLAINED]:
        print(f"{UNEXPLAINED}: {text}")
    if given.out is not None:
        record.write(found, given.out, given.seed)
    return int(bool(found[UNEXPLAINED]))


if __name__ == "__main__":
    sys.exit(main())
