"""Values that cost models of one graph share, on all meshes or on meshes of one shape."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import final

from shardwright.ir.graph import Graph, Op
from shardwright.ir.layout import Atoms
from shardwright.machine.calls import by_target
from shardwright.machine.model import Machine
from shardwright.planner.communication.expert_all_to_all import ExpertAllToAll
from shardwright.planner.communication.resharding import Floats, Reads, Table
from shardwright.planner.tables.layout_codes import Ints
from shardwright.planner.tables.memory import retention
from shardwright.planner.tables.options import Forms, Only, OptionCache
from shardwright.rules.analysis import Analysis
from shardwright.rules.deferrable_scalars import deferrable_scalars
from shardwright.simulate.costs.fusion import fusions
from shardwright.simulate.costs.workload import Workload, workload


@final
class MeshInvariants:
    """Forms of rules, workloads, retention and deferrable scalars of `graph` on `machine`.

    Cost models of this graph on several meshes of that machine may share one. Where layers are
    `compiled`, the compiler fuses operators. `like` are those of another graph, on the same device,
    whose forms of rules and workloads are the same objects where they are equal.
    """

    def __init__(
        self,
        graph: Graph,
        analysis: Analysis,
        machine: Machine,
        *,
        compiled: bool = False,
        like: MeshInvariants | None = None,
    ) -> None:
        self._device, self._expert_skew = machine.device, machine.expert_skew
        self.forms: Forms = Forms() if like is None else like.forms
        self.retention = retention(graph)
        self.deferrable_scalars = deferrable_scalars(graph)
        self.compiled = compiled
        self._fusions = fusions(graph, analysis.rules) if compiled else {}
        self._graph = graph
        self._analysis = analysis
        self._known = by_target(machine.device.timings)
        self._workloads: dict[str, Workload] = {}
        self._equal: dict[Workload, Workload] = {} if like is None else like._equal

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


@dataclass(frozen=True, slots=True, eq=False)
class SharedTables:
    """Options and tables of one graph under one pricing, on meshes of one shape.

    They depend neither on the names of axes nor on the choices that are allowed, so cost models
    with other names or choices may share them. Keys have ids of options and workloads, which
    `options` and `meshless` keep alive.
    """

    meshless: MeshInvariants
    options: OptionCache
    reads: Reads
    tables: dict[Hashable, Table] = field(default_factory=dict)
    workspaces: dict[Hashable, Ints] = field(default_factory=dict)
    backward: dict[Hashable, Floats] = field(default_factory=dict)
    exchanged: dict[Hashable, ExpertAllToAll] = field(default_factory=dict)
    storable: dict[tuple[Atoms, Only | None], Ints] = field(default_factory=dict)

    def of(self, meshless: MeshInvariants, reads: Reads) -> SharedTables:
        """The same tables for another form of the graph."""
        return replace(self, meshless=meshless, reads=reads)
