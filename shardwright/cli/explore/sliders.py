"""Values that the page of `shardwright explore` sets: devices, memory, and sizes of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.cli.errors import UsageError
from shardwright.cli.planning import named_machines
from shardwright.machine.model import Machine
from shardwright.report.units import size
from shardwright.train.targets.target_text import Target, config_file

_PARTS = 8  # of a device's memory: limits that can be set
_TIMES = (0.125, 0.25, 0.5, 1, 2, 4, 8)  # a batch, a sequence: multiples of what the user gave
_MOST_COUNTS = 24  # of devices; more would make the steps of a slider too small


@dataclass(frozen=True, slots=True)
class Slider:
    """A name, the values that can be chosen, their texts, and the index of the first one shown."""

    name: str
    values: tuple[int, ...]
    texts: tuple[str, ...]
    start: int


def sliders(target: Target, machine: Machine, memory_limit: int | None) -> tuple[Slider, ...]:
    """The sliders of a machine, and those of batch and sequence that only a config.json takes."""
    counts = [part.devices for part in named_machines.smaller_machines(machine)]
    if len(counts) > _MOST_COUNTS:
        counts = [n for n in counts if n & (n - 1) == 0 or n == machine.devices]
    usable = machine.device.usable_bytes
    limits = {round(usable * part / _PARTS) for part in range(1, _PARTS + 1)}
    limits |= {memory_limit} if memory_limit is not None else set()
    found = [
        _slider("devices", counts, machine.devices),
        _slider("memory", limits, memory_limit or usable, size),
    ]
    if config_file(target.text) is not None:
        for name, given, least in (("batch", target.batch, 1), ("seq", target.seq, 2)):
            if given is not None:
                values = {round(given * times) for times in _TIMES}
                found.append(_slider(name, {n for n in values if n >= least}, given))
    return tuple(found)


def chosen(known: Sequence[Slider], given: Mapping[str, str]) -> dict[str, int]:
    """The value of each slider by its name; raises `UsageError` for one that it does not have."""
    found = {}
    for slider in known:
        text = given.get(slider.name, str(slider.values[slider.start]))
        if not (text.isascii() and text.isdecimal()) or int(text[:20]) not in slider.values:
            allowed = ", ".join(map(str, slider.values))
            raise UsageError(f"{slider.name} is one of {allowed}, not {text[:20]!r}")
        found[slider.name] = int(text)
    return found


def _slider(name: str, values: Sequence[int] | set[int], start: int, text: object = str) -> Slider:
    ordered = tuple(sorted(values))
    assert callable(text)
    return Slider(name, ordered, tuple(map(text, ordered)), ordered.index(start))
