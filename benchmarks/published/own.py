"""Price the rows of an own measurement, which no figure of a preset is fitted to.

    python -m benchmarks.published.own

Beside predictions the result has seconds by kind of kernel, priced and measured. These prices are
of kernels on a busy device, without launches and without the host. The update is torch's default
on one GPU, one operator after the other (foreach).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published.graphs import Shape, graph_of
from benchmarks.published.own_rows import MEASURED, own_rows
from benchmarks.published.row import Row
from benchmarks.published.run import code, predict
from benchmarks.record import write
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Seconds
from shardwright.machine.model import Device
from shardwright.machine.presets import preset
from shardwright.rules.analysis import analyze
from shardwright.simulate.costs.compute import backward_kernels, forward_kernels
from shardwright.simulate.costs.kernels import KernelWork, kernel_seconds
from shardwright.simulate.costs.update import update_seconds
from shardwright.simulate.costs.workload import OperatorClass, Workload, workload

RESULT = Path(__file__).with_name("own.json")
MACHINE = "1xH100"
_UPDATE, _FUSED = "adamw", "adamw_fused"
_PASSES_OF_SUM = 3  # a gradient that is added reads both terms and writes the sum
_PRODUCTS = (OperatorClass.MATMUL, OperatorClass.EXPERTS, OperatorClass.CONVOLUTION)


def main() -> None:
    """Price all rows and write the result."""
    rows = list(own_rows(MEASURED.read_text()))
    found = [_predicted(row) for row in rows]
    write({"code": code(), "rows": found, "kinds": by_kind(rows)}, RESULT, seed=0)


def _predicted(row: Row) -> dict[str, Any]:
    one = predict(row)
    return {
        "model": row.model,
        "run": row.note,
        "measured": row.step_seconds,
        "measured_gib": row.memory_gib,
        **_rounded({"predicted": one.seconds or 0.0, "predicted_gib": one.gib or 0.0}),
    }


def by_kind(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """By model: `measured` seconds of the module's kernels and host, and `priced` ones."""
    runs = json.loads(MEASURED.read_text())["checks"]["predicted"]["result"]
    shapes = {row.model: Shape.of(row) for row in rows}
    return {
        model: {
            "measured": _measured(runs[model]["module"]),
            "priced": _rounded(priced(graph_of(shape))),
        }
        for model, shape in shapes.items()
    }


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in seconds.items()}


def _measured(run: dict[str, Any]) -> dict[str, float]:
    kinds = run["kernel_seconds"]
    return {
        "products": kinds["products"],
        "attention": kinds["attention"],
        "others": kinds["others"] + kinds["copies"],
        "step": run["seconds"],
        "host": run["host_seconds"],
        "kernels": kinds["count"],
    }


def priced(graph: Graph) -> dict[str, float]:
    """Seconds by kind of kernel, those of the update among others and for themselves."""
    device = replace(
        preset(MACHINE).device, launch_seconds=Seconds(0.0), issue_seconds=Seconds(0.0)
    )
    found = dict.fromkeys(("products", "attention", "others"), 0.0)
    for kernel in _kernels(graph):
        if kernel.kind in _PRODUCTS and kernel.flop[0]:
            kind = "products"
        else:
            kind = "attention" if kernel.kind is OperatorClass.ATTENTION else "others"
        found[kind] += float(kernel_seconds(kernel, device)[0])
    update, fused = (_update(graph, device, name) for name in (_UPDATE, _FUSED))
    found["others"] += update
    return {**found, "update": update, "fused": fused}


def _kernels(graph: Graph) -> Iterator[KernelWork]:
    rules = analyze(graph).rules
    for op in graph.ops:
        work = workload(op, rules[op.name], graph)
        sizes = np.array(work.sizes, np.int64)[:, None]
        yield from forward_kernels(work, sizes)
        if work.has_backward:
            yield from backward_kernels(work, sizes)
            yield from _added(work, sizes)


def _added(work: Workload, sizes: np.ndarray) -> Iterator[KernelWork]:
    nothing = np.zeros(1, np.int64)
    for result, more in zip(work.results, work.added, strict=False):
        moved = _PASSES_OF_SUM * result.local_bytes(sizes)
        yield from [KernelWork(OperatorClass.MEMORY, work.dtype, nothing, moved)] * more


def _update(graph: Graph, device: Device, optimizer: str) -> float:
    """Seconds of the update on one device."""
    sizes = [graph.tensor[name].bytes for name in sorted(graph.trained)]
    return sum(float(update_seconds(np.array([size]), optimizer, device, 1)[0]) for size in sizes)


if __name__ == "__main__":
    main()
