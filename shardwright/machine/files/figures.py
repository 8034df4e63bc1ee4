"""Machines with changed figures, by the names that machine files give them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from shardwright.machine.files.figure_tables import OF_DEVICE, OF_MACHINE
from shardwright.machine.files.toml import machine_of_table, to_toml
from shardwright.machine.model import Efficiency, Machine, MachineError
from shardwright.machine.presets import preset

_FIXED = ("name", "provenance", "backend", "kind", "channel_block", "units", "product_depth")


def changed(machine: Machine, figures: Mapping[str, object]) -> Machine:
    """`machine` with changed figures, by their names in machine files, which its name then lists.

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
    return machine_of_table(data)


def parse_figures(text: str) -> dict[str, object]:
    """Parse figures for `changed` from a text such as "memory=72GiB, overlap=0.6".

    Raises `MachineError` for any other text, and for a figure that occurs twice.

    >>> parse_figures("memory=72GiB,overlap=0.6")
    {'memory': '72GiB', 'overlap': 0.6}
    """
    found: dict[str, object] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value):
            raise MachineError(f"{part!r} is not NAME=VALUE; write it as memory=72GiB,overlap=0.6")
        if name in found:
            raise MachineError(f"{name} occurs twice in {text!r}; give it once")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = value
    return found


def machine_named(name: str) -> Machine:
    """The machine with this name: a preset, a part of one, or a preset with changed figures.

    Raises `MachineError` for any other name.

    >>> machine_named("2 of 8xH100 with memory=72GiB").devices
    2
    """
    if part := re.fullmatch(r"(\d+) of (.+)", name):
        return machine_named(part[2]).with_devices(int(part[1]))
    of, *further = name.split(" with ")
    machine = preset(of)
    for text in further:
        machine = changed(machine, parse_figures(text))
    return machine


def _places(data: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    """The table and key of each figure of a machine file, by the name that `changed` accepts."""
    device = data["device"]
    places = {one.key: (data, one.key) for one in OF_MACHINE if one.key not in _FIXED}
    places |= {one.key: (device, one.key) for one in OF_DEVICE if one.key not in _FIXED}
    places |= {f"compute.{dtype}": (device["compute"], dtype) for dtype in device["compute"]}
    places |= {
        f"efficiency.{field.name}": (device["efficiency"], field.name)
        for field in fields(Efficiency)
    }
    for level in data["level"]:
        for key in ("bandwidth", "latency", "gather_bandwidth"):
            places[f"{level['name']}.{key}"] = (level, key)
    return places
