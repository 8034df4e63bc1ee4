"""Checks that a step program can run."""

from __future__ import annotations

from shardwright.ir.graph import VerifyError
from shardwright.program.step.async_pipeline.versions import Carried
from shardwright.program.step.host_copies import HostCopy
from shardwright.program.step.instructions import (
    Accumulate,
    Backward,
    Forward,
    Free,
    Gradients,
    Recv,
    Send,
    StepInstruction,
    Transfer,
    Update,
    Wait,
    reads,
    writes,
)
from shardwright.program.step.step_program import StepProgram


def verify(program: StepProgram) -> None:
    """Raise `VerifyError` for the first instruction that cannot run, or whose results are lost.

    It checks that every value is defined when it is read; that each transfer is waited for once,
    after its start; that each run that saves values is followed by one backward pass, or by one for
    inputs and then one for weights; that nothing is defined twice; and that the update is last. A
    call of an asynchronous pipeline begins with what such a call leaves.
    """
    there, freed = set(program.given), set[str]()
    in_flight: dict[str, tuple[str, ...]] = {}
    calls: dict[str, int] = {}
    halves: dict[str, int] = {}  # calls whose weights have no gradients yet
    read: set[str] = set()
    updated = False
    if program.carried is not None:
        _begin_with_carried(program, program.carried, there, calls, in_flight)
    for one in program.instructions:
        if updated:
            raise VerifyError(f"{one}: comes after the update")
        for name in reads(one):
            if name not in there:
                why = "after it was freed" if name in freed else "before it is defined"
                raise VerifyError(f"{one}: reads %{name} {why}")
            read.add(name)
        match one:
            case Forward():
                region = program.regions[one.region]
                if len(one.inputs) != len(region.inputs) or len(one.outputs) != len(region.outputs):
                    raise VerifyError(f"{one}: region {one.region} has other inputs or outputs")
                if one.saves:
                    if one.call in calls:
                        raise VerifyError(f"{one}: {one.call} has not run backward yet")
                    calls[one.call] = one.region
            case Backward():
                saved = halves if one.part is Gradients.WEIGHTS else calls
                if saved.pop(one.call, None) != one.region:
                    raise VerifyError(f"{one}: nothing was saved for it")
                if one.part is Gradients.INPUTS:
                    halves[one.call] = one.region
            case Transfer() | Send() | Recv() | HostCopy():
                if one.handle in in_flight:
                    raise VerifyError(f"{one}: {one.handle} is in flight already")
                in_flight[one.handle] = _arriving(one)
            case Wait():
                if in_flight.pop(one.handle, None) != one.results:
                    raise VerifyError(f"{one}: {one.handle} is not in flight")
            case Free():
                if missing := set(one.names) - there:
                    raise VerifyError(f"{one}: %{min(missing)} is not there")
                there.difference_update(one.names)
                freed.update(one.names)
            case Update():
                _check_update(one, program)
                updated = True
        _check_definitions(one, there, freed, read)
        there.update(writes(one))
    if program.carried is not None:
        _leave_carried(program.carried, calls, in_flight)
    if in_flight:
        raise VerifyError(f"{min(in_flight)} is never waited for")
    if calls:
        raise VerifyError(f"{min(calls)} has no backward pass")
    if halves:
        raise VerifyError(f"{min(halves)} has no backward pass for its weights")
    lost = [name for name in program.returned if name not in there]
    if lost:
        raise VerifyError(f"%{lost[0]} is returned but never defined")


def _begin_with_carried(
    program: StepProgram,
    carried: Carried,
    there: set[str],
    calls: dict[str, int],
    in_flight: dict[str, tuple[str, ...]],
) -> None:
    """Add what the call before leaves: values, calls with their regions, handles with results."""
    there.update(start for _, start in carried.values)
    regions = {one.call: one.region for one in program.instructions if isinstance(one, Forward)}
    for end, start in carried.calls:  # each age after the one before
        if end not in regions:
            raise VerifyError(f"{end} is carried to the next call but never started")
        calls[start] = regions[start] = regions[end]
    begun = (*program.transfers(), *program.messages())
    results = {one.handle: _arriving(one) for one in begun}
    for end, start in carried.handles:
        if end not in results:
            raise VerifyError(f"{end} is carried to the next call but never started")
        in_flight[start] = results[start] = results[end]


def _leave_carried(
    carried: Carried, calls: dict[str, int], in_flight: dict[str, tuple[str, ...]]
) -> None:
    """Take what the next call begins with; raise `VerifyError` if something is missing."""
    for pairs, left in ((carried.calls, calls), (carried.handles, in_flight)):
        for end, _ in pairs:
            if end not in left:
                raise VerifyError(f"{end} is carried to the next call but has ended")
            del left[end]


def _check_update(one: Update, program: StepProgram) -> None:
    """Raise `VerifyError` unless it updates leaves by the gradients that the step returns."""
    if missing := {leaf for leaf, _ in one.parameters} - set(program.leaves):
        raise VerifyError(f"{one}: %{min(missing)} is no leaf")
    if not set(one.parameters) <= set(program.gradients):
        raise VerifyError(f"{one}: takes other gradients than the step returns")
    if one.groups and (min(one.groups) < 1 or sum(one.groups) != len(one.parameters)):
        raise VerifyError(f"{one}: has {len(one.parameters)} parameters")


def _check_definitions(
    one: StepInstruction, there: set[str], freed: set[str], read: set[str]
) -> None:
    """Raise `VerifyError` if a result is defined already, unless it is a total that is added to."""
    made = writes(one)
    if not made:
        return
    totals: set[str] = set()
    if isinstance(one, Accumulate):
        totals = {one.total}
    elif isinstance(one, Backward):
        totals = {total for _, total in one.totals}
    twice = len(set(made)) < len(made)
    for name in made:
        again = name in there and name not in totals
        if name in totals and name in read:
            raise VerifyError(f"{one}: adds to %{name} after it was read")
        if again or name in freed or (twice and made.count(name) > 1):
            raise VerifyError(f"{one}: defines %{name} twice")


def _arriving(one: Transfer | Send | Recv | HostCopy) -> tuple[str, ...]:
    """The values that are there after the wait for a transfer, a message or a copy."""
    match one:
        case HostCopy():
            return (one.result,)
        case Transfer():
            return tuple(part.result for part in one.parts)
        case Send():
            return ()
        case Recv():
            return tuple(part.value for part in one.payload)
