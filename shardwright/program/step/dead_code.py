"""Removes instructions whose results nobody reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from shardwright.program.step.instructions import (
    Accumulate,
    Add,
    Backward,
    Forward,
    Free,
    Relayout,
    Seed,
    StepInstruction,
    StepProgram,
    Transfer,
    Wait,
    reads,
)


def forward_only(program: StepProgram) -> StepProgram:
    """`program` without its backward part: what evaluation runs, on the same regions."""
    wanted = (*program.outputs, *(value for _, value in program.updates))
    kept = [one for one in program.instructions if not isinstance(one, Backward | Free | Seed)]
    return replace(program, instructions=without_dead(kept, wanted), gradients=(), seeds=())


def without_dead(
    instructions: Sequence[StepInstruction], returned: Collection[str]
) -> tuple[StepInstruction, ...]:
    """`instructions` without those whose results nobody reads; `returned` are wanted at the end.

    A run whose backward pass does not come saves nothing.
    """
    calls = {one.call for one in instructions if isinstance(one, Backward)}
    wanted = set(returned)
    waited: set[str] = set()
    found: list[StepInstruction] = []
    for one in reversed(instructions):
        if isinstance(one, Forward):
            saves = one.saves and one.call in calls
            if not saves and wanted.isdisjoint(one.outputs):
                continue
            one = replace(one, saves=saves)
        elif isinstance(one, Wait):
            if wanted.isdisjoint(one.results):
                continue
            waited.add(one.handle)
        elif isinstance(one, Transfer):
            if one.handle not in waited:
                continue
        elif (isinstance(one, Relayout | Add) and one.result not in wanted) or (
            isinstance(one, Accumulate) and one.total not in wanted
        ):
            continue
        wanted.update(reads(one))
        found.append(one)
    return tuple(found[::-1])
