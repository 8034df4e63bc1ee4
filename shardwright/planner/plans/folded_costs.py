"""Costs of a plan from the step program of few of its equal layers.

They equal those of the whole program: time and memory of layers that were left out follow from the
ones beside them, where those are run alike (`program/step/sections.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, final

from shardwright.ir.buckets import BUCKET_BYTES, gradient_bucket_bytes
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.plan import Plan
from shardwright.ir.redistribution import Collective
from shardwright.machine.model import Machine
from shardwright.planner.plans.repeated_layers import RepeatedLayers
from shardwright.program.decisions import Decisions
from shardwright.program.step.instructions import StepProgram
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.program.step.lower.purposes import Purpose, purposes
from shardwright.program.step.sections import FoldedGraph, NotPeriodicError, Sections, sections_of
from shardwright.rules.analysis import Analysis
from shardwright.simulate.memory.folded_step import FoldedStep
from shardwright.simulate.memory.step import Trainer
from shardwright.simulate.time.program_prices import prices_of
from shardwright.simulate.time.steady_state import SteadyStateError
from shardwright.simulate.time.step_program import simulated

_Cost = TypeVar("_Cost")
_WIDTHS = (1, 2)  # copies that may count as one layer, as where two kinds alternate


@final
class FoldedCosts:
    """Time and memory of plans of `graph` on `machine`, where their layers can be left out."""

    def __init__(self, graph: Graph, analysis: Analysis, machine: Machine) -> None:
        self.graph, self.analysis, self.machine = graph, analysis, machine
        self._layers = RepeatedLayers(graph)

    def seconds(self, plan: Plan, decisions: Decisions) -> Seconds | None:
        """Seconds of a step; None where only the whole program tells."""
        return self._first(plan, decisions, lambda folded: self._seconds(plan, decisions, folded))

    def peak_bytes(
        self,
        plan: Plan,
        decisions: Decisions,
        ranks: tuple[int, ...],
        trainer: Trainer,
        tracer: OpTracer,
    ) -> Bytes | None:
        """The most memory that one of `ranks` needs; None where only the whole program tells."""

        def peak(folded: FoldedGraph) -> Bytes:
            lowering = self._lowering(decisions, folded)
            found = []
            for rank in ranks:
                step = FoldedStep(self.graph, folded, lowering, rank, trainer, tracer)
                found.append(step.peak(_sections(lowering, rank, folded)))
            return max(found)

        return self._first(plan, decisions, peak)

    def _first(
        self, plan: Plan, decisions: Decisions, cost: Callable[[FoldedGraph], _Cost]
    ) -> _Cost | None:
        """The cost for the first width of layers that are run alike."""
        if plan.pipeline is not None:
            return None
        for width in _WIDTHS:
            folded = self._layers.folded(plan, decisions, width)
            if folded is None:
                continue
            try:
                return cost(folded)
            except (NotPeriodicError, SteadyStateError):
                continue
        return None

    def _seconds(self, plan: Plan, decisions: Decisions, folded: FoldedGraph) -> Seconds:
        sections = _sections(self._lowering(decisions, folded), 0, folded)
        prices = prices_of(plan, folded.graph, self.machine)
        update = defaultdict(float, prices.update)
        for name, like in folded.stands_for.items():
            update[like] += prices.update[name]
        prices = replace(prices, update=update)
        return simulated(sections, prices, plan.devices, plan.micro_batches).seconds

    def _lowering(self, decisions: Decisions, folded: FoldedGraph) -> PlanLowering:
        tilings = {op.name: decisions.tilings[op.name] for op in folded.graph.ops}
        few = replace(decisions, tilings=tilings)
        alone_bytes = self.machine.backend_spec.alone_bytes
        return PlanLowering(folded.graph, self.analysis, few, alone_bytes)


def _sections(lowering: PlanLowering, rank: int, folded: FoldedGraph) -> Sections:
    program = lowering.program(rank)
    _require_full_buckets(program, len(lowering.numbers))
    return sections_of(program, folded)


def _require_full_buckets(program: StepProgram, batches: int) -> None:
    """Raise `NotPeriodicError` if buckets of gradients would be larger with more layers.

    Of small models they are a part of all gradients (`gradient_bucket_bytes`).
    """
    known = purposes(program)
    sums: Counter[tuple[str, str]] = Counter()
    reduced: set[str] = set()
    for one in program.transfers():
        if known[one.handle] is not Purpose.GRADIENT:
            continue
        if one.collective is Collective.ALL_REDUCE:
            first = (part for part in one.parts if part.value not in reduced)
            for part in first:
                sums[one.channel, part.dtype] += part.bytes
        reduced.update(part.result for part in one.parts)
    if any(gradient_bucket_bytes(size // batches) < BUCKET_BYTES for size in sums.values() if size):
        raise NotPeriodicError("buckets of gradients depend on the number of layers")
