"""The order of an asynchronous pipeline and how stale its weights are, counted tick by tick."""

import pytest

from shardwright.ir.schedules.weight_versions import pipeoptim_horizon, spectrain_horizon
from shardwright.runtime.async_pipeline.schedule import call_at, remaining

SIZES = range(2, 9)
MINIBATCHES = 40
SPECTRAIN = {  # (forward, backward) per stage, as published for 4 and 8 stages
    4: [(3, 0), (2, 0), (2, 1), (1, 1)],
    8: [(7, 0), (6, 0), (6, 1), (5, 1), (5, 2), (4, 2), (4, 3), (3, 3)],
}


def forward_tick(minibatch, stage):
    """When a stage runs the forward pass of a mini-batch; one tick is one pass."""
    return 2 * minibatch + stage


def backward_tick(minibatch, stage, stages):
    """When a stage runs the backward pass of a mini-batch and updates its weights."""
    return 2 * minibatch + 2 * stages - 1 - stage


def calls(stage, stages, start, stop):
    """Everything a stage does for mini-batches `start` to `stop`, from empty to empty pipeline."""
    at_arrivals = [call_at(m, stage, stages, start) for m in range(start, stop)]
    return [*at_arrivals, *remaining(stage, stages, start, stop)]


def order(stage, stages):
    """What a stage does, in order: ("F" or "B", mini-batch)."""
    found = []
    for call in calls(stage, stages, 0, MINIBATCHES):
        found += [("F", call.forward)] if call.forward is not None else []
        found += [("B", call.backward)] if call.backward is not None else []
    return found


def by_ticks(stage, stages):
    """The same from the ticks alone."""
    ticks = {forward_tick(m, stage): ("F", m) for m in range(MINIBATCHES)}
    ticks |= {backward_tick(m, stage, stages): ("B", m) for m in range(MINIBATCHES)}
    assert len(ticks) == 2 * MINIBATCHES  # a stage does one thing at a time
    return [ticks[tick] for tick in sorted(ticks)]


@pytest.mark.parametrize("stages", SIZES)
def test_every_stage_alternates_as_the_ticks_say(stages):
    for stage in range(stages):
        assert order(stage, stages) == by_ticks(stage, stages)


@pytest.mark.parametrize("stages", SIZES)
def test_nothing_is_used_before_it_arrives(stages):
    for m in range(MINIBATCHES):
        for stage in range(1, stages):
            assert forward_tick(m, stage - 1) < forward_tick(m, stage)
            assert backward_tick(m, stage, stages) < backward_tick(m, stage - 1, stages)
        assert forward_tick(m, stages - 1) < backward_tick(m, stages - 1, stages)


@pytest.mark.parametrize("stages", SIZES)
def test_horizons_are_the_updates_that_come_between(stages):
    for stage in range(stages):
        done = order(stage, stages)
        spectrain, pipeoptim = spectrain_horizon(stage, stages), pipeoptim_horizon(stage, stages)
        for m in range(stages, MINIBATCHES - stages):  # the pipeline is full
            between = done[done.index(("F", m)) + 1 : done.index(("B", m))]
            updates = sum(kind == "B" for kind, _ in between)
            travels = backward_tick(m, 0, stages) - backward_tick(m, stage, stages)
            assert (pipeoptim.forward, pipeoptim.backward) == (updates, 0)
            assert spectrain.backward == travels // 2  # one update in two ticks
            assert spectrain.forward == updates + travels // 2


@pytest.mark.parametrize("stages", SPECTRAIN)
def test_spectrain_horizons_as_published(stages):
    found = [spectrain_horizon(stage, stages) for stage in range(stages)]
    assert [(h.forward, h.backward) for h in found] == SPECTRAIN[stages]


def test_a_pipeline_shorter_than_its_stages_still_drains():
    assert [(c.forward, c.backward) for c in calls(0, 4, 5, 7)] == [
        (5, None),
        (6, None),
        (None, None),
        (None, 5),
        (None, 6),
    ]
