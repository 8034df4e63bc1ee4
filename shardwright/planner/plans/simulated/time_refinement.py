"""Refines the time of finished plans by simulating their step programs.

The tables are additive, so they model neither buckets nor overlap of communication with
computation. The program of the first rank, whose tiles are the largest, is simulated on streams and
links; for a pipeline, those of the first ranks of all groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

from shardwright.ir.graph import Graph
from shardwright.ir.layout import Seconds
from shardwright.ir.plan import Plan
from shardwright.ir.timeline import Timeline
from shardwright.machine.model import Machine
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.simulate.time.async_pipeline import simulated_calls
from shardwright.simulate.time.program_prices import prices_of
from shardwright.simulate.time.stages import simulated_stages
from shardwright.simulate.time.steady_state import SteadyStateError
from shardwright.simulate.time.step_program import simulated
from shardwright.simulate.time.timeline import group_names


@final
class TimeRefinement:
    """Simulates steps of plans of `graph` on `machine`."""

    def __init__(self, graph: Graph, machine: Machine) -> None:
        self.graph, self.machine = graph, machine

    def refined(self, plan: Plan, lowering: PlanLowering) -> Plan:
        """`plan`, lowered by `lowering`, with the time of its step program, and its timeline.

        Raises:
            NotPeriodicError, SteadyStateError: micro-batches that the lowering of a pipeline leaves
                out do not run like others.
        """
        if plan.timeline is not None:
            return plan
        if plan.pipeline is None:
            found = self._timeline(plan, lowering)
            seconds = found.seconds
        else:
            found, seconds = self._stages(plan, lowering)
        least = min(plan.lower_bound_seconds, seconds)
        return replace(plan, step_seconds=seconds, lower_bound_seconds=least, timeline=found)

    def _stages(self, plan: Plan, lowering: PlanLowering) -> tuple[Timeline, Seconds]:
        """The timeline of a pipeline, and the seconds of a step."""
        assert plan.pipeline is not None, "this plan has stages"
        ranks = plan.stage_ranks
        programs = [lowering.program(ranks.rank(group, 0)) for group in range(ranks.groups)]
        prices = prices_of(plan, self.graph, self.machine)
        names = group_names(plan.pipeline.homes, ranks)
        if plan.is_asynchronous:
            return simulated_calls(plan, programs, prices, names)
        repeats = lowering.repeats(programs)
        found = simulated_stages(programs, [prices] * len(programs), names, repeats)
        return found, found.seconds

    def _timeline(self, plan: Plan, lowering: PlanLowering) -> Timeline:
        prices = prices_of(plan, self.graph, self.machine)
        count = plan.micro_batches
        try:
            return simulated(lowering.program(0), prices, plan.devices, count)
        except SteadyStateError:
            every = lowering.of_micro_batches(0, range(count))
            return simulated(every, prices, plan.devices)
