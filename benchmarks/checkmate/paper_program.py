"""Checkmate's mixed-integer program as in the paper, with a workspace of nodes that run.

R, S, U and FREE are the paper's, in the order of its stages: node t runs in stage t, and no node
before its stage. HiGHS does not solve it for a hundred nodes, but `relaxation.py`.

Paper: Jain et al. 2020 (arXiv 1910.02653), section 4.
"""

from __future__ import annotations

from benchmarks.checkmate.rows import Program
from benchmarks.checkmate.training_graph import TrainingGraph


def paper_program(graph: TrainingGraph, limit: int) -> Program:
    """The program whose cost is the seconds of all runs, within `limit` bytes."""
    program, count, unit = Program(), len(graph), max(graph.bytes)
    size = [one / unit for one in graph.bytes]
    runs = [program.variables(graph.seconds[: t + 1], whole=True) for t in range(count)]
    held = [program.variables([0.0] * t, whole=True) for t in range(count)]
    users: list[list[int]] = [[] for _ in range(count)]
    for node, reads in enumerate(graph.reads):
        for read in reads:
            users[read].append(node)
    for t in range(count):
        program.require(runs[t][t])
        for node in range(t + 1):
            for read in graph.reads[node]:
                program.row(
                    [(runs[t][node], 1.0), (runs[t][read], -1.0), (held[t][read], -1.0)], 0.0
                )
        for node in range(t):
            before = [(held[t - 1][node], -1.0)] if node < t - 1 else []
            program.row([(held[t][node], 1.0), (runs[t - 1][node], -1.0), *before], 0.0)
        now = [(variable, size[node]) for node, variable in enumerate(held[t])]
        for node in range(t + 1):
            # U: the bytes of before, with the result of the node, and less those that it frees.
            (used,) = program.variables([0.0], whole=False, upper=limit / unit)
            program.row([*now, (runs[t][node], size[node]), (used, -1.0)], 0.0)
            program.row([(used, 1.0), (runs[t][node], graph.workspace[node] / unit)], limit / unit)
            now = [(used, 1.0)]
            for gone in sorted({node, *graph.reads[node]}):
                hazards = [(runs[t][user], 1.0) for user in users[gone] if node < user <= t]
                if t + 1 < count:
                    hazards.append((held[t + 1][gone], 1.0))
                (free,) = program.variables([0.0], whole=True)
                # (1 - R) + hazards <= K (1 - FREE); the other row of the paper forces FREE to be 1.
                most = len(hazards) + 1.0
                program.row([(runs[t][node], -1.0), *hazards, (free, most)], most - 1.0)
                now.append((free, -size[gone]))
    return program
