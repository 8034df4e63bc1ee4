"""Programs of asynchronous pipelines: those of all ranks fit together, under every rule."""

from collections import Counter
from dataclasses import replace

import pytest

from shardwright.ir.graph import VerifyError
from shardwright.ir.schedules.weight_versions import WEIGHTS, lag
from shardwright.program.step.async_pipeline.call_sequence import in_sequence
from shardwright.program.step.async_pipeline.lowering import GRADIENTS_OUT, STAGE_PASSES
from shardwright.program.step.async_pipeline.stage_programs import stage_programs
from shardwright.program.step.async_pipeline.versions import Version
from shardwright.program.step.instructions import (
    Backward,
    Forward,
    Free,
    Seed,
    Send,
    Update,
    Wait,
    reads,
    writes,
)
from shardwright.program.step.order import check_order
from shardwright.program.step.program_json import program_from_json, program_to_json
from shardwright.program.step.verify import verify
from tests.unit.program.step.lower.pipelines.test_pipeline import staged

MESHES = {"pp=2 dp=1": 2, "pp=4 dp=1": 4, "pp=2 dp=2": 2}


def programs_of(how, mesh, passes=STAGE_PASSES):
    """The programs of all ranks, with everything in any layout."""
    one = staged(f"async {how}", mesh, MESHES[mesh], 1)
    ranks = range(one.pipeline.groups * one.decisions.mesh.size)
    return [stage_programs(one, rank, passes) for rank in ranks]


def calls(how, mesh):
    """The calls of all ranks."""
    return [one.call for one in programs_of(how, mesh)]


@pytest.mark.parametrize("passes", [STAGE_PASSES, ()], ids=["passes", "naive"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("how", WEIGHTS)
def test_programs_of_all_ranks_fit_together(how, mesh, passes):
    programs, evaluations = zip(*programs_of(how, mesh, passes), strict=True)
    check_order(programs)
    for program in programs:
        assert program_from_json(program_to_json(program)) == program
    for program in evaluations:
        verify(program)
    check_order(evaluations)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("how", WEIGHTS)
def test_calls_one_after_the_other_use_every_value_between_its_definition_and_its_end(how, mesh):
    """And train every mini-batch once, by the update that its lag says."""
    for program in calls(how, mesh):
        sequence, late = in_sequence(program, 6), program.carried.lag
        there, freed, saved = set(sequence.given), set(), set()
        updates = 0
        for one in sequence.instructions:
            if isinstance(one, Forward) and one.saves:
                saved.add(one.call)
            elif isinstance(one, Backward):
                saved.remove(one.call)
            assert there.issuperset(reads(one)), one
            if isinstance(one, Update):
                assert {name.rpartition("@")[2] for _, name in one.parameters} == {str(updates)}
                assert one.late == late
                updates += 1
            elif isinstance(one, Free):
                there.difference_update(one.names)
                freed.update(one.names)
            assert freed.isdisjoint(writes(one)), one
            there.update(writes(one))
        assert (updates, saved) == (6, set())


@pytest.mark.parametrize("how", WEIGHTS)
def test_each_pass_reads_the_versions_of_its_rule(how):
    for stage, program in enumerate(calls(how, "pp=4 dp=1")):
        rule, late = WEIGHTS[how], lag(stage, 4)
        at = next(i for i, one in enumerate(program.instructions) if isinstance(one, Seed))
        halves = program.instructions[:at], program.instructions[at:]
        made = [
            {(one.updates, one.method) for one in half if isinstance(one, Version)}
            for half in halves
        ]
        horizon = rule.horizon(stage, 4)
        ahead = {(horizon.forward, rule.method)} if horizon.forward else set()
        behind = {(horizon.backward, rule.method)} if horizon.backward and late else set()
        assert made == [{(0, "")} if rule.stashes and late else ahead, behind]
        trained = {leaf for leaf, _ in program.gradients}
        direct = {n for one in program.instructions if isinstance(one, Forward) for n in one.inputs}
        assert trained.isdisjoint(direct) == bool(made[0])


def test_predicted_weights_are_dropped_and_stashed_ones_kept():
    (stale, *_), (stash, *_) = calls("spectrain", "pp=2 dp=1"), calls("stash", "pp=2 dp=1")
    assert any(any(region.dropped) for region in stale.regions)
    assert not any("version" in name for name in stale.carried.kept)
    dropped = sum(sum(region.dropped) for region in stale.regions)
    assert dropped > sum(sum(region.dropped) for region in stash.regions)


def test_what_is_wrong_with_a_call_is_found():
    program = calls("stash", "pp=4 dp=1")[1]
    verify(program)
    carried = program.carried
    begun = replace(carried, handles=(*carried.handles, ("values/in@0", "values/in@1")))
    with pytest.raises(VerifyError, match="values/in@0 is carried to the next call but has ended"):
        verify(replace(program, carried=begun))
    with pytest.raises(VerifyError, match="nothing was saved for it"):
        verify(replace(program, carried=replace(carried, calls=carried.calls[:-1])))
    with pytest.raises(VerifyError, match="r0@1 is carried to the next call but never started"):
        verify(replace(program, carried=replace(carried, calls=carried.calls[1:])))


def test_a_stage_that_waits_for_its_gradients_to_be_received_at_once_is_found():
    """The stage before receives them after it has sent values that this one has not asked for."""
    programs = calls("stale", "pp=2 dp=1")
    check_order(programs)
    first = programs[0]
    found = []
    for one in first.instructions:
        found.append(one)
        if isinstance(one, Send):
            found.append(Wait(one.handle, ()))
    waits = tuple(one for one in found if one != Wait("values/out@1", ()))
    carried = replace(first.carried, handles=())
    blocked = [replace(first, instructions=waits, carried=carried), programs[1]]
    verify(blocked[0])
    check_order(blocked)  # the last stage has nothing else to wait for
    last = programs[1]
    waits = []
    for one in last.instructions:
        if isinstance(one, Wait) and one.handle.startswith(GRADIENTS_OUT):
            continue
        waits.append(one)
        if isinstance(one, Send):
            waits.append(Wait(one.handle, ()))
    blocked[1] = replace(last, instructions=tuple(waits), carried=replace(last.carried, handles=()))
    verify(blocked[1])
    with pytest.raises(VerifyError, match="waits forever"):
        check_order(blocked)


def test_messages_of_every_call_are_of_its_mini_batches():
    counted = Counter(
        one.handle for one in in_sequence(calls("stale", "pp=2 dp=1")[0], 5).messages()
    )
    assert set(counted.values()) == {1}
    assert set(counted) == {
        *(f"values/out@{n}" for n in range(5)),
        *(f"gradients/in@{n}" for n in range(5)),
    }
