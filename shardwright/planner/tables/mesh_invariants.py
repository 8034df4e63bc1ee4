"""The inputs of a graph's costs that do not depend on the mesh."""

from __future__ import annotations

from typing import final

from shardwright.ir.graph import Graph, Op
from shardwright.machine.calls import by_target
from shardwright.machine.model import Machine
from shardwright.planner.tables.memory import retention
from shardwright.planner.tables.options import Forms
from shardwright.rules.analysis import Analysis
from shardwright.rules.deferrable_scalars import deferrable_scalars
from shardwright.simulate.costs.fusion import fusions
from shardwright.simulate.costs.workload import Workload, workload


@final
class MeshInvariants:
    """Forms of rules, workloads, retention and deferrable scalars of `graph` on `machine`.

    Cost models of this graph on several meshes of that machine may share one. Where layers are
    `compiled`, the compiler fuses operators.
    """

    def __init__(
        self, graph: Graph, analysis: Analysis, machine: Machine, *, compiled: bool = False
    ) -> None:
        self._device, self._expert_skew = machine.device, machine.expert_skew
        self.forms = Forms()
        self.retention = retention(graph)
        self.deferrable_scalars = deferrable_scalars(graph)
        self.compiled = compiled
        self._fusions = fusions(graph, analysis.rules) if compiled else {}
        self._graph = graph
        self._analysis = analysis
        self._known = by_target(machine.device.timings)
        self._workloads: dict[str, Workload] = {}
        self._equal: dict[Workload, Workload] = {}

    def holds_on(self, machine: Machine) -> bool:
        """Whether these values are also valid on `machine`."""
        return machine.device is self._device and machine.expert_skew == self._expert_skew

    def workload(self, op: Op) -> Workload:
        """The workload of `op`; equal workloads are one object, so that it can key tables."""
        if op.name not in self._workloads:
            rule = self._analysis.rules[op.name]
            given = self._known, self._expert_skew, self._fusions.get(op.name)
            found = workload(op, rule, self._graph, *given)
            self._workloads[op.name] = self._equal.setdefault(found, found)
        return self._workloads[op.name]
