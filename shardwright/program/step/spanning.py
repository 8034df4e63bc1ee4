"""Instructions that name values of all layers, e.g. an all-reduce of all layer norms' gradients.

In the program of a graph with only a few of many equal layers they name fewer values than in that
of the whole graph, which has the names of one more layer for each omitted layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwright.program.step.instructions import (
    Accumulate,
    Free,
    StepInstruction,
    StepProgram,
    Transfer,
    Wait,
    reads,
    writes,
)

Home = tuple[int, int]  # the gap and the layer that a value belongs to


class Span(NamedTuple):
    """Names of the layers beside `gap` in one instruction: `each` of one layer, layer after layer.

    `first` is the place of the first name of layer 0; layer -1 has its names behind those, or with
    `ascending` layers before them.
    """

    gap: int
    each: int
    first: int
    ascending: bool

    @property
    def before(self) -> tuple[int, int]:
        """The places where the names of layer -1 begin and end."""
        first = self.first - self.each if self.ascending else self.first + self.each
        return first, first + self.each

    def pairs(self) -> Iterator[tuple[int, int]]:
        """The places of the names of layer -1, each with that of layer 0."""
        return zip(range(*self.before), range(self.first, self.first + self.each), strict=True)

    def find(self, place: int) -> tuple[int, int]:
        """The layer that has a name at a place if all layers have as many, and its place in it."""
        layer, at = divmod(place - self.first, self.each)
        return layer if self.ascending else -layer, at


def homes_of(
    program: StepProgram, given: Mapping[str, Home], sections: Sequence[Home | None]
) -> dict[str, Home]:
    """The layers of values: those of `given` leaves, or of the instructions that compute them.

    A received value belongs to the layer of the value that was sent. `sections` has for each
    instruction the gap and the layer that it runs.
    """
    found = dict(given)
    sent: dict[str, Transfer] = {}
    for one, home in zip(program.instructions, sections, strict=True):
        if isinstance(one, Transfer):
            sent[one.handle] = one
        elif isinstance(one, Wait) and one.handle in sent:
            for part in sent[one.handle].parts:
                if part.value in found:
                    found.setdefault(part.result, found[part.value])
        elif home is not None:
            for name in writes(one):
                found.setdefault(name, home)
    return found


def spans_of(one: StepInstruction, homes: Mapping[str, Home]) -> tuple[Span, ...]:
    """The spans of an instruction; none if it names no values of both layers beside a gap."""
    names = named_by(one)
    if len(names) < 2:
        return ()
    places: dict[Home, list[int]] = {}
    for place, name in enumerate(names):
        if name in homes:
            places.setdefault(homes[name], []).append(place)
    found = []
    for gap in dict.fromkeys(gap for gap, _ in places):
        layers = {layer: at for (its, layer), at in places.items() if its == gap}
        if -1 not in layers or 0 not in layers:
            continue
        before, behind = layers[-1], layers[0]
        count, ascending = len(behind), before[0] < behind[0]
        first = min(before[0], behind[0])
        together = sorted(before + behind) == list(range(first, first + 2 * count))
        if together and len(before) == count:
            found.append(Span(gap, count, behind[0], ascending))
    return tuple(found)


def named_by(one: StepInstruction) -> tuple[str, ...]:
    """The values of a transfer, a wait or a free, which may belong to all layers."""
    match one:
        case Transfer():
            return reads(one)
        case Wait():
            return one.results
        case Free():
            return one.names
    return ()


def renamed(one: StepInstruction, names: Mapping[str, str]) -> StepInstruction | None:
    """An instruction that adds gradients up or frees values, with other names; None for others."""
    match one:
        case Accumulate():
            return Accumulate(names[one.total], names[one.value])
        case Free():
            return Free(tuple(names[name] for name in one.names))
    return None


def left_out(name: str, number: int) -> str:
    """The name of a value in the layer with this number among those left out."""
    return f"{name}~{number}"


def extended(one: StepInstruction, spans: Sequence[Span], times: Sequence[int]) -> StepInstruction:
    """An instruction with the names of all layers; by gap, so many `times` were left out."""
    for span in sorted(spans, key=lambda span: -span.first):
        at, end = span.before
        numbers = range(times[span.gap])
        if isinstance(one, Transfer):
            more = [
                replace(part, value=left_out(part.value, n), result=left_out(part.result, n))
                for n in numbers
                for part in one.parts[at:end]
            ]
            one = replace(one, parts=(*one.parts[:end], *more, *one.parts[end:]))
        elif isinstance(one, Wait):
            one = replace(one, results=_longer(one.results, at, end, numbers))
        elif isinstance(one, Free):
            one = replace(one, names=_longer(one.names, at, end, numbers))
    return one


def _longer(names: tuple[str, ...], at: int, end: int, numbers: range) -> tuple[str, ...]:
    more = [left_out(name, n) for n in numbers for name in names[at:end]]
    return (*names[:end], *more, *names[end:])
