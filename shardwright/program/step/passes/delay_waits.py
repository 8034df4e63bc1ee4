"""Delays waits for reductions as long as their buffers permit, so that they overlap with operators.

A transfer whose result is another tensor than its operand (reduce-scatter, all-to-all, all-gather)
needs a buffer besides the gradients, and so does a gradient that is one of several in a total (a
single one is the total itself). They are waited for when the next transfer of gradients along the
same axis starts, whatever its size: ranks hold tiles of other sizes, and all of them have to start
what they do together in one order. So are transfers whose result is sent along another axis, in
plans without stages: that second transfer then overlaps with operators, too. Other all-reduces of
gradients and results are waited for at the end of the step, also of gradients that a reduce-scatter
has left (HSDP), and so are stages' sums of totals over micro-batches, which were there before the
last of these: each stage that waited for a sum would delay the stages before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from shardwright.ir.pipeline import AXIS
from shardwright.ir.redistribution import Collective
from shardwright.program.step.channels import axis_of
from shardwright.program.step.host_copies import StoreGradient
from shardwright.program.step.instructions import (
    Accumulate,
    Backward,
    StepInstruction,
    Transfer,
    Wait,
    reads,
    writes,
)
from shardwright.program.step.lower.purposes import Purpose, purposes
from shardwright.program.step.step_program import StepProgram

_LATE = (Purpose.GRADIENT, Purpose.RESULT)


def delay_waits(program: StepProgram) -> StepProgram:
    """`program` with late waits for gradients and results, and what depends on them."""
    order = _Order(program)
    for one in program.instructions:
        order.take(one)
    order.end()
    return replace(program, instructions=tuple(order.found))


class _Order:
    """The instructions of a program in their new order, while they are taken one by one."""

    def __init__(self, program: StepProgram) -> None:
        self.known = purposes(program)
        self.transfers = {one.handle: one for one in program.transfers()}
        self.sums = _sums(program)
        self.in_stages = any(True for _ in program.messages())
        self.found: list[StepInstruction] = []
        self.delayed: list[_Delayed] = []

    def take(self, one: StepInstruction) -> None:
        """Add an instruction, or delay it."""
        if isinstance(one, Transfer) and axis_of(one.channel) == AXIS:
            # Other stages delay others: all of them start what they do together in one order.
            self.end()
        if needed := self.needed_by(one):
            self.delayed = [each for each in self.delayed if each not in needed]
            self.delayed.append(_Delayed.all_of(needed))
            self.delayed[-1].add(one)
        elif isinstance(one, Wait) and self.known.get(one.handle) in _LATE:
            self.delayed.append(_Delayed([self.transfers[one.handle]]))
            self.delayed[-1].add(one)
        else:
            if isinstance(one, Transfer) and self.known[one.handle] is Purpose.GRADIENT:
                while due := [each for each in self.delayed if self.ends_before(each, one)]:
                    self.delayed.remove(due[0])
                    self.release(due[0])
            self.found.append(one)

    def needed_by(self, one: StepInstruction) -> list[_Delayed]:
        """The delayed waits that have to come before an instruction."""
        if isinstance(one, Wait):
            return [each for each in self.delayed if one.handle in each.handles]
        names = reads(one)
        return [each for each in self.delayed if not each.names.isdisjoint(names)]

    def release(self, one: _Delayed) -> None:
        """Wait for what was sent; a transfer of what arrives is started, and waited for later."""
        sent = {each.handle for each in one.sent}
        for each in one.instructions:
            if isinstance(each, Wait) and each.handle in sent:
                self.found.append(each)
            else:
                self.take(each)

    def ends_before(self, each: _Delayed, following: Transfer) -> bool:
        """Whether to wait before the transfer `following` starts.

        That is where a buffer is to be given back, or what arrives is sent along another axis.
        """
        sent = [
            one.collective
            for one in each.sent
            if one.channel == following.channel
            and self.known[one.handle] is Purpose.GRADIENT
            and not (self.in_stages and self.sums.issuperset(part.value for part in one.parts))
        ]
        if not sent:
            return False
        if any(one is not Collective.ALL_REDUCE for one in sent) or each.adds_to(self.sums):
            return True
        return each.sends_on and not self.in_stages

    def end(self) -> None:
        """Add all that is delayed; waits for what is sent along another axis come first."""
        while chained := [each for each in self.delayed if each.sends_on]:
            self.delayed.remove(chained[0])
            self.release(chained[0])
        for each in self.delayed:
            self.found += each.instructions
        self.delayed = []


def _sums(program: StepProgram) -> frozenset[str]:
    """The totals of several gradients."""
    added: Counter[str] = Counter()
    for one in program.instructions:
        if isinstance(one, Accumulate):
            added[one.total] += 1
        elif isinstance(one, Backward):
            added.update(total for _, total in one.totals)
    return frozenset(total for total, count in added.items() if count > 1)


@dataclass(eq=False)
class _Delayed:
    """Waits for `sent`, and instructions that need what arrives."""

    sent: list[Transfer]
    instructions: list[StepInstruction] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    handles: set[str] = field(default_factory=set)
    totals: set[str] = field(default_factory=set)  # to which gradients are added

    @staticmethod
    def all_of(parts: list[_Delayed]) -> _Delayed:
        found = _Delayed([])
        for part in parts:
            found.sent += part.sent
            found.instructions += part.instructions
            found.names |= part.names
            found.handles |= part.handles
            found.totals |= part.totals
        return found

    def add(self, one: StepInstruction) -> None:
        self.instructions.append(one)
        self.names.update(writes(one))
        if isinstance(one, Transfer | StoreGradient):
            self.handles.add(one.handle)
        elif isinstance(one, Accumulate):
            self.totals.add(one.total)

    @property
    def sends_on(self) -> bool:
        """Whether what arrives is sent along another axis."""
        return any(isinstance(one, Transfer) for one in self.instructions)

    def adds_to(self, totals: Collection[str]) -> bool:
        """Whether a gradient is added to one of `totals`."""
        return not self.totals.isdisjoint(totals)
