"""Unrolls the program of a folded graph: its sections as often as the whole graph has layers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from shardwright.program.step.instructions import StepInstruction, StepProgram, Transfer, Wait
from shardwright.program.step.sections import NOWHERE, NotPeriodicError, Section, Sections
from shardwright.program.step.spanning import extended


class Played(NamedTuple):
    """An instruction when its turn comes; of a `Transfer` or a `Wait` a name of the transfer."""

    instruction: StepInstruction
    transfer: Hashable = None


def in_order(program: StepProgram) -> list[Played]:
    """The instructions of a program, once."""
    return [
        Played(one, one.handle if isinstance(one, Transfer | Wait) else None)
        for one in program.instructions
    ]


def unrolled(sections: Sections) -> list[Played]:
    """The instructions of the whole graph's program.

    Raises `NotPeriodicError` where it cannot be told which transfer is waited for.
    """
    writer = _Writer(sections)
    for section, seam in sections.with_seams():
        if seam is not None:
            writer.repeat(seam.before, seam.behind, sections.skipped[section.gap])
        writer.write(section, writer.whole(section))
    return writer.found


class _Writer:
    """Collects unrolled instructions; a transfer is named by the position where it starts."""

    def __init__(self, sections: Sections) -> None:
        self.sections = sections
        self.found: list[Played] = []
        self._started: set[Hashable] = set()
        self._places = {
            one.handle: at
            for at, one in enumerate(sections.program.instructions)
            if isinstance(one, Transfer)
        }
        # What sections at a seam wait for: places relative to the layer.
        self._steady = {
            position
            for seam in sections.seams
            for section in seam
            for position in self._waited(section)
        }

    def repeat(self, before: Section, behind: Section, times: int) -> None:
        """The section before a gap, for each layer that was left out."""
        first, step = self.whole(before), 1 if before.layer < behind.layer else -1
        for number in range(1, times + 1):
            self.write(before, first + step * number)

    def write(self, section: Section, layer: int) -> None:
        """A section, for a layer of the whole graph."""
        for at in range(section.start, section.stop):
            one = self.sections.program.instructions[at]
            if at in self.sections.spans:
                one = extended(one, self.sections.spans[at], self.sections.skipped)
            if isinstance(one, Transfer):
                name = self._name(section, at, layer)
                self._started.add(name)
                self.found.append(Played(one, name))
            elif isinstance(one, Wait):
                name = self._waited_for(section, one, layer)
                if name not in self._started:
                    raise NotPeriodicError(f"{one}: for a transfer of a layer that is left out")
                self.found.append(Played(one, name))
            else:
                self.found.append(Played(one))

    def whole(self, section: Section) -> int:
        """The layer of a section in the whole graph."""
        skipped = self.sections.skipped[section.gap] if section.gap != NOWHERE else 0
        return section.layer + skipped * (section.layer >= 0)

    def _waited_for(self, section: Section, one: Wait, layer: int) -> Hashable:
        at = self._places[one.handle]
        start = self.sections.at[at]
        if start.gap == NOWHERE or start.gap != section.gap:
            return self._name(start, at, self.whole(start))
        same_side = (start.layer >= 0) == (section.layer >= 0)
        if same_side or self._relative(section, start, at) in self._steady:
            return self._name(start, at, layer + start.layer - section.layer)
        return self._name(start, at, self.whole(start))

    def _name(self, start: Section, at: int, layer: int) -> Hashable:
        return start.track, layer, at - start.start

    def _relative(self, section: Section, start: Section, at: int) -> Hashable:
        return section.gap, start.track, start.layer - section.layer, at - start.start

    def _waited(self, section: Section) -> Iterator[Hashable]:
        for one in self._instructions(section):
            if isinstance(one, Wait):
                at = self._places[one.handle]
                yield self._relative(section, self.sections.at[at], at)

    def _instructions(self, section: Section) -> Sequence[StepInstruction]:
        return self.sections.program.instructions[section.start : section.stop]
