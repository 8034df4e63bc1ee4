"""Timelines in plan files: a table of tracks, and a row for each task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.ir.layout import Seconds
from shardwright.ir.timeline import Stream, Task, Timeline, Track
from shardwright.plan_io.checks import number, of_type


def timeline_tables(timeline: Timeline) -> dict[str, Any]:
    """The tables `tracks` (ranks, stream, axis) and `tasks`.

    A task's row has its name, the number of its track, its start and seconds, its kind, module and
    whether it is idle, and then the numbers of the tasks that it comes after.
    """
    tracks = list(dict.fromkeys(task.track for task in timeline.tasks))
    numbers = {track: place for place, track in enumerate(tracks)}
    return {
        "tracks": [[track.ranks, track.stream.value, track.axis] for track in tracks],
        "tasks": [
            [
                *(task.name, numbers[task.track], start, task.seconds),
                *(task.kind, task.where, task.idle, *task.after),
            ]
            for task, start in zip(timeline.tasks, timeline.starts, strict=True)
        ],
    }


def timeline_of(tracks: list[list[Any]], tasks: list[list[Any]]) -> Timeline:
    """The timeline of these tables; raises `TypeError`, `ValueError` or `IndexError`."""
    known = [_track(*row) for row in tracks]
    return Timeline(
        tuple(_task(place, row, known) for place, row in enumerate(tasks)),
        tuple(Seconds(number(row[2])) for row in tasks),
    )


def _track(ranks: Any, stream: Any, axis: Any) -> Track:
    return Track(of_type(ranks, str), Stream(stream), of_type(axis, str))


def _task(place: int, row: list[Any], tracks: Sequence[Track]) -> Task:
    name, track, _, seconds, kind, module, idle, *after = row
    before = tuple(of_type(other, int) for other in after)
    if not of_type(track, int) >= 0 or any(not 0 <= other < place for other in before):
        raise ValueError(f"task {place} of track {track} after {before}")
    return Task(
        of_type(name, str),
        tracks[track],
        Seconds(number(seconds)),
        before,
        of_type(kind, str),
        of_type(module, str),
        of_type(idle, bool),
    )
