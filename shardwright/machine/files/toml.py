"""Machines as TOML files, in which every figure has its unit."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from typing import Any

from shardwright.machine.efficiency_curve import Curve, CurveError
from shardwright.machine.files.figure_tables import (
    OF_DEVICE,
    OF_LEVEL,
    OF_MACHINE,
    check_keys,
    checked,
    lines,
    read,
)
from shardwright.machine.files.measurement_toml import measured_lines, read_measured
from shardwright.machine.files.quantities import (
    COMPUTE,
    SIZE,
    WORK,
    parse_quantity,
    parse_rate,
    quantity,
)
from shardwright.machine.model import Device, Efficiency, Level, Machine, MachineError

_LOWEST_PART = 1e-9
_BY_BYTES = ("memory", "update", "functions", "pooling")  # efficiencies over bytes, not over FLOP


def to_toml(machine: Machine) -> str:
    """The machine as TOML; `parse_toml` reads it back to an equal machine."""
    device = machine.device
    found = [
        *lines(machine, OF_MACHINE),
        "",
        "[device]",
        *lines(device, OF_DEVICE),
        "",
        "[device.compute] # dense",
        *(f'{dtype} = "{quantity(figure, COMPUTE)}"' for dtype, figure in device.flop_per_s),
        "",
        "[device.efficiency] # part of the figures above that operators reach",
        *(
            _efficiency_text(f.name, part)
            for f in fields(Efficiency)
            if (part := getattr(device.efficiency, f.name)) is not None
        ),
        "",
        "# Levels of links, innermost first. Bandwidth: what one device sends, in one direction,",
        "# while all devices send at once.",
    ]
    for level in machine.levels:
        found += ["[[level]]", *lines(level, OF_LEVEL), ""]
    if machine.measured is not None:
        found += measured_lines(machine.measured)
    return "\n".join(found)


def _efficiency_text(name: str, part: float | Curve) -> str:
    if not isinstance(part, Curve):
        return f"{name} = {part!r}"
    units = SIZE if name in _BY_BYTES else WORK
    points = ", ".join(f'["{quantity(work, units)}", {reached!r}]' for work, reached in part.points)
    return f"{name} = [{points}] # by the work of one kernel"


def parse_toml(text: str) -> Machine:
    """The machine that `text` describes; raises `MachineError`."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as e:  # also a number too long, lists too deep
        raise MachineError(f"is not TOML: {e}; correct that line") from e
    return machine_of_table(data)


def machine_of_table(data: dict[str, Any]) -> Machine:
    """The machine of a parsed machine file; raises `MachineError`."""
    found = read(Machine, OF_MACHINE, data, "the file", "device", "level", "?measured")
    if "measured" in data:
        found["measured"] = read_measured(checked("measured", data["measured"], dict))
    levels = checked("level", data["level"], list)
    return Machine(
        **found,
        device=_devices(data["device"]),
        levels=tuple(_level(checked("level", level, dict)) for level in levels),
    )


def _devices(data: Any) -> Device:
    """One `[device]`, or several `[[device]]` of a mixed cluster: the worst figures count."""
    if not isinstance(data, list):
        return _device(checked("device", data, dict))
    if not data:
        raise MachineError("device is an empty list; describe at least one")
    first, *others = [_device(checked("device", device, dict)) for device in data]
    for other in others:
        first = first.slower(other)
    return first


def _efficiency(data: dict[str, Any]) -> Efficiency:
    known = [field.name for field in fields(Efficiency)]
    check_keys("device.efficiency", data, (), known)
    return Efficiency(**{name: _part(name, value) for name, value in data.items()})


def _part(name: str, value: Any) -> float | Curve:
    where, units = f"device.efficiency.{name}", SIZE if name in _BY_BYTES else WORK
    if not isinstance(value, list):
        return _reached(where, value)
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2:
            example = f'["{units.example}", 0.5]'
            raise MachineError(f"{where} has the point {pair!r}; write pairs, as in {example}")
    try:
        return Curve(
            tuple(
                (parse_quantity(where, work, units), _reached(where, part)) for work, part in value
            )
        )
    except CurveError as e:
        raise MachineError(f"{where} has {e}") from e


def _reached(where: str, value: Any) -> float:
    part = float(checked(where, value, int | float))
    if 0 < part < _LOWEST_PART:
        raise MachineError(f"{where} is {part}; give a part of at least {_LOWEST_PART}")
    return part


def _device(data: dict[str, Any]) -> Device:
    found = read(Device, OF_DEVICE, data, "device", "compute", "?efficiency")
    compute = checked("device.compute", data["compute"], dict)
    return Device(
        **found,
        flop_per_s=tuple(
            (dtype, parse_rate(f"device.compute.{dtype}", figure, COMPUTE))
            for dtype, figure in compute.items()
        ),
        efficiency=_efficiency(checked("device.efficiency", data.get("efficiency", {}), dict)),
    )


def _level(data: dict[str, Any]) -> Level:
    name = checked("level name", data.get("name", ""), str)
    return Level(**read(Level, OF_LEVEL, data, f"level {name}".rstrip()))
