"""Seconds of many kept steps at once, for figures that are still looked for.

It tells pricing again over arrays: kernels by `simulate.costs.kernels`, transfers in rings, stages
one after the other, what gathers do not hide. Its figures are confirmed by pricing the rows with
them (`python -m benchmarks.published`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.features import FORWARD, Features
from benchmarks.published.row import Row
from benchmarks.published.setups import FLASH_1, machine_of, optimizer_of
from shardwright.ir.layout import Mesh
from shardwright.ir.options.optimizer_spec import Implementation
from shardwright.ir.options.optimizers import optimizer_spec
from shardwright.machine.fitted import FITTED, OVERLAP
from shardwright.machine.gpus import GPUS
from shardwright.machine.model import Machine
from shardwright.machine.topology import links
from shardwright.simulate.costs.kernels import ProductShape, fill_of

Floats = NDArray[np.float64]
Figures = Mapping[str, float]  # by the name in `FITTED`, with "/" and the architecture
_ARCHITECTURE = {gpu.kind: gpu.architecture for gpu in GPUS}
_KERNEL = (  # columns
    *("row", "stage", "phase", "kind", "dtype", "flop", "moved"),
    *("rows", "columns", "depth", "count", "times"),
)
_TRANSFER = (
    *("row", "stage", "parameter", "reduces", "ranks"),
    *("bytes_per_s", "lap", "bytes", "times"),
)
_GATHERS = ("all_gather", "ring")
_PRODUCTS_AGAIN = 0.5  # part of the products that recomputation by operators makes again


def figure(figures: Figures, name: str, architecture: str) -> float:
    """The value of a figure for an architecture, of Hopper for those without rows."""
    if name in figures:
        return figures[name]
    known = f"{name}/{architecture}"
    return figures[known] if known in figures else figures[f"{name}/hopper"]


@dataclass(frozen=True, eq=False)
class Steps:
    """Features of rows as arrays; a column is a kind of number, an index is that of a row."""

    rows: Sequence[Row]
    features: Sequence[Features]
    kernels: Mapping[str, NDArray[Any]]
    transfers: Mapping[str, NDArray[Any]]
    updates: NDArray[np.float64]  # row, stage, bytes

    @classmethod
    def of(cls, rows: Sequence[Row], features: Sequence[Features]) -> Steps:
        """The arrays of these features."""
        kernels = [
            (i, *key, count) for i, one in enumerate(features) for key, count in one.kernels.items()
        ]
        transfers = [
            line
            for i, pair in enumerate(zip(rows, features, strict=True))
            for line in _transfers(i, *pair)
        ]
        updates = [
            (i, stage, size * count)
            for i, one in enumerate(features)
            for (stage, size), count in one.updates.items()
        ]
        return cls(
            rows,
            features,
            dict(zip(_KERNEL, map(np.array, zip(*kernels, strict=True)), strict=True)),
            dict(zip(_TRANSFER, map(np.array, zip(*transfers, strict=True)), strict=True)),
            np.array(updates, float),
        )

    @property
    def published(self) -> Floats:
        """Seconds of the steps: (rows,)."""
        return np.array([row.step_seconds for row in self.rows])

    @property
    def launched(self) -> list[int]:
        """The kernels that a rank launches in a step, without those of the update."""
        counts = ((sum(one.kernels.values()), one) for one in self.features)
        return [round(count * one.micro_batches / one.groups) for count, one in counts]

    @property
    def exchanged(self) -> list[int]:
        """The transfers of a rank in a step, without those of parameters and their gradients."""
        return [
            round(sum(times for key, times in one.transfers.items() if not key[-1]) / one.groups)
            for one in self.features
        ]

    def seconds(self, figures: Figures, overlap: float = OVERLAP) -> Floats:
        """Predicted seconds, where a part `overlap` of messages of parameters hides: (rows,)."""
        micro_batches = np.array([one.micro_batches for one in self.features])
        moved, once, hideable = self._transfers(figures)
        forward, backward = self._passes(figures, moved / micro_batches[:, None])
        each, count = forward + backward, micro_batches[:, None]
        # Sums and gathers of sharded parameters run beside operators; the sums of replicas beside
        # those of the backward pass alone.
        sharded = np.array([row.zero >= 2 for row in self.rows])[:, None]
        share = backward / np.maximum(forward + backward, 1e-12)
        step = each * count
        least = np.maximum(hideable, step * (1 - share) + np.maximum(step * share, once))
        shown = np.maximum(least, step + (1 - overlap) * (hideable + once))
        each = np.where(sharded, shown, step + hideable) / count
        update = self._updates(figures) + np.where(sharded, 0.0, once)
        return self._staged(each, update, micro_batches)

    def _passes(self, figures: Figures, moved: Floats) -> Floats:
        """Seconds of one micro-batch on the device, forward and backward: (2, rows, stages)."""
        alone = self._alone(figures) * self.kernels["times"]
        return self._by_pass(alone) + moved / 2

    def _by_pass(self, amounts: Floats) -> Floats:
        """Sums of kernels, forward and backward with what is computed again: (2, rows, stages)."""
        one, at = self.kernels, self.kernels["row"].astype(int)
        forward = one["phase"] == FORWARD
        again = np.array([row.recompute == "operators" for row in self.rows])[at]
        product, attention = one["kind"] == "matmul", one["kind"] == "attention"
        part = np.where(product, _PRODUCTS_AGAIN, np.where(attention, 0.0, 1.0)) * again
        summed = partial(self._summed, at, one["stage"])
        later = np.where(forward, part, 1.0)
        return np.stack([summed(amounts * forward), summed(amounts * later)])

    @cached_property
    def machines(self) -> list[Machine]:
        """The machine of each row."""
        return [machine_of(row) for row in self.rows]

    @cached_property
    def _peaks(self) -> Floats:
        """Peak FLOP/s of each kernel: (kernels,)."""
        rows = zip(self.kernels["row"].astype(int), self.kernels["dtype"], strict=True)
        return np.array([self.machines[i].device.peak_flop_per_s(dtype) for i, dtype in rows])

    def _alone(self, figures: Figures) -> Floats:
        """Seconds of each kernel, and at least what the host needs to issue it: (kernels,)."""
        one, at, peak = self.kernels, self.kernels["row"].astype(int), self._peaks
        units = np.array([m.device.units for m in self.machines])[at]
        bandwidth = np.array([m.device.bytes_per_s for m in self.machines])[at]
        product, attention = one["kind"] == "matmul", one["kind"] == "attention"
        shape = ProductShape(*(one[name] for name in ("rows", "columns", "depth", "count")))
        with np.errstate(invalid="ignore"):  # others have no shape
            tiled = fill_of(shape, units, figures["product_depth"])
        fill = np.where(shape.rows > 0, tiled, 1.0)
        reached = self._by_row("efficiency.matmul", figures)[at] * np.maximum(fill, 1e-4)
        fused = self._by_row("efficiency.attention", figures)[at]
        first = np.array([row.attention == "flash-1" for row in self.rows])[at]
        kinds = [_ARCHITECTURE[m.device.kind] for m in self.machines]
        rate = np.array([FLASH_1.get(kind, 0.0) for kind in kinds])[at]
        fused = np.where(first, rate / peak, fused)
        busy = one["flop"] / (peak * np.where(product, reached, np.where(attention, fused, 1.0)))
        waiting = one["moved"] / (bandwidth * figures["efficiency.memory"])
        alone = np.maximum(busy, waiting) + figures["launch"] * 1e-6
        found: Floats = np.maximum(alone, figures["issue"] * 1e-6)
        return found

    def _transfers(self, figures: Figures) -> tuple[Floats, Floats, Floats]:
        """Seconds of a step: of activations, sums of gradients, gathers: (rows, stages) each."""
        one, at = self.transfers, self.transfers["row"].astype(int)
        rate = one["bytes_per_s"] * figures["link bandwidth"]
        ring = 1 + one["reduces"].astype(float)  # an all-reduce is a reduce-scatter and a gather
        fixed = figures["collective_launch"] * 1e-6 + ring * one["lap"]
        part = (one["ranks"] - 1) / one["ranks"]
        seconds = np.where(one["parameter"], 0.0, fixed) + ring * part * one["bytes"] / rate
        seconds = seconds * one["times"]
        parameter, reduces = one["parameter"].astype(bool), one["reduces"].astype(bool)

        def of(mask: NDArray[np.bool_]) -> Floats:
            return self._summed(at[mask], one["stage"][mask], seconds[mask])

        return of(~parameter), of(parameter & reduces), of(parameter & ~reduces)

    def _updates(self, figures: Figures) -> Floats:
        """Seconds of the update: (rows, stages)."""
        rows, stages, sizes = self.updates.T
        bandwidth = np.array([m.device.bytes_per_s for m in self.machines])
        at = rows.astype(int)
        moved = np.array([_passes(row) for row in self.rows])[at] * sizes
        seconds = moved / (bandwidth[at] * figures["efficiency.memory"])
        return self._summed(at, stages, seconds)

    def _staged(self, each: Floats, once: Floats, micro_batches: NDArray[np.int64]) -> Floats:
        """A step of 1F1B, of which a group with v stages waits a v-th as long."""
        found = []
        for i, one in enumerate(self.features):
            groups = np.arange(each.shape[1]) % one.groups
            busy = np.bincount(groups, each[i], one.groups)
            update = np.bincount(groups, once[i], one.groups).max()
            waits = (busy.sum() - busy.max()) * one.groups / one.stages
            sent = 2 * sum(one.receives) * one.groups / one.stages
            found.append(micro_batches[i] * busy.max() + waits + sent + update)
        return np.array(found)

    def _summed(self, rows: NDArray[np.int64], stages: NDArray[Any], seconds: Floats) -> Floats:
        found = np.zeros((len(self.rows), max(one.stages for one in self.features)))
        np.add.at(found, (rows, stages.astype(int)), seconds)
        return found

    def _by_row(self, name: str, figures: Figures) -> Floats:
        kinds = (m.device.kind for m in self.machines)
        return np.array([figure(figures, name, _ARCHITECTURE[kind]) for kind in kinds])


def _passes(row: Row) -> int:
    """How often the update of a row's parameters reads or writes their elements."""
    spec = optimizer_spec(optimizer_of(row))
    fused = spec.implementation is Implementation.FUSED
    return spec.fused_passes if fused else spec.passes


def _transfers(number: int, row: Row, features: Features) -> list[tuple[float, ...]]:
    """The steps of a row's transfers, with their links as specified."""
    mesh = Mesh(tuple(axis for axis in features.mesh if axis[0] != "pp"))
    machine = machine_of(row)
    along = dict(zip(mesh.names, links(machine, mesh), strict=True))
    architecture = _ARCHITECTURE[machine.device.kind]
    reached = FITTED["link bandwidth"].of(architecture)
    found: list[tuple[float, ...]] = []
    for (stage, _, collectives, size, parameter), times in features.transfers.items():
        for name, axis, part in _sizes(collectives, dict(mesh.axes)):
            link = along[axis]
            if link.ranks > 1 and name not in ("slice", "mask", "embed"):
                rate = link.bytes_per_s / reached
                reduces = name == "all_reduce"
                moved = size * part / (link.ranks if name in ("all_to_all", "swap") else 1)
                lap = link.lap_seconds
                found.append(
                    (
                        *(number, stage, parameter, reduces),
                        *(link.ranks, rate, lap, moved, times),
                    )
                )
    return found


def _sizes(collectives: Sequence[str], sizes: Mapping[str, int]) -> list[tuple[str, str, float]]:
    """Each collective, its axis, and its bytes over those of the largest tile on the way."""
    found, now = [], 1.0
    for text in collectives:
        name, axis = text.split(" ")
        before = now
        if name in ("reduce_scatter", "slice"):
            now /= sizes.get(axis, 1)
        elif name in _GATHERS:
            now *= sizes.get(axis, 1)
        if axis in sizes:
            found.append((name, axis, max(before, now)))
    largest = max([1.0, *(part for *_, part in found)])
    return [(name, axis, part / largest) for name, axis, part in found]
