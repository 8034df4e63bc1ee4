"""Baseline plans as texts of strategies: data parallel, fully sharded, Megatron-style.

They are priced by the same model, shown beside the frontier, and part of it: the chosen plan is
never worse than the best of them. The first axis of a mesh has the first degree of a text.

Sources: ZeRO (arXiv 1910.02054) and FSDP shard parameters and gather them for use. ZeRO-3, and FSDP
by default, gather them again in the backward pass; ZeRO-2 keeps the gathered weights. (ZeRO-1 would
be ZeRO-2 with more memory: within one step they differ only in the layout of gradients.)
Megatron-LM (arXiv 1909.08053) splits attention heads and the inner dimension of the MLP, so that
column- and row-parallel layers alternate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.ir.options.constraints import Constraint
from shardwright.ir.strategy.strategy import Strategy
from shardwright.planner.permitted import broken
from shardwright.planner.plans.candidate import Candidate
from shardwright.planner.plans.plan_builder import PlanBuilder
from shardwright.planner.space.constrain import NO_MARKS, Marks
from shardwright.planner.space.space import Space
from shardwright.planner.strategies.dimensions import ModelDimensions
from shardwright.planner.strategies.roles import RoleAxis, role_axes
from shardwright.planner.strategies.splits import most_split
from shardwright.planner.strategies.tilings import StorageKind, Tilings
from shardwright.planner.tables.options import Options
from shardwright.solve.elimination.problem import Assignment

_ONE_DEVICE = "one device"
_TEXTS = (
    ("data parallel", "dp_replicate={} zero=0"),
    ("ZeRO-2", "dp_shard={} zero=2"),
    ("fully sharded", "dp_shard={}"),
    ("tensor parallel", "tp={} sp=off zero=0"),
    ("sequence and tensor parallel", "tp={} zero=0"),
    ("data x tensor parallel", "dp_replicate={} tp={} sp=off zero=0"),
    ("fully sharded x tensor parallel", "dp_shard={} tp={} sp=off"),
    ("data x sequence and tensor parallel", "dp_replicate={} tp={} zero=0"),
    ("fully sharded x sequence and tensor parallel", "dp_shard={} tp={}"),
)


def baselines(space: Space) -> Iterator[tuple[str, Assignment]]:
    """Names and assignments of the space's `problem`, for all texts that fit its mesh."""
    model = space.model
    sizes = model.mesh.shape
    dims = ModelDimensions.of(model.graph, model.analysis)
    if model.mesh.size == 1:
        yield _ONE_DEVICE, _assignment(space, Strategy(), dims)
        return
    for name, text in _TEXTS:
        if text.count("{}") != len(sizes):
            continue
        strategy = Strategy.parse(text.format(*sizes))
        split = "tp=" not in text or dims.splits(strategy.tp)
        if split and ("tp=" not in text or not strategy.sequence_parallel or dims.sequence):
            yield name, _assignment(space, strategy, dims)


def _assignment(space: Space, strategy: Strategy, dims: ModelDimensions) -> Assignment:
    """The assignment that is nearest to a strategy, of which no layer is recomputed."""
    model, kind = space.model, StorageKind.of(strategy)
    known = {len(model.graph.ops): dims}
    tilings = Tilings(strategy, _with_single(space, role_axes(strategy)), known)
    feasible: dict[tuple[int, tuple[int, ...]], int] = {}

    def option(options: Options, wanted: tuple[int, ...]) -> int:
        """The index of the choices `wanted`, as far as they are feasible."""
        key = id(options), wanted
        if key not in feasible:
            feasible[key] = options.choices.index(most_split(options.choices, wanted))
        return feasible[key]

    choices = tilings.choices(model)
    stored = {
        leaf.name: storage.find(
            tilings.storage_code(model, leaf.name, kind), regathered=kind.regathered
        )
        for leaf, storage in zip(space.parameters, space.stored, strict=True)
    }
    ops = {op.name: option(model.options(op), choices[op.name]) for op in model.graph.ops}
    return space.assignment(ops, stored)


def _with_single(space: Space, axes: Sequence[RoleAxis]) -> tuple[RoleAxis, ...]:
    """The axes of a strategy, and those of the space's mesh that have one device."""
    left = iter(axes)
    every = space.model.mesh.axes
    return tuple(next(left) if size > 1 else RoleAxis(name, 1, name) for name, size in every)


def baseline_candidates(
    writer: PlanBuilder, wanted: Sequence[Constraint] = (), marks: Marks = NO_MARKS
) -> Iterator[Candidate]:
    """The baselines of the writer's space, with the constraints that they break."""
    space = writer.space
    named = list(baselines(space))
    points = [space.prices.point(space.folded.expand(assignment)) for _, assignment in named]
    for (name, assignment), point, peak in zip(named, points, writer.peaks(points), strict=True):
        broke: tuple[Constraint, ...] = ()
        if wanted:
            tilings, storage = space.tilings(assignment), space.storage(assignment)
            like = writer.short.stands_for
            broke = broken(wanted, marks, like, space.model, tilings, storage)
        yield Candidate(point, peak, writer, name, (), broke)
