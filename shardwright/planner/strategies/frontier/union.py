"""The spaces that a search adds around the best strategies: more axes, and pipelines.

On three axes an operator has more than a hundred tilings, and a search of all of them takes several
times as long as one of all meshes of two axes. Strategies use few of these tilings, and their union
still leaves the search to mix them, by operator, with any storage and recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.ir.layout import Mesh
from shardwright.ir.strategy.strategy import Strategy
from shardwright.planner.meshes.meshes import mesh_of_shape
from shardwright.planner.strategies.dimensions import ModelDimensions
from shardwright.planner.strategies.roles import RoleAxis, role_axes
from shardwright.planner.strategies.tilings import StorageKind, Tilings
from shardwright.planner.tables.model import CostModel
from shardwright.planner.tables.options import Allowed, Only
from shardwright.planner.tables.options import Tilings as Choices

_WIDE, _MOST_AXES = 3, 4
_Key = tuple[tuple[int, ...], int, int, str, int]  # sizes of axes, micro-batches, pipeline
# All that parameters may be: sharded over the axes of data parallelism, or replicated.
_KINDS = (StorageKind(sharded=True, regathered=True), StorageKind(sharded=False, regathered=False))


@dataclass(frozen=True, slots=True)
class AroundStrategies:
    """The mesh of some strategies, and what is searched on it.

    Attributes:
        mesh: of all devices, or of one group of a pipeline.
        like: one of the strategies; all have its schedule and number of micro-batches.
        tilings: of the strategies.
    """

    mesh: Mesh
    like: Strategy
    tilings: tuple[Tilings, ...]

    @property
    def decide(self) -> Callable[[CostModel], Allowed] | None:
        """The choices of operators and parameters; None, which is all, on one or two axes."""
        return self._union if len(self.mesh.axes) >= _WIDE else None

    def _union(self, model: CostModel) -> Allowed:
        return _union([one.allowed(model, _KINDS) for one in self.tilings])


def around(
    strategies: Sequence[Strategy], known: dict[int, ModelDimensions], most: int
) -> Iterator[AroundStrategies]:
    """The spaces around the best strategies: `most` without stages, and as many pipelines.

    Without stages only meshes of three or four axes are among them.

    Args:
        strategies: best first.
        known: dimensions of the model, as in `Tilings`.
        most: meshes of each kind.
    """
    groups: dict[_Key, list[Strategy]] = {}
    for one in strategies:
        sizes = tuple(axis.size for axis in role_axes(one))
        if len(sizes) <= _MOST_AXES and (one.pp > 1 or len(sizes) >= _WIDE):
            pipeline = one.pp, one.schedule, one.virtual_stages
            groups.setdefault((sizes, one.micro_batches, *pipeline), []).append(one)
    left = {True: most, False: most}
    for (sizes, *_), sharing in groups.items():
        if left[staged := sharing[0].pp > 1] > 0:
            left[staged] -= 1
            every = dict.fromkeys(roles for one in sharing for roles in _roles(one))
            tilings = tuple(Tilings(*one, known) for one in every)
            yield AroundStrategies(mesh_of_shape(sizes or (1,)), sharing[0], tilings)


def _roles(strategy: Strategy) -> Iterator[tuple[Strategy, tuple[RoleAxis, ...]]]:
    """A strategy with and without sequence parallelism, and with other axes for data."""
    axes = role_axes(strategy)
    styles = [strategy]
    if strategy.tp > 1:
        styles.append(strategy.but(sequence_parallel=not strategy.sequence_parallel))
    for style in styles:
        yield style, axes
    for place, axis in enumerate(axes):
        if axis.role != "dp_shard" and not axis.experts and not axis.whole_experts:
            data = replace(axis, role="dp_shard", features=False)
            yield strategy, (*axes[:place], data, *axes[place + 1 :])


def _union(every: Sequence[Allowed]) -> Allowed:
    """The choices that any of several allow; all restrict the same operators and parameters."""

    def merged(given: Sequence[Only]) -> Only:
        return tuple(frozenset().union(*along) for along in zip(*given, strict=True))

    def tilings(name: str) -> Choices:
        return frozenset().union(*(one.tilings[name] for one in every))

    first = every[0]
    return Allowed(
        {name: merged([one.operators[name] for one in every]) for name in first.operators},
        {name: merged([one.parameters[name] for one in every]) for name in first.parameters},
        {name: tilings(name) for name in first.tilings},
    )
