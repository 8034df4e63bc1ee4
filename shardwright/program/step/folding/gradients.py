"""Finds the parameter whose gradient a value of a step program becomes."""

from __future__ import annotations

from shardwright.program.step.host_copies import StoreGradient
from shardwright.program.step.instructions import Accumulate, Relayout, Transfer
from shardwright.program.step.step_program import StepProgram


def becoming_gradients(program: StepProgram) -> dict[str, tuple[str, int]]:
    """By value, the leaf whose gradient it becomes a term of, and in how many steps."""
    found = {value: (leaf, 0) for leaf, value in program.gradients}
    for one in reversed(program.instructions):
        if isinstance(one, Transfer):
            pairs = [(part.value, part.result) for part in one.parts]
        elif isinstance(one, Accumulate):
            pairs = [(one.value, one.total)]
        elif isinstance(one, Relayout | StoreGradient):
            pairs = [(one.value, one.result)]
        else:
            continue
        for value, made in pairs:
            if made in found:
                leaf, steps = found[made]
                found.setdefault(value, (leaf, steps + 1))
    return found
