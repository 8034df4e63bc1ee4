"""Converts timelines of steps, simulated or read from a Chrome trace, to bars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardwright.ir import timeline
from shardwright.report.page import StepBars

SIMULATED = "simulated, "  # prefix of the names of simulated processes
_SHOWN = 4_000  # the most events shown on a page


class TraceError(ValueError):
    """The file is no Chrome trace, or has no events."""


def read_trace(text: str, label: str) -> StepBars:
    """The complete events of the measured processes in a trace, the longest if there are many.

    Raises `TraceError` for a text that is not in the Trace Event Format.
    """
    try:
        events, names = events_and_threads(text)
        owners = {
            e.get("pid"): e["args"]["name"] for e in events if e.get("name") == "process_name"
        }
        bars = [e for e in events if e.get("ph") == "X"]
        made = {pid for pid, name in owners.items() if name.startswith(SIMULATED)}
        bars = [e for e in bars if e.get("pid") not in made] or bars
        bars.sort(key=lambda e: -float(e["dur"]))
        shown = sorted(bars[:_SHOWN], key=lambda e: float(e["ts"]))
        start = min((float(e["ts"]) for e in shown), default=0.0)
        places = {at: row for row, at in enumerate(dict.fromkeys(map(thread_of, shown)))}
        rows = tuple(f"{owners.get(at[0], at[0])} {names.get(at, at[1])}" for at in places)
        found = tuple(_bar(places[thread_of(e)], e, start) for e in shown)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise TraceError(f"{label} is not a Chrome trace ({e!r})") from e
    if not found:
        raise TraceError(f"{label} has no complete events, so there is nothing to show")
    return StepBars(label + _left_out(len(bars)), rows, found)


def simulated(found: timeline.Timeline) -> StepBars:
    """The bars of a simulated step, the longest if there are many."""
    tracks = list(dict.fromkeys(task.track for task in found.tasks))
    both = [
        (start, task)
        for start, task in zip(found.starts, found.tasks, strict=True)
        if not task.idle and task.seconds > 0
    ]
    longest = sorted(both, key=lambda item: -item[1].seconds)[:_SHOWN]
    events = tuple(
        (
            tracks.index(task.track),
            task.name,
            task.kind,
            start * 1e6,
            task.seconds * 1e6,
            task.where,
        )
        for start, task in sorted(longest, key=lambda item: item[0])
    )
    label = "as simulated" + _left_out(len(both))
    rows = tuple(f"{track.ranks}, {track.stream.value}" for track in tracks)
    return StepBars(label, rows, events)


def _left_out(count: int) -> str:
    return f", the longest {_SHOWN} of {count} events" if count > _SHOWN else ""


def events_and_threads(text: str) -> tuple[list[dict[str, Any]], dict[tuple[Any, Any], str]]:
    """The events of a trace, and the names of its threads by `thread_of`."""
    data = json.loads(text)
    events = data["traceEvents"] if isinstance(data, dict) else data
    names = {thread_of(e): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    return events, names


def thread_of(event: Mapping[str, Any]) -> tuple[Any, Any]:
    """The process and the thread of an event."""
    return event.get("pid"), event.get("tid")


def _bar(row: int, event: dict[str, Any], start: float) -> tuple[int, str, str, float, float, str]:
    module = (event.get("args") or {}).get("module", "")
    begin, length = float(event["ts"]) - start, float(event["dur"])
    return row, str(event["name"]), str(event.get("cat", "")), begin, length, str(module)
