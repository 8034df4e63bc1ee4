"""Finds repeated layers of a graph, and shortens the graph to be searched.

Paper: TAPAS (arXiv 2302.00247), folding of repeated substructures.
Deviation: copies need not have equal plans. The short graph has the first, the second and the last
copy of each run of repeats; the second represents all copies that are left out, and the search
chooses for each of them separately (`solve/folding/folded.py`).
Complexity: O(operators) for each candidate period.
Oracle: the same search on the whole graph.

A constraint on some copies splits a run of repeats at these copies. It does not move the boundaries
of copies, so that checkpoint segments do not depend on constraints.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.graph import Arg, Graph, Op, Ref
from shardwright.rules.operators.mlp_chunks import number_drawn_by

_GRAM = 6  # operators that must repeat for a distance to be tried as a period
_PERIODS_TRIED = 6
_LEAST_COPIES = 5  # three of them stay in the short graph
_MOST_LAYERS = 6  # of a copy, whose layers read different values by turns
# Random operators, whose last argument is the number of the operator among all random ones.
_NUMBERED = ("shardwright.dropout.default", "shardwright.uniform.default")


@dataclass(frozen=True, slots=True)
class Repeat:
    """Operators `start` to `start + period * count`: `count` copies of one stretch of operators.

    A copy has several `layers` of equal operators where these read different values by turns, such
    as the masks of attention in a window and over the whole sequence.
    """

    start: int
    period: int
    count: int
    layers: int = 1

    @property
    def end(self) -> int:
        return self.start + self.period * self.count

    def copy(self, number: int) -> range:
        """The operators of one copy."""
        return range(self.start + number * self.period, self.start + (number + 1) * self.period)

    def every_layer(self) -> Iterator[range]:
        """The operators of each layer of all copies."""
        size = self.period // self.layers
        for start in range(self.start, self.end, size):
            yield range(start, start + size)


@dataclass(frozen=True)
class ShortGraph:
    """A graph with three copies of each repeat, and its relation to the whole graph.

    Attributes:
        graph: the short graph.
        repeats: in the short graph's numbering, with three copies each.
        skipped: for each repeat the number of copies that were left out after the second.
        stands_for: maps every operator and leaf that was left out to its representative.
        copy_of: maps a name in a left-out copy to (repeat, copy from 0 on).
        whole: the repeats of the whole graph, in its numbering, without regard to marks.
    """

    graph: Graph
    repeats: tuple[Repeat, ...]
    skipped: tuple[int, ...]
    stands_for: dict[str, str]
    copy_of: dict[str, tuple[int, int]]
    whole: tuple[Repeat, ...] = ()

    @property
    def counts(self) -> list[int]:
        """For each operator of the short graph the number in the whole graph it stands for."""
        found = [1] * len(self.graph.ops)
        for repeat, left_out in zip(self.repeats, self.skipped, strict=True):
            for i in repeat.copy(1):
                found[i] += left_out
        return found


def shorten(graph: Graph, marks: Mapping[str, object] | None = None) -> ShortGraph:
    """Keep only the first, second and last copy of every repeat of `graph`.

    Copies whose operators or parameters have different `marks`, by name, are not equal.
    """
    whole = tuple(find_repeats(graph))
    repeats = tuple(_equally_marked(graph, whole, marks)) if marks else whole
    stands_for: dict[str, str] = {}
    copy_of: dict[str, tuple[int, int]] = {}
    kept: list[Repeat] = []
    dropped: set[int] = set()
    for r, repeat in enumerate(repeats):
        for c in range(2, repeat.count - 1):
            dropped.update(repeat.copy(c))
            for counterpart, i in zip(repeat.copy(1), repeat.copy(c), strict=True):
                for name, other in _own(graph, graph.ops[i], graph.ops[counterpart]):
                    stands_for[name] = other
                    copy_of[name] = r, c - 2
        shift = sum(before.period * (before.count - 3) for before in repeats[:r])
        kept.append(replace(repeat, start=repeat.start - shift, count=3))
    if not repeats:
        return ShortGraph(graph, (), (), {}, {}, whole)
    short = _without(graph, dropped, stands_for)
    skipped = tuple(repeat.count - 3 for repeat in repeats)
    return ShortGraph(short, tuple(kept), skipped, stands_for, copy_of, whole)


def grouped(graph: Graph, together: int) -> dict[str, object]:
    """Marks that make `together` layers of each repeat one copy; the remainder does not repeat.

    Where copies have several layers, a copy then has the least multiple of both numbers.
    """
    marks: dict[str, object] = {}
    for repeat in find_repeats(graph):
        copies = math.lcm(together, repeat.layers) // repeat.layers
        full = repeat.count - repeat.count % copies
        for c in range(repeat.count):
            mark = c % copies if c < full else ("left over", c)
            marks[graph.ops[repeat.copy(c).start].name] = mark
    return marks


def divides(segments: Sequence[range], short: ShortGraph) -> bool:
    """Whether every segment of the whole graph is within one copy of a repeat of `short`."""
    borders: set[int] = set()
    shift = 0
    for repeat, skipped in zip(short.repeats, short.skipped, strict=True):
        start = repeat.start + shift
        borders.update(start + repeat.period * c for c in range(skipped + 4))
        shift += repeat.period * skipped
    return not any(
        segment.start < border < segment.stop for segment in segments for border in borders
    )


def without_copies(graph: Graph, gaps: Sequence[tuple[Repeat, int, int]]) -> Graph:
    """`graph` without copies `first` to `last` of repeats.

    The copy after a gap reads the results of the copy before it. Gaps are (repeat, first, last), in
    order.
    """
    stands_for: dict[str, str] = {}
    dropped: set[int] = set()
    for repeat, first, last in gaps:
        for c in range(first, last):
            dropped.update(repeat.copy(c))
            for counterpart, i in zip(repeat.copy(first - 1), repeat.copy(c), strict=True):
                stands_for.update(_own(graph, graph.ops[i], graph.ops[counterpart]))
    return _without(graph, dropped, stands_for)


def _without(graph: Graph, dropped: set[int], stands_for: dict[str, str]) -> Graph:
    """`graph` without operators `dropped`; their readers read the `stands_for` of the results."""
    return replace(
        graph,
        leaves=tuple(leaf for leaf in graph.leaves if leaf.name not in stands_for),
        ops=tuple(_renamed(op, stands_for) for i, op in enumerate(graph.ops) if i not in dropped),
        values=tuple(
            replace(v, alias_of=stands_for[v.alias_of]) if v.alias_of in stands_for else v
            for v in graph.values
            if v.name not in stands_for
        ),
        updates=tuple(pair for pair in graph.updates if pair[1] not in stands_for),
    )


def _own(graph: Graph, op: Op, counterpart: Op) -> Iterator[tuple[str, str]]:
    """The names of `op`, of its results and own leaves, each with that of `counterpart`."""
    yield op.name, counterpart.name
    yield from zip(op.outputs, counterpart.outputs, strict=True)
    for name, other in zip(op.operands, counterpart.operands, strict=True):
        if name != other and name not in graph.producer:
            yield name, other


def _equally_marked(
    graph: Graph, repeats: Sequence[Repeat], marks: Mapping[str, object]
) -> Iterator[Repeat]:
    """The parts of `repeats` whose copies have equal marks, in order.

    A copy in a part is one or more copies of the repeat: if marks alternate, pairs repeat.
    """
    for repeat in repeats:
        numbers: dict[object, int] = {}
        mark_ids = np.array(
            [
                numbers.setdefault(_marks_of(graph, repeat.copy(c), marks), len(numbers))
                for c in range(repeat.count)
            ]
        )
        pending, found = [(0, repeat.count)], []
        while pending:
            begin, end = pending.pop()
            best = max(_runs(mark_ids, begin, end), default=None)
            if best is not None:
                covered, negative, low = best
                found.append((low, -negative, covered // -negative))
                pending += [(begin, low), (low + covered, end)]
        for low, together, count in sorted(found):
            start = repeat.start + low * repeat.period
            yield Repeat(start, together * repeat.period, count, together * repeat.layers)


def _marks_of(graph: Graph, copy: range, marks: Mapping[str, object]) -> tuple[object, ...]:
    """The marks of a copy's operators and of the leaves that they read, in order."""
    found: list[object] = []
    for op in (graph.ops[i] for i in copy):
        found.append(marks.get(op.name))
        found += [marks.get(name) for name in op.operands if name not in graph.producer]
    return tuple(found)


def _runs(mark_ids: NDArray[np.int64], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Runs of enough equal groups of copies, as (copies covered, -copies per group, start)."""
    for width in range(1, (end - begin) // _LEAST_COPIES + 1):
        for low, high in _stretches(mark_ids[begin : end - width] == mark_ids[begin + width : end]):
            count = (high - low) // width + 1
            if count >= _LEAST_COPIES:
                yield width * count, -width, begin + low


def _stretches(true: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The begin and end of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], true.astype(np.int8), [0]))))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def find_repeats(graph: Graph) -> Iterator[Repeat]:
    """Runs of at least five equal stretches of operators, in order; the longest if they overlap."""
    kinds = _kinds(graph)
    numbers = _Numbers(graph)
    pending = [(0, len(kinds))]
    found: list[Repeat] = []
    while pending:
        begin, end = pending.pop()
        repeat = _longest(kinds, begin, end, numbers)
        if repeat is not None:
            found.append(repeat)
            pending += [(begin, repeat.start), (repeat.end, end)]
    yield from sorted(found, key=lambda repeat: repeat.start)


def _longest(kinds: NDArray[np.int64], begin: int, end: int, numbers: _Numbers) -> Repeat | None:
    """The repeat within `begin` to `end` that covers most operators."""
    candidates = []
    for period in _periods(kinds[begin:end]):
        same = kinds[begin : end - period] == kinds[begin + period : end]
        for low, high in _stretches(same):
            count = (high - low) // period + 1
            if count >= _LEAST_COPIES:
                candidates.append((period * count, -period, begin + low, high - low + period))
    order = [(-negative, low, length) for _, negative, low, length in sorted(candidates)[::-1]]
    single = (_agreeing(numbers, *one, 1) for one in order)
    several = (_agreeing(numbers, *one, n) for n in range(2, _MOST_LAYERS + 1) for one in order)
    return next((found for found in chain(single, several) if found is not None), None)


def _agreeing(numbers: _Numbers, layer: int, low: int, length: int, layers: int) -> Repeat | None:
    """The repeat of copies of `layers` equal stretches of `layer` operators, from `low` on."""
    period = layer * layers
    starts = range(low, low + min(layer, length - period * _LEAST_COPIES + 1))
    for start in sorted(starts, key=lambda s: (numbers.crossing(s, layer), s))[:3]:
        repeat = Repeat(start, period, (low + length - start) // period, layers)
        if numbers.agrees(repeat):
            return repeat
    return None


def _periods(kinds: NDArray[np.int64]) -> list[int]:
    """Distances after which many groups of a few operators repeat, the commonest first."""
    last: dict[bytes, int] = {}
    distances: Counter[int] = Counter()
    for i in range(len(kinds) - _GRAM + 1):
        gram = kinds[i : i + _GRAM].tobytes()
        if gram in last:
            distances[i - last[gram]] += 1
        last[gram] = i
    return [distance for distance, _ in distances.most_common(_PERIODS_TRIED)]


def _kinds(graph: Graph) -> NDArray[np.int64]:
    """A number per operator, equal for operators that differ only in the names of values."""
    seen: dict[object, int] = {}
    forms: dict[object, int] = {}
    leaves = {leaf.name: leaf.kind for leaf in graph.leaves}
    form = {
        v.name: forms.setdefault(
            (v.shape, v.dtype, v.requires_grad, leaves.get(v.name)), len(forms)
        )
        for v in graph.values
    }
    views = {v.name for v in graph.values if v.alias_of}
    found = []
    for op in graph.ops:
        names = (*op.outputs, *op.operands)
        numbered = op.target in _NUMBERED or number_drawn_by(op) is not None
        args = op.args[:-1] if numbered else op.args
        key = (
            op.target,
            tuple([_plain(a) for a in args]),
            tuple([(k, _plain(a)) for k, a in op.kwargs]) if op.kwargs else (),
            tuple([form[name] for name in names]),
            tuple([name in views for name in op.outputs]),
            tuple([names.index(name) if name in names else -1 for name in op.saves]),
            op.extra_saved,
            op.rule,
        )
        found.append(seen.setdefault(key, len(seen)))
    return np.array(found, np.int64)


class _Numbers:
    """The indices of the operators that produce and read each value of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.operands = [op.operands for op in graph.ops]
        self.made = {name: i for i, op in enumerate(graph.ops) for name in op.outputs}
        self.read: dict[str, list[int]] = {}  # in order
        for i, names in enumerate(self.operands):
            for name in names:
                self.read.setdefault(name, []).append(i)
        self.last = np.array(
            [
                max([self.read[name][-1] for name in op.outputs if name in self.read], default=i)
                for i, op in enumerate(graph.ops)
            ],
            np.int64,
        )
        self.returned = set(graph.outputs)
        self.updates = {value: buffer for buffer, value in graph.updates}

    def crossing(self, cut: int, period: int) -> int:
        """The number of operators of the copy after `cut` whose results a later copy reads."""
        inside = np.arange(cut, min(cut + period, len(self.last)))
        return int((self.last[inside] >= cut + period).sum())

    def agrees(self, repeat: Repeat) -> bool:
        """Whether every copy but the first reads the same values as the one before, shifted."""
        if not all(self._moves_on(repeat, c) for c in range(2, repeat.count)):
            return False
        return all(self._stays_inside(repeat, c) for c in range(1, repeat.count - 1))

    def _moves_on(self, repeat: Repeat, c: int) -> bool:
        """Whether copy `c` reads what the copy before it reads, one period later, or its own."""
        own: dict[str, str] = {}
        for i, j in zip(repeat.copy(c - 1), repeat.copy(c), strict=True):
            for one, other in zip(self.operands[i], self.operands[j], strict=True):
                if one in self.made and other in self.made:
                    moved = self.made[other] - self.made[one]
                    if one != other and moved != repeat.period:
                        return False
                    if moved and self.made[one] < repeat.copy(c - 2).start:
                        return False
                elif (
                    one in self.made
                    or other in self.made
                    or (one != other and own.setdefault(one, other) != other)
                ):
                    return False
        return True

    def _stays_inside(self, repeat: Repeat, c: int) -> bool:
        """Whether only this copy and the next read its results, and only it reads its leaves."""
        own, end = repeat.copy(c), repeat.copy(c + 1).stop
        for i in own:
            for name in self.graph.ops[i].outputs:  # nothing is read before it is made
                if name in self.returned or (name in self.read and self.read[name][-1] >= end):
                    return False
            before = self.operands[i - repeat.period]
            for name, other in zip(self.operands[i], before, strict=True):
                shared = name == other or name in self.made
                reads = self.read[name]
                if not shared and not (own.start <= reads[0] and reads[-1] < own.stop):
                    return False
        return True


def _plain(arg: Arg) -> object:
    if isinstance(arg, Ref):
        return Ref
    if isinstance(arg, tuple):
        return tuple([_plain(a) for a in arg])
    return (type(arg), arg)


def _renamed(op: Op, names: dict[str, str]) -> Op:
    """The operator with its operands renamed, or `op` itself where none changes."""
    if not any(name in names for name in op.operands):
        return op

    def rename(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(names.get(arg.name, arg.name))
        return tuple(rename(a) for a in arg) if isinstance(arg, tuple) else arg

    return replace(
        op,
        args=tuple(rename(a) for a in op.args),
        kwargs=tuple((k, rename(a)) for k, a in op.kwargs),
        saves=tuple(names.get(name, name) for name in op.saves),
    )
