"""The quality of a measurement as a table of a machine file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from shardwright.ir.atomic_io import check_printable
from shardwright.machine.measurement import Measured
from shardwright.machine.model import MachineError

_KEYS = ("at", "busy", "errors", "assumed", "instead", "tuned_host")


def measured_lines(measured: Measured) -> list[str]:
    """The lines of `[measured]`; `read_measured` reads them back."""
    return [
        "[measured]",
        f"at = {measured.at.isoformat(timespec='seconds')}",
        f"busy = {measured.busy!r} # part of the cores that other programs took meanwhile",
        *_assumed_lines(measured),
        *(["tuned_host = true # as by --tune-host"] if measured.tuned_host else []),
        "",
        "[measured.errors] # of the fit, by kind: median and largest",
        *(f"{json.dumps(kind)} = [{middle!r}, {most!r}]" for kind, middle, most in measured.errors),
        "",
    ]


def _assumed_lines(measured: Measured) -> list[str]:
    if not measured.assumed:
        return []
    names = json.dumps(list(measured.assumed))
    return [f"assumed = {names} # figures of a preset", f"instead = {json.dumps(measured.instead)}"]


def read_measured(data: Mapping[str, Any]) -> Measured:
    """Reads what `measured_lines` wrote; raises `MachineError` for anything else."""
    for key in data:
        if key not in _KEYS:
            raise MachineError(
                f"measured has the unknown key {key!r}; remove it or use one of {', '.join(_KEYS)}"
            )
    at, busy, errors = data.get("at"), data.get("busy"), data.get("errors", {})
    if not isinstance(at, datetime):
        raise MachineError(f"measured.at is {at!r}; write a date, as in 2026-01-31T12:00:00+00:00")
    if not isinstance(busy, float | int) or not 0 <= busy <= 1:
        raise MachineError(f"measured.busy is {busy!r}; give a part, at least 0 and at most 1")
    if not isinstance(errors, dict) or not all(map(_is_pair, errors.values())):
        raise MachineError("measured.errors holds pairs of numbers by kind, as matmul = [0.1, 0.2]")
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    assumed, instead = data.get("assumed", []), data.get("instead", "")
    if not isinstance(assumed, list) or not all(isinstance(name, str) for name in assumed):
        raise MachineError('measured.assumed is a list of names of figures, as ["host bandwidth"]')
    if not isinstance(instead, str):
        raise MachineError(
            f"measured.instead is {instead!r}; it is the name of a preset, in quotes"
        )
    try:
        check_printable(" ".join((instead, *assumed, *errors)))
    except ValueError as e:
        raise MachineError(f"measured: {e}; leave it out") from e
    tuned = data.get("tuned_host", False)
    if not isinstance(tuned, bool):
        raise MachineError(f"measured.tuned_host is {tuned!r}; write true or false")
    found = tuple((kind, float(pair[0]), float(pair[1])) for kind, pair in errors.items())
    return Measured(at, float(busy), found, tuple(assumed), instead, tuned)


def _is_pair(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(part, float | int) for part in value)
    )
