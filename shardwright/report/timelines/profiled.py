"""Reads a step recorded by torch's profiler, as one process of a Chrome trace.

Its threads and streams become rows; times are relative to the begin of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.report.timelines.chrome import TraceError, events_and_threads, thread_of

STEP = "ProfilerStep#"  # prefix of torch.profiler's name of a step's span, followed by its number
_MICRO = 1e6


@dataclass(frozen=True, slots=True)
class Profiled:
    """A recorded step of a rank. An event is (row, name, kind, start, duration), in microseconds.

    `label` names the process, `rows` its host threads and device streams.
    """

    label: str
    rows: tuple[str, ...]
    events: tuple[tuple[int, str, str, float, float], ...]
    seconds: float


def profiled(text: str, label: str) -> Profiled:
    """The last step in a trace that `torch.profiler` exported, or all of it if no step is marked.

    Raises `TraceError` for other files.
    """
    try:
        events, names = events_and_threads(text)
        # The profiler's own events have a text as process id.
        spans = [e for e in events if e.get("ph") == "X" and isinstance(e.get("pid"), int)]
        spans.sort(key=lambda e: (float(e["ts"]), -float(e["dur"])))
        begin, end = _step(spans)
        inside = [e for e in spans if begin <= float(e["ts"]) < end]
        places = {at: row for row, at in enumerate(dict.fromkeys(map(thread_of, inside)))}
        rows = tuple(str(names.get(at, f"thread {at[1]}")) for at in places)
        found = tuple(
            (
                places[thread_of(e)],
                str(e["name"]),
                str(e.get("cat", "")),
                float(e["ts"]) - begin,
                float(e["dur"]),
            )
            for e in inside
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise TraceError(f"{label} is not a trace of torch.profiler ({e!r})") from e
    if not found:
        raise TraceError(f"{label} has no complete events, so there is nothing to show")
    return Profiled(label, rows, found, (end - begin) / _MICRO)


def _step(spans: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Begin and end of the last marked step; of the whole trace without a mark."""
    on_host = [e for e in spans if not str(e.get("cat", "")).startswith("gpu")]
    marked = [e for e in on_host if str(e["name"]).startswith(STEP)]
    if marked:
        last = marked[-1]
        return float(last["ts"]), float(last["ts"]) + float(last["dur"])
    ends = [float(e["ts"]) + float(e["dur"]) for e in spans]
    return min((float(e["ts"]) for e in spans), default=0.0), max(ends, default=0.0)
