"""Machines by preset name or TOML file, and machines with changed figures."""

from __future__ import annotations

import os
from dataclasses import fields, replace

from shardwright.ir.atomic_io import FileSizeError, read_text_up_to
from shardwright.machine.files.figures import changed
from shardwright.machine.files.toml import parse_toml
from shardwright.machine.model import Machine, MachineError
from shardwright.machine.presets import preset

_LARGEST = 2**24  # bytes of a machine file; timings of 10,000 operators take 2 MiB


def load_machine(path: str | os.PathLike[str]) -> Machine:
    """Read a machine file as `to_toml` writes it; raises `MachineError` for anything else."""
    try:
        text = read_text_up_to(path, _LARGEST)
    except (OSError, UnicodeDecodeError, FileSizeError) as e:
        reason = getattr(e, "strerror", None) or e
        raise MachineError(
            f"cannot read machine {path}: {reason}; give a TOML file or a preset such as 8xH100"
        ) from e
    try:
        return parse_toml(text)
    except MachineError as e:
        raise MachineError(f"machine {path}: {e}") from e


def machine_of(given: Machine | str | os.PathLike[str]) -> Machine:
    """The machine itself, or the machine of a preset's name or file; raises `MachineError`."""
    if isinstance(given, Machine):
        return given
    if not isinstance(given, str | os.PathLike):
        raise MachineError(
            f"machine is a {type(given).__name__}; give a Machine, or a preset's name as '8xH100'"
        )
    text = os.fspath(given)
    return load_machine(text) if text.endswith(".toml") else preset(text)


def with_figures(machine: Machine, /, **figures: object) -> Machine:
    """The machine with changed figures, named and written as in machine files.

    Names with a dot, such as `compute.bfloat16` or `nvlink.bandwidth`, are passed as
    `**{"nvlink.bandwidth": "400GB/s"}`. Raises `MachineError` for other names and invalid figures.

    >>> with_figures(preset("8xH100"), memory="72GB", overlap=0.6).device.memory_bytes
    72000000000
    """
    found = changed(machine, figures)
    kept = replace(found.device, timings=machine.device.timings)
    made = {field.name: getattr(found, field.name) for field in fields(found)}
    made |= {"device": kept, "charged_skew_seconds": machine.charged_skew_seconds}
    return replace(machine, **made)
