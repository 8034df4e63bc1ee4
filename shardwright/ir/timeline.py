"""Timelines: when everything of a step runs, on the streams of a rank.

A track is one stream of a group of ranks that do the same, or of the links of a mesh axis.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.ir.layout import Seconds

# Names of tasks.
STATE_COPIES = "copies of the optimizer's state that nothing hides"
UPDATE, HOST_UPDATE = "update of parameters", "update of parameters on the host"


class Stream(enum.StrEnum):
    """The work of a track."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"


class Track(NamedTuple):
    """One stream of a group of ranks, as `("ranks 0-3", COMPUTE)`; or of the links of one axis."""

    ranks: str
    stream: Stream
    axis: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """Something that occupies a track for some time.

    Attributes:
        name: the text of the task.
        track: the stream that it occupies.
        seconds: how long it does.
        after: the numbers of the tasks that have to end before it starts.
        kind: the part of the step that it belongs to: "forward", "backward", ...
        where: the module.
        idle: whether it keeps its track from doing other work, and does none.
    """

    name: str
    track: Track
    seconds: Seconds
    after: tuple[int, ...] = ()
    kind: str = ""
    where: str = ""
    idle: bool = False


@dataclass(frozen=True, slots=True)
class Timeline:
    """Tasks with the times at which they start."""

    tasks: tuple[Task, ...]
    starts: tuple[Seconds, ...]

    @property
    def seconds(self) -> Seconds:
        """From the start of the first task to the end of the last."""
        spans = zip(self.tasks, self.starts, strict=True)
        return Seconds(max((start + task.seconds for task, start in spans), default=0.0))

    def busy(self, track: Track) -> Seconds:
        """Seconds that a track is busy."""
        return Seconds(sum(end - start for start, end in self._spans(track)))

    def alone(self, track: Track, *other: Track) -> Seconds:
        """Seconds that `track` is busy while none of the others is."""
        mine, others = self._spans(track), _joined(sorted(self._spans(*other)))
        covered, at = 0.0, 0
        for start, end in mine:
            while at < len(others) and others[at][1] <= start:
                at += 1
            i = at
            while i < len(others) and others[i][0] < end:
                covered += max(0.0, min(end, others[i][1]) - max(start, others[i][0]))
                i += 1
        return Seconds(max(0.0, self.busy(track) - covered))

    def _spans(self, *tracks: Track) -> list[tuple[float, float]]:
        return [
            (start, start + task.seconds)
            for task, start in zip(self.tasks, self.starts, strict=True)
            if task.track in tracks and not task.idle
        ]


def _joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted spans without what they share."""
    found: list[tuple[float, float]] = []
    for start, end in spans:
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
