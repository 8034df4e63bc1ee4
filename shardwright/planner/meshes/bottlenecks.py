"""Searches the most promising meshes again, without the choices of the largest transient memory.

The search minimises sums. The memory of a plan also contains a *maximum*: over the workspaces of
operators, and over the bytes that each recomputed segment holds while it runs. So the fastest plan
within a limit may have a larger sum and a smaller maximum than every plan found. This file takes
the best plan, removes its choice of the largest transient memory and all choices that need as much
or more, and searches the remaining space again.

Paper: Hansen 1980, "Bicriterion path problems", in which one objective is a sum and the other a
maximum: bound the maximum by a threshold and find the best sum below it.
Deviation: one threshold for each of two meshes; sums within a segment have none.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.ir.layout import Bytes
from shardwright.planner.meshes.mesh_loop import GAIN, MeshLoop, Searched
from shardwright.planner.plans.candidate import Candidate

_MESHES = 2


def search_below(loop: MeshLoop, limit: Bytes, seconds: float) -> None:
    """Search for plans within `limit` bytes of smaller transient memory; add them to `loop`.

    Args:
        loop: the searches so far; new candidates are added to it.
        limit: bytes per rank, by the tables.
        seconds: the time limit.
    """
    for one, best in _promising(loop, limit):
        most = one.writer.transients.of_one_choice(best.point.choice)
        space = one.writer.transients.below(most)
        if space is not None:
            loop.run_again(one, space, seconds)


def _promising(loop: MeshLoop, limit: Bytes) -> Iterator[tuple[Searched, Candidate]]:
    """The searches that may contain clearly faster plans within `limit`, and their best plans."""
    fitting = [c.point.time for c in loop.found if c.peak <= limit and c.staged is None]
    if not fitting:
        return
    enough = min(fitting) / (1 + GAIN)
    bounds = [(one.bound(limit - one.writer.least_overhead), one) for one in loop.searched]
    for least, one in sorted(bounds, key=lambda pair: pair[0])[:_MESHES]:
        mine = [c for c in loop.found if c.writer is one.writer]
        if least < enough and mine:
            yield one, min(mine, key=lambda c: (max(c.peak - limit, 0), c.point.time))
