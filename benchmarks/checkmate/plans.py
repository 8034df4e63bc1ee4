"""Plans of one device as schedules of Checkmate's training graph, with its costs.

Both have the seconds of the same cost model, without the update. Memory is Checkmate's: of a plan,
too, it is that of the schedule. The simulated peak of a plan, which `explain` shows, counts other
things beside: parameters, gradients and optimizer state, temporaries of single kernels, and
gradients and values where torch has two of them for a moment.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import shardwright as sw
from benchmarks.checkmate.schedule import Schedule, schedule_of
from benchmarks.checkmate.training_graph import TrainingGraph, training_graph
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh
from shardwright.ir.plan import Plan
from shardwright.planner.tables.model import CostModel
from shardwright.rules.analysis import analyze


def priced(graph: Graph, machine: sw.Machine) -> TrainingGraph:
    """The training graph of `graph` with the seconds of its operators on one device."""
    model = CostModel(graph, analyze(graph), machine, Mesh.parse("dp=1"))
    seconds = {}
    for op in graph.ops:
        both, backward = model.operator(op).seconds[0], model.backward_seconds(op)[0]
        seconds[op.name] = float(both - backward), float(backward)
    return training_graph(graph, seconds)


def schedule_of_plan(graph: TrainingGraph, plan: Plan) -> Schedule:
    """The schedule of a plan: a recomputed segment runs again before its first backward node.

    A node runs again if its last operator does, and the plan keeps none of its operators. What
    neither a backward node nor another operator that runs again needs does not run.
    """
    ops = {op.name: op for op in plan.ops}
    runs = np.eye(len(graph), dtype=bool)
    again: dict[int, list[int]] = {}  # the nodes of every segment
    stage: dict[int, int] = {}  # in which they run
    for node, names in enumerate(graph.ops):
        segment = max(ops[name].segment for name in names)
        if segment:
            stage[segment] = len(graph) - 1 - node  # the last node's backward node is the first
            if ops[names[-1]].runs_again and not any(ops[name].kept for name in names):
                again.setdefault(segment, []).append(node)
    needed = {read for reads in graph.reads[graph.forward :] for read in reads}
    for segment in sorted(again, reverse=True):
        for node in reversed(again[segment]):
            if node in needed:
                runs[stage[segment], node] = True
                needed.update(graph.reads[node])
    return schedule_of(graph, runs)


def with_last_end_once(graph: TrainingGraph, found: Schedule) -> Iterator[Schedule]:
    """Schedules in which the last nodes that run again, one more in each, run once instead."""
    runs = found.runs.copy()
    for node in range(graph.forward - 1, -1, -1):
        if runs[graph.forward :, node].any():
            runs[graph.forward :, node] = False
            yield schedule_of(graph, runs.copy())
