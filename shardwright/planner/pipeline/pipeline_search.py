"""Candidate pipelines: numbers of stages, meshes and numbers of micro-batches.

If the user gives numbers of stages, all of them are searched, on meshes in order of their distance
from the best one, until several meshes give no new plan. Otherwise the search is hill climbing: it
starts from a medium number of stages and moves to more or fewer stages, or to a longer or shorter
inner axis of the group's mesh, as long as the step gets faster. Each candidate has four
micro-batches per stage, or as many as the batch allows. Then the search tries, on the best
candidate, other schedules (several stages per group, or split backward passes), more stages under
the best schedule, and more and fewer micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from shardwright.ir.layout import Mesh
from shardwright.ir.options.constraints import Constraint, ConstraintError
from shardwright.ir.schedules.registry import SCHEDULES, continuous, schedule_named
from shardwright.planner.meshes.mesh_loop import MeshLoop
from shardwright.planner.permitted import allowed_meshes
from shardwright.planner.pipeline.stage_assignment import NOTHING, Gain

_ROUNDS = (1, 2, 4, 8)  # micro-batches for each stage
_FIRST = 4  # micro-batches for each stage that are tried first, if the batch is large enough
_PATIENCE = 2  # meshes that give nothing new before the others are skipped
_CLIMB = 0.7  # the part of the progress bar for 1F1B and GPipe
_WEIGHTS = "spectrain"


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Pipelines of `groups` on `mesh`, each with some stages, in `count` micro-batches."""

    mesh: Mesh
    groups: int
    count: int
    schedule: str = ""
    each: int = 1

    @property
    def weights(self) -> bool:
        """Whether passes may use other weights than on one device (asynchronous schedules)."""
        return bool(self.schedule) and schedule_named(self.schedule).asynchronous

    def __str__(self) -> str:
        stages = self.groups * self.each
        by = f", {self.schedule}" if self.schedule else ""
        return f"{stages} stages on {self.mesh}, {self.count} micro-batches{by}"


@final
@dataclass
class PipelineSearch:
    """The search for pipelines.

    Attributes:
        loop: the main loop, to which plans are added.
        every: whether all numbers of stages are searched.
        end: the time limit, by the performance counter.
        notify: called with the current task and the part of the search that is done.
        done: the part that is done.
    """

    loop: MeshLoop
    every: bool
    end: float
    notify: Callable[[str, float], None]
    done: float = 0.0
    _found: dict[_Candidate, Gain] = field(default_factory=dict)

    def search(self, stages: Sequence[int]) -> None:
        """Add pipelines of each of these numbers of stages, or only of the best ones."""
        possible = [groups for groups in stages if self.loop.factory.cuts.allow(groups)]
        for i, groups in enumerate(possible):
            self.done = i / len(possible)
            for mesh in self._meshes(groups) if self.loop.options.allow_async else ():
                self._try(_Candidate(mesh, groups, 1, continuous(_WEIGHTS).name))
            if self.every:
                self._groups(groups)
        if not self.every:
            self._add_even_pipeline(possible)
            self._climb(possible)
        best = self._best
        if best is not None:
            self.done = _CLIMB
            fastest = self._try_schedules(best, possible)
            for one in () if self._counts_given else dict.fromkeys((best, fastest)):
                self._vary_counts(one)  # more micro-batches need less memory

    @property
    def _best(self) -> _Candidate | None:
        """The fastest candidate so far that trains as one device does."""
        plain = [t for t, gain in self._found.items() if gain.new and not t.weights]
        return min(plain, key=lambda tried: self._found[tried].seconds, default=None)

    def _climb(self, stages: Sequence[int]) -> None:
        """Move to a neighbour of the best candidate, as long as that is faster."""
        middle = len(stages) // 2
        for groups in sorted(stages, key=lambda groups: abs(stages.index(groups) - middle)):
            for mesh in self._meshes(groups)[:_PATIENCE]:
                if self._best is None:
                    self._all_counts(groups, mesh)
        left: list[_Candidate] = []
        while (best := self._best) is not None and best not in left:
            left.append(best)
            self.done = _CLIMB * (1 - 1 / (1 + len(left)))
            for groups, mesh in self._next_to(best, stages):
                self._all_counts(groups, mesh)
                if self._best != best:
                    break

    def _next_to(self, best: _Candidate, stages: Sequence[int]) -> Iterator[tuple[int, Mesh]]:
        """The neighbours of `best`: other inner axes, more stages, fewer stages."""
        meshes = sorted(self._meshes(best.groups), key=_inner)
        index = meshes.index(best.mesh)
        yield from ((best.groups, mesh) for mesh in reversed(meshes[max(0, index - 1) : index]))
        yield from ((best.groups, mesh) for mesh in meshes[index + 1 : index + 2])
        index = stages.index(best.groups)
        for groups in (*stages[index + 1 : index + 2], *stages[max(0, index - 1) : index]):
            yield from ((groups, mesh) for mesh in self._meshes(groups)[:1])

    def _vary_counts(self, best: _Candidate) -> None:
        """Try more and fewer micro-batches than `best` has, until they give nothing new."""
        counts = self._counts(best.groups)
        index = counts.index(best.count)
        for way in (counts[index + 1 :], counts[:index][::-1]):
            for count in way:
                if not self._try(replace(best, count=count)).new:
                    break

    def _try_schedules(self, best: _Candidate, stages: Sequence[int]) -> _Candidate:
        """Try other schedules, and deeper pipelines under the fastest; return the fastest."""
        fastest = best
        others = ((one.name, each) for one in SCHEDULES.values() for each in one.tried)
        for schedule, each in others:
            if self.loop.factory.cuts.allow(best.groups * each):
                tried = replace(best, schedule=schedule, each=each)
                if self._try(tried).seconds < self._found[fastest].seconds:
                    fastest = tried
        return fastest if self.every or fastest == best else self._try_more_stages(fastest, stages)

    def _try_more_stages(self, best: _Candidate, stages: Sequence[int]) -> _Candidate:
        """Try more stages under the same schedule, as long as that is faster."""
        for groups in stages[stages.index(best.groups) + 1 :]:
            meshes = [mesh for mesh in self._meshes(groups) if _inner(mesh) == _inner(best.mesh)]
            if not meshes or not self.loop.factory.cuts.allow(groups * best.each):
                break
            count = self._first(self._counts(groups), meshes[0], groups)
            tried = replace(best, mesh=meshes[0], groups=groups, count=count)
            if self._try(tried).seconds >= self._found[best].seconds:
                break
            best = tried
        return best

    def _groups(self, groups: int) -> None:
        """Search pipelines of `groups` stages, on meshes in order of distance from the best."""
        useless = 0
        for mesh in self._meshes(groups):
            # An even pipeline on one axis is a baseline.
            missing = len(mesh.axes) == 1 and not self.loop.knows("even pipeline")
            if useless < _PATIENCE or (missing and not self._wanted):
                useless = 0 if self._all_counts(groups, mesh) else useless + 1

    def _add_even_pipeline(self, stages: Sequence[int]) -> None:
        """Add the even pipeline on one axis as a baseline."""
        for groups in stages:
            for mesh in self._meshes(groups):
                if len(mesh.axes) == 1 and not (self._wanted or self.loop.knows("even pipeline")):
                    self.loop.compare_even(
                        mesh, groups, self._first(self._counts(groups), mesh, groups)
                    )

    def _all_counts(self, groups: int, mesh: Mesh) -> bool:
        """Search the requested numbers of micro-batches, or one; return whether a plan is new."""
        counts = self._counts(groups)
        tried = counts if self._counts_given else [self._first(counts, mesh, groups)]
        gains = [self._try(_Candidate(mesh, groups, count)) for count in tried]
        return any(gain.new for gain in gains)

    @property
    def _counts_given(self) -> bool:
        """Whether the user gave numbers of micro-batches."""
        return self.loop.options.counts not in (None, (1,))

    @property
    def _wanted(self) -> tuple[Constraint, ...]:
        return self.loop.options.constraints

    def _counts(self, groups: int) -> Sequence[int]:
        wanted = (
            self.loop.options.counts
            if self._counts_given
            else [groups * count for count in _ROUNDS]
        )
        return self.loop.factory.possible(wanted)[0]

    def _first(self, counts: Sequence[int], mesh: Mesh, groups: int) -> int:
        """The number of micro-batches to begin with on a mesh.

        It is large enough for a small pipeline bubble, and each micro-batch has at least one sample
        for every device of the outer axis.
        """
        most = min(_FIRST * groups, self.loop.factory.batch // mesh.shape[0])
        return max((count for count in counts if count <= most), default=counts[0])

    def _try(self, tried: _Candidate) -> Gain:
        """The result of a search for this candidate, which runs once."""
        if tried not in self._found:
            self._found[tried] = self._search_one(tried)
        return self._found[tried]

    def _search_one(self, tried: _Candidate) -> Gain:
        """Search one candidate within the time that is left."""
        left = self.end - time.perf_counter()
        if left <= 0 and self.loop.found:
            return NOTHING
        best = self.loop.best
        so_far = f", best so far {best * 1e3:.1f} ms" if best is not None else ""
        self.notify(f"{tried}{so_far}", self.done)
        compare = self.every and len(tried.mesh.axes) == 1 and not self._wanted
        try:
            return self.loop.pipe(
                tried.mesh,
                tried.groups,
                tried.count,
                left,
                compare=compare and not tried.schedule,
                schedule=tried.schedule,
                each=tried.each,
            )
        except ConstraintError as e:
            self.loop.refuse(e)
            return NOTHING

    def _meshes(self, groups: int) -> Sequence[Mesh]:
        """Meshes of one group, in order of distance from the best one so far."""
        try:
            devices = self.loop.machine.devices // groups
            found = allowed_meshes(devices, self._wanted, groups=groups)
        except ConstraintError as e:
            self.loop.refuse(e)
            return ()
        fastest, best = self.loop.fastest, self._best
        if best is not None:
            inner = _inner(best.mesh)
        elif fastest:
            inner = _inner(min(fastest, key=lambda mesh: fastest[mesh]))
        else:
            return found
        return sorted(found, key=lambda mesh: abs(math.log(_inner(mesh) / inner)))


def _inner(mesh: Mesh) -> int:
    """The number of devices that share an index on the outer axis."""
    return mesh.size // mesh.shape[0]
