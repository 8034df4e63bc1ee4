"""Frontiers over the states of saved tensors against a mixed-integer program, on random graphs.

    python -m benchmarks.saved_tensors.run -o benchmarks/saved_tensors/result.json

Graphs of three to six random layers on one device. A layer is kept or recomputed, its products run
again or once, and its input waits on the device or on the host, over links of several rates. At
limits between the ends of the exact frontier, and at those of the frontier that a search makes, the
program (HiGHS), which has costs of its own derivation, gives the least time.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from shardwright.ir.layout import Mesh
from shardwright.machine.presets import preset
from shardwright.planner.plans.mesh_frontier import mesh_frontier
from shardwright.planner.space.assembly import Skeleton
from shardwright.planner.space.space import make_space
from shardwright.planner.tables.model import CostModel
from shardwright.rules.analysis import analyze
from shardwright.solve.elimination.problem import Point
from tests.harness.saved_tensor_states import GRAIN, States, random_layers

GRAPHS, LIMITS = 200, 8
RATES = (1e8, 1e9, 1e10, 5e10)  # bytes per second of the link to the host, by turns


def compared(seed: int) -> dict[str, Any]:
    """One graph: relative errors of the exact frontier, of the search and of its lower bound.

    `error` is that of the exact frontier, `search` what the search's plans take in addition,
    `bound` by how much a lower bound exceeds the optimum, 0 if none does.
    """
    graph, spans = random_layers(seed)
    machine = preset("1xH100")
    machine = replace(
        machine, device=replace(machine.device, host_bytes_per_s=RATES[seed % len(RATES)])
    )
    model = CostModel(graph, analyze(graph), machine, Mesh.parse("dp=1"))
    share = machine.device.host_memory_bytes
    space = make_space(model, spans[:-1], Skeleton(kept=None, host_bytes=share))
    exact, _, _ = mesh_frontier(space, True, np.inf, lambda _: True)
    fast, bound, _ = mesh_frontier(space, False, np.inf, lambda _: True)
    states = States(space)
    least, most = exact[-1].memory, exact[0].memory
    # Between the sizes of values, so that the program's tolerance decides nothing.
    steps = np.linspace(least, most, LIMITS).astype(int) // GRAIN
    limits = sorted({least - GRAIN // 2, *(steps * GRAIN + GRAIN // 2).tolist()})
    errors, more, over = [0.0], [0.0], [0.0]
    for limit in limits:
        optimum = states.least_seconds(limit)
        known = [_least(points, limit) for points in (exact, fast)]
        if np.isinf(optimum):
            errors.append(0.0 if np.isinf(known[0]) else np.inf)
            continue
        errors.append(abs(known[0] / optimum - 1))
        more.append(known[1] / optimum - 1)
        over.append(bound(limit) / optimum - 1)
    hosts = space.recompute_choice.hosts
    return {
        "operators": len(graph.ops),
        "states": len(states.columns),
        "moved": any(p.choice[node] == 1 for p in exact for node in hosts),
        "error": float(max(errors)),
        "search": float(max(more)),
        "bound": float(max(over)),
    }


def _least(points: list[Point], limit: int) -> float:
    return min((point.time for point in points if point.memory <= limit), default=np.inf)


def main() -> None:
    """Compare and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--graphs", type=int, default=GRAPHS)
    given = parser.parse_args()
    start, rows = time.process_time(), []
    for seed in range(given.graphs):
        rows.append(compared(seed))
        print(seed, rows[-1], flush=True)
    if given.output:
        result = {"rows": rows, "seconds": time.process_time() - start}
        record.write(result, given.output, 0)


if __name__ == "__main__":
    main()
