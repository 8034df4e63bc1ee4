"""Which pipelines a search tries: how many stages, which meshes, how many micro-batches.

Of all combinations only those near good ones are tried, unless they are asked for by number. What
an inner axis does, costs a pipeline what it costs one group with the same inner axis, or a pipeline
of fewer stages. So meshes are tried from what was best there outwards, with four micro-batches for
each stage or as many as the batch has samples for; and more stages, for as long as fewer gave
something. Other numbers of micro-batches are tried on what was best of all, and then the schedules
that give a group several stages or make backward passes in halves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from shardwright.ir.constraints import Constraint, ConstraintError
from shardwright.ir.layout import Mesh
from shardwright.ir.machine import Machine
from shardwright.ir.pipeline import ASYNC, PipelineError
from shardwright.search.permitted import allowed_meshes
from shardwright.search.pipelines import OTHERS
from shardwright.search.rounds import Rounds

_MOST_STAGES = 64  # that are tried when nobody says how many
_ROUNDS = (1, 2, 4, 8)  # micro-batches for each stage
_FIRST = 4  # of these are tried first, if the batch is large enough
_PATIENCE = 2  # meshes, or numbers of stages, that give nothing new before the others are left out
_WEIGHTS = "spectrain"


def stages_of(machine: Machine, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """The numbers of stages to search; raises `PipelineError` for those that devices cannot be."""
    devices = machine.devices
    if wanted is None:
        powers = (2**i for i in range(_MOST_STAGES.bit_length()))
        return tuple(count for count in powers if devices % count == 0)
    for count in wanted:
        if count < 1 or devices % count:
            raise PipelineError(
                f"{count} stages cannot share the {devices} devices of {machine.name} evenly; take"
                " a divisor of that"
            )
    return tuple(sorted(set(wanted))) or (1,)


@dataclass(frozen=True, slots=True)
class _Tried:
    """Pipelines of `groups` on `mesh`, each with some stages, in `count` micro-batches."""

    mesh: Mesh
    groups: int
    count: int
    schedule: str = ""
    each: int = 1

    def __str__(self) -> str:
        stages = self.groups * self.each
        by = f", {self.schedule}" if self.schedule else ""
        return f"{stages} stages on {self.mesh}, {self.count} micro-batches{by}"


@final
@dataclass
class Piping:
    """The search for pipelines, up to the moment `end` of the performance counter.

    With `every` all numbers of stages are tried. Asynchronous pipelines are searched with
    `allow_async`.
    """

    rounds: Rounds
    wanted: Sequence[Constraint]
    micro_batches: Sequence[int] | None
    every: bool
    allow_async: bool
    end: float
    tell: Callable[[str, float], None]
    done: float = 0.0  # the part that is

    def search(self, stages: Sequence[int]) -> None:
        """Add the pipelines of each of these numbers of stages, while they give anything new."""
        best: _Tried | None = None
        useless = 0
        for i, groups in enumerate(stages):
            self.done = i / len(stages)
            if not self.rounds.sources.cuts.allow(groups):
                break
            for mesh in self._meshes(groups, None) if self.allow_async else ():
                self._gained(_Tried(mesh, groups, 1, ASYNC + _WEIGHTS))
            if self.every or useless < _PATIENCE:
                found = self._groups(groups, best)
                useless = 0 if found else useless + 1
                best = found or best
        if best is not None:
            best = best if self._asked else self._counted(best)
            self._scheduled(best)

    def _counted(self, best: _Tried) -> _Tried:
        """Try more and fewer micro-batches than `best` has; the last of these that gave new."""
        counts = self._counts(best.groups)
        place = counts.index(best.count)
        found = best
        for way in (counts[place + 1 :], counts[:place][::-1]):
            for count in way:
                if not self._gained(replace(best, count=count)):
                    break
                found = replace(best, count=count)
        return found

    def _scheduled(self, best: _Tried) -> None:
        """Try other schedules, and more and fewer micro-batches under that which gave most."""
        gains: dict[_Tried, int] = {}
        for schedule, each in OTHERS:
            if self.rounds.sources.cuts.allow(best.groups * each):
                tried = replace(best, schedule=schedule, each=each)
                gains[tried] = self._gained(tried)
        most = max(gains, key=lambda tried: gains[tried], default=None)
        if most is not None and gains[most] and not self._asked:
            self._counted(most)

    def _groups(self, groups: int, before: _Tried | None) -> _Tried | None:
        """Search pipelines of `groups` stages; what gave most that is new, if anything did.

        `before` is the same for fewer stages.
        """
        counts, useless = self._counts(groups), 0
        gains: dict[_Tried, int] = {}
        for mesh in self._meshes(groups, before):
            # An even pipeline on one axis is one of the well-known plans.
            missing = len(mesh.axes) == 1 and not self.rounds.knows("even pipeline")
            if useless < _PATIENCE or (missing and not self.wanted):
                new = 0
                for count in counts if self._asked else [self._first(counts, mesh, groups)]:
                    tried = _Tried(mesh, groups, count)
                    gains[tried] = self._gained(tried)
                    new += gains[tried]
                useless = 0 if new else useless + 1
        best = max(gains, key=lambda tried: gains[tried], default=None)  # the first of equals
        return best if best and gains[best] else None

    @property
    def _asked(self) -> bool:
        """Whether numbers of micro-batches are asked for."""
        return self.micro_batches is not None and tuple(self.micro_batches) != (1,)

    def _counts(self, groups: int) -> Sequence[int]:
        wanted = self.micro_batches if self._asked else [groups * count for count in _ROUNDS]
        return self.rounds.sources.possible(wanted)[0]

    def _first(self, counts: Sequence[int], mesh: Mesh, groups: int) -> int:
        """The number of micro-batches to begin with on a mesh.

        Many enough to hide the waiting, but each with a sample for every device of the outer axis.
        """
        most = min(_FIRST * groups, self.rounds.sources.batch // mesh.shape[0])
        return max((count for count in counts if count <= most), default=counts[0])

    def _gained(self, tried: _Tried) -> int:
        """Search one mesh of a group; how many plans that gave that are new."""
        left = self.end - time.perf_counter()
        if left <= 0 and self.rounds.found:
            return 0
        best = self.rounds.best
        so_far = f", best so far {best * 1e3:.1f} ms" if best is not None else ""
        self.tell(f"{tried}{so_far}", self.done)
        compare = len(tried.mesh.axes) == 1 and not self.wanted and not tried.schedule
        try:
            return self.rounds.pipe(
                tried.mesh,
                tried.groups,
                tried.count,
                left,
                compare=compare,
                schedule=tried.schedule,
                each=tried.each,
            )
        except ConstraintError as e:
            self.rounds.refuse(e)
            return 0

    def _meshes(self, groups: int, before: _Tried | None) -> Sequence[Mesh]:
        """Meshes of one group, in the order in which they are tried.

        From that on which is most like what was best for fewer stages, or for one group.
        """
        try:
            found = allowed_meshes(self.rounds.machine.devices // groups, self.wanted)
        except ConstraintError as e:
            self.rounds.refuse(e)
            return ()
        fastest = self.rounds.fastest
        if before is not None:
            inner = _inner(before.mesh)
        elif fastest:
            inner = _inner(min(fastest, key=lambda mesh: fastest[mesh]))
        else:
            return found
        return sorted(found, key=lambda mesh: abs(math.log(_inner(mesh) / inner)))


def _inner(mesh: Mesh) -> int:
    """Devices that share an index on the outer axis."""
    return mesh.size // mesh.shape[0]
