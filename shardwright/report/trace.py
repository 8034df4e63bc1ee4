"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

Trace Event Format: one process for each group of ranks, one thread for each of
its streams, complete events ("X") in microseconds.
"""

from __future__ import annotations

import json
from typing import Any

from shardwright.cost.timeline import Timeline
from shardwright.ir.plan import Plan
from shardwright.report.summary import summary

_MICRO = 1e6


def chrome_trace(timeline: Timeline, plan: Plan) -> str:
    """JSON text of the trace; one event per line, so that two traces can be compared."""
    groups = list(dict.fromkeys(task.track.ranks for task in timeline.tasks))
    tracks = list(dict.fromkeys(task.track for task in timeline.tasks))
    events = [_named("process_name", group, pid=pid) for pid, group in enumerate(groups)]
    for tid, track in enumerate(tracks):
        pid = groups.index(track.ranks)
        events.append(_named("thread_name", track.stream.value, pid=pid, tid=tid))
        events.append(_event("thread_sort_index", {"sort_index": tid}, pid=pid, tid=tid))
    place = {track: (groups.index(track.ranks), tid) for tid, track in enumerate(tracks)}
    for task, start in zip(timeline.tasks, timeline.starts, strict=True):
        pid, tid = place[task.track]
        events.append(
            {
                "name": task.name,
                "cat": task.kind,
                "ph": "X",
                "ts": start * _MICRO,
                "dur": task.seconds * _MICRO,
                "pid": pid,
                "tid": tid,
                "args": {"module": task.where},
            }
        )
    rows = ",\n".join(json.dumps(event) for event in events)
    about = {"plan": summary(plan), "mesh": str(plan.mesh), "machine": plan.machine}
    return (
        f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(about)},\n'
        f'"traceEvents": [\n{rows}\n]}}\n'
    )


def _named(what: str, name: str, **place: int) -> dict[str, Any]:
    return _event(what, {"name": name}, **place)


def _event(what: str, args: dict[str, Any], **place: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", **place, "args": args}
