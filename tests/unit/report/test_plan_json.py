"""The JSON of plans: what a row says, and that the whole plan can be read again."""

import json

import pytest

from shardwright.plan_io.plan_text import plan_from_json
from shardwright.report import plan_json
from tests.harness import plans


@pytest.mark.parametrize("above, fits", [(-1, False), (0, True), (None, True)])
def test_a_row_says_whether_a_plan_fits(above, fits):
    plan = plans.simple(mesh="tp=2")
    limit = None if above is None else plan.peak_bytes + above
    row = plan_json.row(plan, limit)
    assert row["fits"] is fits and (row["mesh"], row["devices"]) == ("tp=2", 2)


def test_the_whole_has_the_plan_of_the_file():
    plan = plans.simple(mesh="tp=2")
    found = plan_json.whole(plan, "plan.json")
    assert plan_from_json(json.dumps(found["plan"])) == plan
    assert found["file"] == "plan.json" and plan_json.parts(plan).items() <= found.items()
