"""Orders of passes against those that torch makes; one value is all that a new schedule needs."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import get_schedule_class

from shardwright.ir.pipeline import Pipeline
from shardwright.ir.schedules import registry
from shardwright.ir.schedules.registry import SCHEDULES, continuous, orders, schedule_named
from shardwright.ir.schedules.schedule import Kind, Pass, PipelineError, Schedule
from shardwright.ir.schedules.single_stage import WEIGHTS
from shardwright.runtime import weight_versions
from shardwright.runtime.async_pipeline.schedule import calls
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
def test_orders_are_those_that_torch_runs(schedule, groups, each, pieces):
    assert orders(schedule, groups, groups * each, pieces) == torch_order(
        schedule, groups, each, pieces
    )


@pytest.mark.parametrize("schedule, groups, each, pieces", CASES)
def test_every_pass_is_made_once_where_its_stage_is(schedule, groups, each, pieces):
    homes = schedule_named(schedule).homes(groups, groups * each)
    kinds = {Kind.FORWARD, Kind.BACKWARD}
    if schedule != "Interleaved1F1B":
        kinds = {Kind.FORWARD, Kind.INPUTS, Kind.WEIGHTS}
    every = [one for mine in orders(schedule, groups, groups * each, pieces) for one in mine]
    wanted = {(s, m, kind) for s in range(groups * each) for m in range(pieces) for kind in kinds}
    assert set(every) == wanted
    assert len(every) == len(wanted)
    for group, mine in enumerate(orders(schedule, groups, groups * each, pieces)):
        assert {homes[one.stage] for one in mine} == {group}


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES.values() if not s.asynchronous])
def test_torch_runs_every_schedule_that_flushes(schedule):
    assert get_schedule_class(schedule.name).__name__ == f"Schedule{schedule.name}"


@pytest.mark.parametrize("stage", range(3))
def test_asynchronous_stages_make_the_passes_of_their_schedule(stage):
    made = []
    for call in calls(stage, 3, 0, 7):
        made += [Pass(stage, call.forward, Kind.FORWARD)] if call.forward is not None else []
        made += [Pass(stage, call.backward, Kind.BACKWARD)] if call.backward is not None else []
    assert orders(continuous("stale").name, 3, 3, 7)[stage] == tuple(made)


def test_the_runtime_knows_the_weights_of_every_asynchronous_schedule():
    assert set(weight_versions.WEIGHTS) == set(WEIGHTS)
    assert {s.weights for s in SCHEDULES.values() if s.asynchronous} == set(WEIGHTS)
    with pytest.raises(PipelineError, match="'fresh'; there are spectrain"):
        continuous("fresh")


def _breadth_first(group, groups, stages, micro_batches):
    mine = range(group, stages, groups)
    for stage in mine:
        yield from (Pass(stage, m, Kind.FORWARD) for m in range(micro_batches))
    for stage in reversed(mine):
        yield from (Pass(stage, m, Kind.BACKWARD) for m in reversed(range(micro_batches)))


def test_a_new_schedule_is_one_value(monkeypatch):
    """Looped breadth-first pipelines (arXiv 2211.05953) are checked, ordered and simulated so."""
    new = Schedule("LoopedBFS", _breadth_first, stages_per_group=None)
    with pytest.raises(PipelineError, match="none of GPipe"):
        Pipeline(("b", "c", "d"), "LoopedBFS", 2)
    monkeypatch.setitem(registry.SCHEDULES, new.name, new)
    monkeypatch.setattr(registry, "orders", orders.__wrapped__)  # what is kept knows no other
    pipeline = Pipeline(("b", "c", "d"), "LoopedBFS", 2)
    pipeline.check(4)
    assert pipeline.homes == (0, 1, 0, 1)
    with pytest.raises(PipelineError, match="3 stages cannot be shared evenly"):
        Pipeline(("b", "c"), "LoopedBFS", 2).check(4)
    assert orders("LoopedBFS", 2, 4, 4) == torch_order("LoopedBFS", 2, 2, 4)
    assert [held.sum(axis=1).max() for held in waiting("LoopedBFS", 2, 4, 4)] == [8, 8]
    found = step_seconds("LoopedBFS", [StageTime(0.5)] * 4, 4, 2)
    assert found >= least_step_seconds("LoopedBFS", 8.0, 0.0, 2, 4)
    assert found == pytest.approx(4.5)
