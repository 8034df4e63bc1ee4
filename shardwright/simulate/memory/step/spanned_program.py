"""Extends a program of few layers by the tensors of all layers, where instructions read them.

A graph of equal layers is simulated with few of them (`program/step/folding/sections.py`); the
others are left out at a gap. But one collective may move tensors of all layers
(`program/step/folding/spanning.py`), and its buffer is as large as all of them. Tensors of the
layers that were left out are therefore added as copies of those beside the gap, and a section that
only adds up such tensors at the end of a step is repeated for each of these layers. What one
collective makes for all layers, each layer frees; the tensors of those that were left out are freed
at the gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.program.step.folding.sections import NotPeriodicError, Seam, Section, Sections
from shardwright.program.step.folding.spanning import Span, extended, left_out, named_by, renamed
from shardwright.program.step.instructions import Free, StepInstruction, Update, reads, writes
from shardwright.program.step.step_program import StepProgram


@dataclass(frozen=True)
class SpannedProgram:
    """An extended program, and the positions of the instructions of few layers in it.

    Attributes:
        program: the program of few layers, with the names and sections that were added.
        written: the number of instructions that were added before an instruction of few layers, by
            its position there.
        copies: by a position in `program`, for each layer that was left out: the values to copy
            before that position, and the names of the copies.
        drops: by a position in `program`: values of layers that were left out, which these layers
            free there.
    """

    program: StepProgram
    written: Mapping[int, int]
    copies: Mapping[int, list[dict[str, str]]]
    drops: Mapping[int, list[str]]

    def place(self, start: int) -> int:
        """The position in `program` of the instruction at `start` of few layers."""
        return start + sum(count for at, count in self.written.items() if at <= start)

    def places(self, start: int, stop: int) -> range:
        """Positions after each instruction from `start` to `stop`, and after those added before."""
        first = self.place(start) - self.written.get(start, 0)
        last = self.place(start) if start == stop else self.place(stop - 1) + 1
        return range(first + 1, last + 1)


def spanned(sections: Sections) -> SpannedProgram:
    """Extend the program of few layers.

    Raises `NotPeriodicError` if instructions of a single layer read what a collective over all
    layers makes, and do not free it, or read later what such a collective reads.
    """
    if not sections.spans:
        return SpannedProgram(sections.program, {}, {}, {})
    names = _Names(sections)
    more = {
        seam.behind.start: found
        for seam in sections.seams
        if (found := names.written(seam)) is not None
    }
    for at, found in names.added().items():
        more.setdefault(at, found)
    names.check()
    instructions: list[StepInstruction] = []
    for at, one in enumerate(sections.program.instructions):
        instructions += more.get(at, ())
        spans = sections.spans.get(at, ())
        instructions.append(extended(one, spans, sections.skipped) if spans else one)
    written = {at: len(found) for at, found in more.items()}
    program = replace(sections.program, instructions=tuple(instructions))
    bare = SpannedProgram(program, written, {}, {})
    return replace(
        bare,
        copies={bare.place(at): found for at, found in names.copies().items()},
        drops={bare.place(at): found for at, found in names.drops().items()},
    )


class _Names:
    """Names in instructions over all layers: the layer that each belongs to, and who reads it."""

    def __init__(self, sections: Sections) -> None:
        self.sections = sections
        self.made: dict[str, int] = {}
        self.used: defaultdict[str, set[int]] = defaultdict(set)
        for at, one in enumerate(sections.program.instructions):
            if isinstance(one, Update):  # it names all parameters
                continue
            for name in writes(one):
                self.made.setdefault(name, at)
            for name in (*reads(one), *writes(one), *named_by(one)):
                self.used[name].add(at)
        # The name that the layer before the gap has instead, for names over all layers.
        self.before_gap: dict[str, str] = {}
        self.first: dict[str, int] = {}  # name beside a gap: the first instruction over all layers
        for at, spans in sorted(sections.spans.items()):
            known = named_by(sections.program.instructions[at])
            for span in spans:
                begin, _ = span.before
                for place in range(span.begin, span.end):
                    same = known[begin + span.find(place)[1]]
                    self.before_gap.setdefault(known[place], same)
                for pair in span.pairs():
                    for place in pair:
                        self.first.setdefault(known[place], at)
        self.unrolled: set[int] = set()  # positions in sections that are repeated for each layer

    def written(self, seam: Seam) -> list[StepInstruction] | None:
        """Repeat the section before a gap for each layer left out, if it only adds up values."""
        before = self.sections.program.instructions[seam.before.start : seam.before.stop]
        found = self._repeated(before, self.sections.skipped[seam.before.gap])
        if found is None:
            return None
        for section in self.sections.sections:
            if section.track == seam.before.track:
                self.unrolled.update(_instructions(section))
        return found

    def added(self) -> dict[int, list[StepInstruction]]:
        """By position, what layers left out do with results of collectives in no pass over them.

        Gradients of all layers are added up and freed in the pass over others, for example. Raises
        `NotPeriodicError` for other instructions.
        """
        beside = {at for seam in self.sections.seams for one in seam for at in _instructions(one)}
        found: dict[int, list[StepInstruction]] = {}
        for name, span in self._made():
            own = sorted(self._own(name))
            if not own or any(self.sections.at[at].gap == span.gap for at in own):
                continue
            ones = [self.sections.program.instructions[at] for at in own]
            more = self._repeated(ones, self.sections.skipped[span.gap])
            if more is None or not beside.isdisjoint((*own, own[-1] + 1)):
                raise NotPeriodicError(f"%{name} is read in no pass over its layer")
            found.setdefault(own[-1] + 1, []).extend(more)
            self.unrolled.update(own)
        return found

    def _repeated(
        self, ones: Sequence[StepInstruction], times: int
    ) -> list[StepInstruction] | None:
        """Some instructions for each of `times` layers that were left out; None if not possible."""
        found: list[StepInstruction] = []
        for number in range(times):
            for one in ones:
                named = (*reads(one), *writes(one), *named_by(one))
                names = {name: left_out(self.before_gap.get(name, name), number) for name in named}
                other = renamed(one, names)
                if other is None:
                    return None
                found.append(other)
        return found

    def _made(self) -> Iterator[tuple[str, Span]]:
        """The results of instructions over all layers for the layer before a gap, with the span."""
        for at, spans in self.sections.spans.items():
            names = named_by(self.sections.program.instructions[at])
            for span in spans:
                for name in names[slice(*span.before)]:
                    if self.made.get(name) == at:
                        yield name, span

    def _own(self, name: str) -> set[int]:
        """The instructions with a name that are neither over all layers nor repeated for them."""
        return self.used[name] - self.sections.spans.keys() - self.unrolled

    def check(self) -> None:
        """Raise `NotPeriodicError` if a layer reads what a collective over all layers read."""
        for name, first in self.first.items():
            own = self.used[name] - self.sections.spans.keys()
            made = self.made.get(name)
            if made not in (None, *self.sections.spans) and any(at > first for at in own):
                raise NotPeriodicError(f"%{name} is read by its layer later")

    def drops(self) -> dict[int, list[str]]:
        """By position, the values of layers that were left out, where each layer frees its own.

        Raises `NotPeriodicError` for values that a layer reads and does not free.
        """
        behind = {seam.behind.track: seam.behind for seam in self.sections.seams}
        found: defaultdict[int, list[str]] = defaultdict(list)
        for name, span in self._made():
            own = self._own(name)
            if not own:
                continue
            if not isinstance(self.sections.program.instructions[max(own)], Free) or any(
                self.sections.at[at].gap != span.gap for at in own
            ):
                raise NotPeriodicError(f"%{name} is read by its layer, too")
            numbers = range(self.sections.skipped[span.gap])
            place = behind[self.sections.at[max(own)].track].start
            found[place] += [left_out(name, number) for number in numbers]
        return found

    def copies(self) -> dict[int, list[dict[str, str]]]:
        """By position, for each layer that was left out: the copied values and their copies."""
        found: defaultdict[int, defaultdict[int, dict[str, str]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        for name, gap, place in self._copied():
            for number in range(self.sections.skipped[gap]):
                found[place][number][name] = left_out(self.before_gap[name], number)
        return {place: list(by_number.values()) for place, by_number in found.items()}

    def _copied(self) -> Iterator[tuple[str, int, int]]:
        """Names to copy, each with its gap and the position of the copy."""
        before = {at: seam for seam in self.sections.seams for at in _instructions(seam.before)}
        for at, spans in self.sections.spans.items():
            names = named_by(self.sections.program.instructions[at])
            for span in spans:
                mine = names[slice(*span.before)]
                beside = [name for name in names if self.made.get(name) in before]
                for name in mine:
                    made = self.made.get(name)
                    if made is None:  # a parameter
                        yield name, span.gap, 0
                    elif made not in self.sections.spans and made not in self.unrolled:
                        found = [one for one in beside if self.before_gap[one] == name]
                        if len(found) != 1:
                            raise NotPeriodicError(f"%{name} is not made beside a gap")
                        yield found[0], span.gap, before[self.made[found[0]]].behind.start


def _instructions(section: Section) -> range:
    return range(section.start, section.stop)
