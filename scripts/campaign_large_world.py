"""Check steps of one rank of 1,024, on the meta device: five models under three plans each.

python scripts/campaign_large_world.py

Prints a line for each model, and ends with an error at the first step that does not begin the
collectives of its program, reads a value, or makes a tensor on the host.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.ranks.test_rank_of_1024 import MODELS, STRATEGIES, check


def main() -> None:
    """Check every pair of a model and a strategy."""
    for make in MODELS:
        check(make, STRATEGIES)
        print(f"{make.__name__}: {len(STRATEGIES)} plans", flush=True)


if __name__ == "__main__":
    main()
