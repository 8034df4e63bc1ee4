"""Plans are compared with many buckets of parameters in flight, those with stages as they are."""

from dataclasses import replace

import pytest

from shardwright.planner.plans.far_ahead import far_ahead
from tests.harness.plans import simple


@pytest.mark.parametrize(
    ("ahead", "other", "expected"), [(1, None, 8), (1, 2, 8), (1, 12, 12), (8, None, 8), (9, 2, 9)]
)
def test_plans_gather_eight_buckets_ahead_or_as_many_as_another_one(ahead, other, expected):
    plan = replace(simple(), ahead=ahead)
    compared = None if other is None else replace(simple(), ahead=other)
    assert far_ahead(plan, compared) == replace(plan, ahead=expected)


def test_plans_with_stages_stay_as_they_are():
    plan, staged = simple(), replace(simple(), stages=2)
    assert far_ahead(staged) is staged
    assert far_ahead(plan, staged) is plan
