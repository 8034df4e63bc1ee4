"""Memory over a step by cause: what is alive at the highest moment of each instruction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, final

from shardwright.ir.layout import Bytes
from shardwright.ir.memory import Moment
from shardwright.program.step.instructions import Wait
from shardwright.program.step.lower.purposes import Purpose, purposes
from shardwright.program.step.step_program import StepProgram
from shardwright.simulate.memory.allocator import Allocator, Block, Use
from shardwright.simulate.memory.values import View

_MOST = 240  # moments; neighbouring instructions share one, the highest of them


class _Mark(NamedTuple):
    """The state between two instructions: changes so far, the last event, gathered bytes by use."""

    changes: int
    where: str
    gathered: Counter[Use]


@final
class MemoryCurve:
    """Observes a step of a rank while its memory is simulated (`StepMemory.play`).

    It is told of every instruction of `program`, in their order.
    """

    def __init__(self, program: StepProgram, allocator: Allocator) -> None:
        self._allocator = allocator
        kinds = purposes(program)
        # By instruction: the gathered values that are there after it.
        self._gathered = [
            one.results if isinstance(one, Wait) and kinds.get(one.handle) is Purpose.COPY else ()
            for one in program.instructions
        ]
        self._alive: dict[str, None] = {}  # the names of gathered values
        self._blocks: Sequence[Block] = ()  # that they are in
        self._marks: list[_Mark] = []

    def observe(self, values: dict[str, View]) -> None:
        """Record the state before the first instruction, or after the next one."""
        done = len(self._marks)
        new = self._gathered[done - 1] if done else ()
        if new or not self._alive.keys() <= values.keys():
            self._alive = {name: None for name in (*self._alive, *new) if name in values}
            blocks = (values[name].block for name in self._alive)
            self._blocks = tuple({id(block): block for block in blocks}.values())
        found = Counter[Use]()
        for block in self._blocks:
            if block.use is not Use.LASTING:
                found[block.counts_as] += block.bytes
        self._marks.append(_Mark(self._allocator.changes, self._allocator.where, found))

    def moments(self) -> tuple[Moment, ...]:
        """The highest moments, those of neighbouring instructions together if there are many."""
        ends = [mark.changes for mark in self._marks] + [self._allocator.changes]
        highest = self._allocator.highest_between(ends)
        after = [*self._marks[1:], self._marks[-1]._replace(where=self._allocator.where)]
        pairs = zip(self._marks, after, highest, strict=True)
        found = [_moment(now.where, found, before.gathered) for before, now, found in pairs]
        size = -(-len(found) // _MOST)
        groups: Sequence[Sequence[Moment]] = [
            found[at : at + size] for at in range(0, len(found), size)
        ]
        return tuple(max(group, key=lambda one: one.total) for group in groups)


def _moment(what: str, found: Counter[Use], gathered: Counter[Use]) -> Moment:
    def beside(use: Use) -> Bytes:
        return Bytes(max(0, found[use] - gathered[use]))

    rest = [beside(use) for use in (Use.SAVED, Use.WORKSPACE, Use.COMMUNICATION)]
    total = found[Use.SAVED] + found[Use.WORKSPACE] + found[Use.COMMUNICATION]
    saved, workspace, communication = rest
    return Moment(
        what,
        Bytes(found[Use.GRADIENT]),
        saved,
        Bytes(total - sum(rest)),
        workspace,
        communication,
    )
