"""The calls that take most of the compute time of plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from shardwright.ir.graph import Graph
from shardwright.ir.plan import Plan
from shardwright.machine.calls import OpCall
from shardwright.rules.analysis import Analysis, analyze
from shardwright.rules.micro_batches import micro_batches
from shardwright.rules.micro_graph import micro_graph
from shardwright.rules.operators.chunks import with_chunks
from shardwright.rules.placements import parse_tiling
from shardwright.rules.rule import JointSplit
from shardwright.simulate.costs.op_calls import form_of
from shardwright.simulate.costs.tile_sizes import local_sizes
from shardwright.simulate.costs.workload import OperatorClass, workload

PART = 0.97  # the fraction of the compute time that the timed calls cover
MOST = 80  # the largest number of timed calls
_SOME = 0.002  # operators above this fraction of the compute time have at least one timed call
_UNTIMED = (
    OperatorClass.VIEW, OperatorClass.PART, OperatorClass.EXPERTS, OperatorClass.CHUNKED_LOSS,
    OperatorClass.CHUNKED_MLP,
)  # fmt: skip


def hot_calls(graph: Graph, analysis: Analysis, plans: Iterable[Plan]) -> list[OpCall]:
    """The calls of `plans` that take longest, which together cover `PART` of the compute time.

    The longest call of each operator above `_SOME` comes first, because an operator whose formula
    underestimates its time would otherwise be missed. Plans with micro-batches give calls of the
    size of one micro-batch.
    """
    most: defaultdict[OpCall, float] = defaultdict(float)
    forms = {_chunks_of(graph): (graph, analysis)}
    sized: dict[tuple[tuple[int, int], int], tuple[Graph, Analysis]] = {}
    for plan in plans:
        chunks, count = _chunks_of(plan), plan.micro_batches
        if chunks not in forms:
            form = with_chunks(graph, *chunks)
            forms[chunks] = form, analyze(form)
        if (chunks, count) not in sized:
            form, known = forms[chunks]
            parts = micro_batches(form, known, count) if count > 1 else None
            sized[chunks, count] = micro_graph(form, known, parts) if parts else forms[chunks]
        for call, part in _parts(*sized[chunks, count], plan).items():
            most[call] = max(most[call], part)
    total = sum(most.values())
    longest = sorted(most, key=lambda call: -most[call])
    by_target: defaultdict[str, list[OpCall]] = defaultdict(list)
    for call in longest:
        by_target[call.target].append(call)
    found = [
        calls[0] for calls in by_target.values() if sum(most[c] for c in calls) > _SOME * total
    ]
    covered = sum(most[call] for call in found)
    for call in (one for one in longest if one not in found):
        if covered >= PART * total or len(found) >= MOST:
            break
        found.append(call)
        covered += most[call]
    return found


def _chunks_of(one: Graph | Plan) -> tuple[int, int]:
    """The chunks of the loss and of MLPs."""
    return one.numerics.loss_chunks, one.numerics.mlp_chunks


def _parts(graph: Graph, analysis: Analysis, plan: Plan) -> Mapping[OpCall, float]:
    """The fraction of a plan's compute time that each call takes."""
    found: defaultdict[OpCall, float] = defaultdict(float)
    planned = {op.name: op for op in plan.ops}
    total = sum(op.seconds for op in plan.ops) or 1.0
    for op in graph.ops:
        rule = analysis.rules[op.name]
        form = form_of(op, rule, graph)
        if form is None or workload(op, rule, graph).kind in _UNTIMED:
            continue
        tiling = parse_tiling(rule, planned[op.name].tiling)
        if any(isinstance(choice, JointSplit) for choice in tiling):
            continue  # no call of its own
        found[form.at(local_sizes(rule, tiling, plan.layout_mesh))] += (
            planned[op.name].seconds / total
        )
    return found
