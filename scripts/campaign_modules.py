"""Check random small modules on two ranks: captured, split at random, compared with eager mode.

python scripts/campaign_modules.py --modules 1000            # seeds from 0 on, 25 modules each
python scripts/campaign_modules.py --modules 100 --seed 40

Prints the verdicts of each seed, and the shortest program that was found for each that is wrong.
Exits with 1 where there was one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.harness.ranks import run_ranks
from tests.sweep.random_check import check_random

_EACH, _SECONDS = 25, 1800  # modules of a seed, and how long its ranks may take


def main() -> int:
    """Try seeds in order until so many modules are checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first that is tried")
    given = parser.parse_args()
    found: Counter[str] = Counter()
    failed = 0
    for seed in range(given.seed, given.seed - (-given.modules // _EACH)):
        try:
            verdicts = run_ranks(2, check_random, _EACH, seed, timeout=_SECONDS)[0]
        except (RuntimeError, TimeoutError) as e:
            failed += 1
            print(f"seed {seed}: {str(e)[-2000:]}", flush=True)
            continue
        found.update(verdicts)
        print(f"seed {seed}: {verdicts}", flush=True)
    print(f"{sum(found.values())} modules: {dict(found)}; {failed} seeds with a wrong one")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
