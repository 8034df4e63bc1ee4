"""Resolves MACHINE of the command line: a preset, a file, or this host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import click

from shardwright.cli.console import working, wrapped
from shardwright.cli.groups import MachineOptions
from shardwright.cli.timings import measurement_age
from shardwright.ir.options.mixed_precision import HALF_DTYPES
from shardwright.machine.files.loading import load_machine, with_figures
from shardwright.machine.model import Machine, MachineError
from shardwright.machine.presets import preset


def machine_of(
    given: MachineOptions, devices: int | None = None, *, tune_host: bool = False
) -> Machine:
    """The named machine with changed figures, reduced to `devices`.

    This host is measured with or without tuning, as the ranks will run.
    """
    return with_figures(_named(given.text, devices, tune_host), **given.figures)


def _named(text: str, devices: int | None, tune_host: bool) -> Machine:
    if text == "here":
        with working("measuring this host") as tell:
            from shardwright.profile.measure import measure_host

            found = measure_host(devices or devices_here(), tell=tell, tune_host=tune_host)
        if found.measured is not None:
            click.echo(wrapped(measurement_age(found, found.measured)), err=True)
        return found
    is_file = text.endswith(".toml") or Path(text).is_file()
    machine = load_machine(text) if is_file else preset(text)
    return machine if devices is None else machine.with_devices(devices)


def smaller_machines(machine: Machine) -> Iterator[Machine]:
    """Machines with one, two, ... devices, as far as they split evenly over the hosts."""
    for devices in range(1, machine.devices + 1):
        with contextlib.suppress(MachineError):
            yield machine.with_devices(devices)


def devices_here() -> int:
    """The number of GPUs of this host, or of its cores if it has none."""
    import os

    import torch

    return torch.cuda.device_count() or os.cpu_count() or 1


def host_fast_halves() -> tuple[str, ...]:
    """As `Device.fast_halves`, of the GPUs of this host before they are measured."""
    import torch

    if not torch.cuda.is_available():
        return ()
    wide = torch.cuda.is_bf16_supported(including_emulation=False)
    return HALF_DTYPES if wide else ("float16",)
