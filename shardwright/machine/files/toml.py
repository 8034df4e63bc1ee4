"""Machines as TOML files, in which every figure has its unit."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from shardwright.ir.atomic_io import check_printable
from shardwright.ir.layout import Seconds
from shardwright.machine.efficiency_curve import Curve, CurveError
from shardwright.machine.files.measurement_toml import measured_lines, read_measured
from shardwright.machine.files.quantities import (
    BANDWIDTH,
    COMPUTE,
    DURATION,
    SIZE,
    WORK,
    parse_memory,
    parse_quantity,
    parse_rate,
    parse_time,
    quantity,
)
from shardwright.machine.model import (
    EXPERT_SKEW,
    INDEPENDENT,
    PLAIN_BLOCK,
    SKEWED_SECONDS,
    Device,
    Efficiency,
    Level,
    Machine,
    MachineError,
)

_LOWEST_PART = 1e-9
_BY_BYTES = ("memory", "update", "functions", "pooling")  # efficiencies over bytes, not over FLOP


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
        *_workspace_text(device),
        f'memory_bandwidth = "{quantity(device.bytes_per_s, BANDWIDTH)}"',
        f'launch = "{quantity(device.launch_seconds, DURATION)}"',
        *_update_text(device),
        *_packing_text(device),
        *_block_text(device),
        *_host_text(device),
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


def _workspace_text(device: Device) -> list[str]:
    if not device.workspace_bytes:
        return []
    size = quantity(device.workspace_bytes, SIZE)
    return [f'workspace = "{size}" # of it, what libraries keep of the allocator\'s memory']


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


def _block_text(device: Device) -> list[str]:
    if device.channel_block == PLAIN_BLOCK:
        return []
    return [f"channel_block = {device.channel_block} # convolutions pad channels to multiples"]


def _host_text(device: Device) -> list[str]:
    lines = []
    if device.issue_seconds:
        issue = quantity(device.issue_seconds, DURATION)
        lines.append(f'issue = "{issue}" # of the host, to issue a kernel ahead of the device')
    if device.units:
        lines.append(f"units = {device.units} # multiprocessors, which share tiles of a product")
    if device.product_depth:
        depth = f"product_depth = {device.product_depth}"
        lines.append(f"{depth} # of a tile, that its start and end take as long as")
    return lines


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
        collective_launch_seconds=parse_time(
            "collective_launch", data.get("collective_launch", "0s")
        ),
        overlap=float(_is("overlap", data.get("overlap", 0.0), int | float)),
        gather_overlap=None
        if "gather_overlap" not in data
        else float(_is("gather_overlap", data["gather_overlap"], int | float)),
        contention=float(_is("contention", data.get("contention", 1.0), int | float)),
        expert_skew=float(_is("expert_skew", data.get("expert_skew", EXPERT_SKEW), int | float)),
        arrival_skew_seconds=parse_time("arrival_skew", data.get("arrival_skew", "0s")),
        arrival_skew_power=float(
            _is("arrival_skew_power", data.get("arrival_skew_power", INDEPENDENT), int | float)
        ),
        measured=None
        if "measured" not in data
        else read_measured(_is("measured", data["measured"], dict)),
    )


def _devices(data: Any) -> Device:
    """One `[device]`, or several `[[device]]` of a mixed cluster: the worst figures count."""
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
    optional = (
        *(
            "efficiency",
            "dispatch",
            "parameter",
            "packing",
            "context",
            "workspace",
            "channel_block",
        ),
        *("issue", "units", "product_depth"),
    )
    _check_keys("device", data, needed, optional=optional)
    compute = _is("device.compute", data["compute"], dict)
    return Device(
        kind=_is("device.kind", data["kind"], str),
        memory_bytes=parse_memory("device.memory", data["memory"]),
        flop_per_s=tuple(
            (dtype, parse_rate(f"device.compute.{dtype}", figure, COMPUTE))
            for dtype, figure in compute.items()
        ),
        bytes_per_s=parse_rate("device.memory_bandwidth", data["memory_bandwidth"], BANDWIDTH),
        launch_seconds=parse_time("device.launch", data["launch"]),
        efficiency=_efficiency(_is("device.efficiency", data.get("efficiency", {}), dict)),
        dispatch_seconds=_duration("dispatch", data),
        parameter_seconds=parse_time("device.parameter", data.get("parameter", "0s")),
        packing_seconds=_duration("packing", data),
        context_bytes=parse_memory("device.context", data.get("context", "0B")),
        workspace_bytes=parse_memory("device.workspace", data.get("workspace", "0B")),
        channel_block=_is("device.channel_block", data.get("channel_block", PLAIN_BLOCK), int),
        issue_seconds=parse_time("device.issue", data.get("issue", "0s")),
        units=_is("device.units", data.get("units", 0), int),
        product_depth=_is("device.product_depth", data.get("product_depth", 0), int),
    )


def _duration(key: str, device: dict[str, Any]) -> Seconds | None:
    """An optional duration of a device."""
    if key not in device:
        return None
    return parse_time(f"device.{key}", device[key])


def _level(data: dict[str, Any]) -> Level:
    _check_keys("level", data, ("name", "size", "bandwidth", "latency"), ("gather_bandwidth",))
    name = f"level {_is('level name', data['name'], str)}"
    gather = data.get("gather_bandwidth")
    return Level(
        name=data["name"],
        size=_is(f"{name}: size", data["size"], int),
        bytes_per_s=parse_rate(f"{name}: bandwidth", data["bandwidth"], BANDWIDTH),
        latency_seconds=parse_time(f"{name}: latency", data["latency"]),
        gather_bytes_per_s=None
        if gather is None
        else parse_rate(f"{name}: gather_bandwidth", gather, BANDWIDTH),
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
    if isinstance(value, str):
        try:
            check_printable(value)
        except ValueError as e:
            raise MachineError(f"{name}: {e}; leave it out") from e
    return value


def _quoted(text: str) -> str:
    """A TOML basic string; JSON's escapes are a subset of TOML's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
