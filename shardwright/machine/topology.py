"""The links that a mesh axis uses, and the bandwidth that each of its groups gets.

Ranks are numbered row-major over the mesh and devices innermost level first, so
the innermost axis joins neighbours on the fastest links. All groups of an axis
communicate at the same time, as every rank runs the same program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.hosts import axis_strides, neighbours
from shardwright.ir.layout import Mesh, Seconds
from shardwright.ir.pipeline import whole_mesh
from shardwright.machine.model import Level, Machine


@dataclass(frozen=True, slots=True)
class Link:
    """The links of the collectives along one mesh axis, of its slowest group.

    * `ranks`: devices in a group;
    * `bytes_per_s`: of a ring through the group, one direction, on its slowest level;
    * `gather_bytes_per_s`: the same for all-gather and all-to-all;
    * `lap_seconds`: latency of `ranks - 1` hops, once around the ring;
    * `exchange_seconds_per_byte`: of all_to_all, per byte of the local tile.
    """

    ranks: int
    bytes_per_s: float
    gather_bytes_per_s: float
    lap_seconds: Seconds
    exchange_seconds_per_byte: float


@cache
def links(machine: Machine, mesh: Mesh) -> tuple[Link, ...]:
    """One `Link` per mesh axis.

    A level joins units: devices, hosts, and so on. A ring enters and leaves
    each unit that it crosses once, with the bandwidth of all the unit's
    devices, which it shares with the other rings that cross the unit: eight
    groups of one GPU per host get one network share each, one group of
    all eight GPUs gets all eight.
    """
    whole = _with_pipeline(mesh)
    if whole.size > machine.devices:
        raise ValueError(
            f"mesh {whole} needs {whole.size} devices, machine {machine.name} has"
            f" {machine.devices}; choose a smaller mesh or a larger machine"
        )
    return tuple(_link(machine.levels, axis, whole.size) for axis in _axes_of(mesh))


def host_devices(machine: Machine) -> int:
    """Devices below the outermost level, as those of a host; 0 if there is one level."""
    return prod(level.size for level in machine.levels[:-1]) if len(machine.levels) > 1 else 0


@cache
def hop_links(machine: Machine, mesh: Mesh) -> tuple[tuple[Link, ...], ...]:
    """For each mesh axis the links of a message that goes to hosts first.

    Where an axis joins hosts, each with several of its devices, the first link is between devices
    at the same place of all hosts, and the second one within a host. Else it is that of the axis.
    """
    devices = _with_pipeline(mesh).size
    near = neighbours(mesh, host_devices(machine))
    found = list[tuple[Link, ...]]()
    for name, axis, whole in zip(mesh.names, _axes_of(mesh), links(machine, mesh), strict=True):
        if name not in near:
            found.append((whole,))
            continue
        here = near[name]
        parts = _Axis(axis.size // here, axis.stride * here), _Axis(here, axis.stride)
        found.append(tuple(_link(machine.levels, part, devices) for part in parts))
    return tuple(found)


@cache
def crossed_levels(machine: Machine, mesh: Mesh) -> tuple[frozenset[int], ...]:
    """For each mesh axis the numbers of the levels that its groups' messages cross."""
    found, devices = [], _with_pipeline(mesh).size
    for axis in _axes_of(mesh):
        groups = axis.groups(devices)
        crossed, width = set[int](), 1
        for number, level in enumerate(machine.levels):
            units, outer = groups // width, groups // (width * level.size)
            if (_distinct(units) > _distinct(outer)).any():
                crossed.add(number)
            width *= level.size
        found.append(frozenset(crossed))
    return tuple(found)


def _with_pipeline(mesh: Mesh) -> Mesh:
    """The mesh of all stages, of that of one whose ranks lie between those of others."""
    return mesh if mesh.pipeline is None else whole_mesh(mesh, mesh.pipeline.groups)


class _Axis(NamedTuple):
    """A mesh axis: the devices along it, and the distance of neighbours in ranks."""

    size: int
    stride: int

    def groups(self, devices: int) -> NDArray[np.int64]:
        """The ranks of its groups on a mesh of so many devices, one group per row."""
        ranks = np.arange(devices).reshape(-1, self.size, self.stride)
        return np.moveaxis(ranks, 1, -1).reshape(-1, self.size)


def _axes_of(mesh: Mesh) -> Iterator[_Axis]:
    """The axes of a mesh, without that of pipeline stages."""
    strides = axis_strides(mesh)
    return (_Axis(size, strides[name]) for name, size in mesh.axes)


def contention_of(machine: Machine, mesh: Mesh, one: str, other: str) -> float:
    """The part of its time by which a message along a mesh axis delays one along another axis.

    0 where the axes cross other levels of the machine, else `Machine.contention`.
    """
    levels = dict(zip(mesh.names, crossed_levels(machine, mesh), strict=True))
    return machine.contention if levels[one] & levels[other] else 0.0


@cache
def _link(levels: tuple[Level, ...], axis: _Axis, devices: int) -> Link:
    """The link of one axis of a mesh of so many devices, whatever its other axes are."""
    groups = axis.groups(devices)
    count, size = groups.shape
    lap = np.zeros(count)
    ring = gather = np.inf
    exchange = 0.0
    width = 1  # devices in one unit of the level
    for level in levels:
        units, outer = groups // width, groups // (width * level.size)
        hops = _distinct(units) - _distinct(outer)  # over this level, per group
        if hops.any():
            lap += hops * level.latency_seconds
            unit_sizes = np.bincount(np.arange(devices) // width)  # devices of each unit
            ringed = units[hops > 0]
            rings = np.bincount(ringed[_starts(ringed)], minlength=len(unit_sizes))
            share = (unit_sizes[rings > 0] / rings[rings > 0]).min()
            ring = min(ring, share * level.bytes_per_s)
            gather = min(gather, share * (level.gather_bytes_per_s or level.bytes_per_s))
            crossing = (_same(outer) - _same(units)) / size  # part of a rank's tile that crosses
            load = np.bincount(units.ravel(), weights=crossing.ravel())
            exchange = max(exchange, (load / unit_sizes).max() / level.bytes_per_s)
        width *= level.size
    return Link(size, float(ring), float(gather), Seconds(float(lap.max())), float(exchange))


def _distinct(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of different values in each row."""
    found: NDArray[np.int64] = _starts(units).sum(axis=1)
    return found


def _same(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each entry, the number of entries of its row that equal it."""
    equal = _starts(units).ravel().cumsum() - 1  # a number for each stretch of equal entries
    found: NDArray[np.int64] = np.bincount(equal)[equal].reshape(units.shape)
    return found


def _starts(units: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a value is the first of its kind in its row; rows are sorted, as ranks ascend."""
    found = np.ones(units.shape, bool)
    found[:, 1:] = units[:, 1:] > units[:, :-1]
    return found
