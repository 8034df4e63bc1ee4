"""Classifies the transfers of a step program by what they move; passes treat each class apart."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Sequence

from shardwright.program.step.async_pipeline.versions import Version
from shardwright.program.step.host_copies import StoreGradient
from shardwright.program.step.instructions import (
    Accumulate,
    Backward,
    Forward,
    Recv,
    Relayout,
    Send,
    StepInstruction,
    Transfer,
    Update,
    Wait,
    reads,
)
from shardwright.program.step.step_program import StepProgram


class Purpose(enum.Enum):
    """The kind of value that a transfer moves."""

    COPY = "copy"  # a parameter, to be read as a whole
    GRADIENT = "gradient"  # of a parameter, reduced to the layout that it is stored in
    RESULT = "result"  # what the step returns, and no operator reads
    ACTIVATION = "activation"


def purposes(program: StepProgram) -> dict[str, Purpose]:
    """The purpose of each transfer, by its handle."""
    readers = readers_of(program.instructions)
    waits = {one.handle: one for one in program.instructions if isinstance(one, Wait)}
    totals = {value for _, value in program.gradients}
    results = {*program.outputs, *(value for _, value in program.updates)}
    ends: dict[str, set[str]] = {}  # value -> where it goes: "", if an operator reads it

    def ends_of(name: str) -> set[str]:
        if name not in ends:
            found = {name} if name in totals or name in results else set()
            ends[name] = found
            for one in readers[name]:
                if isinstance(one, Accumulate):
                    found |= ends_of(one.total)
                elif isinstance(one, Transfer):
                    for part, result in zip(one.parts, waits[one.handle].results, strict=True):
                        if part.value == name:
                            found |= ends_of(result)
                elif isinstance(one, Relayout | StoreGradient):
                    found |= ends_of(one.result)
                elif not isinstance(one, Update):
                    found.add("")
        return ends[name]

    from_leaves = set(program.leaves)
    found: dict[str, Purpose] = {}
    for one in program.instructions:
        if isinstance(one, Relayout) and one.value in from_leaves:
            from_leaves.add(one.result)
        elif isinstance(one, Version):
            from_leaves.update(result for _, result in one.parameters)
        if not isinstance(one, Transfer):
            continue
        made = waits[one.handle].results
        goes = set().union(*(ends_of(name) for name in made))
        if from_leaves.issuperset(reads(one)):
            from_leaves.update(made)
            found[one.handle] = Purpose.COPY
        elif goes and goes <= results:
            found[one.handle] = Purpose.RESULT
        elif goes and goes <= totals | results:  # results may be summed along with gradients
            found[one.handle] = Purpose.GRADIENT
        else:
            found[one.handle] = Purpose.ACTIVATION
    return found


def readers_of(
    instructions: Sequence[StepInstruction],
) -> defaultdict[str, list[StepInstruction]]:
    """The instructions that read each value, in order."""
    found: defaultdict[str, list[StepInstruction]] = defaultdict(list)
    for one in instructions:
        names = reads(one)
        for name in names if len(names) < 2 else dict.fromkeys(names):
            found[name].append(one)
    return found


def parts_of_step(instructions: Sequence[StepInstruction]) -> Iterator[int]:
    """For each instruction the number of its forward or backward part; messages begin another."""
    number, backward = 0, False
    for one in instructions:
        if isinstance(one, Forward | Backward) and backward != isinstance(one, Backward):
            backward, number = not backward, number + 1
        elif isinstance(one, Send | Recv):  # a pass of a pipeline stage ends
            number += 1
        yield number
