"""Capture and search times, by model, by depth, by number of devices; the distance to the optimum.

    python -m benchmarks.search.run -o benchmarks/search/result.json
    python -m benchmarks.search.run --milp -o benchmarks/search/optimum.json

Models are built on the meta device: nothing is downloaded or allocated. Every
row is measured in a process of its own, so that its peak memory is its own. A
search is repeated and the median reported, in wall and in processor seconds
(on a shared machine the second is the one to compare).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardwright as sw
from benchmarks import record
from benchmarks.search.models import DEPTHS, PUBLISHED, SHALLOW
from benchmarks.search.optimum import distances
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh
from shardwright.rules.analysis import analyze
from shardwright.search.fast import fast_frontier
from shardwright.search.space import make_space

SEED = 0
MACHINE = "8x8xH100"
MESH = Mesh.parse("dp=8 tp=8")
LARGE = {64: "8x8xH100", 1024: "128x8xH100", 16384: "2048x8xH100"}
MEASURED = "llama-8b, 32 layers"  # also over numbers of devices, and without folding

MODELS = {**DEPTHS, **PUBLISHED}


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Times of one model on one mesh of 64 devices, and what its frontier looks like."""
    graph, captured, by_processor = _captured(name)
    machine = sw.Machine.preset(MACHINE)
    times = [_timed(lambda: sw.search(graph, machine, meshes=[MESH])) for _ in range(repeats)]
    frontier = sw.search(graph, machine, meshes=[MESH])
    fastest = frontier[0]
    row: dict[str, Any] = {
        "operators": len(graph.ops),
        "capture": {"wall_seconds": captured, "processor_seconds": by_processor},
        f"search {MESH}": _median(times),
        "plans": len(frontier),
        "fastest_over_bound": fastest.step_seconds / fastest.lower_bound_seconds - 1,
    }
    if frontier.baselines:  # not every model has one on two axes
        best = min(plan.step_seconds for plan in frontier.baselines)
        row["fastest_over_best_baseline"] = fastest.step_seconds / best
    if name == MEASURED:
        row[f"search {MESH}, nothing folded"] = _median([_timed(lambda: _unfolded(graph))])
    return {**row, "peak_resident_gib": _peak()}


def measure_devices(devices: int, repeats: int) -> dict[str, Any]:
    """Times of one model on every mesh over a number of devices."""
    graph, _, _ = _captured(MEASURED)
    machine = sw.Machine.preset(LARGE[devices])
    times = [_timed(lambda: sw.search(graph, machine)) for _ in range(repeats)]
    return {"search of every mesh": _median(times), "peak_resident_gib": _peak()}


def _captured(name: str) -> tuple[Graph, float, float]:
    """The graph of a model, and the seconds that capture took, by the clock and the processor."""
    torch.manual_seed(SEED)
    with torch.device("meta"):
        model, batch = MODELS[name]()
    wall, processor = time.perf_counter(), time.process_time()
    graph = sw.capture(model, (), batch)
    return (
        graph,
        round(time.perf_counter() - wall, 3),
        round(time.process_time() - processor, 3),
    )


def _unfolded(graph: Graph) -> object:
    model = CostModel(graph, analyze(graph), sw.Machine.preset(MACHINE), MESH)
    return fast_frontier(make_space(model).problem, max_weights=40, max_points=64, resolution=1e-3)


def _timed(search: Callable[[], object]) -> tuple[float, float]:
    wall, processor = time.perf_counter(), time.process_time()
    search()
    return time.perf_counter() - wall, time.process_time() - processor


def _median(times: list[tuple[float, float]]) -> dict[str, float]:
    wall, processor = zip(*times, strict=True)
    return {
        "wall_seconds": round(statistics.median(wall), 3),
        "processor_seconds": round(statistics.median(processor), 3),
    }


def _peak() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


def _alone(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """What `function` returns, called in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def main() -> None:
    """Measure what was asked for and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--milp", action="store_true", help="the distance to the optimum instead")
    parser.add_argument("--models", nargs="*", choices=[*MODELS, *SHALLOW])
    parser.add_argument("--devices", nargs="*", type=int, default=list(LARGE), choices=list(LARGE))
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    result: dict[str, Any] = {}

    def keep(name: str, row: dict[str, Any]) -> None:
        result[name] = row
        print(f"{name}: {json.dumps(row)}", flush=True)

    if given.milp:
        for name, row in distances([m for m in given.models or SHALLOW if m in SHALLOW]):
            keep(name, row)
    else:
        for name in [m for m in given.models or MODELS if m in MODELS]:
            keep(name, _alone(measure, name, given.repeats))
        for devices in given.devices:
            row = _alone(measure_devices, devices, given.repeats)
            keep(f"{MEASURED}, {devices} devices", row)
    record.write({"machine planned for": MACHINE, "rows": result}, given.output, SEED)


if __name__ == "__main__":
    main()
