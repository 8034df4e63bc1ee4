"""Settles plans of several forms of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.plan import Plan
from shardwright.planner.meshes.mesh_loop import MeshLoop
from shardwright.planner.plans.plan_simulation import PlanSimulation
from shardwright.planner.plans.simulated.refinement import Refinement


@final
class Refinements(PlanSimulation):
    """Settles plans, each on the form of the graph that it is for."""

    def __init__(self, tracer: OpTracer) -> None:
        self._tracer = tracer
        self._of: dict[str, Refinement] = {}  # by fingerprint

    def add(self, loops: Sequence[MeshLoop]) -> None:
        """Add forms of the graph; those that are known keep what was simulated of them."""
        for loop in loops:
            graph = loop.factory.graph
            if graph.fingerprint not in self._of:
                given = loop.machine, loop.options.optimizer, self._tracer, loop.factory.analysis
                self._of[graph.fingerprint] = Refinement(graph, *given)

    def of(self, plan: Plan) -> Refinement:
        """The refinement of the form of the graph which `plan` is for."""
        return self._of[plan.fingerprint]

    def ranked(self, plan: Plan) -> Plan:
        """See `Refinement`."""
        return self._of[plan.fingerprint].ranked(plan)

    def settled(self, plan: Plan) -> Plan:
        """See `Refinement`."""
        return self._of[plan.fingerprint].settled(plan)

    def compared(self, plan: Plan) -> Plan:
        """See `Refinement`."""
        return self._of[plan.fingerprint].compared(plan)

    def peak(self, plan: Plan) -> Bytes:
        """See `Refinement`."""
        return self._of[plan.fingerprint].peak(plan)

    def reserved(self, plan: Plan) -> Bytes:
        """See `Refinement`."""
        return self._of[plan.fingerprint].reserved(plan)

    def seconds(self, plan: Plan) -> Seconds:
        """See `Refinement`."""
        return self._of[plan.fingerprint].seconds(plan)

    def least_seconds(self, plan: Plan) -> Seconds:
        """See `Refinement`."""
        return self._of[plan.fingerprint].least_seconds(plan)

    def deepened(self, plan: Plan, limit: Bytes | None) -> Plan:
        """See `Refinement`."""
        return self._of[plan.fingerprint].deepened(plan, limit)
