"""Expands a uniform strategy to a point of the search space, which becomes a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import final

import numpy as np

from shardwright.ir.gradient_sync import EVERY, LAST
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh, Seconds
from shardwright.ir.plan import Plan
from shardwright.ir.strategy.recompute import NONE, StrategyError
from shardwright.ir.strategy.strategy import ModelLimits, Strategy
from shardwright.machine.model import Machine
from shardwright.planner.pipeline.stage_assignment import Pipelines, Staged
from shardwright.planner.pipeline.stage_costs import Offer
from shardwright.planner.plans.candidate import Candidate
from shardwright.planner.plans.plan_builder import PlanBuilder
from shardwright.planner.space_factory import DecidedOptions, SpaceFactory
from shardwright.planner.strategies.dimensions import ModelDimensions
from shardwright.planner.strategies.layers import cuts_of, layers_of
from shardwright.planner.strategies.recomputation import recomputable_by, recomputed
from shardwright.planner.strategies.roles import mesh_of, role_axes
from shardwright.planner.strategies.tilings import StorageKind, Tilings
from shardwright.planner.strategies.unpriced import require_priced
from shardwright.program.lower.stages import needs_one_stage
from shardwright.rules.mixtures.dense_experts import dense_experts_note
from shardwright.simulate.time.stragglers import skewed, stretch
from shardwright.solve.elimination.problem import Ints

_EVERYWHERE = ("full", "groups", "children", "modules", "ops")  # kinds that apply to every layer


@final
class Expansion:
    """Expands strategies of one graph on one machine.

    Strategies that differ only in recomputation, storage and pipeline schedule share a space.
    """

    def __init__(
        self, graph: Graph, machine: Machine, optimizer: str, sources: SpaceFactory | None = None
    ) -> None:
        self.graph = graph
        self.machine = machine
        self.optimizer = optimizer
        self.sources = sources or SpaceFactory(graph, recompute=False)
        self.layers = layers_of(graph, self.sources.short.whole)
        self._factories: dict[int, SpaceFactory] = {}
        self._waiting: dict[tuple[int, bool], Machine] = {}
        self.known_dimensions: dict[int, ModelDimensions] = {}  # by the number of operators

    @cached_property
    def dimensions(self) -> ModelDimensions:
        """The dimensions that strategies split."""
        return ModelDimensions.of(self.sources.short.graph, self.sources.analysis)

    @cached_property
    def limits(self) -> ModelLimits:
        """Sizes of the model that limit degrees."""
        short, layers = self.sources.short.graph, len(self.layers)
        return self.dimensions.limits(short, self.sources.analysis, layers)

    @cached_property
    def _stretch(self) -> Seconds:
        return stretch(self.graph, self.sources.analysis, self.machine)

    def require(self, strategy: Strategy) -> None:
        """Raise `StrategyError` for a strategy that cannot be priced here."""
        strategy.require(self.machine.devices, self.limits)
        require_priced(strategy, self.graph, self.machine)
        role_axes(strategy)
        if strategy.ep > 1 and not self.dimensions.experts:
            why = dense_experts_note(self.graph) or "this model has none"
            raise StrategyError(f"ep={strategy.ep} splits experts, and {why}; use ep=1")
        if strategy.cp > 1 and not self.dimensions.sequence:
            raise StrategyError(
                f"cp={strategy.cp} splits a sequence, and no input of this model has tokens; use"
                " cp=1"
            )
        if strategy.tp > 1 and not self.dimensions.splits(strategy.tp):
            raise StrategyError(
                f"tp={strategy.tp} splits no weight of this model evenly; use tp=1 or a degree that"
                " divides heads and inner features"
            )
        if strategy.pp > 1:
            self._require_stages(strategy)
        if strategy.micro_batches > 1:
            counts, reasons = self.sources.possible((strategy.micro_batches,))
            if strategy.micro_batches not in counts:
                raise StrategyError(f"{'; '.join(reasons)}; use micro_batches=1")

    def _require_stages(self, strategy: Strategy) -> None:
        if reason := needs_one_stage(self.graph):
            raise StrategyError(f"pp={strategy.pp}: {reason}; use pp=1")
        if not self.sources.cuts.allow(strategy.stages):
            raise StrategyError(
                f"pp={strategy.pp} x virtual_stages={strategy.virtual_stages} are more stages than"
                " this model can be cut into; use fewer"
            )

    def expanded(self, strategy: Strategy) -> Candidate:
        """The point of a strategy, which becomes a plan.

        Raises `StrategyError` for one that does not fit model or machine, or that has no price yet.
        """
        self.require(strategy)
        return SpaceOfStrategy(self, strategy, (StorageKind.of(strategy),)).candidate(strategy)

    def plan(self, strategy: Strategy) -> Plan:
        """The plan of a strategy by the tables, which leave out what its program alone has.

        Raises `StrategyError` as `expanded` does.
        """
        plan = marked(self.expanded(strategy).plan(0.0, ()), strategy)
        if strategy.recompute == NONE or any(op.segment for op in plan.ops):
            return plan
        note = (
            f"ac={strategy.recompute} recomputes nothing: what it names keeps only its inputs for"
            " the backward pass, which are kept in any case; name modules of several operators, as"
            " a layer or its MLP"
        )
        return replace(plan, notes=(*plan.notes, note))

    def factory(self, together: int) -> SpaceFactory:
        """The factory of spaces in which a repeat has `together` layers."""
        if together == 1:
            return self.sources
        if together not in self._factories:
            self._factories[together] = SpaceFactory(
                self.graph, recompute=False, together=together, other=self.sources
            )
        return self._factories[together]

    def setting(self, strategy: Strategy) -> tuple[Machine, Mesh, Tilings]:
        """The machine with its straggler time, the mesh of a group, and the tilings on it."""
        axes = role_axes(strategy)
        mesh, staged = mesh_of(strategy, axes), strategy.pp > 1
        machine = self.waiting(mesh.size, strategy.micro_batches, staged=staged)
        return machine, mesh, Tilings(strategy, axes, self.known_dimensions)

    def waiting(self, devices: int, micro_batches: int, *, staged: bool) -> Machine:
        """The machine with the straggler time of a group of `devices` in one micro-batch."""
        key = devices * micro_batches, staged
        if key not in self._waiting:  # one object, so that cost models on it share tables
            self._waiting[key] = skewed(self.machine, lambda: self._stretch, key[0], whole=staged)
        return self._waiting[key]


@final
class SpaceOfStrategy:
    """The space that strategies of several `kinds` of storage and any recomputation share.

    These strategies have equal axes and equal numbers of micro-batches and pipeline groups.
    """

    def __init__(
        self, expansion: Expansion, strategy: Strategy, kinds: Sequence[StorageKind]
    ) -> None:
        self.expansion = expansion
        machine, mesh, self.tilings = expansion.setting(strategy)
        word = strategy.recompute
        self.recomputable = recomputable_by(word, expansion.graph, expansion.layers)
        options = DecidedOptions(
            expansion.optimizer,
            strategy.micro_batches,
            self.recomputable.segments,
            sync_of(strategy),
            self.recomputable.skeleton,
            strategy.compile != "off",
        )
        space, short = expansion.factory(self.recomputable.together).decided_space(
            machine, mesh, options, lambda model: self.tilings.allowed(model, kinds)
        )
        self.writer = PlanBuilder(space, expansion.graph, short, expansion.optimizer)
        self._known: dict[StorageKind, tuple[Ints, Ints]] = {}

    @cached_property
    def offer(self) -> Offer:
        """Prices assignments of this space as pipeline stages."""
        return Offer(self.writer, ())

    def candidate(self, strategy: Strategy) -> Candidate:
        """The point of one of the strategies."""
        if strategy.pp == 1:
            return self._whole(strategy, self.assignment_of(strategy))
        return self._staged(strategy, *self.assignments(StorageKind.of(strategy)))

    def assignment_of(self, strategy: Strategy) -> Ints:
        """The whole assignment of one of the strategies, which has no stages."""
        kept, again = self.assignments(StorageKind.of(strategy))
        return self._mixed(kept, again, self._recomputed(strategy))

    def assignments(self, kind: StorageKind) -> tuple[Ints, Ints]:
        """The whole assignments in which no layer is recomputed, and in which all are."""
        if kind not in self._known:
            self._known[kind] = (
                self._assignment(kind, recompute=False),
                self._assignment(kind, recompute=True),
            )
        return self._known[kind]

    def _whole(self, strategy: Strategy, choice: Ints) -> Candidate:
        point = self.writer.space.prices.point(tuple(choice.tolist()))
        (peak,) = self.writer.peaks([point])
        return Candidate(point, peak, self.writer, str(strategy), ())

    def _staged(self, strategy: Strategy, kept: Ints, again: Ints) -> Candidate:
        """The pipeline, cut evenly in time where the strategy names no cut."""
        cuts, schedule = self.expansion.sources.cuts, strategy.schedule
        pipelines = Pipelines(self.offer, cuts, strategy.pp, schedule, strategy.virtual_stages)
        found: Staged | None
        if strategy.stage_cut is not None:
            places: Sequence[int] = cuts_of(strategy.stage_cut, self.expansion.layers)
        else:
            everywhere = again if strategy.recompute.kind in _EVERYWHERE else kept
            even = pipelines.even_cuts(tuple(everywhere.tolist()))
            if even is None:
                raise _no_pipeline(strategy)
            places = even
        layers = self._recomputed(strategy, places)
        found = pipelines.priced(tuple(self._mixed(kept, again, layers).tolist()), places)
        if found is None:
            raise _no_pipeline(strategy)
        memory = partial(pipelines.memory, found)
        name = str(strategy)
        return Candidate(found.point, found.peak, self.writer, name, (), (), found, memory)

    def _recomputed(self, strategy: Strategy, cuts: Sequence[int] = ()) -> tuple[range, ...]:
        """The segments that a strategy runs again."""
        given = self.expansion.graph, self.expansion.layers, self.recomputable
        return recomputed(strategy.recompute, *given, cuts)

    def _mixed(self, kept: Ints, again: Ints, layers: Sequence[range]) -> Ints:
        """The whole assignment in which these layers are recomputed."""
        mixed, ops = kept.copy(), self.writer.graph.ops
        for layer in layers:
            nodes = self.writer.segment_nodes(ops[i].name for i in layer)
            mixed[nodes] = again[nodes]
        return mixed

    def _assignment(self, kind: StorageKind, *, recompute: bool) -> Ints:
        """The whole assignment in which every layer is recomputed, or none."""
        space = self.writer.space
        options = dict.fromkeys((op.name for op in space.model.graph.ops), 0)
        storage = dict(self._storage(kind))
        kept = self.recomputable.skeleton.kept or ()
        chosen = space.assignment(options, storage, recompute, kept)
        return np.array(space.folded.expand(chosen), np.int64)

    def _storage(self, kind: StorageKind) -> Iterator[tuple[str, int]]:
        """For every parameter the index of its storage choice."""
        space = self.writer.space
        for leaf, stored in zip(space.parameters, space.stored, strict=True):
            if len(stored.codes) == 1:
                yield leaf.name, 0
                continue
            code = self.tilings.storage_code(space.model, leaf.name, kind)
            yield leaf.name, stored.find(code, regathered=kind.regathered)


def sync_of(strategy: Strategy) -> str | None:
    """After which micro-batches gradients are reduced, as in `Plan.gradient_sync`."""
    given = strategy.zero == 1 or strategy.gradient_sync is not None
    if strategy.micro_batches == 1 or not given:
        return None
    return EVERY if strategy.syncs_every else LAST


def _no_pipeline(strategy: Strategy) -> StrategyError:
    return StrategyError(
        f"there is no pipeline of {strategy.stages} stages under {strategy.schedule} through this"
        " model; use fewer stages"
    )


def marked(plan: Plan, strategy: Strategy) -> Plan:
    """`plan` with what a strategy has that tables do not: offload, and messages beside others."""
    hidden = {name: getattr(strategy, name) for name in ("async_tp", "ep_overlap")}
    return replace(plan, offload=strategy.offload, **hidden)
