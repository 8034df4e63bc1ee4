"""List scheduling of a step's tasks on streams.

As on a GPU, what is put on a track runs in that order; a task starts when the one before it on its
track has ended, and all that it comes after (Graham, "Bounds on multiprocessing timing anomalies",
1969; with a fixed order on every track there are none: less work never takes longer). It knows
neither plans nor machines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from shardwright.ir.layout import Seconds
from shardwright.ir.timeline import Task, Timeline, Track


def schedule(tasks: Iterable[Task]) -> Timeline:
    """Start every task as early as it may; on each track they run in the given order.

    A task comes after tasks given before it only, so one sweep will do: O(tasks).
    Raises `ValueError` for one that does not.

    >>> from shardwright.ir.timeline import Stream
    >>> here, net = Track("rank 0", Stream.COMPUTE), Track("rank 0", Stream.COMMUNICATION)
    >>> tasks = [Task("a", here, 2.0), Task("sum", net, 3.0, (0,)), Task("b", here, 2.0)]
    >>> schedule(tasks).starts
    (0.0, 2.0, 2.0)
    """
    free: defaultdict[Track, float] = defaultdict(float)
    ends: list[float] = []
    starts: list[Seconds] = []
    given: Sequence[Task] = tuple(tasks)
    for number, task in enumerate(given):
        start = free[task.track]
        for before in task.after:
            if not 0 <= before < number:
                raise ValueError(
                    f"task {number} ({task.name}) comes after {task.after}, not before"
                )
            start = max(start, ends[before])
        starts.append(Seconds(start))
        ends.append(start + task.seconds)
        free[task.track] = ends[-1]
    return Timeline(tuple(given), tuple(starts))
