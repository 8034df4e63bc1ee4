"""Builds the search space for each mesh and number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh
from shardwright.ir.options.optimizers import placed
from shardwright.machine.model import Machine
from shardwright.planner.communication.prices import Routes
from shardwright.planner.micro_batch_counts import MicroBatchCounts
from shardwright.planner.pipeline.cuts import StageCuts
from shardwright.planner.space.assembly import FREE, SEARCHED, Skeleton
from shardwright.planner.space.checkpoint_segments import checkpoint_segments, kept_segments
from shardwright.planner.space.constrain import NO_MARKS, Limits, Marks
from shardwright.planner.space.repeats import ShortGraph, divides, grouped, shorten
from shardwright.planner.space.skeleton import constrained
from shardwright.planner.space.space import Space, TooWideError, make_folded_space, make_space
from shardwright.planner.tables.memory import BucketSizes, bucket_sizes, state_bytes
from shardwright.planner.tables.model import CostModel
from shardwright.planner.tables.options import Allowed
from shardwright.rules.analysis import Analysis, analyze, expand_analysis

_MOST_ENTRIES = 1_500_000  # per weight, in all tables; recomputation is not searched beyond
_MOST_RUN = (
    _MOST_ENTRIES // 8
)  # of these in the table of one run, before there is any recomputation


@dataclass(frozen=True, slots=True)
class DecidedOptions:
    """Options of a space whose tilings are given.

    * `optimizer`: the name of the optimizer;
    * `micro_batches`: their number in a step;
    * `segments`: ranges of the whole graph that may be recomputed;
    * `gradient_sync`: as in `Plan`;
    * `skeleton`: has the operators inside of segments that run once;
    * `compiled`: whether layers run through `torch.compile`.
    """

    optimizer: str
    micro_batches: int
    segments: tuple[range, ...]
    gradient_sync: str | None = None
    skeleton: Skeleton = FREE
    compiled: bool = False


class SpaceFactory:
    """Builds spaces of the shortened graph, or of the whole graph if a space cannot be folded.

    Copies of a layer that `marks` distinguish do not count as repeats. `together` copies of a run
    count as one. Spaces share cost tables with those of `other`, whose graph has equal operators.
    """

    def __init__(
        self,
        graph: Graph,
        marks: Marks = NO_MARKS,
        *,
        recompute: bool,
        together: int = 1,
        other: SpaceFactory | None = None,
    ) -> None:
        self.recompute = recompute
        self.too_wide: set[Mesh] = set()  # with recomputation
        self.short = shorten(graph, grouped(graph, together) if together > 1 else marks.of)
        self.graph = graph
        self.marks = marks
        self._other = other
        self._routes: Routes = (
            Routes() if other is None else other._routes
        )  # the same on all meshes
        self._counts: dict[bool, MicroBatchCounts] = {}
        self._limits: dict[tuple[int, bool], Limits] = {}
        self._segments: dict[bool, tuple[range, ...]] = {}

    @cached_property
    def cuts(self) -> StageCuts:
        """The positions at which the whole graph may be cut into stages."""
        return StageCuts(self.graph)

    @property
    def has_parts(self) -> bool:
        """Whether parts of layers may be recomputed that are no whole layers."""
        whole, parts = (self._segments_of(parts=one) for one in (False, True))
        return self.recompute and whole != parts

    def _segments_of(self, *, parts: bool) -> tuple[range, ...]:
        """The segments of the whole graph; independent of marks, which may only remove choices."""
        if parts not in self._segments:
            whole = self.short.whole
            self._segments[parts] = checkpoint_segments(self.graph, whole, parts=parts)
        return self._segments[parts]

    @cached_property
    def analysis(self) -> Analysis:
        """The analysis of the whole graph; repeats share their rules."""
        return expand_analysis(
            self._counts_of(whole=False).analysis, self.graph, self.short.stands_for
        )

    @cached_property
    def _buckets(self) -> BucketSizes:
        return bucket_sizes(self.graph)

    def possible(self, wanted: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The numbers of micro-batches that the graph supports, and notes on the others."""
        return self._counts_of(whole=False).possible(wanted)

    @property
    def batch(self) -> int:
        """Samples in the batch; 1 where the batch dimension is not known."""
        return self._counts_of(whole=False).batch

    def space(
        self,
        machine: Machine,
        mesh: Mesh,
        optimizer: str,
        count: int,
        decide: Callable[[CostModel], Allowed] | None = None,
        skeleton: Skeleton = SEARCHED,
        *,
        host: bool = False,
    ) -> tuple[Space, ShortGraph]:
        """The space on `mesh` with `count` micro-batches.

        Recomputation is omitted if the tables would be too large with it. `decide` gives the
        choices of operators and parameters, in place of what constraints permit. `skeleton` says
        which operators may be kept and whether parts of layers are segments; nothing else of it
        counts. With `host` inputs of recomputed segments may wait in the memory of the host, unless
        the tables would be too large with that.

        Raises:
            ConstraintError: the constraints leave an operator or parameter no choice.
        """

        @cache
        def model(whole: bool) -> CostModel:  # cached, because both attempts use its tables
            limits = self._limited(count, whole=whole)
            free = limits.model(machine, mesh, optimizer, count, self._buckets)
            return free if decide is None else free.with_allowed(decide(free))

        if self.recompute and mesh not in self.too_wide:
            segments = self._segments_of(parts=skeleton.parts)
            share = self._share_of_host(machine, optimizer, segments) if host else None
            for one in dict.fromkeys((replace(skeleton, host_bytes=share), skeleton)):
                try:
                    space, short = self._space(model, segments, one)
                except TooWideError:
                    continue  # build the space without recomputation
                if not space.solver.pinned and space.solver.entries <= _MOST_ENTRIES:
                    return space, short
            self.too_wide.add(mesh)
        return self._space(model, ())

    def _share_of_host(self, machine: Machine, optimizer: str, segments: Sequence[range]) -> int:
        """Bytes of the memory of a device's host for the input of each segment.

        State of the optimizer that is there leaves less, by an even share of all state.
        """
        state = state_bytes(self.graph, placed(optimizer, ())) - state_bytes(self.graph, optimizer)
        left = (machine.device.host_memory_bytes or 0) - state // machine.devices
        return max(0, left) // max(1, len(segments))

    def decided_space(
        self,
        machine: Machine,
        mesh: Mesh,
        options: DecidedOptions,
        decide: Callable[[CostModel], Allowed],
    ) -> tuple[Space, ShortGraph]:
        """The space in which `decide` gives the choices of operators and parameters."""

        @cache
        def model(whole: bool) -> CostModel:
            free = self.costs(machine, mesh, options, whole=whole)
            return free.with_allowed(decide(free))

        return self._space(model, options.segments, options.skeleton)

    def costs(
        self, machine: Machine, mesh: Mesh, options: DecidedOptions, *, whole: bool = False
    ) -> CostModel:
        """The cost model of all choices, of the `whole` graph or of the shortened one."""
        return self._limited(options.micro_batches, whole=whole).model(
            machine,
            mesh,
            options.optimizer,
            options.micro_batches,
            self._buckets,
            options.gradient_sync,
            compiled=options.compiled,
        )

    def _space(
        self,
        model: Callable[[bool], CostModel],
        segments: Sequence[range],
        decided: Skeleton = FREE,
    ) -> tuple[Space, ShortGraph]:
        """The space of few layers, or of all where it cannot be folded, with its graph."""
        short = self.short
        if divides(segments, short):
            kept = kept_segments(segments, self.graph, short.graph)
            costs, skeleton = self._decided(model(False), kept, decided)
            space = make_folded_space(
                costs, short.repeats, short.skipped, kept, most_run=_MOST_RUN, skeleton=skeleton
            )
            if space is not None:
                return space, short
        costs, skeleton = self._decided(model(True), segments, decided)
        return make_space(costs, segments, skeleton), ShortGraph(self.graph, (), (), {}, {})

    def _decided(
        self, model: CostModel, segments: Sequence[range], decided: Skeleton
    ) -> tuple[CostModel, Skeleton]:
        """The constrained cost model, and the skeleton, which does not depend on constraints."""
        every = self.marks.binds_roles(model.mesh)
        marked = [op.name for op in model.graph.ops if every or op.name in self.marks.of]
        if not marked or model.mesh.size == 1:
            return model, decided
        costs, skeleton = constrained(model, frozenset(marked), segments)
        return costs, replace(
            skeleton,
            kept=decided.kept,
            chains=decided.chains,
            host_bytes=decided.host_bytes,
            keeps_copies=decided.keeps_copies,
        )

    def _limited(self, count: int, *, whole: bool) -> Limits:
        if (count, whole) not in self._limits:
            sized = self._counts_of(whole=whole).analyzed(count)
            other = None if self._other is None else self._other._limits.get((count, whole))
            self._limits[count, whole] = Limits(*sized, self.marks, self._routes, other)
        return self._limits[count, whole]

    def _counts_of(self, *, whole: bool) -> MicroBatchCounts:
        if whole not in self._counts:
            graph = self.graph if whole else self.short.graph
            self._counts[whole] = MicroBatchCounts(graph, analyze(graph))
        return self._counts[whole]
