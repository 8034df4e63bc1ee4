import pytest

from shardwright.planner.plans.candidate import may_improve
from shardwright.solve.frontier.sweep import DualBound

KNOWN = [(2.0, 60), (3.0, 40), (3.5, 50)]  # the last is beaten


@pytest.mark.parametrize(
    "value, least, better",
    [
        (1.9, 45, True),  # faster than all
        (2.0, 30, True),  # may be as fast as the fastest with less memory
        (3.0, 39, True),  # smaller than all
        (3.0, 40, False),  # no better than what is known
        (4.0, 30, True),  # slow, but needs the least
        (4.0, 40, False),
    ],
)
def test_a_mesh_may_improve_where_its_bound_is_below_the_known_plans(value, least, better):
    bound = DualBound(((0.0, value),), least)
    assert may_improve(KNOWN, 0)(bound) is better
    assert may_improve([(t, m + 10) for t, m in KNOWN], 10)(bound) is better
