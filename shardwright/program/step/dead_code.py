"""Removes instructions whose results are not read, and those that a part of a step does not run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from shardwright.program.step.host_copies import HostCopy
from shardwright.program.step.instructions import (
    Accumulate,
    Add,
    Backward,
    Forward,
    Free,
    Recv,
    Relayout,
    Seed,
    Send,
    StepInstruction,
    Transfer,
    Update,
    Wait,
    reads,
    writes,
)
from shardwright.program.step.step_program import StepProgram


def forward_only(program: StepProgram) -> StepProgram:
    """`program` without its backward part: what evaluation runs, on the same regions."""
    wanted = (*program.outputs, *(value for _, value in program.updates))
    left_out = {one.handle for one in program.messages() if one.backward}
    there = {*program.leaves, *(value for _, _, value in program.inputs)}
    kept: list[StepInstruction] = []
    for one in program.instructions:
        if isinstance(one, Backward | Free | Seed | Update):
            continue
        if isinstance(one, Send | Recv | Wait):
            if one.handle in left_out:
                continue
        elif not there.issuperset(reads(one)):
            if isinstance(one, Transfer | HostCopy):
                left_out.add(one.handle)
            continue
        there.update(writes(one))
        kept.append(one)
    return replace(program, instructions=without_dead(kept, wanted), gradients=(), seeds=())


def without_update(program: StepProgram) -> StepProgram:
    """`program` up to its gradients: what a call of a module and its backward pass run."""
    kept = tuple(one for one in program.instructions if not isinstance(one, Update))
    return replace(program, instructions=kept)


def without_dead(
    instructions: Sequence[StepInstruction], returned: Collection[str]
) -> tuple[StepInstruction, ...]:
    """Remove instructions whose results are neither read nor in `returned`.

    A region without a backward pass saves nothing. Messages stay, because the rank at the other end
    sends or receives them.
    """
    calls = {one.call for one in instructions if isinstance(one, Backward)}
    wanted = set(returned)
    waited: set[str] = set()
    messages = {one.handle for one in instructions if isinstance(one, Send | Recv)}
    found: list[StepInstruction] = []
    for one in reversed(instructions):
        if isinstance(one, Forward):
            saves = one.saves and one.call in calls
            if not saves and wanted.isdisjoint(one.outputs):
                continue
            one = replace(one, saves=saves)
        elif isinstance(one, Wait):
            if wanted.isdisjoint(one.results) and one.handle not in messages:
                continue
            waited.add(one.handle)
        elif isinstance(one, Transfer | HostCopy):
            if one.handle not in waited:
                continue
        elif (isinstance(one, Relayout | Add) and one.result not in wanted) or (
            isinstance(one, Accumulate) and one.total not in wanted
        ):
            continue
        wanted.update(reads(one))
        found.append(one)
    return tuple(found[::-1])
