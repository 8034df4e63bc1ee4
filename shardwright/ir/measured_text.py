"""How a measurement went, as a table of a machine file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from shardwright.ir.machine import MachineError
from shardwright.ir.measured import Measured


def measured_lines(measured: Measured) -> list[str]:
    """The lines of `[measured]`; `read_measured` reads them back."""
    return [
        "[measured]",
        f"at = {measured.at.isoformat(timespec='seconds')}",
        f"busy = {measured.busy!r} # part of the cores that other programs took meanwhile",
        "",
        "[measured.errors] # of the fit, by kind: median and largest",
        *(f"{json.dumps(kind)} = [{middle!r}, {most!r}]" for kind, middle, most in measured.errors),
        "",
    ]


def read_measured(data: Mapping[str, Any]) -> Measured:
    """What `measured_lines` wrote; raises `MachineError` for anything else."""
    for key in data:
        if key not in ("at", "busy", "errors"):
            raise MachineError(
                f"measured has the unknown key {key!r}; remove it or use one of at, busy, errors"
            )
    at, busy, errors = data.get("at"), data.get("busy"), data.get("errors", {})
    if not isinstance(at, datetime):
        raise MachineError(f"measured.at is {at!r}; write a date, as in 2026-01-31T12:00:00+00:00")
    if not isinstance(busy, float | int) or not 0 <= busy <= 1:
        raise MachineError(f"measured.busy is {busy!r}; give a part, at least 0 and at most 1")
    if not isinstance(errors, dict) or not all(map(_is_pair, errors.values())):
        raise MachineError("measured.errors holds pairs of numbers by kind, as matmul = [0.1, 0.2]")
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    found = tuple((kind, float(pair[0]), float(pair[1])) for kind, pair in errors.items())
    return Measured(at, float(busy), found)


def _is_pair(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(part, float | int) for part in value)
    )
