"""Orders of passes against those that torch makes; one value is all that a new schedule needs."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from shardwright.ir.pipeline import Pipeline
from shardwright.ir.schedules import registry
from shardwright.ir.schedules.registry import SCHEDULES, continuous, orders, schedule_named
from shardwright.ir.schedules.schedule import Kind, Pass, PipelineError, Schedule
from shardwright.ir.schedules.weight_versions import WEIGHTS
from shardwright.runtime.async_pipeline.schedule import call_at, remaining
from shardwright.simulate.time.pipeline_schedules import waiting
from shardwright.simulate.time.pipelines import StageTime, least_step_seconds, step_seconds

TORCH = {
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "LoopedBFS": ScheduleLoopedBFS,
}
KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUTS, "W": Kind.WEIGHTS}
CASES = [
    (schedule, groups, each, pieces)
    for schedule, counts in (
        ("Interleaved1F1B", (1, 2, 3)),
        ("InterleavedZeroBubble", (1, 2)),
        ("ZBVZeroBubble", (2,)),
        ("LoopedBFS", (1, 2, 3)),
    )
    for groups in (2, 3, 4)
    for each in counts
    for pieces in (1, groups, 2 * groups, 4 * groups)
]


def torch_order(schedule, groups, each, pieces):
    """What torch's schedule says of each group, without the places where it waits."""
    stages = [
        SimpleNamespace(
            group_size=groups, group_rank=0, num_stages=groups * each, stage_index=s, submod=None
        )
        for s in range(each)
    ]
    made = TORCH[schedule](stages, pieces)
    return tuple(
        tuple(
            (action.stage_index, action.microbatch_index, KINDS[action.computation_type.value])
            for action in made.pipeline_order[group]
            if action is not None
        )
        for group in range(groups)
    )


@pytest.mark.parametrize("schedule, groups, each, pieces", CASES)
def test_orders_are_those_that_torch_makes(schedule, groups, each, pieces):
    assert orders(schedule, groups, groups * each, pieces) == torch_order(
        schedule, groups, each, pieces
    )


@pytest.mark.parametrize("schedule, groups, each, pieces", CASES)
def test_every_pass_is_made_once_where_its_stage_is(schedule, groups, each, pieces):
    homes = schedule_named(schedule).homes(groups, groups * each)
    kinds = {Kind.FORWARD, Kind.BACKWARD}
    if schedule_named(schedule).splits_backward:
        kinds = {Kind.FORWARD, Kind.INPUTS, Kind.WEIGHTS}
    every = [one for mine in orders(schedule, groups, groups * each, pieces) for one in mine]
    wanted = {(s, m, kind) for s in range(groups * each) for m in range(pieces) for kind in kinds}
    assert set(every) == wanted
    assert len(every) == len(wanted)
    for group, mine in enumerate(orders(schedule, groups, groups * each, pieces)):
        assert {homes[one.stage] for one in mine} == {group}


@pytest.mark.parametrize("stage", range(3))
def test_asynchronous_stages_make_the_passes_of_their_schedule(stage):
    made = []
    arrivals = [call_at(m, stage, 3, 0) for m in range(7)]
    for call in [*arrivals, *remaining(stage, 3, 0, 7)]:
        made += [Pass(stage, call.forward, Kind.FORWARD)] if call.forward is not None else []
        made += [Pass(stage, call.backward, Kind.BACKWARD)] if call.backward is not None else []
    assert orders(continuous("stale").name, 3, 3, 7)[stage] == tuple(made)


def test_the_runtime_knows_the_weights_of_every_asynchronous_schedule():
    assert {s.weights for s in SCHEDULES.values() if s.asynchronous} == set(WEIGHTS)
    with pytest.raises(PipelineError, match="'fresh'; there are spectrain"):
        continuous("fresh")


def _eager(group, groups, stages, micro_batches):
    ahead = min(micro_batches, 2 * (stages - group) - 1)
    yield from (Pass(group, m, Kind.FORWARD) for m in range(ahead))
    for m in range(micro_batches):
        yield Pass(group, m, Kind.BACKWARD)
        if m + ahead < micro_batches:
            yield Pass(group, m + ahead, Kind.FORWARD)


def test_a_new_schedule_is_one_value(monkeypatch):
    """Eager 1F1B (arXiv 2211.05322), which torch does not have, is checked and simulated so."""
    new = Schedule("Eager1F1B", _eager)
    with pytest.raises(PipelineError, match="none of GPipe"):
        Pipeline(("b", "c"), "Eager1F1B", 3)
    monkeypatch.setitem(registry.SCHEDULES, new.name, new)
    monkeypatch.setattr(registry, "orders", orders.__wrapped__)  # what is kept knows no other
    pipeline = Pipeline(("b", "c"), "Eager1F1B", 3)
    pipeline.check(6)
    assert pipeline.homes == (0, 1, 2)
    with pytest.raises(PipelineError, match="one stage for each of pp=2 groups, not 3 stages"):
        Pipeline(("b", "c"), "Eager1F1B", 2).check(6)
    assert [held.sum(axis=1).max() for held in waiting("Eager1F1B", 3, 3, 6)] == [5, 3, 1]
    found = step_seconds("Eager1F1B", [StageTime(1.0)] * 3, 6)
    assert found >= least_step_seconds("Eager1F1B", 18.0, 0.0, 3, 6)
    assert found == pytest.approx(8.0)
