"""Unrolls the program of a folded graph: its sections as often as the whole graph has layers.

Layers that were left out are iterations of a `Loop`, so that whoever plays them may stop once they
repeat themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from shardwright.program.step.folding.sections import NOWHERE, NotPeriodicError, Section, Sections
from shardwright.program.step.folding.spanning import extended
from shardwright.program.step.host_copies import HostCopy
from shardwright.program.step.instructions import Recv, Send, StepInstruction, Transfer, Wait
from shardwright.program.step.step_program import StepProgram


class Played(NamedTuple):
    """An instruction when its turn comes; a transfer, a message or a wait has a name of it."""

    instruction: StepInstruction
    transfer: Hashable = None


@dataclass(frozen=True)
class Loop:
    """Instructions that run several times, each time alike but for the names of transfers.

    Attributes:
        times: the number of iterations, which are numbered from 0.
        iteration: the instructions of one of them.
        started: names of the transfers that an iteration starts, in this order.
        lags: for each of those, how many iterations later it is waited for; None: never.
        outside: names of the transfers that an iteration waits for and the loop did not start.
        renames: other names that transfers get before each iteration but the first.
        micro_batches: how many micro-batches later an iteration is than the one before it, if it
            is the passes of such, in which other groups may take part; else 0.
        left_out: how many more iterations the step has, which are not played.
    """

    times: int
    iteration: Callable[[int], Sequence[Item]]
    started: Callable[[int], Sequence[Hashable]]
    lags: Sequence[int | None]
    outside: Callable[[int], Sequence[Hashable]] = lambda _: ()
    renames: Mapping[Hashable, Hashable] = field(default_factory=dict)
    micro_batches: int = 0
    left_out: int = 0

    @property
    def depth(self) -> int:
        """The largest lag: the number of iterations that one depends on."""
        return max((lag for lag in self.lags if lag is not None), default=0)


Item = Played | Loop


def in_order(program: StepProgram) -> list[Item]:
    """The instructions of a program, once."""
    return [
        Played(
            one, one.handle if isinstance(one, Transfer | HostCopy | Send | Recv | Wait) else None
        )
        for one in program.instructions
    ]


def transfers(items: Iterable[Item]) -> Iterator[Played]:
    """All starts of transfers and waits for them, in order."""
    for one in items:
        if isinstance(one, Loop):
            for number in range(one.times):
                yield from transfers(one.iteration(number))
        elif one.transfer is not None:
            yield one


def unrolled(sections: Sections) -> list[Item]:
    """The instructions of the whole graph's program; layers that were left out are loops.

    Raises `NotPeriodicError` where it cannot be told which transfer is waited for.
    """
    writer = _Writer(sections)
    for section, seam in sections.with_seams():
        if seam is not None:
            writer.repeat(seam.before, seam.behind, sections.skipped[section.gap])
        writer.found += writer.written(section, writer.whole(section))
    return writer.found


class _Name(NamedTuple):
    """A transfer, by the pass that starts it, the layer, and its place in the layer's section."""

    track: int
    layer: int
    position: int


class _Writer:
    """Collects unrolled instructions; a transfer is named by the position where it starts."""

    def __init__(self, sections: Sections) -> None:
        self.sections = sections
        self.found: list[Item] = []
        self._started: set[_Name] = set()
        self._written: dict[
            Section, tuple[list[Played], list[tuple[int, int, StepInstruction]]]
        ] = {}
        self._places = {
            one.handle: at
            for at, one in enumerate(sections.program.instructions)
            if isinstance(one, Transfer | HostCopy)
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

        def layer(number: int) -> int:
            return first + step * (number + 1)

        if any(self._is_of_message(one) for _, one in self._in(before)):
            raise NotPeriodicError("each layer sends or receives a message")
        starts = [at for at, one in self._in(before) if isinstance(one, Transfer | HostCopy)]
        waits = [one for _, one in self._in(before) if isinstance(one, Wait)]
        waited = [self._waited_for(before, one, layer(0)) for one in waits]
        own = {
            name: (layer(0) - name.layer) * step for name in waited if name.track == before.track
        }
        outside = [one for one, name in zip(waits, waited, strict=True) if name not in own]
        lags = {name.position: lag for name, lag in own.items()}
        for number in range(times):
            self._started.update(self._name(before, at, layer(number)) for at in starts)
            for one in waits:
                self._known(before, one, layer(number))
        if times > 1 and any(self._waited_for(before, one, layer(1)) in waited for one in waits):
            raise NotPeriodicError("all layers wait for one transfer")
        self.found.append(
            Loop(
                times,
                lru_cache(maxsize=2)(lambda number: self.written(before, layer(number))),
                lambda number: [self._name(before, at, layer(number)) for at in starts],
                [lags.get(at - before.start) for at in starts],
                lambda number: [self._waited_for(before, one, layer(number)) for one in outside],
            )
        )

    def written(self, section: Section, layer: int) -> list[Played]:
        """The instructions of a section, for a layer of the whole graph."""
        if section not in self._written:
            self._written[section] = self._of_every_layer(section)
        of_every_layer, others = self._written[section]
        found = of_every_layer.copy()
        for index, at, one in others:
            if isinstance(one, Wait):
                name = self._known(section, one, layer)
            else:
                name = self._name(section, at, layer)
                self._started.add(name)
            found[index] = Played(one, name)
        return found

    def _of_every_layer(
        self, section: Section
    ) -> tuple[list[Played], list[tuple[int, int, StepInstruction]]]:
        """The instructions of a section, and which of them name transfers of the layer.

        Those are given with their places in the section and in the program.
        """
        found: list[Played] = []
        others: list[tuple[int, int, StepInstruction]] = []
        for at, one in self._in(section):
            if at in self.sections.spans:
                one = extended(one, self.sections.spans[at], self.sections.skipped)
            waits = isinstance(one, Wait) and not self._is_of_message(one)
            if waits or isinstance(one, Transfer | HostCopy):
                others.append((len(found), at, one))
            found.append(Played(one, one.handle if isinstance(one, Send | Recv | Wait) else None))
        return found, others

    def whole(self, section: Section) -> int:
        """The layer of a section in the whole graph."""
        skipped = self.sections.skipped[section.gap] if section.gap != NOWHERE else 0
        return section.layer + skipped * (section.layer >= 0)

    def _is_of_message(self, one: StepInstruction) -> bool:
        """Whether an instruction is a message between pipeline groups, or the wait for one."""
        waits = isinstance(one, Wait) and one.handle not in self._places
        return waits or isinstance(one, Send | Recv)

    def _known(self, section: Section, one: Wait, layer: int) -> _Name:
        """The transfer that is waited for; raises `NotPeriodicError` if it was not started."""
        name = self._waited_for(section, one, layer)
        if name not in self._started:
            raise NotPeriodicError(f"{one}: for a transfer of a layer that is left out")
        return name

    def _waited_for(self, section: Section, one: Wait, layer: int) -> _Name:
        at = self._places[one.handle]
        start = self.sections.at[at]
        if start.gap == NOWHERE or start.gap != section.gap:
            return self._name(start, at, self.whole(start))
        same_side = (start.layer >= 0) == (section.layer >= 0)
        if same_side or self._relative(section, start, at) in self._steady:
            return self._name(start, at, layer + start.layer - section.layer)
        return self._name(start, at, self.whole(start))

    def _name(self, start: Section, at: int, layer: int) -> _Name:
        return _Name(start.track, layer, self.sections.place(start, at))

    def _relative(self, section: Section, start: Section, at: int) -> Hashable:
        layer = start.layer - section.layer
        return section.gap, start.track, layer, self.sections.place(start, at)

    def _waited(self, section: Section) -> Iterator[Hashable]:
        for _, one in self._in(section):
            if isinstance(one, Wait) and not self._is_of_message(one):
                at = self._places[one.handle]
                yield self._relative(section, self.sections.at[at], at)

    def _in(self, section: Section) -> Iterator[tuple[int, StepInstruction]]:
        """The instructions of a section, with their indices."""
        for at in range(section.start, section.stop):
            yield at, self.sections.program.instructions[at]
