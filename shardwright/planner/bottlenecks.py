"""A second search of the most promising meshes, without the largest single choices.

The search adds up memory. A plan also needs the *largest* of some figures: the workspace of one
operator, and what one recomputed segment holds while it runs. So the fastest plan within a limit
may have a larger sum and a smaller maximum than all that was found. Here the single choice of the
best plan with the largest figure is ruled out, with all choices that need as much, and the rest is
searched again.

Paper: Hansen 1980, "Bicriterion path problems", where one objective is a sum and the other a
maximum: a threshold for the maximum, and the best sum below it.
Deviation: one threshold for each of two meshes; sums within a segment have none.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.ir.layout import Bytes
from shardwright.planner.mesh_loop import GAIN, MeshLoop, Searched
from shardwright.planner.plans.candidate import Candidate

_MESHES = 2


def search_below(loop: MeshLoop, limit: Bytes, seconds: float) -> None:
    """Add plans within `limit` bytes whose largest single choice needs less than that of others.

    Args:
        loop: the searches so far, which get the new candidates.
        limit: bytes per rank, by the tables.
        seconds: the time limit.
    """
    for one, best in _promising(loop, limit):
        most = one.writer.transients.of_one_choice(best.point.choice)
        space = one.writer.transients.below(most)
        if space is not None:
            loop.run_again(one, space, seconds)


def _promising(loop: MeshLoop, limit: Bytes) -> Iterator[tuple[Searched, Candidate]]:
    """The searches that may have clearly faster plans within `limit`, with their best plans."""
    fitting = [c.point.time for c in loop.found if c.peak <= limit and c.staged is None]
    if not fitting:
        return
    enough = min(fitting) / (1 + GAIN)
    bounds = [(one.bound(limit - one.writer.least_overhead), one) for one in loop.searched]
    for least, one in sorted(bounds, key=lambda pair: pair[0])[:_MESHES]:
        mine = [c for c in loop.found if c.writer is one.writer]
        if least < enough and mine:
            yield one, min(mine, key=lambda c: (max(c.peak - limit, 0), c.point.time))
