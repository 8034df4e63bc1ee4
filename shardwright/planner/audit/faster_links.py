"""Time of a step whose messages wait, if links between devices were faster.

The same decisions are simulated on the machine with its outermost links `FASTER` times as fast.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shardwright.ir.graph import Graph
from shardwright.ir.layout import Seconds
from shardwright.ir.plan import Plan
from shardwright.machine.model import Level, Machine
from shardwright.planner.plans.simulated.folded_costs import FoldedCosts
from shardwright.planner.plans.simulated.time_refinement import TimeRefinement
from shardwright.planner.recost import with_internal_transfers
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.rules.analysis import Analysis

FASTER = 2.0
_WAITS = 0.1  # of a step that neither computes nor updates: less is not looked at
_GAIN = 0.02  # the least fraction of a step that faster links save


class FasterLinks(NamedTuple):
    """A level of links, and the seconds of a step if they had `FASTER` times the bandwidth."""

    level: str
    seconds: Seconds


def faster_links(
    plan: Plan, graph: Graph, analysis: Analysis, machine: Machine
) -> FasterLinks | None:
    """The outermost links, if the step of a simulated plan would be faster with faster ones.

    `graph` has its loss and MLPs in the chunks of the plan, and `analysis` is of it.
    None for plans in stages, whose devices also wait for each other for other reasons.
    """
    busy = sum(op.seconds for op in plan.ops) + sum(p.seconds for p in plan.parameters)
    if plan.pipeline is not None or plan.step_seconds - busy < _WAITS * plan.step_seconds:
        return None
    used = machine.with_devices(plan.mesh.size)
    outer = max((i for i, level in enumerate(used.levels) if level.size > 1), default=None)
    if outer is None:
        return None
    levels = [_faster(one) if i == outer else one for i, one in enumerate(used.levels)]
    seconds = _seconds(plan, graph, analysis, replace(used, levels=tuple(levels)))
    if seconds >= (1 - _GAIN) * plan.step_seconds:
        return None
    return FasterLinks(used.levels[outer].name, seconds)


def _faster(level: Level) -> Level:
    gathers = level.gather_bytes_per_s
    return replace(
        level,
        bytes_per_s=FASTER * level.bytes_per_s,
        gather_bytes_per_s=None if gathers is None else FASTER * gathers,
    )


def _seconds(plan: Plan, graph: Graph, analysis: Analysis, machine: Machine) -> Seconds:
    """Seconds of a step of the same decisions on another machine."""
    priced = with_internal_transfers(replace(plan, timeline=None), graph, analysis, machine)
    decisions = read_plan(plan, graph, analysis)
    few = FoldedCosts(graph, analysis, machine).seconds(priced, decisions)
    if few is not None:
        return few
    alone = machine.backend_spec.alone_bytes
    lowering = PlanLowering(graph, analysis, decisions, alone)
    return TimeRefinement(graph, machine).refined(priced, lowering).step_seconds
