"""Quantities with units, as texts: sizes, rates, work and durations."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from shardwright.ir.layout import Bytes, Seconds
from shardwright.machine.model import MachineError

_PREFIXES = ("", "k", "M", "G", "T", "P")
_HIGHEST_RATE = 1e24  # per second
_LONGEST = 3600.0  # seconds
_LARGEST_MEMORY = 1e18  # bytes


@dataclass(frozen=True, slots=True)
class Units:
    """The units of one quantity: base units per unit, and an example text."""

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
    """Parse `text` into base units (bytes, seconds, FLOP/s); `name` is for error messages.

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


def parse_rate(name: str, text: object, units: Units) -> float:
    """Bandwidth or compute; raises `MachineError` for implausible figures.

    They would make the times of plans infinite or meaningless.
    """
    figure = parse_quantity(name, text, units)
    if figure and not 1 <= figure <= _HIGHEST_RATE:  # zero is checked by the class that takes it
        limits = f"{quantity(1.0, units)} to {quantity(_HIGHEST_RATE, units)}"
        raise MachineError(f'{name} is {text!r}; give {limits}, as "{units.example}"')
    return figure


def parse_time(name: str, text: object) -> Seconds:
    """A duration of at most one hour, in seconds; raises `MachineError`."""
    seconds = parse_quantity(name, text, DURATION)
    if seconds > _LONGEST:
        raise MachineError(f'{name} is {text!r}; give at most an hour, as "{DURATION.example}"')
    return Seconds(seconds)


def parse_memory(name: str, text: object) -> Bytes:
    """A size of at most 1 EB, in bytes; raises `MachineError`."""
    size = parse_quantity(name, text, SIZE)
    if size > _LARGEST_MEMORY:
        most = quantity(_LARGEST_MEMORY, SIZE)
        raise MachineError(f'{name} is {text!r}; give at most {most}, as "{SIZE.example}"')
    return Bytes(int(size))


def quantity(figure: float, units: Units) -> str:
    """The text of `figure` in a suitable unit, which `parse_quantity` reads back exactly.

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
