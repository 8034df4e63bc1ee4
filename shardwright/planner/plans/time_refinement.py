"""Refines the time of finished plans by simulating their step programs.

Tables add up, and so they know neither buckets nor what runs beside operators. A plan in
micro-batches that is looked at is lowered for its first rank, whose tiles are the largest, and
played on streams and links (`simulate/time/step_program.py`). Whole batches follow when their steps
run as step programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import final

from shardwright.ir.graph import Graph
from shardwright.ir.plan import Plan
from shardwright.ir.timeline import Timeline
from shardwright.machine.model import Machine
from shardwright.planner.micro_batch_counts import MicroBatchCounts
from shardwright.program.decisions import Decisions
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.instructions import StepProgram
from shardwright.program.step.lower.lowering import lower_step
from shardwright.program.step.lower.micro_batches import micro_batched_step
from shardwright.program.step.optimize import optimized
from shardwright.rules.analysis import Analysis, analyze
from shardwright.simulate.time.program_prices import prices_of
from shardwright.simulate.time.steady_state import SAMPLED, SteadyStateError
from shardwright.simulate.time.step_program import simulated


@final
class TimeRefinement:
    """Simulates steps of plans of `graph` on `machine`; its `analysis` is made if not given."""

    def __init__(self, graph: Graph, machine: Machine, analysis: Analysis | None = None) -> None:
        self.graph, self.machine = graph, machine
        self._given = analysis

    @cached_property
    def _analysis(self) -> Analysis:
        return self._given or analyze(self.graph)

    @cached_property
    def _counts(self) -> MicroBatchCounts:
        return MicroBatchCounts(self.graph, self._analysis)

    def refined(self, plan: Plan) -> Plan:
        """`plan` with the time of its step program, and its timeline.

        Plans of whole batches and with pipeline stages stay as they are.
        """
        if plan.pipeline is not None or plan.micro_batches == 1 or plan.timeline is not None:
            return plan
        found = self._timeline(plan)
        least = min(plan.lower_bound_seconds, found.seconds)
        return replace(plan, step_seconds=found.seconds, lower_bound_seconds=least, timeline=found)

    def _timeline(self, plan: Plan) -> Timeline:
        decisions = read_plan(plan, self.graph, self._analysis)
        prices = prices_of(plan, self.graph, self.machine)
        count = plan.micro_batches
        try:
            few = self._program(decisions, [0] * min(count, SAMPLED))
            return simulated(few, prices, plan.devices, count)
        except SteadyStateError:
            return simulated(self._program(decisions, [0] * count), prices, plan.devices)

    def _program(self, decisions: Decisions, numbers: Sequence[int]) -> StepProgram:
        """The program of the first rank for micro-batches that are as those with these numbers."""
        micro = self._counts.split(decisions.micro_batches)
        firsts = sorted(set(numbers))
        step = micro_batched_step(self.graph, self._analysis, micro, decisions, 0, numbers=firsts)
        known = dict(zip(firsts, step.programs, strict=True))
        step = replace(step, programs=[known[number] for number in numbers])
        return optimized(lower_step(step))
