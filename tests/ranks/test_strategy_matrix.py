"""Schedule x micro-batches x sharding x tensor parallelism equals one device.

Sixty strategies, of which a test runs a few; `scripts/campaign_programs.py --matrix` runs all.
"""

import json
from pathlib import Path

import pytest

from tests.harness import strategy_matrix as matrix

SEEN = Path(__file__).parents[2] / "scripts" / "campaign_matrix.json"


@pytest.mark.ranks
@pytest.mark.hf
def test_strategies_of_the_matrix_equal_one_device():
    cases = matrix.CASES[5::11]
    assert sum("pp=" in text for text in cases) == 4
    for text, error in matrix.errors_of(cases).items():
        assert error <= matrix.TOLERANCE, f"{text}: {error:.1e}"


@pytest.mark.ranks
@pytest.mark.hf
@pytest.mark.slow
def test_sharded_replicas_inside_of_stages_equal_one_device():
    text = "pp=2:1F1B dp_replicate=2 dp_shard=2 mb=4"
    assert matrix.errors_of((text,), world=8)[text] <= matrix.TOLERANCE


def test_all_strategies_of_the_matrix_were_run():
    errors = json.loads(SEEN.read_text())["errors"]
    assert errors.keys() == set(matrix.CASES) and len(errors) == 60
    assert max(errors.values()) <= matrix.TOLERANCE
