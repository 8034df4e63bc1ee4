"""Asynchronous pipelines on a timeline: nearly as long as their law says, and never empty."""

from functools import cache

import pytest

from shardwright.api import search_with as search
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.timeline import Stream
from shardwright.machine.presets import preset
from shardwright.simulate.time.async_pipeline import mini_batches
from tests.harness import plans
from tests.harness.layered_graphs import residual_layers


@cache
def pipeline(machine="2xH100", stages=2):
    """An asynchronous plan before and after its simulation."""
    options = PlanOptions.of(stages=(stages,), allow_async=True)
    found = search(residual_layers(8), preset(machine), options)
    plan = next(plan for plan in found if plan.is_asynchronous)
    return plan, found.settled(plan)


@pytest.mark.parametrize("machine, stages", [("2xH100", 2), ("4xH100", 2), ("4xH100", 4)])
def test_an_asynchronous_pipeline_is_never_empty_between_updates(machine, stages):
    plan, found = pipeline(machine, stages)
    count = mini_batches(found)
    assert (count, mini_batches(plans.simple())) == (3 * stages, 1)
    timed = list(zip(found.timeline.tasks, found.timeline.starts, strict=True))
    updates = {}
    for task, start in timed:
        if task.kind == "update":
            updates.setdefault(task.track.ranks, []).append(start + task.seconds)
    assert [len(ends) for ends in updates.values()] == [count] * stages
    # Between two updates of a full pipeline a stage does the work of one mini-batch.
    for ends in updates.values():
        steady = (ends[2 * stages - 1] - ends[stages - 1]) / stages
        assert steady == pytest.approx(found.step_seconds, rel=0.02)
    # The law adds up messages and passes of the slowest stage.
    assert found.step_seconds == pytest.approx(plan.step_seconds, rel=0.05)
    every = range(1, count + 1)
    names = {task.name for task, _ in timed if task.track.stream is Stream.COMMUNICATION}
    assert {f"receive {what} {n}" for what in ("values", "gradients") for n in every} <= names
    assert {task.kind for task, _ in timed} == {"forward", "backward", "update"}
