"""Finds the sections of a step program that run equal layers, and checks that they are periodic.

A step is lowered from a graph with only a few of many equal layers. If its program runs the layers
on both sides of the gap in the same way, then the program of the whole graph also runs the omitted
layers in this way: passes depend only on instructions within a layer or two, and two sections
count as equal only if all values and transfers that they mention occur at equal positions relative
to the layer. Otherwise `NotPeriodicError` is raised, and the whole graph has to be lowered.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwright.ir.graph import Graph
from shardwright.program.step.folding.equal_instructions import is_same
from shardwright.program.step.folding.gradients import becoming_gradients
from shardwright.program.step.folding.spanning import Span, homes_of, spans_of, split_by_size
from shardwright.program.step.host_copies import HostCopy
from shardwright.program.step.instructions import (
    Backward,
    Forward,
    Free,
    StepInstruction,
    Transfer,
    Update,
    Wait,
    reads,
    writes,
)
from shardwright.program.step.step_program import StepProgram

NOWHERE = -1  # the gap of sections that run no repeated layer


class NotPeriodicError(ValueError):
    """Layers on both sides of a gap are not run in the same way."""


class NeverPeriodicError(NotPeriodicError):
    """They would not be, either, if other numbers of layers remained."""


class Layer(NamedTuple):
    """The layer that an operator or a leaf belongs to.

    Layers of `gap` have numbers: from 0 on behind the gap, from -1 down before it. `position`
    tells the operators and leaves of one layer apart.
    """

    gap: int
    number: int
    position: Hashable


@dataclass(frozen=True)
class FoldedGraph:
    """A graph with few of many equal layers.

    Attributes:
        graph: with two layers, or more, on both sides of each gap.
        layer_of: the layers of its operators and leaves, by name.
        skipped: by gap, how many layers were left out.
        stands_for: the leaves that were left out, and that of the layer behind the gap.
    """

    graph: Graph
    layer_of: Mapping[str, Layer]
    skipped: tuple[int, ...]
    stands_for: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive instructions that run one layer, or no repeated layer.

    Attributes:
        start: the first instruction.
        stop: the one behind the last.
        track: the number of the pass of a micro-batch over the layers of a gap that they belong to;
            `NOWHERE` for none.
        gap: the number of that gap; `NOWHERE` for none.
        layer: the number of the layer, as in `Layer`.
    """

    start: int
    stop: int
    track: int = NOWHERE
    gap: int = NOWHERE
    layer: int = 0


class Seam(NamedTuple):
    """The section `before` the gap and the one behind it, of one track, in the order they run."""

    before: Section
    behind: Section


@dataclass(frozen=True)
class Sections:
    """A program divided into consecutive sections.

    Attributes:
        program: the program of few layers.
        sections: all sections, in order.
        seams: where sections of layers were left out, one seam for each track.
        skipped: by gap, how many layers were left out.
        spans: by the index of an instruction, its names of values of all layers.
    """

    program: StepProgram
    sections: tuple[Section, ...]
    seams: tuple[Seam, ...]
    skipped: tuple[int, ...]
    spans: Mapping[int, tuple[Span, ...]]

    @cached_property
    def at(self) -> list[Section]:
        """The section of every instruction."""
        return [one for one in self.sections for _ in range(one.start, one.stop)]

    def place(self, section: Section, at: int) -> int:
        """The place of instruction `at` in its section, counted as in sections at the seam.

        The first layers may begin otherwise than others, and the last ones end otherwise.
        """
        if section.gap == NOWHERE:
            return at - section.start
        before, _ = self.seams[section.track]
        if section.start > before.start:
            return at - section.start
        return at - section.stop + before.stop - before.start

    def with_seams(self) -> Iterator[tuple[Section, Seam | None]]:
        """Every section, with the seam that it is behind, if it is."""
        seams = {seam.behind.start: seam for seam in self.seams}
        for section in self.sections:
            yield section, seams.get(section.start)


def sections_of(program: StepProgram, folded: FoldedGraph) -> Sections:
    """The sections of the program of a folded graph; raises `NotPeriodicError`."""
    tracks = _disjoint(_tracks(program, folded.layer_of))
    starts = sorted((at, n) for n, track in enumerate(tracks) for at in track.boundaries)
    layers = {at: number for track in tracks for number, at in track.at.items()}
    found = [Section(0, starts[0][0] if starts else len(program.instructions))]
    stops = [at for at, _ in starts[1:]] + [len(program.instructions)]
    for (start, n), stop in zip(starts, stops, strict=False):
        found.append(Section(start, stop, n, tracks[n].gap, layers[start]))
    by_layer = {(one.track, one.layer): one for one in found}
    seams = []
    for n, track in enumerate(tracks):
        first, second = (-1, 0) if track.ascending else (0, -1)
        seams.append(Seam(by_layer[n, first], by_layer[n, second]))
    run = {
        folded.layer_of[name].gap
        for one in program.instructions
        if isinstance(one, Forward)
        for name in one.ops
        if name in folded.layer_of
    }
    if run - {track.gap for track in tracks}:
        raise NotPeriodicError("no region begins at the same operator of every layer")
    at = [one for one in found for _ in range(one.start, one.stop)]
    spans = _spans(program, at, seams, folded.layer_of)
    if (one := split_by_size(program, spans, folded.skipped)) is not None:
        raise NeverPeriodicError(f"{one.handle} of all layers would be several transfers")
    sections = Sections(program, tuple(found), tuple(seams), folded.skipped, spans)
    _check(sections, folded.layer_of)
    return sections


def _spans(
    program: StepProgram, at: Sequence[Section], seams: Sequence[Seam], layers: Mapping[str, Layer]
) -> dict[int, tuple[Span, ...]]:
    """Names of values of all layers in instructions outside of seams, by index.

    Raises `NotPeriodicError` for a transfer of them whose wait has others: then a bucket has
    parameters of two neighbours, as the last of one layer and the first of the next.
    """
    homes = homes_of(
        program,
        {
            leaf: (layers[leaf].gap, layers[leaf].number)
            for leaf in program.leaves
            if leaf in layers
        },
        [None if one.gap == NOWHERE else (one.gap, one.layer) for one in at],
    )
    beside = {section for seam in seams for section in seam}
    found = {
        index: spans_of(one, homes)
        for index, one in enumerate(program.instructions)
        if at[index] not in beside
    }
    found = {index: spans for index, spans in found.items() if spans}
    sent: dict[str, tuple[Span, ...]] = {}
    for index, one in enumerate(program.instructions):
        if isinstance(one, Transfer):
            sent[one.handle] = found.get(index, ())
        elif isinstance(one, Wait) and sent.get(one.handle, ()) != found.get(index, ()):
            raise NotPeriodicError(f"{one.handle} of all layers is waited for by one layer")
    return found


@dataclass
class _Track:
    """The first instruction of each layer in one pass over the layers of a gap."""

    gap: int
    at: dict[int, int]  # by the layer's number
    of_transfers: bool = False

    @property
    def ascending(self) -> bool:
        return self.at[0] > self.at[-1]

    @property
    def boundaries(self) -> list[int]:
        return list(self.at.values())


def _tracks(program: StepProgram, layer_of: Mapping[str, Layer]) -> Iterator[_Track]:
    """All passes over layers: forward, backward, and what follows the last backward pass.

    Those that do not run the layers around the gap one by one are left out.
    """
    found: defaultdict[tuple[object, ...], list[tuple[Layer, int]]] = defaultdict(list)
    calls: dict[str, Layer] = {}
    leaf_of = {value: leaf for leaf, value in program.gradients}
    backward = [i for i, one in enumerate(program.instructions) if isinstance(one, Backward)]
    end = backward[-1] if backward else len(program.instructions)
    for at, one in enumerate(program.instructions):
        if isinstance(one, Forward):
            layer = next((layer_of[name] for name in one.ops if name in layer_of), None)
            if layer is not None and not one.again:
                calls[one.call] = layer
                found["forward", layer.gap, _batch(one.call)].append((layer, at))
        elif isinstance(one, Backward):
            if one.call in calls:
                layer = calls[one.call]
                found["backward", layer.gap, _batch(one.call), one.part].append((layer, at))
        elif at > end:
            leaves = (leaf_of[name] for name in writes(one) if name in leaf_of)
            layer = next((layer_of[leaf] for leaf in leaves if leaf in layer_of), None)
            if layer is not None:
                found["end", layer.gap].append((layer, at))
    for key, given in found.items():
        at_layer = _boundaries(given)
        if at_layer is not None:
            yield _Track(given[0][0].gap, at_layer)
        elif key[0] != "end":
            raise NotPeriodicError("no region begins at the same operator of every layer")
    yield from _passes_of_transfers(program, layer_of, end)


def _passes_of_transfers(
    program: StepProgram, layer_of: Mapping[str, Layer], end: int
) -> Iterator[_Track]:
    """Passes over layers that start gathers of parameters or wait for sums of gradients.

    The first are before all regions, where a stage of a pipeline gathers what it keeps. The others
    are behind instruction `end`: more than one where sums along several axes are waited for axis
    after axis.
    """
    becomes, begun = becoming_gradients(program), False
    found: defaultdict[tuple[Hashable, ...], list[tuple[Layer, int]]] = defaultdict(list)
    for at, one in enumerate(program.instructions):
        begun = begun or isinstance(one, Forward)
        leaves: Iterator[tuple[str, int]] = iter(())
        if isinstance(one, Transfer) and not begun:
            leaves = ((name, -1) for name in reads(one))
        elif isinstance(one, Wait) and at > end:
            leaves = (becomes[name] for name in one.results if name in becomes)
        leaf, steps = next((each for each in leaves if each[0] in layer_of), ("", 0))
        if leaf:
            layer = layer_of[leaf]
            found[layer.gap, layer.position, steps].append((layer, at))
    for given in found.values():
        if (at_layer := _boundaries(given)) is not None:
            yield _Track(given[0][0].gap, at_layer, of_transfers=True)


def _batch(call: str) -> str:
    return call.partition("@")[2]


def _boundaries(given: Sequence[tuple[Layer, int]]) -> dict[int, int] | None:
    """The indices of one instruction of each layer, by its number; None if there is none."""
    indices: defaultdict[Hashable, defaultdict[int, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for layer, at in given:
        indices[layer.position][layer.number].append(at)
    for by_layer in indices.values():
        found = {number: found[0] for number, found in by_layer.items() if len(found) == 1}
        if not {-1, 0} <= found.keys():
            continue
        ascending = found[0] > found[-1]
        if (1 if ascending else -2) not in found:
            continue
        ordered = sorted(found, reverse=not ascending)
        if sorted(found.values()) == [found[number] for number in ordered]:
            return {number: found[number] for number in ordered}
    return None


def _disjoint(tracks: Iterator[_Track]) -> list[_Track]:
    """Tracks without those of transfers that overlap others; others must not overlap."""
    found: list[_Track] = []
    for one in sorted(tracks, key=lambda track: (track.of_transfers, track.boundaries[0])):
        at = bisect(found, one.boundaries[0], key=lambda track: track.boundaries[0])
        clear = not at or found[at - 1].boundaries[-1] < one.boundaries[0]
        if clear and (at == len(found) or one.boundaries[-1] < found[at].boundaries[0]):
            found.insert(at, one)
        elif not one.of_transfers:
            raise NotPeriodicError("passes over layers run into each other")
    return found


# A name that an instruction mentions, and its index among those.
_Mention = tuple[int, int]


def _names(one: StepInstruction) -> tuple[str, ...]:
    """All names in an instruction, in a fixed order."""
    names = (*reads(one), *writes(one))
    match one:
        case Forward() | Backward():
            return (*names, f"call {one.call}")
        case Transfer() | HostCopy() | Wait():
            return (*names, f"transfer {one.handle}")
        case Free():
            return one.names
        case Update():  # all parameters alike, at the end
            return ()
    return names


def _check(sections: Sections, layer_of: Mapping[str, Layer]) -> None:
    """Raise `NotPeriodicError` unless both sections of every seam have equal instructions."""
    program = sections.program
    mentions: defaultdict[str, list[_Mention]] = defaultdict(list)
    named = [_names(one) for one in program.instructions]
    for at, names in enumerate(named):
        for slot, name in enumerate(names):
            mentions[name].append((at, slot))
    returned = set(program.returned)

    def signature(name: str, section: Section) -> tuple[object, ...]:
        """The positions of a name, relative to the layer of a section."""
        if name in layer_of:
            layer = layer_of[name]
            return layer.gap, layer.number - section.layer, layer.position
        positions: list[object] = [name in returned]
        mention: tuple[object, ...]
        for at, slot in mentions[name]:
            where = sections.at[at]
            if (span := _place_in_span(sections, at, slot, section)) is not None:
                mention = span
            elif where.gap == section.gap:
                place = sections.place(where, at)
                mention = where.track, where.layer - section.layer, place, slot
            else:
                mention = NOWHERE, 0, at, slot
            positions.append(mention)
        return tuple(positions)

    for before, behind in sections.seams:
        if before.stop - before.start != behind.stop - behind.start:
            raise NotPeriodicError("a layer runs more instructions than the one before it")
        pairs = zip(range(before.start, before.stop), range(behind.start, behind.stop), strict=True)
        for first, second in pairs:
            if not is_same(program, program.instructions[first], program.instructions[second]):
                raise NotPeriodicError(f"{program.instructions[second]}: not as a layer before")
            if len(named[first]) != len(named[second]):
                raise NotPeriodicError(f"{program.instructions[second]}: not as a layer before")
            for one, other in zip(named[first], named[second], strict=True):
                if one != other and signature(one, before) != signature(other, behind):
                    raise NotPeriodicError(f"%{other}: not read or written as %{one}")


def _place_in_span(
    sections: Sections, at: int, slot: int, section: Section
) -> tuple[object, ...] | None:
    """The position of a name, relative to the layer of a section, where all layers are named."""
    for span in sections.spans.get(at, ()):
        if span.gap == section.gap and span.begin <= slot < span.end:
            layer, index = span.find(slot)
            return span.gap, layer - section.layer, at, index
    return None
