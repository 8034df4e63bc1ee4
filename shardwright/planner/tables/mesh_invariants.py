"""Values that cost models of one graph share, on all meshes or on meshes of one shape."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import final

from shardwright.ir.graph import Graph, Op
from shardwright.ir.layout import Atoms
from shardwright.ir.options.fp8 import MXFP8, recipe_of
from shardwright.machine.calls import by_target
from shardwright.machine.model import Machine
from shardwright.planner.communication.expert_all_to_all import ExpertAllToAll
from shardwright.planner.communication.resharding import Floats, Reads, Table
from shardwright.planner.tables.layout_codes import Ints
from shardwright.planner.tables.memory import retention
from shardwright.planner.tables.options import Forms, Only, OptionCache
from shardwright.planner.tables.pricing import Pricing
from shardwright.rules.analysis import Analysis
from shardwright.rules.deferrable_scalars import deferrable_scalars
from shardwright.rules.operators.fp8_layers import experts_in_8_bit, fp8_layers
from shardwright.simulate.costs.fusion import fusions
from shardwright.simulate.costs.workload import Fp8Work, Workload, workload


@final
class MeshInvariants:
    """Forms of rules, workloads, retention and deferrable scalars of `graph` on `machine`.

    Cost models of this graph on several meshes of that machine may share one. Where layers are
    `compiled`, the compiler fuses operators. `graph` is that of one of `micro_batches`. `like` are
    those of another graph, on the same device, whose forms of rules and workloads are the same
    objects where they are equal.
    """

    def __init__(
        self,
        graph: Graph,
        analysis: Analysis,
        machine: Machine,
        *,
        compiled: bool = False,
        micro_batches: int = 1,
        like: MeshInvariants | None = None,
    ) -> None:
        self._device, self._expert_skew = machine.device, machine.expert_skew
        self.forms: Forms = Forms() if like is None else like.forms
        self.retention = retention(graph)
        self.deferrable_scalars = deferrable_scalars(graph)
        self.compiled = compiled
        self._fusions = fusions(graph, analysis.rules) if compiled else {}
        self._in_8_bit, self._recipe = fp8_layers(graph), recipe_of(graph.numerics.fp8)
        self._copies = not machine.device.multiplies_in(MXFP8)  # operands in another layout
        self._micro_batches = micro_batches
        self._graph = graph
        self._analysis = analysis
        self._known = by_target(machine.device.timings)
        self._workloads: dict[str, Workload] = {}
        self._equal: dict[Workload, Workload] = {} if like is None else like._equal

    @classmethod
    def under(
        cls, pricing: Pricing, graph: Graph, analysis: Analysis, machine: Machine
    ) -> MeshInvariants:
        """The values of a graph of its own under a pricing."""
        compiled, count = pricing.compiled, pricing.micro_batches
        return cls(graph, analysis, machine, compiled=compiled, micro_batches=count)

    def holds_on(self, machine: Machine) -> bool:
        """Whether these values are also valid on `machine`."""
        return machine.device is self._device and machine.expert_skew == self._expert_skew

    def workload(self, op: Op) -> Workload:
        """The workload of `op`; equal workloads are one object, so that it can key tables."""
        if op.name not in self._workloads:
            rule = self._analysis.rules[op.name]
            given = self._known, self._expert_skew, self._fusions.get(op.name), self._fp8(op)
            found = workload(op, rule, self._graph, *given)
            self._workloads[op.name] = self._equal.setdefault(found, found)
        return self._workloads[op.name]

    def _fp8(self, op: Op) -> Fp8Work | None:
        """The casts of a layer in 8 bits; None for other operators."""
        recipe = self._recipe
        if recipe is None:
            return None
        share = 1 / self._micro_batches if recipe.casts_weights_once else 1.0
        if experts_in_8_bit(self._graph, op):
            plain = recipe.plain  # experts are gathered in the model's dtype
            return Fp8Work(plain if self._copies else plain.without_copies(), True, share)
        if op.name not in self._in_8_bit:
            return None
        if recipe.gathers and not self._graph.tensor[op.operands[1]].gathered_as:
            recipe = recipe.plain
        recipe = recipe if self._copies else recipe.without_copies()
        return Fp8Work(recipe, self._in_8_bit[op.name], share)


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
