"""How far the fast frontier is from the optimum, by a mixed-integer program, for shallow models.

python -m benchmarks.search.run --milp -o benchmarks/search/optimum.json

At ten memory limits between the ends of the frontier the program finds the least time; beside it
stand the frontier's own and its lower bound. Some programs take minutes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

import shardwright as sw
from benchmarks.search.models import SHALLOW
from shardwright.ir.layout import Mesh
from shardwright.planner.space.space import make_space
from shardwright.planner.tables.model import CostModel
from shardwright.rules.analysis import analyze
from shardwright.solve.elimination.problem import Problem
from shardwright.solve.frontier.fast import Effort, fast_frontier
from tests.harness.generators import as_lists
from tests.harness.oracles import integer_program

MACHINES = ("8xH100", "4x2xA100")
MESHES = ("dp=8", "dp=4 tp=2")
LIMITS = 10
_SUMS = 200_000_000  # no budget to speak of


def distances(names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """One row for each model, machine and mesh."""
    for name in names:
        with torch.device("meta"):
            model, batch = SHALLOW[name]()
        graph = sw.capture(model, (), batch)
        analysis = analyze(graph)
        for machine in MACHINES:
            for mesh in MESHES:
                costs = CostModel(graph, analysis, sw.Machine.preset(machine), Mesh.parse(mesh))
                yield f"{name}, {machine}, {mesh}", distance(make_space(costs).problem)


def distance(problem: Problem) -> dict[str, Any]:
    """The worst of ten limits, as parts of the optimum, and what it took."""
    start = time.process_time()
    found = fast_frontier(problem, Effort(max_points=300, max_sums=_SUMS))
    searched = time.process_time() - start
    most, least = found.points[0].memory, found.points[-1].memory
    over, below = [], []
    nodes, edges = as_lists(problem)
    for part in range(LIMITS):
        limit = int(least + (most - least) * (part + 0.5) / LIMITS)
        best = integer_program(nodes, edges, limit)
        over.append(min(p.time for p in found.points if p.memory <= limit) / best - 1)
        below.append(1 - found.lower_bound(limit) / best)
    return {
        "nodes": len(problem.nodes),
        "search_processor_seconds": round(searched, 2),
        "program_processor_seconds": round(time.process_time() - start - searched, 2),
        "most_above_optimum": max(over),
        "bound_most_below_optimum": max(below),
        "bound_least_below_optimum": min(below),  # negative would be a wrong bound
    }
