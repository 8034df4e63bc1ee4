"""A run is compared with one device where this host can do so in minutes."""

from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.cli.runs.verifying import ComparisonEffort, effort, reason_against
from tests.harness import models


def test_the_effort_grows_with_the_model():
    model, batch = models.mlp()
    graph = sw.capture(model, (), batch)
    plan = sw.price(graph, "5xcpu", "dp_shard=5")
    found, without = effort(graph, plan), effort(graph, replace(plan, memory=None))
    # Values, gradients and values after a step of the module, its graph and the ranks.
    assert without.bytes == 3 * 3 * 8 * sum(p.numel() for p in model.parameters())
    kept = plan.memory.saved + plan.memory.workspace
    assert found.bytes - without.bytes == 3 * 5 * 2 * kept  # on five ranks, twice as wide
    assert found.seconds > 0 and reason_against(graph, plan) == ""


@pytest.mark.parametrize(
    "found, reason",
    [
        (ComparisonEffort(7 * 2**30, 30.0), ""),
        (ComparisonEffort(9 * 2**30, 30.0), "takes about 9 GiB of this host's 10"),
        (ComparisonEffort(2**30, 1801.0), "takes about 31 minutes of"),
    ],
)
def test_a_host_that_lacks_memory_or_minutes_does_not_verify(found, reason):
    against = found.reason_against(10 * 2**30)
    assert against.startswith(reason) and bool(against) == bool(reason)
