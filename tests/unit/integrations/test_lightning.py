"""What Lightning would do in the place of the plan is refused; the rest runs on ranks."""

import pytest

pytest.importorskip("lightning")

from shardwright.integrations.lightning import PlannedStrategy
from shardwright.integrations.planned_runs import found_plan
from shardwright.ir.plan import PlanError
from tests.harness.trainers.classifier import BATCH, Classifier, data


def test_a_sampler_of_lightnings_own_is_refused():
    plan = found_plan(Classifier(), data()[:BATCH], {}, "1xcpu", "model")
    with pytest.raises(PlanError, match="use_distributed_sampler=False"):
        _ = PlannedStrategy(plan).distributed_sampler_kwargs
