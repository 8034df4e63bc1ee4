"""A stratified sample of rows: over sources, and in each over models, GPUs and degrees."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.published.row import Row

SEED = 3
_EACH = 12  # rows of one graph, at most: a captured graph prices many degrees


def sample(rows: Sequence[Row], count: int, seed: int = SEED) -> list[Row]:
    """`count` rows or a few more, as many of each source as of any other that has enough.

    Models of a source take turns, so that few graphs stand for many rows.
    """
    by_source: dict[str, dict[tuple[object, ...], list[Row]]] = defaultdict(dict)
    for row in rows:
        shape = row.model, row.sequence, row.global_batch, row.attention, row.precision
        by_source[row.source].setdefault(shape, []).append(row)
    chosen: list[Row] = []
    left = count
    for number, source in enumerate(sorted(by_source, key=lambda name: _rows(by_source[name]))):
        share = -(-left // (len(by_source) - number))
        # A draw of its own: other rows of one source leave the sample of the others as it is.
        found = _in_turns(by_source[source], share, random.Random(f"{seed} {source}"))
        left -= len(found)
        chosen += found
    return chosen


def _rows(groups: dict[tuple[object, ...], list[Row]]) -> int:
    return sum(len(group) for group in groups.values())


def _in_turns(
    groups: dict[tuple[object, ...], list[Row]], count: int, draw: random.Random
) -> list[Row]:
    """At most `count` rows, up to `_EACH` of each group."""
    order = sorted(groups, key=str)
    draw.shuffle(order)
    found: list[Row] = []
    for shape in order:
        if len(found) >= count:
            break
        group = groups[shape]
        found += draw.sample(group, min(_EACH, len(group), count - len(found)))
    return found
