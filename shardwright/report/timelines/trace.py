"""Writes steps as a Chrome trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

Trace Event Format: one process for each group of ranks that was simulated and
for each rank that was measured, one thread for each of its streams, complete
events ("X") in microseconds from the beginning of the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from shardwright.ir.plan import Plan
from shardwright.ir.timeline import Timeline
from shardwright.report.summary import summary
from shardwright.report.timelines.chrome import SIMULATED
from shardwright.report.timelines.profiled import Profiled

_MICRO = 1e6

Event = dict[str, Any]


def chrome_trace(timeline: Timeline, plan: Plan, measured: Sequence[Profiled] = ()) -> str:
    """JSON text of the trace; one event per line, so that two traces can be compared.

    The `measured` processes follow those of the simulated `timeline`.
    """
    groups = list(dict.fromkeys(task.track.ranks for task in timeline.tasks))
    events = list(_simulated(timeline, groups))
    for pid, one in enumerate(measured, start=len(groups)):
        events += _measured(one, pid)
    rows = ",\n".join(json.dumps(event) for event in events)
    about = {"plan": summary(plan), "mesh": str(plan.mesh), "machine": plan.machine}
    return (
        f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(about)},\n'
        f'"traceEvents": [\n{rows}\n]}}\n'
    )


def _simulated(timeline: Timeline, groups: Sequence[str]) -> Iterator[Event]:
    tracks = list(dict.fromkeys(task.track for task in timeline.tasks))
    for pid, group in enumerate(groups):
        yield from _process(f"{SIMULATED}{group}", pid)
    for tid, track in enumerate(tracks):
        name = f"{track.stream.value} {track.axis}".rstrip()
        yield from _thread(name, pid=groups.index(track.ranks), tid=tid)
    place = {track: (groups.index(track.ranks), tid) for tid, track in enumerate(tracks)}
    for task, start in zip(timeline.tasks, timeline.starts, strict=True):
        pid, tid = place[task.track]
        yield {
            "name": task.name,
            "cat": task.kind,
            "ph": "X",
            "ts": start * _MICRO,
            "dur": task.seconds * _MICRO,
            "pid": pid,
            "tid": tid,
            "args": {"module": task.where},
        }


def _measured(one: Profiled, pid: int) -> Iterator[Event]:
    yield from _process(one.label, pid)
    for tid, row in enumerate(one.rows):
        yield from _thread(row, pid=pid, tid=tid)
    for tid, name, kind, start, length in one.events:
        yield {
            "name": name,
            "cat": kind,
            "ph": "X",
            "ts": start,
            "dur": length,
            "pid": pid,
            "tid": tid,
        }


def _process(name: str, pid: int) -> Iterator[Event]:
    yield _event("process_name", {"name": name}, pid=pid)
    yield _event("process_sort_index", {"sort_index": pid}, pid=pid)


def _thread(name: str, **place: int) -> Iterator[Event]:
    yield _event("thread_name", {"name": name}, **place)
    yield _event("thread_sort_index", {"sort_index": place["tid"]}, **place)


def _event(what: str, args: dict[str, Any], **place: int) -> Event:
    return {"name": what, "ph": "M", **place, "args": args}
