"""The origin of each figure of a machine: a document, published measurements, or an assumption."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from shardwright.machine.fitted import (
    ASSUMED,
    CONTEXT_SOURCE,
    FITTED,
    HOST_MEMORY_SOURCE,
    WORKSPACE_SOURCE,
)
from shardwright.machine.gpus import GPUS, Gpu
from shardwright.machine.model import Machine


class FigureKind(Enum):
    """The ways in which a figure is known."""

    SPECIFIED = "specified"
    FITTED = "fitted"
    ASSUMED = "assumed"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Origin:
    """One figure of a machine.

    Attributes:
        figure: its name, as in machine files.
        value: as text, with its unit.
        kind: how it is known.
        source: the document and its date, the rows, or the reason.
    """

    figure: str
    value: str
    kind: FigureKind
    source: str


def origins(machine: Machine) -> tuple[Origin, ...]:
    """The origins of the figures of a preset; of another machine its one provenance."""
    gpu = next((gpu for gpu in GPUS if gpu.kind == machine.device.kind), None)
    if gpu is None or machine.measured is not None or not _is_preset(machine):
        kind = FigureKind.ASSUMED if machine.measured is None else FigureKind.MEASURED
        return (Origin("all figures", str(machine), kind, machine.provenance or "unstated"),)
    return tuple(_origins(machine, gpu))


def _is_preset(machine: Machine) -> bool:
    return re.fullmatch(r"(\d+x)?\d+x[\w-]+", machine.name) is not None


def _origins(machine: Machine, gpu: Gpu) -> Iterator[Origin]:
    document = f"{gpu.source}, {gpu.dates}"
    device = machine.device
    memory = f"{gpu.memory_gib} GiB"
    if gpu.memory_source:
        seen = f"as torch reports it: {gpu.memory_source}"
        yield Origin("memory", memory, FigureKind.SPECIFIED, seen)
    else:
        yield Origin(
            "memory", memory, FigureKind.ASSUMED, "less than the data sheet's, as drivers leave"
        )
    yield Origin(
        "context", f"{device.context_bytes / 2**30:.2f} GiB", FigureKind.ASSUMED, CONTEXT_SOURCE
    )
    workspace = f"{device.workspace_bytes / 2**20:.2f} MiB"
    kind = FigureKind.SPECIFIED if device.workspace_bytes else FigureKind.ASSUMED
    yield Origin("workspace", workspace, kind, WORKSPACE_SOURCE)
    yield Origin("memory_bandwidth", f"{gpu.tb_per_s} TB/s", FigureKind.SPECIFIED, document)
    for dtype, figure in gpu.tflops:
        yield Origin(f"compute.{dtype}", f"{figure} TFLOP/s", FigureKind.SPECIFIED, document)
    yield Origin("units", str(gpu.units), FigureKind.SPECIFIED, document)
    link = f"{gpu.link_gb_per_s} GB/s a GPU and direction"
    yield Origin(f"{gpu.link}.bandwidth", link, FigureKind.SPECIFIED, document)
    host = f"{gpu.host_gb_per_s:g} GB/s a GPU and direction"
    yield Origin("host_bandwidth", host, FigureKind.SPECIFIED, document)
    yield Origin("host_memory", f"{gpu.host_gib:g} GiB", FigureKind.ASSUMED, HOST_MEMORY_SOURCE)
    if len(machine.levels) > 1:
        network = f"{gpu.network_gbit} Gbit/s for {gpu.host_gpus} GPUs"
        yield Origin("network.bandwidth", network, FigureKind.SPECIFIED, document)
    for name, fitted in FITTED.items():
        yield Origin(name, fitted.text(gpu.architecture), FigureKind.FITTED, fitted.rows)
    for name, (value, reason) in ASSUMED.items():
        yield Origin(name, value, FigureKind.ASSUMED, reason)
