"""The figures of machine files: the key of each, its unit, and the attribute that holds it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from shardwright.ir.atomic_io import check_printable
from shardwright.machine.files.quantities import (
    BANDWIDTH,
    DURATION,
    SIZE,
    Units,
    parse_memory,
    parse_rate,
    parse_time,
    quantity,
)
from shardwright.machine.model import SKEWED_SECONDS, MachineError


class ValueSyntax(NamedTuple):
    """Reads and writes values of figures; `read` takes the name, for messages, and the value."""

    read: Callable[[str, Any], Any]
    written: Callable[[Any], str]


class Figure(NamedTuple):
    """One figure of a table of a machine file.

    Attributes:
        key: its name in the file.
        attribute: the attribute of the `Machine`, `Device` or `Level`; its default is that of a
            figure that is not given.
        syntax: its unit or type.
        note: a comment behind it.
        brief: whether it is left out where it has its default.
    """

    key: str
    attribute: str
    syntax: ValueSyntax
    note: str = ""
    brief: bool = False


def checked(name: str, value: Any, kind: Any) -> Any:
    """The value, which must be of this type; raises `MachineError`."""
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = {str: "a text", int: "a whole number", dict: "a table", list: "tables"}
        raise MachineError(f"{name} is {value!r}; it must be {wanted.get(kind, 'a number')}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise MachineError(f"{name} is {value}; it must be below 2^63")
    if isinstance(value, str):
        try:
            check_printable(value)
        except ValueError as e:
            raise MachineError(f"{name}: {e}; leave it out") from e
    return value


def _quoted(text: str) -> str:
    """A TOML basic string; JSON's escapes are a subset of TOML's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _in(units: Units, read: Callable[[str, Any], Any]) -> ValueSyntax:
    return ValueSyntax(read, lambda value: f'"{quantity(value, units)}"')


_TEXT = ValueSyntax(lambda name, value: checked(name, value, str), _quoted)
_COUNT = ValueSyntax(lambda name, value: checked(name, value, int), repr)
_NUMBER = ValueSyntax(lambda name, value: float(checked(name, value, int | float)), repr)
_SKEW = ValueSyntax(
    lambda name, value: (
        tuple(_NUMBER.read(f"{name} of an expert", one) for one in value)
        if isinstance(value, list)
        else _NUMBER.read(name, value)
    ),
    lambda value: repr(list(value)) if isinstance(value, tuple) else repr(value),
)
_TIME = _in(DURATION, parse_time)
_MEMORY = _in(SIZE, parse_memory)
_RATE = _in(BANDWIDTH, lambda name, value: parse_rate(name, value, BANDWIDTH))

OF_MACHINE = (
    Figure("name", "name", _TEXT),
    Figure("provenance", "provenance", _TEXT),
    Figure("backend", "backend", _TEXT),
    Figure("collective_launch", "collective_launch_seconds", _TIME),
    Figure("overlap", "overlap", _NUMBER, "part of a sum of gradients that other work hides"),
    Figure("gather_overlap", "gather_overlap", _NUMBER, "of what is waited for sooner", brief=True),
    Figure(
        "contention",
        "contention",
        _NUMBER,
        "part of a collective by which it delays one along another axis",
    ),
    Figure(
        "expert_skew",
        "expert_skew",
        _SKEW,
        "rows of the busiest device over the mean, where devices hold different experts",
    ),
    Figure(
        "arrival_skew",
        "arrival_skew_seconds",
        _TIME,
        f"until the last rank comes, having computed for {quantity(SKEWED_SECONDS, DURATION)}",
        brief=True,
    ),
    Figure(
        "arrival_skew_power",
        "arrival_skew_power",
        _NUMBER,
        "of that time, by which it grows",
        brief=True,
    ),
)
OF_DEVICE = (
    Figure("kind", "kind", _TEXT),
    Figure("memory", "memory_bytes", _MEMORY),
    Figure(
        "context",
        "context_bytes",
        _MEMORY,
        "of it, what the driver and its libraries take",
        brief=True,
    ),
    Figure(
        "workspace",
        "workspace_bytes",
        _MEMORY,
        "of it, what libraries keep of the allocator's memory",
        brief=True,
    ),
    Figure("memory_bandwidth", "bytes_per_s", _RATE),
    Figure("launch", "launch_seconds", _TIME),
    Figure(
        "dispatch",
        "dispatch_seconds",
        _TIME,
        "of an operator of the optimizer's, on a parameter as it is stored",
        brief=True,
    ),
    Figure(
        "parameter",
        "parameter_seconds",
        _TIME,
        "to bring a trained one in and its gradient back",
        brief=True,
    ),
    Figure(
        "packing",
        "packing_seconds",
        _TIME,
        "to put a small tile into a message of many, or to take a copy out of one",
        brief=True,
    ),
    Figure(
        "channel_block",
        "channel_block",
        _COUNT,
        "convolutions pad channels to multiples",
        brief=True,
    ),
    Figure(
        "issue",
        "issue_seconds",
        _TIME,
        "of the host, to issue a kernel ahead of the device",
        brief=True,
    ),
    Figure("units", "units", _COUNT, "multiprocessors, which share tiles of a product", brief=True),
    Figure(
        "product_depth",
        "product_depth",
        _COUNT,
        "of a tile, that its start and end take as long as",
        brief=True,
    ),
    Figure(
        "host_memory",
        "host_memory_bytes",
        _MEMORY,
        "of its host, its share",
        brief=True,
    ),
    Figure(
        "host_bandwidth",
        "host_bytes_per_s",
        _RATE,
        "to its host or from it, while all copy",
        brief=True,
    ),
)
OF_LEVEL = (
    Figure("name", "name", _TEXT),
    Figure("size", "size", _COUNT),
    Figure("bandwidth", "bytes_per_s", _RATE),
    Figure("latency", "latency_seconds", _TIME),
    Figure("gather_bandwidth", "gather_bytes_per_s", _RATE, brief=True),
)


def lines(value: object, figures: Sequence[Figure]) -> Iterator[str]:
    """The figures of a machine, a device or a level, one a line."""
    defaults = _defaults(type(value))
    for figure in figures:
        found = getattr(value, figure.attribute)
        if not figure.brief or found != defaults[figure.attribute]:
            note = f" # {figure.note}" if figure.note else ""
            yield f"{figure.key} = {figure.syntax.written(found)}{note}"


def read(
    made: type, figures: Sequence[Figure], data: Mapping[str, Any], where: str, *tables: str
) -> dict[str, Any]:
    """Arguments of the class `made` from a table of a file, whose name is `where`.

    `tables` are keys of further tables, which the caller reads; those that begin with `?` may be
    missing. Raises `MachineError` for unknown keys, missing ones and wrong values.
    """
    defaults = _defaults(made)
    needed = [one.key for one in figures if one.attribute not in defaults]
    needed += [name for name in tables if name[0] != "?"]
    known = [*needed, *(one.key for one in figures if one.attribute in defaults)]
    check_keys(where, data, needed, [*known, *(name[1:] for name in tables if name[0] == "?")])
    prefix = {"the file": "", "device": "device."}.get(where, f"{where}: ")
    return {
        one.attribute: one.syntax.read(f"{prefix}{one.key}", data[one.key])
        for one in figures
        if one.key in data
    }


def check_keys(
    where: str, data: Mapping[str, Any], needed: Sequence[str], known: Sequence[str]
) -> None:
    """Raise `MachineError` for a key that is not `known`, and for a `needed` one that is not there.

    `where` is the name of the table.
    """
    for key in data:
        if key not in known:
            raise MachineError(
                f"{where} has the unknown key {key!r}; remove it or use one of {', '.join(known)}"
            )
    for key in needed:
        if key not in data:
            raise MachineError(f"{where} has no {key!r}; add it, `to_toml` of a preset shows how")


def _defaults(made: type) -> dict[str, Any]:
    return {one.name: one.default for one in fields(made) if one.default is not MISSING}
