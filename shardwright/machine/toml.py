"""Machines as TOML files, in which every figure has its unit."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

from shardwright.ir.layout import Bytes, Seconds
from shardwright.machine.efficiency_curve import Curve, CurveError
from shardwright.machine.measurement_toml import measured_lines, read_measured
from shardwright.machine.model import (
    EXPERT_SKEW,
    INDEPENDENT,
    SKEWED_SECONDS,
    Device,
    Efficiency,
    Level,
    Machine,
    MachineError,
)
from shardwright.machine.presets import preset

_FIGURES = (
    *("overlap", "gather_overlap", "contention", "expert_skew"),
    *("collective_launch", "arrival_skew", "arrival_skew_power"),
)
_OF_DEVICE = (
    *("memory", "memory_bandwidth", "context", "launch", "dispatch", "parameter", "packing"),
)
_PREFIXES = ("", "k", "M", "G", "T", "P")
_HIGHEST_RATE = 1e24  # per second
_LONGEST = 3600.0  # seconds
_LARGEST_MEMORY = 1e18  # bytes
_LOWEST_PART = 1e-9
_BY_BYTES = ("memory", "update", "functions", "pooling")  # efficiencies over bytes, not over FLOP


@dataclass(frozen=True, slots=True)
class Units:
    """The units of one quantity: how many base units each is, and a text that shows one."""

    example: str
    scales: dict[str, Decimal]


def _decimal(unit: str) -> dict[str, Decimal]:
    return {f"{prefix}{unit}": Decimal(10) ** (3 * i) for i, prefix in enumerate(_PREFIXES)}


_SIZES = _decimal("B") | {f"{p}iB": Decimal(2) ** (10 * i) for i, p in enumerate("KMGT", start=1)}
_BITS = {unit: scale / 8 for unit, scale in _decimal("bit/s").items()}
_TIMES = {"s": "1", "ms": "1e-3", "us": "1e-6", "µs": "1e-6", "ns": "1e-9"}

SIZE = Units("80GB", _SIZES)
BANDWIDTH = Units("900GB/s", {f"{unit}/s": scale for unit, scale in _SIZES.items()} | _BITS)
COMPUTE = Units("67TFLOP/s", _decimal("FLOP/s"))
WORK = Units("1GFLOP", _decimal("FLOP"))
DURATION = Units("5us", {unit: Decimal(scale) for unit, scale in _TIMES.items()})


def parse_quantity(name: str, text: object, units: Units) -> float:
    """Number of base units (bytes, seconds, FLOP/s) that `text` says; `name` is for errors.

    >>> parse_quantity("latency", "5us", DURATION)
    5e-06
    """
    example = units.example
    if not isinstance(text, str):
        raise MachineError(f'{name} is {text!r}, without a unit; write a text such as "{example}"')
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*(\S*)\s*", text)
    if found is None:
        raise MachineError(f'{name} is {text!r}; write a number and a unit, as in "{example}"')
    if found[2] not in units.scales:
        what = f"has the unit {found[2]!r}" if found[2] else "has no unit"
        raise MachineError(
            f"{name} is {text!r}, which {what}; use one of {', '.join(units.scales)}"
        )
    try:
        figure = float(Decimal(found[1]) * units.scales[found[2]])
    except ArithmeticError:  # beyond what even `Decimal` holds
        figure = math.inf
    if math.isinf(figure):
        raise MachineError(f'{name} is {text!r}, more than can be; write one such as "{example}"')
    return figure


def _rate(name: str, text: object, units: Units) -> float:
    """Bandwidth or compute; raises `MachineError` for one that no hardware has.

    With such figures the times of plans are beyond floats, or say nothing.
    """
    figure = parse_quantity(name, text, units)
    if figure and not 1 <= figure <= _HIGHEST_RATE:  # zero is told by what it is a figure of
        limits = f"{quantity(1.0, units)} to {quantity(_HIGHEST_RATE, units)}"
        raise MachineError(f'{name} is {text!r}; give {limits}, as "{units.example}"')
    return figure


def _time(name: str, text: object) -> Seconds:
    """Duration of at most an hour."""
    seconds = parse_quantity(name, text, DURATION)
    if seconds > _LONGEST:
        raise MachineError(f'{name} is {text!r}; give at most an hour, as "{DURATION.example}"')
    return Seconds(seconds)


def _memory(name: str, text: object) -> Bytes:
    size = parse_quantity(name, text, SIZE)
    if size > _LARGEST_MEMORY:
        most = quantity(_LARGEST_MEMORY, SIZE)
        raise MachineError(f'{name} is {text!r}; give at most {most}, as "{SIZE.example}"')
    return Bytes(int(size))


def quantity(figure: float, units: Units) -> str:
    """Text that `parse_quantity` reads back to exactly `figure`, in the unit that suits it.

    >>> quantity(3.35e12, BANDWIDTH)
    '3.35TB/s'
    """
    plain = [(u, scale) for u, scale in units.scales.items() if "i" not in u and u != "µs"]
    for unit, scale in sorted(plain, key=lambda item: -item[1]):
        number = f"{Decimal(repr(figure)) / scale:f}"
        if "." in number:
            number = number.rstrip("0").rstrip(".")
        if Decimal(number) >= 1 and parse_quantity("", number + unit, units) == figure:
            return number + unit
    base = next(unit for unit, scale in plain if scale == 1)
    return f"{figure!r}{base}"


def to_toml(machine: Machine) -> str:
    """The machine as TOML; `parse_toml` reads it back to an equal machine."""
    device = machine.device
    lines = [
        f"name = {_quoted(machine.name)}",
        f"provenance = {_quoted(machine.provenance)}",
        f"backend = {_quoted(machine.backend)}",
        f'collective_launch = "{quantity(machine.collective_launch_seconds, DURATION)}"',
        f"overlap = {machine.overlap!r} # part of a sum of gradients that other work hides",
        *_soon_text(machine),
        f"contention = {machine.contention!r}"
        " # part of a collective by which it delays one along another axis",
        f"expert_skew = {machine.expert_skew!r}"
        " # rows of the busiest device over the mean, where devices hold different experts",
        *_skew_text(machine),
        "",
        "[device]",
        f"kind = {_quoted(device.kind)}",
        f'memory = "{quantity(device.memory_bytes, SIZE)}"',
        *_context_text(device),
        f'memory_bandwidth = "{quantity(device.bytes_per_s, BANDWIDTH)}"',
        f'launch = "{quantity(device.launch_seconds, DURATION)}"',
        *_update_text(device),
        *_packing_text(device),
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
        lines += [
            "[[level]]",
            f"name = {_quoted(level.name)}",
            f"size = {level.size}",
            f'bandwidth = "{quantity(level.bytes_per_s, BANDWIDTH)}"',
            f'latency = "{quantity(level.latency_seconds, DURATION)}"',
        ]
        if level.gather_bytes_per_s is not None:
            lines.append(f'gather_bandwidth = "{quantity(level.gather_bytes_per_s, BANDWIDTH)}"')
        lines.append("")
    if machine.measured is not None:
        lines += measured_lines(machine.measured)
    return "\n".join(lines)


def _skew_text(machine: Machine) -> list[str]:
    if not machine.arrival_skew_seconds:
        return []
    skew = quantity(machine.arrival_skew_seconds, DURATION)
    after = quantity(SKEWED_SECONDS, DURATION)
    return [
        f'arrival_skew = "{skew}" # until the last rank comes, having computed for {after}',
        f"arrival_skew_power = {machine.arrival_skew_power!r} # of that time, by which it grows",
    ]


def _soon_text(machine: Machine) -> list[str]:
    if machine.gather_overlap is None:
        return []
    return [f"gather_overlap = {machine.gather_overlap!r} # of what is waited for sooner"]


def _context_text(device: Device) -> list[str]:
    if not device.context_bytes:
        return []
    size = quantity(device.context_bytes, SIZE)
    return [f'context = "{size}" # of it, what the driver and its libraries take']


def _update_text(device: Device) -> list[str]:
    if device.dispatch_seconds is None:
        return []
    return [
        f'dispatch = "{quantity(device.dispatch_seconds, DURATION)}"'
        " # of an operator of the optimizer's, on a parameter as it is stored",
        f'parameter = "{quantity(device.parameter_seconds, DURATION)}"'
        " # to bring a trained one in and its gradient back",
    ]


def _packing_text(device: Device) -> list[str]:
    if device.packing_seconds is None:
        return []
    return [
        f'packing = "{quantity(device.packing_seconds, DURATION)}"'
        " # to put a small tile into a message of many, or to take a copy out of one"
    ]


def _efficiency_text(name: str, part: float | Curve) -> str:
    if not isinstance(part, Curve):
        return f"{name} = {part!r}"
    units = SIZE if name in _BY_BYTES else WORK
    points = ", ".join(f'["{quantity(work, units)}", {reached!r}]' for work, reached in part.points)
    return f"{name} = [{points}] # by the work of one kernel"


def parse_toml(text: str) -> Machine:
    """The machine that `text` describes; raises `MachineError`, one line that says what to do."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as e:  # also a number too long, lists too deep
        raise MachineError(f"is not TOML: {e}; correct that line") from e
    return _machine(data)


def changed(machine: Machine, figures: Mapping[str, object]) -> Machine:
    """`machine` with other figures, by their names in machine files; its name tells them.

    >>> changed(preset("8xH100"), {"overlap": 0.6}).name
    '8xH100 with overlap=0.6'
    """
    if not figures:
        return machine
    data = tomllib.loads(to_toml(machine))
    places = _places(data)
    for name, figure in figures.items():
        if name not in places:
            close = get_close_matches(name, places, 3)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            raise MachineError(
                f"{machine} has no figure {name!r}; {hint}there are {', '.join(places)}"
            )
        table, key = places[name]
        table[key] = figure
    said = ", ".join(f"{name}={figure}" for name, figure in figures.items())
    data["name"] = f"{machine.name} with {said}"
    data["provenance"] = f"{machine.provenance}; changed: {said}".removeprefix("; ")
    return _machine(data)


def figures_of(machine: Machine) -> tuple[str, ...]:
    """Names of the figures of `machine` that `changed` takes."""
    return tuple(_places(tomllib.loads(to_toml(machine))))


def parse_figures(text: str) -> dict[str, object]:
    """Figures as `changed` takes them, of a text such as "memory=72GiB, overlap=0.6".

    Raises `MachineError` for another text, and for a figure that is there twice.

    >>> parse_figures("memory=72GiB,overlap=0.6")
    {'memory': '72GiB', 'overlap': 0.6}
    """
    found: dict[str, object] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value):
            raise MachineError(f"{part!r} is not NAME=VALUE; write it as memory=72GiB,overlap=0.6")
        if name in found:
            raise MachineError(f"{name} is there twice in {text!r}; give it once")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = value
    return found


def named(name: str) -> Machine:
    """The machine that has this name: a preset, a part of one, or one that `changed` made of it.

    Raises `MachineError` for the name of any other machine.

    >>> named("2 of 8xH100 with memory=72GiB").devices
    2
    """
    if part := re.fullmatch(r"(\d+) of (.+)", name):
        return named(part[2]).with_devices(int(part[1]))
    of, *further = name.split(" with ")
    machine = preset(of)
    for text in further:
        machine = changed(machine, parse_figures(text))
    return machine


def _places(data: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    """Where each figure of a machine file is, by the name that `changed` takes."""
    device = data["device"]
    places = {key: (data, key) for key in _FIGURES}
    places |= {key: (device, key) for key in _OF_DEVICE}
    places |= {f"compute.{dtype}": (device["compute"], dtype) for dtype in device["compute"]}
    places |= {
        f"efficiency.{field.name}": (device["efficiency"], field.name)
        for field in fields(Efficiency)
    }
    for level in data["level"]:
        for key in ("bandwidth", "latency", "gather_bandwidth"):
            places[f"{level['name']}.{key}"] = (level, key)
    return places


def _machine(data: dict[str, Any]) -> Machine:
    _check_keys(
        "the file",
        data,
        needed=("name", "device", "level"),
        optional=(
            *("provenance", "backend", "collective_launch"),
            *("overlap", "gather_overlap", "contention", "expert_skew", "arrival_skew"),
            *("arrival_skew_power", "measured"),
        ),
    )
    levels = _is("level", data["level"], list)
    return Machine(
        name=_is("name", data["name"], str),
        device=_devices(data["device"]),
        levels=tuple(_level(_is("level", level, dict)) for level in levels),
        provenance=_is("provenance", data.get("provenance", ""), str),
        backend=_is("backend", data.get("backend", "nccl"), str),
        collective_launch_seconds=_time("collective_launch", data.get("collective_launch", "0s")),
        overlap=float(_is("overlap", data.get("overlap", 0.0), int | float)),
        gather_overlap=None
        if "gather_overlap" not in data
        else float(_is("gather_overlap", data["gather_overlap"], int | float)),
        contention=float(_is("contention", data.get("contention", 1.0), int | float)),
        expert_skew=float(_is("expert_skew", data.get("expert_skew", EXPERT_SKEW), int | float)),
        arrival_skew_seconds=_time("arrival_skew", data.get("arrival_skew", "0s")),
        arrival_skew_power=float(
            _is("arrival_skew_power", data.get("arrival_skew_power", INDEPENDENT), int | float)
        ),
        measured=None
        if "measured" not in data
        else read_measured(_is("measured", data["measured"], dict)),
    )


def _devices(data: Any) -> Device:
    """One `[device]`, or a `[[device]]` for each kind in one cluster: the worst figures count."""
    if not isinstance(data, list):
        return _device(_is("device", data, dict))
    if not data:
        raise MachineError("device is an empty list; describe at least one")
    first, *others = [_device(_is("device", device, dict)) for device in data]
    for other in others:
        first = first.slower(other)
    return first


def _efficiency(data: dict[str, Any]) -> Efficiency:
    known = [field.name for field in fields(Efficiency)]
    _check_keys("device.efficiency", data, (), known)
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
    part = float(_is(where, value, int | float))
    if 0 < part < _LOWEST_PART:
        raise MachineError(f"{where} is {part}; give a part of at least {_LOWEST_PART}")
    return part


def _device(data: dict[str, Any]) -> Device:
    needed = ("kind", "memory", "memory_bandwidth", "launch", "compute")
    optional = ("efficiency", "dispatch", "parameter", "packing", "context")
    _check_keys("device", data, needed, optional=optional)
    compute = _is("device.compute", data["compute"], dict)
    return Device(
        kind=_is("device.kind", data["kind"], str),
        memory_bytes=_memory("device.memory", data["memory"]),
        flop_per_s=tuple(
            (dtype, _rate(f"device.compute.{dtype}", figure, COMPUTE))
            for dtype, figure in compute.items()
        ),
        bytes_per_s=_rate("device.memory_bandwidth", data["memory_bandwidth"], BANDWIDTH),
        launch_seconds=_time("device.launch", data["launch"]),
        efficiency=_efficiency(_is("device.efficiency", data.get("efficiency", {}), dict)),
        dispatch_seconds=_duration("dispatch", data),
        parameter_seconds=_time("device.parameter", data.get("parameter", "0s")),
        packing_seconds=_duration("packing", data),
        context_bytes=_memory("device.context", data.get("context", "0B")),
    )


def _duration(key: str, device: dict[str, Any]) -> Seconds | None:
    """What a device says of it, if anything."""
    if key not in device:
        return None
    return _time(f"device.{key}", device[key])


def _level(data: dict[str, Any]) -> Level:
    _check_keys("level", data, ("name", "size", "bandwidth", "latency"), ("gather_bandwidth",))
    name = f"level {_is('level name', data['name'], str)}"
    gather = data.get("gather_bandwidth")
    return Level(
        name=data["name"],
        size=_is(f"{name}: size", data["size"], int),
        bytes_per_s=_rate(f"{name}: bandwidth", data["bandwidth"], BANDWIDTH),
        latency_seconds=_time(f"{name}: latency", data["latency"]),
        gather_bytes_per_s=None
        if gather is None
        else _rate(f"{name}: gather_bandwidth", gather, BANDWIDTH),
    )


def _check_keys(
    where: str, data: Mapping[str, Any], needed: Iterable[str], optional: Iterable[str]
) -> None:
    needed, known = tuple(needed), (*needed, *optional)
    for key in data:
        if key not in known:
            raise MachineError(
                f"{where} has the unknown key {key!r}; remove it or use one of {', '.join(known)}"
            )
    for key in needed:
        if key not in data:
            raise MachineError(f"{where} has no {key!r}; add it, `to_toml` of a preset shows how")


def _is(name: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = {str: "a text", int: "a whole number", dict: "a table", list: "tables"}
        raise MachineError(f"{name} is {value!r}; it must be {wanted.get(kind, 'a number')}")
    return value


def _quoted(text: str) -> str:
    """TOML basic string; JSON's escapes are a subset of TOML's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
