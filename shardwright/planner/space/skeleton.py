"""Leaders, followers and shared readings of a space, computed without regard to constraints.

Which operators follow others, and which share a reading, depends on their allowed choices. Computed
under constraints, fewer choices could permit more plans: an operator that can no longer follow
becomes a leader, and a value may then be redistributed before it. So the structure is computed from
all choices, and constraints only remove choices: constrained plans are a subset of all plans.

A cluster whose members have no common choice under the constraints is split.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from shardwright.ir.graph import Op
from shardwright.planner.space.assembly import Assembly, Skeleton
from shardwright.planner.space.clusters import Clusters
from shardwright.planner.tables.model import CostModel
from shardwright.planner.tables.options import Allowed
from shardwright.solve.elimination.problem import Bools


def constrained(
    wanted: CostModel, marked: Collection[str], segments: Sequence[range]
) -> tuple[CostModel, Skeleton]:
    """The cost model `wanted`, restricted to choices of unconstrained clusters, and the structure.

    `marked` are the operators whose choices are constrained.
    """
    free = wanted.with_allowed(Allowed())
    forced_leaders: frozenset[str] = frozenset()
    while True:
        assembly = Assembly(free, segments, Skeleton(forced_leaders=forced_leaders))
        clusters = assembly.clusters
        left = _left(clusters, wanted, marked)
        infeasible = {node for node, kept in left.items() if not kept.any()}
        members = _members(clusters, left)
        more = {
            op.name
            for node in infeasible
            for op in members[node]
            if op.name in marked and not clusters.op_nodes[op.name].leads
        }
        if not more:
            break
        forced_leaders |= more
    tilings: dict[str, frozenset[tuple[int, ...]]] = {}
    for node, kept in left.items():
        if node not in infeasible and not kept.all():
            for op in members[node]:
                choices = free.options(op).choices
                options = clusters.op_nodes[op.name].options[kept]
                tilings[op.name] = frozenset(choices[k] for k in options.tolist())
    return wanted.with_tilings(tilings), assembly.skeleton()


def _left(clusters: Clusters, wanted: CostModel, marked: Collection[str]) -> Mapping[int, Bools]:
    """For each marked cluster, which choices are allowed for all of its members: (K,)."""
    free, left = clusters.model, dict[int, Bools]()
    for op in free.graph.ops:
        op_node = clusters.op_nodes[op.name]
        if op.name in marked and op_node.node is not None:
            may = set(wanted.options(op).choices)
            good = np.array([choice in may for choice in free.options(op).choices])[op_node.options]
            left[op_node.node] = left.get(op_node.node, np.ones(len(good), bool)) & good
    return left


def _members(clusters: Clusters, nodes: Collection[int]) -> Mapping[int, list[Op]]:
    """The operators of some clusters, in order."""
    found: dict[int, list[Op]] = {node: [] for node in nodes}
    for op in clusters.model.graph.ops:
        node = clusters.op_nodes[op.name].node
        if node in found:
            found[node].append(op)
    return found
