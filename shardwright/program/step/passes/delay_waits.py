"""Delays waits for reductions as long as their buffers permit, so that they overlap with operators.

A transfer whose result is another tensor than its operand (reduce-scatter, all-to-all, all-gather)
needs a buffer besides the gradients, and so does a gradient that is added to a total. They are
waited for when the next transfer of gradients along the same axis starts. Other all-reduces of
gradients and results are waited for at the end of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwright.ir.pipeline import AXIS
from shardwright.ir.redistribution import Collective
from shardwright.program.step.channels import axis_of
from shardwright.program.step.instructions import (
    Accumulate,
    StepInstruction,
    StepProgram,
    Transfer,
    Wait,
    reads,
    writes,
)
from shardwright.program.step.lower.purposes import Purpose, purposes

_LATE = (Purpose.GRADIENT, Purpose.RESULT)


def delay_waits(program: StepProgram) -> StepProgram:
    """`program` with late waits for gradients and results, and what depends on them."""
    known = purposes(program)
    transfers = {one.handle: one for one in program.transfers()}
    found: list[StepInstruction] = []
    delayed: list[_Delayed] = []
    for one in program.instructions:
        if isinstance(one, Transfer) and axis_of(one.channel) == AXIS:
            # Other stages delay others: all of them start what they do together in one order.
            for each in delayed:
                found += each.instructions
            delayed = []
        if needed := [each for each in delayed if each.needs(one)]:
            delayed = [each for each in delayed if each not in needed]
            delayed.append(_Delayed.all_of(needed))
            delayed[-1].add(one)
        elif isinstance(one, Wait) and known.get(one.handle) in _LATE:
            delayed.append(_Delayed([transfers[one.handle]]))
            delayed[-1].add(one)
        else:
            if isinstance(one, Transfer) and known[one.handle] is Purpose.GRADIENT:
                for each in [each for each in delayed if each.holds_a_buffer(one, known)]:
                    delayed.remove(each)
                    found += each.instructions
            found.append(one)
    for each in delayed:
        found += each.instructions
    return replace(program, instructions=tuple(found))


@dataclass(eq=False)
class _Delayed:
    """Waits for `sent`, and instructions that need what arrives."""

    sent: list[Transfer]
    instructions: list[StepInstruction] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    handles: set[str] = field(default_factory=set)

    @staticmethod
    def all_of(parts: list[_Delayed]) -> _Delayed:
        found = _Delayed([])
        for part in parts:
            found.sent += part.sent
            found.instructions += part.instructions
            found.names |= part.names
            found.handles |= part.handles
        return found

    def needs(self, one: StepInstruction) -> bool:
        """Whether an instruction has to come after these."""
        if isinstance(one, Wait):
            return one.handle in self.handles
        return not self.names.isdisjoint(reads(one))

    def add(self, one: StepInstruction) -> None:
        self.instructions.append(one)
        self.names.update(writes(one))
        if isinstance(one, Transfer):
            self.handles.add(one.handle)

    def holds_a_buffer(self, following: Transfer, known: Mapping[str, Purpose]) -> bool:
        """Whether a buffer is to be given back before the transfer `following` starts."""
        added = any(isinstance(one, Accumulate) for one in self.instructions)
        return any(
            one.channel == following.channel and known[one.handle] is Purpose.GRADIENT
            for one in self.sent
            if added or one.collective is not Collective.ALL_REDUCE
        )
