"""TAPAS' claim: folding what repeats makes the search time hardly depend on depth.

    python -m benchmarks.tapas.run -o benchmarks/tapas/result.json

Llama on 64 H100s as 8 x 8, in processor seconds, captured on the meta device: by number of layers
with and without folding, by width, and beside an integer program (HiGHS) that finds the
optimum of the same tables at one memory limit. Folded is the whole search, from finding repeats to
baselines; unfolded are tables and sweep alone. Where meta-pytorch/autoparallel is there, it plans
for the same model and mesh, at some of the depths; where it is not, the result says so.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import shardwright as sw
from benchmarks import record
from benchmarks.tapas import autoparallel
from benchmarks.tapas.llama import BATCH, LENGTH, llama
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh
from shardwright.planner.space.space import make_space
from shardwright.planner.tables.model import CostModel
from shardwright.rules.analysis import analyze
from shardwright.solve.frontier.fast import Effort, fast_frontier
from tests.harness.generators import as_lists
from tests.harness.oracles import integer_program

SEED = 0
MACHINE, MESH = "8x8xH100", Mesh.parse("dp=8 tp=8")
SMALL_MACHINE, SMALL_MESH = "8xH100", Mesh.parse("dp=8")  # where the program ends in time
DEPTHS, WIDTHS = (2, 4, 8, 16, 32, 64), (1024, 2048, 4096, 8192)
PROGRAM_DEPTHS = (1, 2, 4)
RIVAL_DEPTHS, RIVAL_SECONDS = (2, 4, 8), 600.0


def captured(layers: int, width: int, attention: str = "sdpa") -> Graph:
    """A Llama of so many layers, `width` wide, sequence 2048, batch 128."""
    with torch.device("meta"):
        model = llama(layers, width, attention)
        ids = torch.zeros((BATCH, LENGTH), dtype=torch.long)
    return sw.capture(model, (), {"input_ids": ids, "labels": ids})


def row(layers: int, width: int, repeats: int, unfolded: bool) -> dict[str, Any]:
    """Seconds of the whole search, folded, and without folding of the tables and the sweep."""
    graph = captured(layers, width)
    machine = sw.Machine.preset(MACHINE)
    found: dict[str, Any] = {"layers": layers, "width": width, "operators": len(graph.ops)}
    found["folded_seconds"] = _median(
        repeats, lambda: sw.search(graph, machine, meshes=[MESH], recompute=False)
    )
    if unfolded:
        found["unfolded_seconds"] = _median(1, lambda: _unfolded(graph))
    return found


def program_row(layers: int, width: int) -> dict[str, Any]:
    """The frontier of a whole problem, and one point of it by the integer program."""
    graph = captured(layers, width)
    costs = CostModel(graph, analyze(graph), sw.Machine.preset(SMALL_MACHINE), SMALL_MESH)
    problem = make_space(costs).problem
    start = time.process_time()
    frontier = fast_frontier(problem)
    ours = time.process_time() - start
    limit = (frontier.points[0].memory + frontier.points[-1].memory) // 2
    start = time.process_time()
    nodes, edges = as_lists(problem)
    best = integer_program(nodes, edges, limit)
    return {
        "layers": layers,
        "width": width,
        "frontier_seconds": ours,
        "program_seconds": time.process_time() - start,
        "above_optimum": min(p.time for p in frontier.points if p.memory <= limit) / best - 1,
    }


def _unfolded(graph: Graph) -> object:
    costs = CostModel(graph, analyze(graph), sw.Machine.preset(MACHINE), MESH)
    return fast_frontier(
        make_space(costs).problem, Effort(max_weights=40, max_points=64, resolution=1e-3)
    )


def _autoparallel(depths: Sequence[int]) -> dict[str, Any]:
    """What meta-pytorch/autoparallel takes and what we take, by depth, if it is there."""
    if not autoparallel.installed():
        return {"installed": False}
    rows = []
    for layers in depths:
        theirs = autoparallel.asked(layers, WIDTHS[0], RIVAL_SECONDS)
        rows.append({"layers": layers, "ours": _ours(layers), "theirs": theirs})
        print("autoparallel", rows[-1], flush=True)
    return {"installed": True, "rows": rows}


def _ours(layers: int) -> dict[str, float]:
    """Processor seconds for the network that autoparallel is asked about: the whole frontier."""
    start = time.process_time()
    graph = captured(layers, WIDTHS[0], autoparallel.ATTENTION)
    captured_at = time.process_time()
    sw.search(graph, sw.Machine.preset(MACHINE), meshes=[MESH])
    return {
        "capture_seconds": captured_at - start,
        "search_seconds": time.process_time() - captured_at,
    }


def _median(repeats: int, call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def main() -> None:
    """Measure, print a line each, write the result."""
    options = _options()
    depths: Sequence[int] = DEPTHS[:3] if options.quick else DEPTHS
    widths: Sequence[int] = WIDTHS[:1] if options.quick else WIDTHS
    programs: Sequence[int] = PROGRAM_DEPTHS[:1] if options.quick else PROGRAM_DEPTHS
    result: dict[str, Any] = {"machine planned for": MACHINE, "depths": [], "widths": []}
    for layers in depths:
        found = row(layers, WIDTHS[0], options.repeats, unfolded=True)
        result["depths"].append(found)
        print(found, flush=True)
    for width in widths[1:]:
        found = row(4, width, options.repeats, unfolded=False)
        result["widths"].append(found)
        print(found, flush=True)
    result["programs"] = [program_row(layers, WIDTHS[0]) for layers in programs]
    print(*result["programs"], sep="\n", flush=True)
    result["autoparallel"] = _autoparallel(() if options.quick else RIVAL_DEPTHS)
    record.write(result, options.output, SEED)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="to 8 layers, one width")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
