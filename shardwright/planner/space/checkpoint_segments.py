"""Segments of a graph that may be recomputed in the backward pass (activation checkpointing).

The inputs of a segment are kept; the tensors that autograd saves inside are recomputed in the
backward pass. Every repeated layer is a segment, or each of its parts between points that no more
activations cross than the border of the layer, such as attention and MLP. Operators between repeats
are cut where the fewest activations cross, into segments that save about equally many bytes.

Paper: Chen et al. 2016 (arXiv 1604.06174), segments between kept activations.
Deviation: the search decides which segments are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from shardwright.ir.graph import Graph, Op
from shardwright.planner.space.repeats import Repeat
from shardwright.solve.elimination.problem import Ints

_SEGMENTS = 8  # outside of repeats
_LEAST_PART = 0.1  # segments that save less than this fraction of the largest are dropped


def checkpoint_segments(
    graph: Graph, repeats: Sequence[Repeat], *, parts: bool = False
) -> tuple[range, ...]:
    """The checkpoint segments of `graph` as ranges of operator indices, in order.

    `repeats` are the repeats of `graph`, whose layers are segments, or with `parts` parts of them.
    The last operators are in no segment, because their backward pass begins as soon as they have
    run.
    """
    saved = _saved(graph)
    crossing = _crossing(graph)
    found: list[range] = []
    begin = 0
    for repeat in repeats:
        found += _even_segments(begin, repeat.start, saved, crossing)
        found += repeat.every_layer()
        begin = repeat.end
    found += _even_segments(begin, len(graph.ops), saved, crossing)
    if found and found[-1].stop == len(graph.ops):
        found.pop()
    found = [segment for segment in found if all(_may_run_again(graph.ops[i]) for i in segment)]
    sizes = [int(saved[segment.start : segment.stop].sum()) for segment in found]
    least = _LEAST_PART * max(sizes, default=0)
    found = [segment for segment, size in zip(found, sizes, strict=True) if size > least]
    if not parts:
        return tuple(found)
    cuts = {
        layer.start: inside
        for repeat in repeats
        for inside in [_cuts_of_layer(repeat, saved, crossing)]
        for layer in repeat.every_layer()
    }
    return tuple(part for one in found for part in _cut(one, cuts.get(one.start, ())))


def kept_segments(segments: Sequence[range], whole: Graph, short: Graph) -> tuple[range, ...]:
    """The segments of the `whole` graph that the `short` graph contains, by its indices.

    The short graph omits whole copies of repeats, so it contains a segment completely or not at
    all.
    """
    at = {op.name: i for i, op in enumerate(short.ops)}
    starts = ((at.get(whole.ops[segment.start].name), len(segment)) for segment in segments)
    return tuple(range(start, start + size) for start, size in starts if start is not None)


def _cut(segment: range, cuts: Sequence[int]) -> Iterator[range]:
    """A segment in parts; `cuts` are numbers of operators before each cut."""
    for start, stop in pairwise((0, *cuts, len(segment))):
        yield segment[start:stop]


def _cuts_of_layer(repeat: Repeat, saved: Ints, crossing: Ints) -> list[int]:
    """Numbers of operators before each cut of a layer into parts, which save a fair share each."""
    layer = list(repeat.every_layer())[1]  # what only the first one reads crosses that one, too
    least = _LEAST_PART * saved[layer.start : layer.stop].sum()
    start, cuts = layer.start, list[int]()
    for cut in layer[1:]:
        few = crossing[cut] <= crossing[layer.start]
        if few and min(saved[start:cut].sum(), saved[cut : layer.stop].sum()) > least:
            cuts.append(cut - layer.start)
            start = cut
    return cuts


def _even_segments(begin: int, end: int, saved: Ints, crossing: Ints) -> Iterator[range]:
    """Operators `begin` to `end` in segments that save about equally many bytes."""
    inner = np.arange(begin + 1, end)
    # No cut is before the first activation, where the look-up of an input or a position may be.
    inner = inner[crossing[inner] > 0]
    if not inner.size:
        return
    cuts = inner[crossing[inner] == crossing[inner].min()].tolist()
    share = saved[begin:end].sum() / _SEGMENTS
    start = begin
    for cut in (*cuts, end):
        if saved[start:cut].sum() >= share or cut == end:
            yield range(start, cut)
            start = cut


def _may_run_again(op: Op) -> bool:
    """Whether `op` may run twice: an opaque module may change state of its own."""
    return op.kind != "opaque"


def _saved(graph: Graph) -> Ints:
    """Bytes that autograd saves for each operator, without leaves, which are kept anyway."""
    leaves = {leaf.name for leaf in graph.leaves}
    sizes = [
        sum(graph.tensor[name].bytes for name in op.saves if name not in leaves) + op.extra_saved
        for op in graph.ops
    ]
    return np.array(sizes, np.int64)


def _crossing(graph: Graph) -> Ints:
    """For each cut before an operator, the number of activations with a gradient that cross it."""
    change = np.zeros(len(graph.ops) + 1, np.int64)
    number = {op.name: i for i, op in enumerate(graph.ops)}
    for i, op in enumerate(graph.ops):
        for name in op.outputs:
            readers = [number[reader.name] for reader in graph.consumers[name]]
            if readers and graph.tensor[name].requires_grad:
                change[i + 1] += 1
                change[max(readers) + 1] -= 1
    return np.cumsum(change)[: len(graph.ops)]
