"""Schedules a step's tasks on streams (list scheduling).

As on a GPU, tasks of one track run in the given order. A task starts when its predecessor on the
track and all tasks that it depends on have ended (Graham, "Bounds on multiprocessing timing
anomalies", 1969). With a fixed order on every track there are no anomalies: less work never takes
longer. This module depends on neither plans nor machines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from shardwright.ir.layout import Seconds
from shardwright.ir.pipeline import StageRanks
from shardwright.ir.timeline import Task, Timeline, Track


class TaskSchedule:
    """Schedules tasks one after the other, each as early as possible.

    Attributes:
        tasks: all tasks.
        starts: the seconds at which they start.
        ends: the seconds at which they end.
        free: when the last task of each track ends.
    """

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.starts: list[Seconds] = []
        self.ends: list[float] = []
        self.free: defaultdict[Track, float] = defaultdict(float)

    def add(self, task: Task) -> int:
        """Schedule a task and return its number.

        It starts when its track is free and all tasks that it depends on have ended. Raises
        `ValueError` if one of these has not been added.
        """
        number = len(self.ends)
        start = self.free[task.track]
        for before in task.after:
            if not 0 <= before < number:
                raise ValueError(
                    f"task {number} ({task.name}) comes after {task.after}, not before"
                )
            start = max(start, self.ends[before])
        self.keep(task, start)
        self.ends.append(start + task.seconds)
        self.free[task.track] = self.ends[-1]
        return number

    def keep(self, task: Task, start: float) -> None:
        """Record a task that was scheduled."""
        self.tasks.append(task)
        self.starts.append(Seconds(start))

    @property
    def timeline(self) -> Timeline:
        """All tasks, and the seconds at which they start."""
        return Timeline(tuple(self.tasks), tuple(self.starts))


def schedule(tasks: Iterable[Task]) -> Timeline:
    """Schedule all tasks as early as possible; on each track they run in the given order.

    Takes O(tasks + dependencies). Raises `ValueError` for a task that depends on one that is given
    after it.

    >>> from shardwright.ir.timeline import Stream
    >>> here, net = Track("rank 0", Stream.COMPUTE), Track("rank 0", Stream.COMMUNICATION)
    >>> tasks = [Task("a", here, 2.0), Task("sum", net, 3.0, (0,)), Task("b", here, 2.0)]
    >>> schedule(tasks).starts
    (0.0, 2.0, 2.0)
    """
    found = TaskSchedule()
    for task in tasks:
        found.add(task)
    return found.timeline


def group_names(homes: Sequence[int], ranks: StageRanks) -> list[str]:
    """Names of the groups of a pipeline: their stages and their ranks.

    >>> group_names((0, 1, 0, 1), StageRanks(groups=2, size=2, neighbours=2))
    ['stages 1, 3, ranks 0-1', 'stages 2, 4, ranks 2-3']
    >>> group_names((0, 1), StageRanks(groups=2, size=4, neighbours=2))
    ['stage 1, ranks 0-1, 4-5', 'stage 2, ranks 2-3, 6-7']
    """
    names = []
    for group in range(ranks.groups):
        mine = [str(stage + 1) for stage, home in enumerate(homes) if home == group]
        stages = f"stage{'s' if mine[1:] else ''} {', '.join(mine)}"
        numbers = ", ".join(_spans(ranks.of_group(group)))
        names.append(f"{stages}, rank{'s' if ranks.size > 1 else ''} {numbers}")
    return names


def _spans(numbers: Sequence[int]) -> Iterator[str]:
    """Ascending numbers as text, with the first and the last of those that follow each other."""
    first = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            one, last = numbers[first], numbers[at - 1]
            yield str(one) if one == last else f"{one}-{last}"
            first = at
