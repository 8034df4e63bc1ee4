"""Instructions that name values of all layers, e.g. an all-reduce of all layer norms' gradients.

Another example is the backward pass of a value that all layers read, such as a position bias: it is
given the sum of the layers' gradients. In the program of a graph with only a few of many equal
layers such instructions name fewer values than in that of the whole graph, which has the names of
one more layer for each omitted layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from shardwright.ir.buckets import enough_bytes
from shardwright.ir.redistribution import Collective
from shardwright.program.step.host_copies import HostCopy
from shardwright.program.step.instructions import (
    Accumulate,
    Add,
    Backward,
    Free,
    StepInstruction,
    Transfer,
    Wait,
    reads,
    writes,
)
from shardwright.program.step.lower.purposes import Purpose, parts_of_step, purposes
from shardwright.program.step.step_program import StepProgram

Home = tuple[int, int]  # the gap and the layer that a value belongs to


class Span(NamedTuple):
    """The names in one instruction that are of the layers beside a gap, layer after layer.

    Attributes:
        gap: the number of the gap.
        each: how many names are of one layer.
        first: the place of the first name of layer 0.
        ascending: whether the names of layer -1 are before those; otherwise they are behind.
        begin: the first place whose name is of a layer of this gap.
        end: the place behind the last one.
    """

    gap: int
    each: int
    first: int
    ascending: bool
    begin: int
    end: int

    @property
    def before(self) -> tuple[int, int]:
        """The places where the names of layer -1 begin and end."""
        first = self.first - self.each if self.ascending else self.first + self.each
        return first, first + self.each

    @property
    def between(self) -> int:
        """The place where the names of layers that were left out begin."""
        return self.first if self.ascending else self.first + self.each

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
    copied: dict[str, HostCopy] = {}
    for one, home in zip(program.instructions, sections, strict=True):
        if isinstance(one, Transfer):
            sent[one.handle] = one
        elif isinstance(one, HostCopy):
            copied[one.handle] = one
        elif isinstance(one, Wait) and one.handle in copied:
            if (value := copied[one.handle].value) in found:
                found.setdefault(copied[one.handle].result, found[value])
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
    groups = _groups(one)
    starts = accumulate((len(names) for names in groups), initial=0)
    return tuple(
        span
        for names, start in zip(groups, starts, strict=False)
        for span in _spans_of(names, start, homes)
    )


def _spans_of(names: Sequence[str], start: int, homes: Mapping[str, Home]) -> Iterator[Span]:
    """The spans of names that an instruction has from the place `start`."""
    if len(names) < 2:
        return
    places: dict[Home, list[int]] = {}
    for place, name in enumerate(names, start):
        if name in homes:
            places.setdefault(homes[name], []).append(place)
    for gap in dict.fromkeys(gap for gap, _ in places):
        layers = {layer: at for (its, layer), at in places.items() if its == gap}
        if -1 not in layers or 0 not in layers:
            continue
        before, behind = layers[-1], layers[0]
        count, ascending = len(behind), before[0] < behind[0]
        first = min(before[0], behind[0])
        together = sorted(before + behind) == list(range(first, first + 2 * count))
        if not together or len(before) != count:
            continue
        mine = {place for at in layers.values() for place in at}
        begin, end = first, first + 2 * count
        while begin - 1 in mine:
            begin -= 1
        while end in mine:
            end += 1
        yield Span(gap, count, behind[0], ascending, begin, end)


def named_by(one: StepInstruction) -> tuple[str, ...]:
    """The names in an instruction that may be of values of all layers, the first that it reads."""
    return tuple(name for names in _groups(one) for name in names)


def _groups(one: StepInstruction) -> tuple[tuple[str, ...], ...]:
    """The names of `named_by` in groups that each grow with a layer more, as the terms of a sum."""
    match one:
        case Transfer():
            return (reads(one),)
        case Wait():
            return (one.results,)
        case Free():
            return (one.names,)
        case Add():
            return (one.terms,)
        case Backward():
            return one.given
    return ()


def renamed(one: StepInstruction, names: Mapping[str, str]) -> StepInstruction | None:
    """An instruction that adds gradients up or frees values, with other names; None for others."""
    match one:
        case Accumulate():
            return Accumulate(names[one.total], names[one.value])
        case Free():
            return Free(tuple(names[name] for name in one.names))
    return None


def split_by_size(
    program: StepProgram, spans: Mapping[int, Sequence[Span]], times: Sequence[int]
) -> Transfer | None:
    """A transfer that would be several with the tensors of all layers: buckets have a size.

    `spans` are those of instructions, by index; by gap, so many `times` were left out.
    """
    named = [at for at, one in enumerate(program.instructions) if isinstance(one, Transfer)]
    if spans.keys().isdisjoint(named):
        return None
    known, largest = purposes(program), Counter[object]()
    parts = list(parts_of_step(program.instructions))

    def kind(at: int, one: Transfer) -> object:
        return parts[at], known[one.handle], one.collective, one.channel, one.parts[0].dtype

    for at in named:
        one = program.instructions[at]
        assert isinstance(one, Transfer)
        key = kind(at, one)
        largest[key] = max(largest[key], *(part.bytes for part in one.parts))
    for at in named:
        one = program.instructions[at]
        assert isinstance(one, Transfer)
        if not spans.get(at) or known[one.handle] is Purpose.RESULT:
            continue
        more = sum(
            times[span.gap] * sum(part.bytes for part in one.parts[slice(*span.before)])
            for span in spans[at]
        )
        sums = one.collective is Collective.ALL_REDUCE
        most = largest[kind(at, one)]
        enough = enough_bytes(most)
        if sums:  # along the first axis, or another one
            enough = min(program.sum_bytes / 2, enough_bytes(most, program.sum_bytes))
        if one.bytes + more > enough:
            return one
    return None


def left_out(name: str, number: int) -> str:
    """The name of a value in the layer with this number among those left out."""
    return f"{name}~{number}"


def extended(one: StepInstruction, spans: Sequence[Span], times: Sequence[int]) -> StepInstruction:
    """An instruction with the names of all layers; by gap, so many `times` were left out."""
    for span in sorted(spans, key=lambda span: -span.first):
        numbers = range(times[span.gap])
        if isinstance(one, Transfer):
            more = [
                replace(part, value=left_out(part.value, n), result=left_out(part.result, n))
                for n in numbers
                for part in one.parts[slice(*span.before)]
            ]
            one = replace(
                one, parts=(*one.parts[: span.between], *more, *one.parts[span.between :])
            )
        elif isinstance(one, Wait):
            one = replace(one, results=_longer(one.results, span, numbers))
        elif isinstance(one, Free):
            one = replace(one, names=_longer(one.names, span, numbers))
        elif isinstance(one, Add):
            one = replace(one, terms=_longer(one.terms, span, numbers))
        elif isinstance(one, Backward):
            one = replace(one, given=_longer_group(one.given, span, numbers))
    return one


def _longer_group(
    groups: tuple[tuple[str, ...], ...], span: Span, numbers: range
) -> tuple[tuple[str, ...], ...]:
    """Groups of names, of which that with the places of a span has more names."""
    found, start = [], 0
    for names in groups:
        inside = start <= span.first < start + len(names)
        own = span._replace(first=span.first - start)
        found.append(_longer(names, own, numbers) if inside else names)
        start += len(names)
    return tuple(found)


def _longer(names: tuple[str, ...], span: Span, numbers: range) -> tuple[str, ...]:
    more = [left_out(name, n) for n in numbers for name in names[slice(*span.before)]]
    return (*names[: span.between], *more, *names[span.between :])
