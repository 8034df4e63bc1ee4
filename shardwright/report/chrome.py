"""Chrome traces read for the report: simulated or measured, one row per stream."""

from __future__ import annotations

import json
from typing import Any

from shardwright.report.page import Timeline

_SHOWN = 20_000  # events; more do not get any clearer on a page


class TraceError(ValueError):
    """A file that is no Chrome trace, or shows nothing."""


def read_trace(text: str, label: str) -> Timeline:
    """The complete events of a trace, the longest if there are very many.

    Raises `TraceError` for anything that is not in the Trace Event Format.
    """
    try:
        data = json.loads(text)
        events = data["traceEvents"] if isinstance(data, dict) else data
        names = {_at(e): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
        owners = {
            e.get("pid"): e["args"]["name"] for e in events if e.get("name") == "process_name"
        }
        bars = [e for e in events if e.get("ph") == "X"]
        bars.sort(key=lambda e: -float(e["dur"]))
        shown = sorted(bars[:_SHOWN], key=lambda e: float(e["ts"]))
        start = min((float(e["ts"]) for e in shown), default=0.0)
        places = {at: row for row, at in enumerate(dict.fromkeys(map(_at, shown)))}
        rows = tuple(f"{owners.get(at[0], at[0])} {names.get(at, at[1])}" for at in places)
        found = tuple(_bar(places[_at(e)], e, start) for e in shown)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise TraceError(f"{label} is not a Chrome trace ({e!r})") from e
    if not found:
        raise TraceError(f"{label} has no complete events, so there is nothing to show")
    more = f", the longest {_SHOWN} of {len(bars)} events" if len(bars) > _SHOWN else ""
    return Timeline(f"{label}{more}", rows, found)


def _at(event: dict[str, Any]) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


def _bar(row: int, event: dict[str, Any], start: float) -> tuple[int, str, str, float, float, str]:
    module = (event.get("args") or {}).get("module", "")
    begin, length = float(event["ts"]) - start, float(event["dur"])
    return row, str(event["name"]), str(event.get("cat", "")), begin, length, str(module)
