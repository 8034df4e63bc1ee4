"""The tiling of every operator, and the storage of every parameter, under a strategy.

Along an axis of data parallelism an operator splits the batch; along `cp` the sequence, also in
attention; along `tp` the dimensions that Megatron-LM splits, or, with sequence parallelism, the
sequence in operators that have none of these; along an axis of experts it routes rows to experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from shardwright.ir.graph import LeafKind, Op
from shardwright.ir.layout import Layout, Shard
from shardwright.ir.strategy.strategy import Strategy
from shardwright.planner.space.clusters import constant_values
from shardwright.planner.strategies.dimensions import ModelDimensions, is_attention
from shardwright.planner.strategies.roles import SHARDING, RoleAxis
from shardwright.planner.strategies.splits import (
    UNSPLIT,
    first_natural,
    first_shard,
    most_split,
    sharded_over,
    split_choice,
    with_other_dimensions,
)
from shardwright.planner.tables.layout_codes import digit, encode
from shardwright.planner.tables.model import CostModel
from shardwright.planner.tables.options import Allowed, Only
from shardwright.rules.rule import JointSplit, Route, Rule


@dataclass(frozen=True, slots=True)
class StorageKind:
    """Whether parameters are sharded over data-parallel ranks and regathered in backward."""

    sharded: bool
    regathered: bool

    @classmethod
    def of(cls, strategy: Strategy) -> StorageKind:
        """The storage that a strategy prescribes."""
        return cls(strategy.zero >= 1, strategy.reshards)


@final
class Tilings:
    """Decides operators and parameters of graphs on the mesh of `axes`."""

    def __init__(
        self,
        strategy: Strategy,
        axes: tuple[RoleAxis, ...],
        known: dict[int, ModelDimensions],
    ) -> None:
        """`known` caches dimensions by the number of operators of a graph; it is extended."""
        self.strategy = strategy
        self.axes = axes
        self._dimensions = known

    def allowed(self, model: CostModel, kinds: Sequence[StorageKind]) -> Allowed:
        """The choices that a strategy leaves: one tiling per operator, one layout per parameter.

        Parameters may be stored in each of `kinds`. If a tiling leaves a device without data, its
        innermost splits are removed.
        """
        if model.mesh.size == 1:
            return Allowed()
        parameters = {
            leaf.name: self._digits(model, leaf.name, kinds)
            for leaf in model.graph.leaves_of(LeafKind.PARAMETER)
        }
        return replace(self.of_operators(model), parameters=parameters)

    def of_operators(self, model: CostModel) -> Allowed:
        """The choices of operators as in `allowed`, and all choices of parameters."""
        if model.mesh.size == 1:
            return Allowed()
        wanted = self.choices(model)
        only = {
            name: tuple(frozenset({UNSPLIT, choice}) for choice in choices)
            for name, choices in wanted.items()
        }
        left = model.with_allowed(Allowed(only))
        tilings = {
            op.name: frozenset({most_split(left.options(op).choices, wanted[op.name])})
            for op in model.graph.ops
        }
        return Allowed(only, tilings=tilings)

    def choices(self, model: CostModel) -> dict[str, tuple[int, ...]]:
        """For each operator the numbers of its choices, as `wanted`; constants are not split."""
        constant, dims = constant_values(model.graph), self._dimensions_of(model)
        whole = (UNSPLIT,) * len(self.axes)
        return {
            op.name: whole
            if constant.issuperset(op.outputs)
            else self.wanted(op, model.analysis.rules[op.name], dims)
            for op in model.graph.ops
        }

    def wanted(self, op: Op, rule: Rule, dims: ModelDimensions) -> tuple[int, ...]:
        """The number of an operator's choice along each axis among `Rule.choices()`."""
        attention = is_attention(op, rule)
        whole = self.strategy.loss == "whole" and op.name in dims.logits
        return tuple(
            UNSPLIT
            if axis.size == 1 or (whole and axis.role == "tp")
            else self._choice(rule, axis, dims, attention=attention)
            for axis in self.axes
        )

    def storage_code(self, model: CostModel, name: str, kind: StorageKind) -> int:
        """The code of a parameter's layout."""
        return encode(self.layout(model, name, kind), model.analysis.atoms[name])

    def layout(self, model: CostModel, name: str, kind: StorageKind) -> Layout:
        """The layout in which a parameter is stored."""
        atoms, dims = model.analysis.atoms[name], model.analysis.dims[name]
        known = self._dimensions_of(model)
        inner = known.splits(self.strategy.tp)
        features = known.splits(self.strategy.expert_tensor)
        layout = Layout.replicated(model.mesh)
        owned = first_shard(dims, known.experts) is not None
        split: set[int] = set()  # dimensions
        for place, axis in enumerate(self.axes):
            shards: list[Shard] = []
            if axis.experts and (at := first_shard(dims, known.experts)) is not None:
                shards = [at]
            elif owned and axis.features and (at := first_shard(dims, features)) is not None:
                shards = with_other_dimensions(at, atoms)
            elif owned and (axis.features or axis.whole_experts):
                continue
            elif axis.role == "tp" and (at := first_shard(dims, inner)) is not None:
                shards = with_other_dimensions(at, atoms)
            layout, shard = first_natural(atoms, layout, place, shards)
            split |= {shard.dim} if shard is not None else set()
        if not kind.sharded:
            return layout
        data = (
            place
            for place, axis in enumerate(self.axes)
            if axis.role in SHARDING and not (owned and (axis.experts or axis.features))
        )
        return sharded_over(atoms, layout, data, split)

    def _digits(self, model: CostModel, name: str, kinds: Sequence[StorageKind]) -> Only:
        """The digits of a parameter's layouts along each axis."""
        counts = [len(sizes) for sizes in model.analysis.atoms[name]]
        layouts = [self.layout(model, name, kind) for kind in kinds]
        return tuple(
            frozenset(digit(layout.placements[place], counts) for layout in layouts)
            for place in range(len(model.mesh.axes))
        )

    def _dimensions_of(self, model: CostModel) -> ModelDimensions:
        """The dimensions of a model's graph, which may be the short or the whole one."""
        size = len(model.graph.ops)
        if size not in self._dimensions:
            self._dimensions[size] = ModelDimensions.of(model.graph, model.analysis)
        return self._dimensions[size]

    def _choice(self, rule: Rule, axis: RoleAxis, dims: ModelDimensions, *, attention: bool) -> int:
        """The number of an operator's choice along one axis among `Rule.choices()`."""
        if axis.experts and rule.routes:
            return _find_route(rule, dims.sequence if axis.role in ("cp", "tp") else dims.batch)
        if axis.features and rule.routes:
            return split_choice(rule, dims.splits(self.strategy.expert_tensor))
        if axis.role in ("dp_replicate", "dp_shard"):
            return split_choice(rule, dims.batch)
        if axis.role == "cp":
            return (
                self._across_sequence(rule, dims)
                if attention
                else split_choice(rule, dims.sequence)
            )
        inner = dims.splits(self.strategy.tp)
        split = UNSPLIT if axis.whole_experts and rule.routes else split_choice(rule, inner)
        if split == UNSPLIT and self.strategy.sequence_parallel:
            return split_choice(rule, dims.sequence)
        return split

    def _across_sequence(self, rule: Rule, dims: ModelDimensions) -> int:
        """The choice of an attention along `cp`."""
        if self.strategy.cp_style == "ulysses":
            return split_choice(rule, self._free_heads(dims))
        joint = [choice for choice in rule.choices() if isinstance(choice, JointSplit)]
        by_length = sorted(joint, key=lambda choice: len(choice.factors))
        if not by_length:
            return split_choice(rule, dims.sequence)
        ring = self.strategy.cp_style == "ring-zigzag"
        gathered = [one for one in by_length if not _splits_keys(rule, one)]
        rings = [one for one in by_length if _splits_keys(rule, one)]
        chosen = rings if ring else gathered
        if chosen:
            return rule.choices().index(chosen[-1])
        return split_choice(rule, dims.sequence)

    def _free_heads(self, dims: ModelDimensions) -> frozenset[int]:
        """Heads that `cp` may split: those that `tp` does not, or all that both divide."""
        both = self.strategy.tp * self.strategy.cp
        sizes, heads, inner = dims.sizes, dims.heads, dims.splits(self.strategy.tp)
        together = {atom for atom in heads & inner if sizes[atom] % both == 0}
        separate = {a for a in heads - inner if sizes[a] % self.strategy.cp == 0}
        return frozenset(together or separate)


def _splits_keys(rule: Rule, choice: JointSplit) -> bool:
    """Whether a joint split of attention leaves each device a part of the keys."""
    keys = {name for names in rule.operands[1] for name in names}
    queries = {name for names in rule.operands[0] for name in names}
    return bool((keys - queries) & {*choice.factors})


def _find_route(rule: Rule, rows: frozenset[int]) -> int:
    """The route of rows that an axis splits, or the first one."""
    routes = {i: one for i, one in enumerate(rule.choices()) if isinstance(one, Route)}
    wanted = (i for i, one in routes.items() if rule.factor[one.rows].atom in rows)
    return next(wanted, min(routes))
