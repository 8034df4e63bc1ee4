"""Requests of memory of a step whose program is that of a graph with few of many equal layers.

What an allocator with a cache reserves depends on the order of all requests, and not on sums. So
the requests of layers that were left out are written out: those of the section before a gap, for
each of these layers. Blocks are named as transfers are in `program/step/folding/unrolled.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from shardwright.program.step.folding.sections import (
    NOWHERE,
    FoldedGraph,
    NotPeriodicError,
    Seam,
    Section,
    Sections,
)
from shardwright.program.step.folding.spanning import named_by
from shardwright.simulate.memory.caching_allocator import Request
from shardwright.simulate.memory.step.spanned_program import SpannedProgram


class Recorded(NamedTuple):
    """The requests of a program of few layers.

    Attributes:
        requests: all of them, in order.
        ends: how many are made before the program and until the end of each of its instructions.
        copies: requests for copies of blocks, which stand for those of layers that were left out:
            the block, and which of its copies.
        program: the program that was played, with values of all layers.
    """

    requests: Sequence[Request]
    ends: Sequence[int]
    copies: Mapping[int, tuple[int, int]]
    program: SpannedProgram


class _Birth(NamedTuple):
    """The request that allocates a block: an instruction, and which of its requests it is.

    Of a layer that was left out it is `left_out`, counted from the gap; 0 for all other blocks.
    """

    at: int
    number: int
    left_out: int = 0


class _Event(NamedTuple):
    """A block is taken or given back."""

    birth: _Birth
    bytes: int
    taken: bool


def whole_requests(sections: Sections, recorded: Recorded) -> list[Request]:
    """The requests of all layers, from those of a program of few layers in sections.

    Raises:
        NotPeriodicError: layers on both sides of a gap have different requests, or it cannot be
            told in which order the layers that were left out have theirs.
    """
    _check_copies(sections, recorded.program)
    writer = _Writer(sections, recorded.program, _events(recorded))
    for one in sections.seams:
        writer.check(one)
    found = list(writer.outside(-1))
    for section, seam in sections.with_seams():
        if seam is not None and section.start not in recorded.program.written:
            for number in range(sections.skipped[section.gap]):
                found += writer.written(seam.before, writer.left_out(seam, 1 + number))
        found += writer.written(section, writer.whole(section))
    found += writer.outside(len(recorded.ends) - 1)
    return _numbered(found)


def _check_copies(sections: Sections, program: SpannedProgram) -> None:
    """Raise `NotPeriodicError` unless copies of values are in the order of layers that are run."""
    steps = {
        program.place(seam.behind.start): (seam.behind.gap, _step(seam)) for seam in sections.seams
    }
    for at, copies in program.copies.items():
        names = {name for one in copies for name in one}
        if at not in steps:
            if at:  # before the program there are parameters only, which are no requests
                raise NotPeriodicError("values are copied elsewhere than at a gap")
            continue
        gap, step = steps[at]
        for index, spans in sections.spans.items():
            named = named_by(sections.program.instructions[index])
            for span in spans:
                own = names.intersection(named[span.begin : span.end])
                if own and (span.gap != gap or span.ascending != (step > 0)):
                    raise NotPeriodicError("values of layers are not listed as layers run")


def _step(seam: Seam) -> int:
    """The difference between the numbers of a layer and of the one that is run before it."""
    return 1 if seam.before.layer < seam.behind.layer else -1


def _events(recorded: Recorded) -> list[list[_Event]]:
    """The events of each instruction, behind those before the program; at last those behind it.

    Copies are left out: the layers that they stand for allocate them.
    """
    alive: dict[int, _Birth] = {}
    found: list[list[_Event]] = []
    begin = 0
    for at, end in enumerate((*recorded.ends, len(recorded.requests)), -1):
        own: list[_Event] = []
        for index, (block, size, taken) in enumerate(recorded.requests[begin:end], begin):
            if (copied := recorded.copies.get(index)) is not None:
                source, number = copied
                alive[block] = alive[source]._replace(left_out=1 + number)
                continue
            if taken:
                alive[block] = birth = _Birth(at, len(own))
            else:
                birth = alive.pop(block)
            own.append(_Event(birth, size, taken))
        found.append(own)
        begin = end
    return found


class _Writer:
    """Writes the events of sections for layers of the whole graph."""

    def __init__(
        self, sections: Sections, program: SpannedProgram, events: Sequence[Sequence[_Event]]
    ) -> None:
        self.sections, self._program, self._events = sections, program, events
        self._places = [program.place(at) for at in range(len(sections.at))]
        self._few = {place: at for at, place in enumerate(self._places)}
        # Blocks that sections at a seam give back, by their place relative to the layer.
        self._steady = {
            self._relative(section, event.birth)
            for seam in sections.seams
            for section in seam
            for event in self._in(section)
            if not event.taken
        }

    def check(self, seam: Seam) -> None:
        """Raise `NotPeriodicError` unless both sections of a seam have equal requests.

        Where the program has the instructions of all layers they may differ.
        """
        if seam.behind.start in self._program.written:
            return
        first, second = (
            [
                (event.bytes, event.taken, self._relative(section, event.birth))
                for event in self._in(section)
            ]
            for section in seam
        )
        if first != second:
            raise NotPeriodicError("layers on both sides of a gap have different requests")

    def outside(self, at: int) -> Iterator[tuple[Hashable, int, bool]]:
        """The events before the program, with `at` -1, or behind it."""
        for birth, size, taken in self._events[at + 1]:
            yield self._name(Section(at, at), 0, birth), size, taken

    def written(self, section: Section, layer: int) -> Iterator[tuple[Hashable, int, bool]]:
        """The events of a section, for a layer of the whole graph, with names of blocks."""
        for at in range(section.start, section.stop):
            place = self._places[at]
            for own in range(place - self._program.written.get(at, 0), place + 1):
                for birth, size, taken in self._events[own + 1]:
                    yield self._name(section, layer, birth), size, taken

    def whole(self, section: Section) -> int:
        """The layer of a section in the whole graph."""
        skipped = self.sections.skipped[section.gap] if section.gap != NOWHERE else 0
        return section.layer + skipped * (section.layer >= 0)

    def left_out(self, seam: Seam, number: int) -> int:
        """The layer of the whole graph that is `number` layers behind that before a gap."""
        return self.whole(seam.before) + _step(seam) * number

    def _in(self, section: Section) -> Iterator[_Event]:
        for at in range(section.start, section.stop):
            yield from self._events[self._places[at] + 1]

    def _home(self, birth: _Birth) -> Section | None:
        """The section that allocates a block; None where no layer does."""
        if birth.at not in self._few:
            return None
        home = self.sections.at[self._few[birth.at]]
        return None if home.gap == NOWHERE else home

    def _name(self, section: Section, layer: int, birth: _Birth) -> Hashable:
        """The name of a block for a section that runs a layer of the whole graph."""
        home = self._home(birth)
        if home is None:
            return birth
        if birth.left_out:
            seam = self.sections.seams[home.track]
            its = self.left_out(seam, birth.left_out) + home.layer - seam.before.layer
            return home.track, its, self._place(home, birth), birth.number
        its = self.whole(home)
        if home.gap == section.gap:
            same_side = (home.layer >= 0) == (section.layer >= 0)
            if same_side or self._relative(section, birth) in self._steady:
                its = layer + home.layer - section.layer
        return home.track, its, self._place(home, birth), birth.number

    def _place(self, home: Section, birth: _Birth) -> int:
        """The place in its section of the instruction that allocates a block."""
        return self.sections.place(home, self._few[birth.at])

    def _relative(self, section: Section, birth: _Birth) -> Hashable:
        """The place where a block is allocated, relative to the layer of a section."""
        home = self._home(birth)
        if home is None or home.gap != section.gap:
            return birth
        place = self._place(home, birth)
        return home.gap, home.track, home.layer - section.layer, place, birth.number


def _numbered(events: Sequence[tuple[Hashable, int, bool]]) -> list[Request]:
    """Requests of named blocks; raises `NotPeriodicError` where one is not there, or is twice."""
    alive: dict[Hashable, tuple[int, int]] = {}
    found: list[Request] = []
    for name, size, taken in events:
        if taken:
            if name in alive:
                raise NotPeriodicError("a block of a layer that was left out is allocated twice")
            alive[name] = number, _ = len(found), size
        else:
            number, allocated = alive.pop(name, (0, -1))
            if allocated != size:
                raise NotPeriodicError("a layer frees what one that was left out has not allocated")
        found.append(Request(number, size, taken))
    return found


def whole_order(names: Sequence[str], folded: FoldedGraph) -> list[str]:
    """Leaves of all layers in the order of those of few layers; others stand for those left out.

    Raises `NotPeriodicError` unless the leaves of each layer follow those of the one before it.
    """
    layers = folded.layer_of
    runs = [
        (home, list(found))
        for home, found in groupby(names, lambda name: layers[name][:2] if name in layers else None)
    ]
    homes = [home for home, _ in runs if home is not None]
    if len(set(homes)) < len(homes):
        raise NotPeriodicError("leaves of layers are in no order of layers")
    found: list[str] = []
    before: tuple[tuple[int, int] | None, list[str]] = None, []
    for home, own in runs:
        if _is_gap(before[0], home):
            _require_equal_positions(before[1], own, layers)
            assert home is not None
            found += before[1] * folded.skipped[home[0]]
        found += own
        before = home, own
    return found


def _is_gap(before: tuple[int, int] | None, home: tuple[int, int] | None) -> bool:
    """Whether layers were left out between two."""
    if before is None or home is None or before[0] != home[0]:
        return False
    return {before[1], home[1]} == {-1, 0}


def _require_equal_positions(
    before: Sequence[str], behind: Sequence[str], layers: Mapping[str, tuple[int, int, Hashable]]
) -> None:
    if [layers[name][2] for name in before] != [layers[name][2] for name in behind]:
        raise NotPeriodicError("layers on both sides of a gap have their leaves in other orders")
