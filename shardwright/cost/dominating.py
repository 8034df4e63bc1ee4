"""The calls that take most of what plans compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from shardwright.cost.calls import form_of
from shardwright.cost.layouts import local_sizes
from shardwright.cost.workload import OperatorClass, workload
from shardwright.ir.calls import Call
from shardwright.ir.graph import Graph
from shardwright.ir.plan import Plan
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro import micro_batches
from shardwright.rules.micro_graph import micro_graph
from shardwright.rules.placing import parse_tiling
from shardwright.rules.rule import Together

PART = 0.97  # of what is computed
MOST = 80  # calls
_UNTIMED = (OperatorClass.VIEW, OperatorClass.PART, OperatorClass.EXPERTS)


def dominating(graph: Graph, analysis: Analysis, plans: Iterable[Plan]) -> list[Call]:
    """The calls of `plans`, those first that take longest in any, until few seconds are left.

    Operators of plans in several micro-batches have the sizes of one.
    """
    most: defaultdict[Call, float] = defaultdict(float)
    sized = {1: (graph, analysis)}
    for plan in plans:
        count = plan.micro_batches
        if count not in sized:
            sized[count] = micro_graph(graph, analysis, micro_batches(graph, analysis, count))
        for call, part in _parts(*sized[count], plan).items():
            most[call] = max(most[call], part)
    found: list[Call] = []
    total, covered = sum(most.values()), 0.0
    for call, part in sorted(most.items(), key=lambda item: -item[1]):
        if covered >= PART * total or len(found) == MOST:
            break
        found.append(call)
        covered += part
    return found


def _parts(graph: Graph, analysis: Analysis, plan: Plan) -> Mapping[Call, float]:
    """Seconds of each call in a plan, of all that the plan computes."""
    found: defaultdict[Call, float] = defaultdict(float)
    planned = {op.name: op for op in plan.ops}
    total = sum(op.seconds for op in plan.ops) or 1.0
    for op in graph.ops:
        rule = analysis.rules[op.name]
        form = form_of(op, rule, graph)
        if form is None or workload(op, rule, graph).kind in _UNTIMED:
            continue
        tiling = parse_tiling(rule, planned[op.name].tiling)
        if any(isinstance(choice, Together) for choice in tiling):
            continue  # no call of its own
        found[form.at(local_sizes(rule, tiling, plan.layout_mesh))] += (
            planned[op.name].seconds / total
        )
    return found
