"""Random small modules: captured, split at random over two ranks, and compared with eager mode.

More of them: `python scripts/campaign_modules.py`.
"""

import pytest

from tests.harness.ranks import run_ranks
from tests.sweep.random_check import check_random
from tests.sweep.random_modules import OPS


def test_the_grammar_is_large():
    assert len(OPS) >= 80


@pytest.mark.ranks
@pytest.mark.slow
def test_random_modules_are_exact_under_random_tilings_or_refused_in_one_line():
    found = run_ranks(2, check_random, 15, 7)[0]
    assert found["exact"] > found.get("refused", 0)
