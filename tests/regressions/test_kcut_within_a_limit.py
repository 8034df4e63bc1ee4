"""The method "kcut" gives the k-cut's plan or none.

Within a limit that it exceeds, `fastest` gave a plan of the joint search, whose frontier lends the
k-cut its baselines: one that was never asked for, under the name "searched".
"""

import pytest

from shardwright.api import search_with as search
from shardwright.ir.frontier import InfeasibleError
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.machine.presets import preset
from tests.harness.layered_graphs import residual_layers


def test_a_limit_below_its_plan_is_infeasible():
    found = search(residual_layers(3), preset("8xH100"), PlanOptions(method="kcut"))
    (plan,) = found
    assert found.fastest(plan.peak_bytes) == plan
    with pytest.raises(InfeasibleError):
        found.fastest(plan.peak_bytes - 1)
