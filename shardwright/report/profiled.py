"""Reads a step that torch's profiler recorded, as one process of a Chrome trace.

Its threads and streams become rows, its times begin with the step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.report.chrome import TraceError

STEP = "ProfilerStep#"  # how torch.profiler names the span of a step, its number behind it
_MICRO = 1e6


@dataclass(frozen=True, slots=True)
class Profiled:
    """What a rank did in a step. An event is (row, name, kind, start, duration), in microseconds.

    `label` names the process, `rows` its threads on the host and its streams on the device.
    """

    label: str
    rows: tuple[str, ...]
    events: tuple[tuple[int, str, str, float, float], ...]
    seconds: float


def profiled(text: str, label: str) -> Profiled:
    """The last step in a trace that `torch.profiler` exported, or all of it if no step is marked.

    Raises `TraceError` for what is no such trace.
    """
    try:
        data = json.loads(text)
        events = data["traceEvents"] if isinstance(data, dict) else data
        names = {_at(e): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
        # What the profiler says of itself belongs to processes that are texts.
        spans = [e for e in events if e.get("ph") == "X" and isinstance(e.get("pid"), int)]
        spans.sort(key=lambda e: (float(e["ts"]), -float(e["dur"])))
        begin, end = _step(spans)
        inside = [e for e in spans if begin <= float(e["ts"]) < end]
        places = {at: row for row, at in enumerate(dict.fromkeys(map(_at, inside)))}
        rows = tuple(str(names.get(at, f"thread {at[1]}")) for at in places)
        found = tuple(
            (
                places[_at(e)],
                str(e["name"]),
                str(e.get("cat", "")),
                float(e["ts"]) - begin,
                float(e["dur"]),
            )
            for e in inside
        )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise TraceError(f"{label} is not a trace of torch.profiler ({e!r})") from e
    if not found:
        raise TraceError(f"{label} has no complete events, so there is nothing to show")
    return Profiled(label, rows, found, (end - begin) / _MICRO)


def _step(spans: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """When the last marked step begins and ends; without a mark, when all does."""
    on_host = [e for e in spans if not str(e.get("cat", "")).startswith("gpu")]
    marked = [e for e in on_host if str(e["name"]).startswith(STEP)]
    if marked:
        last = marked[-1]
        return float(last["ts"]), float(last["ts"]) + float(last["dur"])
    ends = [float(e["ts"]) + float(e["dur"]) for e in spans]
    return min((float(e["ts"]) for e in spans), default=0.0), max(ends, default=0.0)


def _at(event: Mapping[str, Any]) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")
