"""Check random small modules on two ranks: captured, split at random, compared with eager mode.

python scripts/campaign_modules.py --modules 1000 -o scripts/campaign_modules.json
python scripts/campaign_modules.py --modules 100 --seed 40

A seed has 25 modules; without --seed they are tried from 0 on. Prints the verdicts of each, and the
shortest program that was found for each that is wrong. Exits with 1 where there was one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from tests.harness.ranks import run_ranks
from tests.sweep.random_check import check_random

_EACH, _SECONDS = 25, 1800  # modules of a seed, and how long its ranks may take


def main() -> int:
    """Try seeds in order until so many modules are checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first that is tried")
    parser.add_argument("-o", "--out", type=Path)
    given = parser.parse_args()
    found: Counter[str] = Counter()
    failed = []
    for seed in range(given.seed, given.seed - (-given.modules // _EACH)):
        try:
            verdicts = run_ranks(2, check_random, _EACH, seed, timeout=_SECONDS)[0]
        except (RuntimeError, TimeoutError) as e:
            failed.append(seed)
            print(f"seed {seed}: {str(e)[-2000:]}", flush=True)
            continue
        found.update(verdicts)
        print(f"seed {seed}: {verdicts}", flush=True)
    print(f"{sum(found.values())} modules: {dict(found)}; {len(failed)} seeds with a wrong one")
    if given.out is not None:
        made = {"verdicts": dict(found.most_common()), "wrong_seeds": failed}
        record.write(made, given.out, given.seed)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
