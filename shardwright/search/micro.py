"""Which numbers of micro-batches a search tries, and when a question is worth trying more than one.

The search's other choices are made anew for each number: a choice of the outer loop, like the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwright.ir.frontier import Frontier, parse_bytes
from shardwright.ir.graph import Graph
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro import MicroBatchError, MicroBatches, micro_batches
from shardwright.rules.micro_graph import micro_graph

_MOST = 1024  # micro-batches that are tried when nobody says how many
_TIGHT = 1.02  # slower than this by its limit, a plan may gain from micro-batches


def analyzed(graph: Graph, analysis: Analysis, count: int) -> tuple[Graph, Analysis]:
    """The graph of one of `count` micro-batches, with its analysis."""
    if count == 1:
        return graph, analysis
    return micro_graph(graph, analysis, micro_batches(graph, analysis, count))


def possible(
    graph: Graph, analysis: Analysis, wanted: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The numbers of micro-batches that `graph` can have, and why it cannot have the others.

    Of `wanted`, or of all powers of two; 1 if none is possible.
    """
    counts: list[int] = []
    notes: list[str] = []
    for count in sorted(set(wanted)) if wanted is not None else _powers():
        if count == 1:
            counts.append(count)
            continue
        try:
            found: MicroBatches = micro_batches(graph, analysis, count)
        except MicroBatchError as e:
            if wanted is None:
                break
            notes.append(f"{count} micro-batches are not possible: {e}")
        else:
            counts.append(found.count)
    return tuple(counts) or (1,), tuple(notes)


def _powers() -> list[int]:
    return [2**i for i in range(_MOST.bit_length())]


def if_tight(run: Callable[[Sequence[int] | None], Frontier], limit: str | int | None) -> Frontier:
    """The frontier that `run` finds without micro-batches, or with them where `limit` asks for it.

    Micro-batches never make a step faster. They save memory, so they are worth
    trying where nothing fits into the limit, or only what is slower than the fastest.
    """
    plain = run((1,))
    if limit is None:
        return plain
    most = parse_bytes(limit)
    fits = min((seconds for seconds, peak in plain.costs if peak <= most), default=None)
    if fits is not None and fits <= _TIGHT * plain.costs[0][0]:
        return plain
    more = run(None)
    return replace(more, search_seconds=plain.search_seconds + more.search_seconds)
