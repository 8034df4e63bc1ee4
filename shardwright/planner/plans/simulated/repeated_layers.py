"""Removes layers whose neighbours have the same plan.

The cost of the whole step follows from the step program of the remaining layers
(`folded_costs.py`). Copies of a repeat (`planner/space/repeats.py`) are equal if all inputs of
lowering and simulation are: tilings, storage, recomputation, offload and seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

from shardwright.ir.graph import Graph
from shardwright.ir.plan import Plan
from shardwright.planner.space.repeats import Repeat, find_repeats, without_copies
from shardwright.program.decisions import Decisions
from shardwright.program.step.folding.sections import FoldedGraph, Layer
from shardwright.simulate.time.program_prices import seconds_of_transfers


class Remaining(NamedTuple):
    """The layers that remain on each side of a gap; `width` copies count as one layer.

    Some plans and buckets only repeat after so many copies.
    """

    width: int
    layers: int


class _Gap(NamedTuple):
    """Copies `first` to `last` of a repeat, which are removed; their number divides by `width`."""

    repeat: Repeat
    first: int
    last: int
    width: int
    begin: int  # of all that are equal
    end: int


@dataclass(frozen=True)
class _Marks:
    """A number for each copy of a repeat; equal copies have equal numbers."""

    repeat: Repeat
    numbers: Sequence[int]


@final
class RepeatedLayers:
    """Finds the repeats of a graph and removes layers that are equal under a plan."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._known: dict[tuple[_Gap, ...], FoldedGraph] = {}
        self._last: tuple[Plan, tuple[_Marks, ...]] | None = None

    @cached_property
    def repeats(self) -> tuple[Repeat, ...]:
        """Repeats whose copies write no buffers."""
        written = {value for _, value in self.graph.updates}

        def updates(repeat: Repeat) -> bool:
            ops = self.graph.ops[repeat.start : repeat.end]
            return any(name in written for op in ops for name in op.outputs)

        return tuple(one for one in find_repeats(self.graph) if not updates(one))

    def folded(self, plan: Plan, decisions: Decisions, way: Remaining) -> FoldedGraph | None:
        """The graph without most of its equal layers; None if no layer can be removed."""
        if not self.repeats:
            return None
        if self._last is None or self._last[0] is not plan:
            self._last = plan, tuple(self._marks(plan, decisions))
        gaps = tuple(gap for marks in self._last[1] for gap in _gaps(marks, way))
        if not gaps:
            return None
        if gaps not in self._known:
            self._known[gaps] = self._without(gaps)
        return self._known[gaps]

    def _marks(self, plan: Plan, decisions: Decisions) -> Iterator[_Marks]:
        numbers: dict[object, int] = {}
        beside = _seconds_beside(plan, self.graph)
        by_op = {}
        for op in plan.ops:
            name, seconds = op.name, (op.seconds, op.backward_seconds)
            key = op.tiling, op.kept, seconds, beside.get(name, "")
            by_op[name] = numbers.setdefault(key, len(numbers))
        of_ops = [by_op[op.name] for op in self.graph.ops]
        stored = {
            p.name: numbers.setdefault((p.layout, p.regathered), len(numbers))
            for p in plan.parameters
        }
        segments, offloaded = decisions.segments, decisions.offloaded
        of_segments = [segments.get(op.name, 0) for op in self.graph.ops]
        stages = self._stages(decisions)
        spread = self._spread_segments(segments) if any(segments.values()) else set()
        for repeat, own in zip(self.repeats, self._own_leaves, strict=True):
            found: list[int] = []
            for c in range(repeat.count):
                copy = repeat.copy(c)
                again = of_segments[copy.start : copy.stop]
                marks = (
                    tuple(of_ops[copy.start : copy.stop]),
                    _pattern(again) if any(again) else (),
                    tuple([number in offloaded for number in again]) if offloaded else (),
                    tuple([stored.get(name, -1) for name in own[c]]),
                    -1 if spread.isdisjoint(again) else c,
                    _stage_of(copy, stages),
                )
                found.append(numbers.setdefault(marks, len(numbers)))
            yield _Marks(repeat, found)

    def _stages(self, decisions: Decisions) -> list[int]:
        """The indices of the operators that later pipeline stages begin with."""
        cuts = () if decisions.pipeline is None else decisions.pipeline.cuts
        if not cuts:
            return []
        position = {op.name: i for i, op in enumerate(self.graph.ops)}
        return [position[name] for name in cuts if name in position]

    def _spread_segments(self, segments: Mapping[str, int]) -> set[int]:
        """Recomputed segments that are not within one copy of a repeat."""
        copy_of = {
            name: (r, c)
            for r, names in enumerate(self._names)
            for c, copy in enumerate(names)
            for name in copy
        }
        homes: dict[int, object] = {}
        found: set[int] = set()
        for name, segment in segments.items():
            home = copy_of.get(name)
            if segment and homes.setdefault(segment, home) != home:
                found.add(segment)
        return found

    @cached_property
    def _names(self) -> list[list[list[str]]]:
        """The operator names of every copy of every repeat."""
        return [
            [[self.graph.ops[i].name for i in repeat.copy(c)] for c in range(repeat.count)]
            for repeat in self.repeats
        ]

    @cached_property
    def _own_leaves(self) -> list[list[list[str]]]:
        """The leaves that only one copy reads, for every copy of every repeat, in reading order."""
        return [
            [list(dict.fromkeys(self._leaves(repeat, c))) for c in range(repeat.count)]
            for repeat in self.repeats
        ]

    def _leaves(self, repeat: Repeat, c: int) -> Iterator[str]:
        neighbour = repeat.copy(c + 1 if c + 1 < repeat.count else c - 1)
        for i, j in zip(repeat.copy(c), neighbour, strict=True):
            pairs = zip(self.graph.ops[i].operands, self.graph.ops[j].operands, strict=True)
            yield from (
                name for name, other in pairs if name != other and name not in self.graph.producer
            )

    def _without(self, gaps: Sequence[_Gap]) -> FoldedGraph:
        ops = self.graph.ops
        layer_of: dict[str, Layer] = {}
        stands_for: dict[str, str] = {}
        for number, gap in enumerate(gaps):
            own = self._own_leaves[self.repeats.index(gap.repeat)]
            for c in range(gap.begin, gap.end):
                if gap.first <= c < gap.last:
                    like = own[gap.last + (c - gap.first) % gap.width]
                    stands_for.update(zip(own[c], like, strict=True))
                    continue
                layer, at = divmod(c - (gap.first if c < gap.first else gap.last), gap.width)
                for index, i in enumerate(gap.repeat.copy(c)):
                    layer_of[ops[i].name] = Layer(number, layer, (at, index))
                for index, name in enumerate(own[c]):
                    layer_of[name] = Layer(number, layer, (at, index, "leaf"))
        short = without_copies(self.graph, [(gap.repeat, gap.first, gap.last) for gap in gaps])
        skipped = tuple((gap.last - gap.first) // gap.width for gap in gaps)
        return FoldedGraph(short, layer_of, skipped, stands_for)


def _seconds_beside(plan: Plan, graph: Graph) -> dict[str, str]:
    """Seconds of collectives and moves within operators, as text, by operator that has any."""
    found: dict[str, str] = {}
    for seconds in seconds_of_transfers(plan, graph):
        for (name, backward), one in seconds.items():
            found[name] = f"{found.get(name, '')} {backward} {one}"
    return found


def _stage_of(copy: range, cuts: Sequence[int]) -> tuple[int, int]:
    """The stages of the first and the last operator of a copy; its index if these differ."""
    first, last = bisect_right(cuts, copy.start), bisect_right(cuts, copy.stop - 1)
    return (first, 0) if first == last else (first, copy.start)


def _pattern(segments: Sequence[int]) -> tuple[int, ...]:
    """The segments of a copy, renumbered from 1 in order of appearance; 0 stays 0."""
    local = {0: 0}
    return tuple([local.setdefault(segment, len(local)) for segment in segments])


def _gaps(marks: _Marks, way: Remaining) -> Iterator[_Gap]:
    """The copies to remove: the middle ones of each run of equal layers."""
    numbers, begin, width = marks.numbers, 0, way.width
    kept = way.layers * width
    while begin < len(numbers):
        end = begin + width
        while end < len(numbers) and numbers[end] == numbers[end - width]:
            end += 1
        left_out = (end - begin - 2 * kept) // width * width
        if left_out > 0:
            last = end - kept
            yield _Gap(marks.repeat, last - left_out, last, width, begin, end)
            begin = end
        else:
            begin += 1
