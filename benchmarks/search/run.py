"""Capture and search times, by model, by depth, by number of devices; the distance to the optimum.

    python -m benchmarks.search.run -o benchmarks/search/result.json
    python -m benchmarks.search.run --milp -o benchmarks/search/optimum.json

Models are built on the meta device: nothing is downloaded or allocated. Every
row is measured in a process of its own, so that its peak memory is its own. A
search is repeated and the median reported, in wall and in processor seconds
(on a shared machine the second is the one to compare). At the end stands what
is aimed at, beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import shardwright as sw
from benchmarks import record
from benchmarks.search.models import DEEP, DEPTHS, PUBLISHED, SHALLOW, Built
from benchmarks.search.optimum import distances
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh
from shardwright.planner.meshes.meshes import meshes_of
from shardwright.planner.space.repeats import shorten
from shardwright.planner.space.space import make_space
from shardwright.planner.tables.model import CostModel
from shardwright.rules.analysis import analyze
from shardwright.solve.frontier.fast import Effort, fast_frontier

SEED = 0
MACHINE = "8x8xH100"
MESH = Mesh.parse("dp=8 tp=8")
LARGE = {64: "8x8xH100", 1024: "128x8xH100", 16384: "2048x8xH100"}
MEASURED = "llama-8b, 32 layers"  # also over numbers of devices, and without folding

MODELS = {**DEPTHS, **PUBLISHED}
EVERY: dict[str, Callable[[], Built]] = {**MODELS, **DEEP}
(STAGED,) = DEEP
STAGED_ON = 1024
LEAST_DEPTH, MOST_DEPTH = "llama-8b, 4 layers", "llama-8b, 128 layers"
SEARCH = f"search {MESH}"
EVERY_MESH = "search of every mesh"
SECONDS = {64: 2.0, 1024: 6.0, 16384: 12.0}  # aimed at for every mesh over so many devices


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Times of one model on one mesh of 64 devices, and what its frontier looks like."""
    captures = [_captured(name) for _ in range(repeats if name == MEASURED else 1)]
    graph = captures[0][0]
    machine = sw.Machine.preset(MACHINE)
    found: list[sw.Frontier] = []

    def search() -> None:
        found[:] = [sw.search(graph, machine, meshes=[MESH])]

    searches = [_timed(search) for _ in range(repeats)]
    (frontier,) = found
    row: dict[str, Any] = {
        "operators": len(graph.ops),
        "capture": _median([times for _, times in captures]),
        SEARCH: _median(searches),
        "of it to find repeats": _median([_timed(lambda: shorten(graph)) for _ in range(repeats)]),
        "peak_resident_gib": _peak(),  # of capture and search
        "plans": len(frontier),
        "notes": sorted({note for plan in frontier for note in plan.notes}),
        "fastest_over_bound": frontier[0].step_seconds / frontier[0].lower_bound_seconds - 1,
    }
    if frontier.baselines:  # not every model has one on two axes
        best = min(plan.step_seconds for plan in frontier.baselines)
        row["fastest_over_best_baseline"] = frontier[0].step_seconds / best
    if name == MEASURED:
        without = [
            _timed(lambda: sw.search(graph, machine, meshes=[MESH], recompute=False))
            for _ in range(repeats)
        ]
        row[f"{SEARCH}, nothing recomputed"] = _median(without)
        row[f"{SEARCH}, nothing folded"] = _median([_timed(lambda: _unfolded(graph))])
    return row


def measure_devices(devices: int, repeats: int) -> dict[str, Any]:
    """Times of one model on every mesh over a number of devices."""
    graph, _ = _captured(MEASURED)
    machine = sw.Machine.preset(LARGE[devices])
    times = [_timed(lambda: sw.search(graph, machine)) for _ in range(repeats)]
    meshes = len(list(meshes_of(devices)))
    return {EVERY_MESH: _median(times), "meshes": meshes, "peak_resident_gib": _peak()}


def measure_stages(repeats: int) -> dict[str, Any]:
    """Times of a deep model on many devices, as pipelines of every number of stages, too."""
    graph, capture = _captured(STAGED)
    machine = sw.Machine.preset(LARGE[STAGED_ON])
    times = [_timed(lambda: sw.search(graph, machine, stages=None)) for _ in range(repeats)]
    meshes = len(list(meshes_of(STAGED_ON)))
    found = {EVERY_MESH: _median(times), "capture": _median([capture])}
    return {**found, "meshes": meshes, "peak_resident_gib": _peak()}


def aims(rows: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What is aimed at, as far as it was measured: wall seconds and their ratios, and GiB."""

    def aim(what: str, measured: float, most: float) -> dict[str, Any]:
        return {"what": what, "measured": round(measured, 3), "at_most": most}

    def wall(row: dict[str, Any], part: str) -> float:
        return float(row[part]["wall_seconds"])

    if MEASURED in rows:
        row = rows[MEASURED]
        both = wall(row, SEARCH) + wall(row, "capture")
        yield aim(f"{MEASURED}: search, seconds", wall(row, SEARCH), 0.25)
        yield aim(f"{MEASURED}: capture and search, seconds", both, 4.5)
        yield aim(f"{MEASURED}: peak resident GiB", row["peak_resident_gib"], 1.5)
    if LEAST_DEPTH in rows and MOST_DEPTH in rows:
        few, many = (
            wall(rows[name], SEARCH) - wall(rows[name], "of it to find repeats")
            for name in (LEAST_DEPTH, MOST_DEPTH)
        )
        yield aim("128 layers over 4: search without finding repeats, ratio", many / few, 1.3)
    for name in [name for name in PUBLISHED if name in rows]:
        yield aim(f"{name}: search, seconds", wall(rows[name], SEARCH), 1.0)
    for devices, seconds in SECONDS.items():
        if (row := rows.get(_on(devices), {})) and EVERY_MESH in row:
            yield aim(f"{_on(devices)}: search, seconds", wall(row, EVERY_MESH), seconds)
    if row := rows.get(_staged(), {}):
        most = SECONDS[STAGED_ON]
        yield aim(f"{_staged()}: search, seconds", wall(row, EVERY_MESH), most)


def _staged() -> str:
    return f"{STAGED}, {STAGED_ON} devices, in stages too"


def _on(devices: int) -> str:
    return f"{MEASURED}, {devices} devices"


def _captured(name: str) -> tuple[Graph, tuple[float, float]]:
    """The graph of a model, and the seconds that capture took, by the clock and the processor."""
    torch.manual_seed(SEED)
    with torch.device("meta"):
        model, batch = EVERY[name]()
    graphs: list[Graph] = []
    times = _timed(lambda: graphs.append(sw.capture(model, (), batch)))
    return graphs[0], times


def _unfolded(graph: Graph) -> object:
    model = CostModel(graph, analyze(graph), sw.Machine.preset(MACHINE), MESH)
    return fast_frontier(
        make_space(model).problem, Effort(max_weights=40, max_points=64, resolution=1e-3)
    )


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
            keep(_on(devices), row)
        if STAGED_ON in given.devices:
            keep(_staged(), _alone(measure_stages, given.repeats))
    found = list(aims(result))
    for one in found:
        print(f"{one['what']}: {one['measured']}, at most {one['at_most']} aimed at")
    content = {"machine planned for": MACHINE, "rows": result, "aims": found}
    record.write(content, given.output, SEED)


if __name__ == "__main__":
    main()
